"""The files of the model that a vLLM server was started with, and which of their weights it must be sent."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

INDEX = "model.safetensors.index.json"


def own_paths(model: str) -> list[Path]:
    """The safetensors files of a model's folder as vLLM reads them; empty for a model that is not in one.

    An index names them all, and other files beside are a second copy in another form.
    """
    folder = Path(model)
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(listed))]
    one = folder / "model.safetensors"
    return [one] if one.is_file() else sorted(folder.glob("*.safetensors"))


class OwnFiles:
    """The weights of the model that the server was started with, by name."""

    def __init__(self, model: str) -> None:
        self.model, self.paths = model, own_paths(model)
        with ExitStack() as stack:
            self.names = frozenset(name for file in _opened(stack, self.paths) for name in file.keys())  # noqa: SIM118
        self._absent: dict[frozenset[str], frozenset[str]] = {}

    def base_paths(self) -> list[Path]:
        """The files to which adapters are added. Raises ValueError if they are not on this disk as safetensors."""
        if not self.paths:
            raise ValueError(f"{self.model} is no folder with safetensors, whose weights an adapter could be added to")
        return self.paths

    def check(self, names: frozenset[str]) -> None:
        """Raises ValueError unless these are all weights of the model and no others.

        A trainer sends a matrix that the model has twice, as embedding and as head, under one of its names. A file that
        holds both has equal numbers under both.
        """
        wrong = names ^ self.names if self.names else frozenset()
        if wrong and wrong <= self.names and wrong not in self._absent:
            self._absent[wrong] = frozenset(self._alone(wrong))
        wrong = self._absent.get(wrong, wrong)
        if wrong:
            some = ", ".join(sorted(wrong)[:3])
            raise ValueError(f"these are not the weights of this model, all of them and no others: see {some}")

    def _alone(self, absent: Iterable[str]) -> Iterable[str]:
        """The names whose weight no other name shares as a matrix; vectors are often alike by chance."""
        with ExitStack() as stack:
            files = _opened(stack, self.paths)
            where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            shapes = {name: where[name].get_slice(name).get_shape() for name in where}
            others = set(where) - set(absent)
            for name in absent:
                alike = (other for other in others if shapes[other] == shapes[name] and len(shapes[name]) > 1)
                mine = where[name].get_tensor(name)
                if not any(_are_equal(mine, where[other].get_tensor(other)) for other in alike):
                    yield name


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _opened(stack: ExitStack, paths: Iterable[Path]) -> list[Any]:
    return [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
