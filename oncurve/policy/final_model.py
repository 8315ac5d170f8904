"""The finished model on the disk, written by one process while all of them put it together."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from oncurve.algorithm.precision import SavedCopies
from oncurve.policy.model_folder import is_converted, save_model, write_around
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from oncurve.policy.lora import Adapter

MODEL_TYPES = {"float32": None, "bfloat16": torch.bfloat16}
"""Types of final models by their names in a recipe; None keeps those of the weights in training."""
FILE_BYTES = 50 * 10**9
"""Files of a model become no larger than this, as with transformers."""


class Gathered:
    """A model or adapter with weights that were put together, ready to be written; ``dtype`` is that of a model in
    which they are, if it is not the model's own."""

    def __init__(
        self, savable: PreTrainedModel | Adapter, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> None:
        self.savable, self.weights, self.dtype = savable, dict(weights), dtype

    def save_pretrained(self, folder: str | Path, /) -> None:
        """Write it."""
        self.savable.save_pretrained(folder, state_dict=self.weights)
        declare_type(Path(folder), self.dtype)


def declare_type(folder: Path, dtype: torch.dtype | None) -> None:
    """Let a model's config.json name the type of its weights, so that others load it so; None leaves it."""
    if dtype is None:
        return
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class Streamed:
    """A model whose weights come one after the other."""

    def __init__(
        self,
        model: PreTrainedModel,
        described: Mapping[str, tuple[torch.dtype, torch.Size]],
        weights: Iterator[Tensor],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.described, self.weights, self.dtype = model, described, weights, dtype

    def save_pretrained(self, folder: str | Path, /) -> None:
        """Write it; no more than one weight is in memory."""
        from oncurve.policy.backend import tensor_writer  # lazy

        groups = _groups(self.described)
        names = [SAFE_WEIGHTS_NAME]
        if len(groups) > 1:
            names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
        write_around(
            self.model,
            Path(folder),
            {name: file for file, group in zip(names, groups, strict=True) for name in group}
            if len(groups) > 1
            else {},
        )
        for file, group in zip(names, groups, strict=True):
            with tensor_writer(Path(folder) / file, {name: self.described[name] for name in group}) as write:
                for _ in group:
                    write(next(self.weights))
        declare_type(Path(folder), self.dtype)


def _copied(model: PreTrainedModel, copies: SavedCopies, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of a whole model in a type; of tied ones the first."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    return {
        name: copies.copy(name, weight, dtype) if weight.is_floating_point() else weight
        for name, weight in (*model.named_parameters(), *buffers.items())
    }


def _groups(described: Mapping[str, tuple[torch.dtype, torch.Size]]) -> list[list[str]]:
    """The names of each file."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, (dtype, shape) in described.items():
        more = shape.numel() * dtype.itemsize
        if groups[-1] and size + more > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += more
    return groups


def write_model(policy: TrainedPolicy, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the model, or its adapter, as ``save_model`` does. All processes must call it.

    A whole model is written in a ``dtype`` through the copies that the policy itself makes; None keeps every digit.

    Where weights are in parts they are put together one after the other; process 0 writes each, the others drop it.

    Raises CheckpointError if it cannot be written.
    """
    processes, model = policy.processes, policy.trained_model
    savable = model if policy.adapter is None else policy.adapter
    dtype = None if policy.adapter is not None else dtype
    copies = SavedCopies(model)
    if not policy.backend.is_lockstep:
        if dtype is not None:
            savable = Gathered(model, _copied(model, copies, dtype), dtype)
        processes.on_main(lambda: save_model(savable, policy.tokenizer, folder))
        return
    chosen = {
        name: weight for name, weight in model.named_parameters() if policy.adapter is None or weight.requires_grad
    }
    if policy.adapter is not None or is_converted(policy.model):
        whole_weights = {}
        for name, weight in chosen.items():
            together = policy.backend.full_tensor(weight)
            if processes.is_main:
                whole_weights[name] = (together if dtype is None else copies.copy(name, together, dtype)).cpu()
        around = policy.model if policy.adapter is None else policy.adapter
        processes.on_main(lambda: save_model(Gathered(around, whole_weights, dtype), policy.tokenizer, folder))
        return
    described = {name: (dtype or weight.dtype, policy.backend.full_shape(weight)) for name, weight in chosen.items()}
    gathered = ((name, policy.backend.full_tensor(weight)) for name, weight in chosen.items())
    weights = (whole if dtype is None else copies.copy(name, whole, dtype) for name, whole in gathered)

    def write() -> None:
        try:
            save_model(Streamed(policy.model, described, weights, dtype), policy.tokenizer, folder)
        finally:
            deque(weights, maxlen=0)  # the others wait for as many

    if not processes.is_main:
        deque(weights, maxlen=0)
    processes.on_main(write)
