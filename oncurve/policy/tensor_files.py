"""Files of tensors: safetensors files read row by row, and one written tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from oncurve.algorithm.precision import SAFETENSORS_TYPES


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of some safetensors files by name, each read from the disk when it is asked for."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        """Raises SafetensorError or OSError for a file that cannot be read."""
        self._files: dict[str, Any] = {}
        for path in paths:
            file: Any = safe_open(str(path), "pt")
            self._files |= dict.fromkeys(file.keys(), file)  # closed with the last name of it

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def shape(self, name: str) -> torch.Size:
        """Without reading the tensor."""
        return torch.Size(self._files[name].get_slice(name).get_shape())

    def rows(self, name: str, rows: slice) -> Tensor:
        """Some rows of a tensor; nothing else of it is read."""
        if rows == slice(None):
            return self[name]
        return self._files[name].get_slice(name)[rows]

    def reader(self, name: str) -> Callable[[slice], Tensor]:
        """A function that reads the rows of one tensor."""
        return lambda rows: self.rows(name, rows)


@contextmanager
def tensor_writer(path: Path, described: Mapping[str, tuple[torch.dtype, torch.Size]]) -> Iterator[Callable[..., None]]:
    """A safetensors file whose tensors are given one after the other, in the order in which they were described.

    No more than one of them has to be in memory at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in described.items():
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)

        def write(tensor: Tensor) -> None:
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)

        yield write


def narrow_files(folder: Path, kind: torch.dtype) -> None:
    """Write the float32 weights of a saved model in another type, one tensor after the other, and say so in its
    configuration; adapters stay as they are."""
    for path in sorted(folder.glob("model*.safetensors")):
        files, narrower = TensorFiles([path]), path.with_suffix(".narrower")
        kinds = {name: files[name].dtype for name in files}
        kinds = {name: kind if dtype == torch.float32 else dtype for name, dtype in kinds.items()}
        with tensor_writer(narrower, {name: (kinds[name], files.shape(name)) for name in files}) as write:
            for name in files:
                write(files[name].to(kinds[name]))
        narrower.replace(path)
        config = folder / "config.json"
        settings = {**json.loads(config.read_text(encoding="utf-8")), "dtype": str(kind).removeprefix("torch.")}
        config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
