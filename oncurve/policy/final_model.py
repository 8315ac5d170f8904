"""The finished model on the disk, written by one process while all of them put it together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from oncurve.policy.lora import Adapter
from oncurve.policy.model_folder import is_converted, save_model, write_around
from oncurve.policy.tensor_files import tensor_writer
from oncurve.policy.trained_policy import TrainedPolicy

FILE_BYTES = 50 * 10**9
"""Files of a model become no larger than this, as with transformers."""


class Gathered:
    """A model or adapter with weights that were put together, ready to be written."""

    def __init__(self, savable: PreTrainedModel | Adapter, weights: Mapping[str, Tensor]) -> None:
        self.savable, self.weights = savable, dict(weights)

    def save_pretrained(self, folder: str | Path, /) -> None:
        """Write it."""
        self.savable.save_pretrained(folder, state_dict=self.weights)


class Streamed:
    """A model whose weights come one after the other."""

    def __init__(
        self, model: PreTrainedModel, described: Mapping[str, tuple[torch.dtype, torch.Size]], weights: Iterator[Tensor]
    ) -> None:
        self.model, self.described, self.weights = model, described, weights

    def save_pretrained(self, folder: str | Path, /) -> None:
        """Write it; no more than one weight is in memory."""
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


def write_model(policy: TrainedPolicy, folder: Path) -> None:
    """Write the model, or its adapter, as ``save_model`` does. All processes must call it.

    Where weights are in parts they are put together one after the other; process 0 writes each, the others drop it.

    Raises CheckpointError if it cannot be written.
    """
    processes, model = policy.processes, policy.trained_model
    savable = model if policy.adapter is None else policy.adapter
    if not policy.backend.is_lockstep:
        processes.on_main(lambda: save_model(savable, policy.tokenizer, folder))
        return
    chosen = {
        name: weight for name, weight in model.named_parameters() if policy.adapter is None or weight.requires_grad
    }
    if policy.adapter is not None or is_converted(policy.model):
        kept = {}
        for name, weight in chosen.items():
            together = policy.backend.full_tensor(weight)
            if processes.is_main:
                kept[name] = together.cpu()
        around = policy.model if policy.adapter is None else policy.adapter
        processes.on_main(lambda: save_model(Gathered(around, kept), policy.tokenizer, folder))
        return
    described = {name: (weight.dtype, policy.backend.full_shape(weight)) for name, weight in chosen.items()}
    weights = (policy.backend.full_tensor(weight) for weight in chosen.values())

    def write() -> None:
        try:
            save_model(Streamed(policy.model, described, weights), policy.tokenizer, folder)
        finally:
            deque(weights, maxlen=0)  # the others wait for as many

    if not processes.is_main:
        deque(weights, maxlen=0)
    processes.on_main(write)
