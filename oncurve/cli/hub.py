"""Commands `download`, `merge` and `push`: models and data sets of the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from oncurve.core.errors import ConfigError
from oncurve.observe.terminal import console, quiet_libraries


def merge(
    adapter: Annotated[Path, typer.Argument(help="A run that trained a LoRA adapter, or an adapter folder.")],
    output: Annotated[Path, typer.Option(help="New folder for the merged model.")],
    weight_type: Annotated[
        str | None, typer.Option("--type", help="float32, bfloat16 or float16 (default: that of the base's files).")
    ] = None,
) -> None:
    """Merge a LoRA adapter into its base model, and say how much of it is left after rounding.

    Example: `oncurve merge runs/demo/model --output runs/demo/merged`
    """
    quiet_libraries()
    from oncurve.run.publish import merge_with_card  # lazy

    folder, share = merge_with_card(adapter, output, weight_type)
    console().print(f"merged: {folder}", highlight=False)
    if share != 1:
        console().print(
            f"Rounded to their type, the weights show {share:.3f} of what the adapter adds; --type float32 keeps every "
            f"digit",
            highlight=False,
        )


def push(
    model: Annotated[Path, typer.Argument(help="A run or a model folder.")],
    repo: Annotated[str, typer.Option(help="owner/name on the Hugging Face Hub.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files to upload.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public (default: private).")] = False,
) -> None:
    """Upload a model with its card to the Hugging Face Hub; files that look like secrets are refused.

    Example: `oncurve push runs/demo --repo me/my-model --dry-run`
    """
    from oncurve.observe.run_model import resolve_model  # lazy
    from oncurve.run.publish import files_to_upload  # lazy
    from oncurve.run.publish import push as upload  # lazy

    if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", repo):
        raise ConfigError(f"--repo {repo!r} is not the name of a repository. Write owner/name")
    folder = Path(resolve_model(str(model)))
    for path in files_to_upload(folder):
        console().print(f"{path.stat().st_size:>16,}  {path.name}", markup=False, highlight=False)
    if not dry_run:
        console().print(f"uploaded: {upload(folder, repo, private=not public)}", highlight=False)


def download(
    name: Annotated[str, typer.Argument(help="gsm8k, math, or a model on the Hugging Face Hub.")],
    output: Annotated[Path, typer.Option(help="Folder for the files.")],
    split: Annotated[
        list[str] | None, typer.Option(help="Dataset split; repeat for several (default: train and test).")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Only these model files, such as *.json; repeat for several.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Skip these model files, such as *.bin; repeat for several.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Download again even if the files exist.")] = False,
) -> None:
    """Download a dataset (as JSON lines) or a model from the Hugging Face Hub to a folder.

    For gated models, set HF_TOKEN or run `hf auth login` first.

    Example: `oncurve download math --output data/math`
    """
    from oncurve.data.download import SPLITS, download_data, download_model, is_model  # lazy

    if is_model(name):
        if split:
            raise ConfigError("download: --split is for datasets; for a model, use --include")
        path = download_model(
            name, output, revision=revision, include=include or (), exclude=exclude or (), force=force
        )
        console().print(f"model: {path}", highlight=False)
        return
    if include or exclude:
        raise ConfigError("download: --include and --exclude are for models; for a dataset, use --split")
    for report in download_data(name, output, splits=split or SPLITS, revision=revision, force=force):
        console().print(report, markup=False, highlight=False)
