"""Model cards, merged adapters, and uploads to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from oncurve.core.errors import ConfigError, DataError
from oncurve.observe.manifest import redact, redact_tree
from oncurve.observe.record import parse_yaml, to_yaml
from oncurve.observe.run_model import base_of, is_adapter, read_adapter, resolve_model
from oncurve.policy.model_folder import merge_adapter
from oncurve.run_errors import CheckpointError
from oncurve.wording import listed

CARD = "README.md"
UPLOADED = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja", CARD, "LICENSE*",
)  # fmt: skip
"""Files of an ordinary model; everything else stays here."""
WEIGHT_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOADING = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")  # an adapter is put on its base if peft is installed
tokenizer = AutoTokenizer.from_pretrained("{name}")
```"""


def write_card(folder: Path, *, name: str, run: Path | None = None) -> Path:
    """Write the card of a model: its base, and recipe and measurements of the run that it came from.

    Paths and keys of this machine are left out. Raises DataError if the run's recipe cannot be read.
    """
    from huggingface_hub import ModelCardData

    try:
        config = {} if run is None else parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DataError(f"{run}: no run whose recipe can be read ({' '.join(str(error).split())})") from None
    base = base_of(folder)[0] if is_adapter(folder) else config.get("model")
    adapted = [str(read_adapter(folder).get("peft_type")).lower()] if is_adapter(folder) else []
    data = ModelCardData(
        model_name=name,
        base_model=base if is_hub_name(base) else None,
        library_name="peft" if adapted else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning", "oncurve", *adapted],
    )
    parts = [f"# {name}", f"Trained from `{_public(base or 'an unknown model')}` with oncurve."]
    if adapted and not is_hub_name(base):
        parts.append(
            f"Its base is not on the Hub: whoever loads this adapter needs the model `{_public(base)}` as well."
        )
    if run is not None:
        table = run / "comparison.md"
        measured = table.read_text(encoding="utf-8").split("~~~~")[0].strip() if table.is_file() else "Not evaluated."
        recipe = to_yaml(_public(redact_tree(config)))
        parts += ["## Evaluation", measured, "The intervals are over problems; another seed can move the numbers more."]
        parts += ["## Recipe", f"```yaml\n{recipe}```"]
    text = "\n\n".join([*parts, "## Loading", LOADING.format(name=name)])
    (folder / CARD).write_text(f"---\n{data.to_yaml()}\n---\n\n{text}\n", encoding="utf-8")
    return folder / CARD


def merge_with_card(adapter: Path, output: Path, weight_type: str | None = None) -> tuple[Path, float]:
    """Merge an adapter into its base, with a card; the folder, and the share of the adapter that is in it.

    Weights are rounded as the run did it, so that the merged model is the one that the run measured.

    Raises ConfigError for a type that is none of WEIGHT_TYPES, and what ``merge_adapter`` does.
    """
    if weight_type is not None and weight_type not in WEIGHT_TYPES:
        raise ConfigError(f"--type {weight_type}: choose one of {', '.join(WEIGHT_TYPES)}")
    adapter = Path(resolve_model(str(adapter)))
    run = adapter.parent if (adapter.parent / "config.yaml").is_file() else None
    kind = WEIGHT_TYPES[weight_type] if weight_type else None
    folder, share = merge_adapter(adapter, output, kind, seed=_seed_of(run))
    write_card(folder, name=folder.name, run=run)
    return folder, share


def _seed_of(run: Path | None) -> int | None:
    """The seed of the dither of a run; None of one that rounds to the nearest."""
    if run is None:
        return 0
    config = parse_yaml((run / "config.yaml").read_text(encoding="utf-8"))
    is_nearest = config.get("policy", {}).get("rounding") == "nearest"
    return None if is_nearest else config.get("run", {}).get("seed", 0)


def files_to_upload(folder: Path) -> list[Path]:
    """The files of a model that belong on the hub.

    Raises CheckpointError for a folder without weights, ConfigError for a file with what looks like a key.
    """
    files = sorted({path for pattern in UPLOADED for path in folder.glob(pattern) if path.is_file()})
    if not any(path.suffix == ".safetensors" for path in files):
        raise CheckpointError(f"{folder}: no model there (no .safetensors). Name a run or the folder of a model")
    texts = {
        path.name: path.read_text("utf-8", "replace") for path in files if path.suffix in (".json", ".md", ".jinja")
    }
    if with_keys := [name for name, text in texts.items() if redact(text) != text]:
        raise ConfigError(
            f"{folder}: {listed(with_keys)} holds what looks like a key. Remove it, and revoke it if it was public"
        )
    return files


def push(folder: Path, repository: str, *, private: bool, token: str | None = None, message: str | None = None) -> str:
    """Create the repository if it is not there and upload a model's files in one commit; the commit's address.

    Raises ConfigError without a token, CheckpointError if the hub refuses, and as ``files_to_upload``.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    names = [path.name for path in files_to_upload(folder)]
    if (token or get_token()) is None:
        raise ConfigError("no token for the hub. Run `hf auth login`, or set HF_TOKEN; --dry-run needs none")
    api = HfApi(token=token)
    no_answer: Any = HfHubHTTPError.__base__  # of whatever HTTP library this version of huggingface_hub uses
    try:
        repository_id = api.create_repo(repository, private=private, exist_ok=True).repo_id
        done = api.upload_folder(
            repo_id=repository_id,
            folder_path=folder,
            allow_patterns=names,
            commit_message=message or "Model trained with oncurve",
        )
    except (no_answer, OSError, ValueError) as error:  # ValueError: a name that the hub does not allow
        raise CheckpointError(f"{repository}: not uploaded: {' '.join(str(error).split())[:400]}") from None
    return str(done.commit_url)


def is_hub_name(name: str | None) -> bool:
    """Whether a name is that of a repository, and not of a folder here."""
    return name is not None and name.count("/") == 1 and name[0] not in "/.~" and not Path(name).exists()


def _public(value: Any) -> Any:
    """Without the folders of the machine: of an absolute path its last part stays. Keys that are None are left out."""
    if isinstance(value, str):
        return Path(value).name if value.startswith(("/", "~", "./", "../")) else value
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items() if item is not None}
    return [_public(item) for item in value] if isinstance(value, list) else value
