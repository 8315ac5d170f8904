"""Finding the shape of a model: in a folder, this package, a table, the hub's cache, or by a small download."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, cast

from oncurve.constants import ADAPTER_CONFIG
from oncurve.observe.run_model import locate
from oncurve.plan.hardware import read_table
from oncurve.plan.shape import FAMILIES, ModelShape, counted_shape, shape_of_config
from oncurve.run_errors import CheckpointError

HERE = Path(__file__).resolve().parent


def find_shape(name: str, *, revision: str | None = None, fetches: bool = True) -> ModelShape:
    """The shape of the model that a recipe names; no weights are read and none are downloaded.

    Looked for in this order: the embedded model, a local folder (of a run its final model, of an adapter its base), the
    table of known models (an ``-Instruct`` or ``-Base`` model has the shape of its sibling), config.json in the hub's
    cache, config.json from the hub, unless it ``fetches`` nothing.

    Raises CheckpointError where there is none, ConfigError for a config.json that the planner does not understand.
    """
    folder = Path(locate(name)).expanduser()
    if (folder / "config.json").is_file():
        return _of_file(folder / "config.json", name)
    if (folder / ADAPTER_CONFIG).is_file():
        described = _read(folder / ADAPTER_CONFIG, name)
        if not (base := described.get("base_model_name_or_path")):
            raise CheckpointError(f"model {name!r}: its {ADAPTER_CONFIG} names no base model")
        return find_shape(str(base), revision=described.get("revision"), fetches=fetches)
    if folder.is_dir():
        raise CheckpointError(f"model {name!r}: the folder has no config.json. Give the folder of a whole checkpoint")
    if revision is None and (known := known_shapes().get(_plain(name))):
        return known
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(
            f"model {name!r}: no such folder, and no model of the planner's table. Give a folder with config.json or "
            "a hub name (a recipe whose base must be built first says how in its first line); known without a network: "
            f"{', '.join(shape.name for shape in known_shapes().values())}"
        )
    return _of_file(_from_hub(name, revision, fetches=fetches), name)


def _of_file(path: Path, name: str) -> ModelShape:
    """By the formula of its family where there is one; otherwise its modules are counted."""
    config = _read(path, name)
    family = str(config.get("model_type"))
    return shape_of_config(config, name=name) if family in FAMILIES else counted_shape(path, name=name, family=family)


@cache
def known_shapes() -> dict[str, ModelShape]:
    """The table of known models, by plain name."""
    rows = cast("dict[str, list[Any]]", read_table(HERE / "models.yaml"))
    fields = ("family", "hidden", "layers", "heads", "kv_heads", "head_size", "mlp", "vocabulary", "is_tied")
    return {
        _plain(name): ModelShape(name=name, **dict(zip((*fields, "max_tokens"), row, strict=True)))
        for name, row in rows.items()
    }


def _plain(name: str) -> str:
    """A hub name without case and without what does not change the shape."""
    plain = name.lower()
    for ending in ("-instruct", "-base"):
        plain = plain.removesuffix(ending)
    return plain


def _from_hub(name: str, revision: str | None, *, fetches: bool) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        return Path(
            hf_hub_download(name, "config.json", revision=revision, etag_timeout=10, local_files_only=not fetches)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        is_offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        why = f"the answer was {status}" if status else "no network, or no such name"
        why = "HF_HUB_OFFLINE is set" if is_offline else why
        raise CheckpointError(
            f"model {name!r}: its config.json is neither in the hub's cache nor could it be fetched "
            f"({why}). Give a folder with config.json, or plan with a model of the same "
            f"size that is known without a network, such as model=Qwen/Qwen2.5-7B"
        ) from None


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model {name!r}: {path.name} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"model {name!r}: {path.name} holds no mapping")
    return cast("dict[str, Any]", config)
