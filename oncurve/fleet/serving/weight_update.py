"""Weight update of a server: everything is fetched and checked before the model changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from oncurve.fleet.weights.fetch import fetched
from oncurve.fleet.weights.mirror import Mirror
from oncurve.model.lora_weights import AnotherModel, check_base, merged, read_thin
from oncurve.policy.model_folder import is_converted, under_module_names


class WeightUpdate:
    """One version of the weights on its way into the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.label: str | None = None
        """The version that was staged."""
        self._mirror: Mirror | None = None
        self._staged: dict[str, torch.Tensor] | None = None
        self._base: dict[str, torch.Tensor] = {}
        """The matrices that adapters are added to, as they were before the first of them."""
        self._is_whole = False

    def stage(self, message: Mapping[str, Any]) -> None:
        """Read everything that a trainer announces, and compare it with the model.

        Raises ValueError for files that are not there or not whole, and for weights that are not those of this model.
        """
        self._staged = self.label = None
        with self.mirror.opened(message) if message.get("chain") else fetched(message) as paths:
            try:
                staged = self._merge(paths, message["adapter"]) if message.get("adapter") else self._read(paths)
            except SafetensorError as error:
                raise ValueError(f"{paths[0].name} cannot be read: {error}") from None
        self._staged, self._is_whole = staged, not message.get("adapter")
        self.label = str(message["label"])

    @property
    def mirror(self) -> Mirror:
        """The copy of the newest weights that differences are applied to."""
        if self._mirror is None:
            self._mirror = Mirror()
        return self._mirror

    def _read(self, paths: Sequence[Path]) -> dict[str, torch.Tensor]:
        staged: dict[str, torch.Tensor] = {}
        for path in paths:
            staged |= load_file(path)
        if staged.keys() - self.model.state_dict().keys() and is_converted(self.model):
            staged = under_module_names(self.model, staged)
        self._check(staged)
        return staged

    def _merge(self, paths: Sequence[Path], facts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The matrices that an adapter changes, with it. Whole weights that came before it must be its base."""
        thin, own = read_thin(paths[0], facts), self.model.state_dict()
        check_base(thin, lambda name: self._base[name] if name in self._base else own[name])
        for name in thin.pairs.keys() - self._base.keys():
            self._base[name] = own[name].clone()
        return {name: merged(thin, name, weight) for name, weight in self._base.items()}

    def _check(self, staged: Mapping[str, torch.Tensor]) -> None:
        """All weights of the model, and nothing else; tied ones come once."""
        own = self.model.state_dict()
        given = {own[name].data_ptr() for name in staged if name in own}
        missing = sorted(name for name, tensor in own.items() if tensor.data_ptr() not in given)
        unknown = sorted(staged.keys() - own.keys())
        if missing or unknown:
            raise AnotherModel(
                f"{len(missing)} of its weights are missing ({', '.join(missing[:2])}), "
                f"{len(unknown)} are unknown ({', '.join(unknown[:2])})"
            )
        for name, tensor in staged.items():
            if tensor.shape != own[name].shape:
                raise AnotherModel(
                    f"{name} has the shape {tuple(tensor.shape)}, and {tuple(own[name].shape)} is needed"
                )

    @torch.no_grad()
    def apply(self) -> None:
        """Copy what was staged into the model."""
        assert self._staged is not None
        own = self.model.state_dict()
        for name, tensor in self._staged.items():
            own[name].copy_(tensor)
        self._staged = None
        if self._is_whole:
            self._base = {}

    @property
    def is_staged(self) -> bool:
        """There is something to apply."""
        return self._staged is not None
