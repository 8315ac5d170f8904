"""The comparison of a model that a program passed with the files that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from oncurve.observe.run_model import locate
from oncurve.wording import counted


def changed_in_memory(model: nn.Module, name: str) -> str | None:
    """A warning of weights that are not those of the files, on which an adapter of this model will be put later.

    None where all that can be compared are the same: weights by their names in the files of a folder or of the hub's
    cache, and of few bits none.
    """
    folder = _folder(name)
    if folder is None:
        return None
    weights = {key.replace(".base_layer.", "."): value for key, value in model.named_parameters()}
    changed: list[str] = []
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                changed += [
                    key
                    for key in opened.keys()  # noqa: SIM118  # it is no dictionary
                    if key in weights and _differ(weights[key], opened.get_tensor(key))
                ]
        except (OSError, SafetensorError):
            return None
    if not changed:
        return None
    are = "is" if len(changed) == 1 else "are"
    return (
        f"warning: {counted(len(changed), 'weight')} of the model that was passed {are} not as in the files of {name}, "
        f"such as {changed[0]}. The adapter is trained on the model in memory; loaded on those files it is another "
        f"model. Write the model with save_pretrained(FOLDER), and train the one from there"
    )


def _differ(weight: torch.Tensor, stored: torch.Tensor) -> bool:
    if weight.is_meta or not (weight.is_floating_point() and stored.is_floating_point()):
        return False
    if weight.shape != stored.shape:
        return True
    here = weight.detach().cpu()
    return not torch.equal(here.to(stored.dtype), stored)


def _folder(name: str) -> Path | None:
    located = Path(locate(name))
    if located.is_dir():
        return located
    from transformers.utils.hub import cached_file  # lazy

    try:
        file = cached_file(name, "config.json", local_files_only=True)
    except OSError:
        return None
    return None if file is None else Path(file).parent


def _files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        yield from (folder / name for name in sorted(set(names)))
    elif (folder / "model.safetensors").is_file():
        yield folder / "model.safetensors"
