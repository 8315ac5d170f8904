"""The files of the model that a vLLM server was started with, beside which adapters are applied."""

from __future__ import annotations

import json
from pathlib import Path

from oncurve.fleet.weights.weight_manifest import names_in
from oncurve.model.lora_weights import AnotherModel

INDEX = "model.safetensors.index.json"


def own_paths(model: str) -> list[Path]:
    """The safetensors files of a model's folder as vLLM reads them; empty for a model that is not in one.

    An index names them all, and other files beside are a second copy in another form.
    """
    folder = Path(model)
    if (folder / INDEX).is_file():
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(listed))]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


class OwnFiles:
    """The weights of the model that the server was started with, by name."""

    def __init__(self, model: str) -> None:
        self.model, self.paths = model, own_paths(model)
        self.names = frozenset(name for path in self.paths for name in names_in(path))

    def base_paths(self) -> list[Path]:
        """The files of the base. Raises ValueError if they are not on this disk as safetensors."""
        if not self.paths:
            raise ValueError(f"{self.model} is no folder with safetensors, by which an adapter's base could be told")
        return self.paths

    def find(self, name: str) -> str:
        """A weight's name here. Files may lack the first parts of a checkpoint's names, or have more of them.

        Raises AnotherModel if there is none, or more than one.
        """
        if name in self.names:
            return name
        alike = [own for own in self.names if own.endswith(f".{name}") or name.endswith(f".{own}")]
        if len(alike) != 1:
            raise AnotherModel(f"{len(alike)} of its weights can be {name}, to which the adapter belongs")
        return alike[0]
