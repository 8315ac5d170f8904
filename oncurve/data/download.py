"""Downloads from the hub: a named data set as JSON lines, or the files of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oncurve.core.errors import ConfigError, DataError
from oncurve.data.datasets import load_rows, save_rows, statistics
from oncurve.data.sources import HUB_NAMES, read_stored
from oncurve.run_errors import CheckpointError
from oncurve.wording import did_you_mean, listed

SPLITS = ("train", "test")


def download_data(
    name: str, output: Path, *, splits: Sequence[str] = SPLITS, revision: str | None = None, force: bool = False
) -> list[str]:
    """Write every split of a named data set as ``<split>.jsonl``, as the hub has it; what each holds, for people.

    A recipe reads the folder as ``{type: <name>, path: <folder>, split: <split>}``.

    Raises DataError before anything is fetched if a file exists already and ``force`` is not given.
    """
    files = {split: output / f"{split}.jsonl" for split in splits}
    if there := [str(path) for path in files.values() if path.exists() and not force]:
        raise DataError(f"{', '.join(there)}: exists already. Choose another folder, or write it anew with --force.")
    reports: list[str] = []
    for split, path in files.items():
        save_rows([row for _, row in read_stored(name, None, split=split, revision=revision)], path, overwrite=force)
        described = statistics(load_rows(name, path=path)).describe()
        reports.append(f"{path}\n" + "\n".join(f"  {line}" for line in described.splitlines()))
    return reports


def download_model(
    name: str,
    output: Path,
    *,
    revision: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    force: bool = False,
) -> Path:
    """Fetch the files of a model of the hub that match ``include`` and not ``exclude``; all of them by default.

    The token of a gated model is that of ``hf auth login`` or of HF_TOKEN. What is there already is not fetched again
    unless ``force`` is given.

    Raises CheckpointError if the hub does not give it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    no_answer: Any = HfHubHTTPError.__base__  # of whatever HTTP library this version of huggingface_hub uses
    patterns: dict[str, Any] = {"allow_patterns": list(include) or None, "ignore_patterns": list(exclude) or None}
    try:
        snapshot_download(name, revision=revision, local_dir=output, force_download=force, **patterns)
    except (HfHubHTTPError, no_answer, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:400]
        raise CheckpointError(
            f"{name}: not downloaded: {reason}. Check the name and --revision; a gated model needs `hf auth login` or "
            f"HF_TOKEN, and the consent that its page asks for"
        ) from None
    return output


def is_model(name: str) -> bool:
    """A hub name of a model, and not the name of a data set.

    Raises ConfigError for what is neither.
    """
    if name in HUB_NAMES:
        return False
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ConfigError(
            f"download: there is no {name!r}. {did_you_mean(name, HUB_NAMES)}Name a dataset, one of "
            f"{listed(HUB_NAMES)}, or a model on the Hugging Face Hub, such as Qwen/Qwen2.5-0.5B"
        )
    return True
