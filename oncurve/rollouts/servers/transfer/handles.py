"""CUDA IPC handles as plain values instead of pickles.

vLLM's own client pickles it, and its server unpickles whatever it is sent. Nothing but torch is needed here, because
vLLM's environment imports it too.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

_CLASSES: dict[str, type] = {
    "Tensor": torch.Tensor,
    "TypedStorage": torch.storage.TypedStorage,
    "UntypedStorage": torch.UntypedStorage,
}
_TYPES = {"uint8": torch.uint8}
"""The buffer is one of bytes."""
_PLAIN = (int, bool, type(None))


def to_plain(arguments: Sequence[object]) -> list[Any]:
    """What ``torch.multiprocessing.reductions.reduce_tensor`` says of a tensor on a GPU, for JSON.

    Raises ValueError for something of another kind.
    """
    return [_plain(one) for one in arguments]


def from_plain(values: Sequence[Any]) -> tuple[Any, ...]:
    """The same, read back. Raises ValueError for something of another kind."""
    return tuple(_real(one) for one in values)


def _plain(value: object) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if value in _TYPES.values():
        return {"type": str(value).removeprefix("torch.")}
    if isinstance(value, tuple | list):  # a size or a stride
        return [_plain(one) for one in value]
    if isinstance(value, type) and _CLASSES.get(value.__name__) is value:
        return {"class": value.__name__}
    raise ValueError(f"the handle of a GPU's memory holds {value!r}, which cannot be sent")


def _real(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list):
        return tuple(_real(one) for one in value)
    match value:
        case {"bytes": str(text)}:
            return base64.b64decode(text, validate=True)
        case {"type": str(name)} if name in _TYPES:
            return _TYPES[name]
        case {"class": str(name)} if name in _CLASSES:
            return _CLASSES[name]
        case _:
            raise ValueError(f"the handle of a GPU's memory holds {value!r}, which means nothing here")
