"""Weight update of a server: everything is fetched and checked before the model changes.

An adapter is put beside the base and changes none of its weights: added to them, it would be rounded away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from oncurve.algorithm.precision import narrow, parameter_keys, set_dither
from oncurve.fleet.weights.fetch import Fetcher
from oncurve.model.lora_weights import AnotherModel, LoraWeights, check_base, read_thin
from oncurve.policy.lora_forward import base_state, check_shapes, put_adapter, remove_adapter
from oncurve.policy.model_folder import is_converted, under_module_names


class WeightUpdate:
    """One version of the weights on its way into the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.label: str | None = None
        """The version that was staged."""
        self.fetcher = Fetcher()
        self._staged: dict[str, torch.Tensor] | LoraWeights | None = None
        self._seed: int | None = None
        """Seed of the dither of the trainer's copies."""

    def stage(self, message: Mapping[str, Any]) -> None:
        """Read everything that a trainer announces, and compare it with the model.

        Raises ValueError for files that are not there or not whole, and for weights that are not those of this model.
        """
        self._staged = self.label = None
        with self.fetcher.fetch(message) as paths:
            try:
                staged = self._adapter(paths[0], message["adapter"]) if message.get("adapter") else self._read(paths)
            except SafetensorError as error:
                raise ValueError(f"{paths[0].name} cannot be read: {error}") from None
        self._staged, self._seed = staged, message.get("dither")
        self.label = str(message["label"])

    def _read(self, paths: Sequence[Path]) -> dict[str, torch.Tensor]:
        staged: dict[str, torch.Tensor] = {}
        for path in paths:
            staged |= load_file(path)
        if staged.keys() - base_state(self.model).keys() and is_converted(self.model):
            staged = under_module_names(self.model, staged)
        self._check(staged)
        return staged

    def _adapter(self, path: Path, facts: Mapping[str, Any]) -> LoraWeights:
        """An adapter for the base that is here; whole weights that came before it are one as well."""
        thin, own = read_thin(path, facts), base_state(self.model)
        check_base(thin, lambda name: own[name])
        check_shapes(self.model, thin)
        return thin

    def _check(self, staged: Mapping[str, torch.Tensor]) -> None:
        """All weights of the model, and nothing else; tied ones come once."""
        own = base_state(self.model)
        received = {own[name].data_ptr() for name in staged if name in own}
        missing = sorted(name for name, tensor in own.items() if tensor.data_ptr() not in received)
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
        """Copy what was staged into the model, or put it beside the base."""
        assert self._staged is not None
        if isinstance(self._staged, LoraWeights):
            set_dither(self.model, self._seed)
            put_adapter(self.model, self._staged)
        else:
            remove_adapter(self.model)
            set_dither(self.model, self._seed)
            own, keys = self.model.state_dict(), parameter_keys(self.model)
            for name, tensor in self._staged.items():
                own[name].copy_(narrow(tensor, own[name].dtype, keys.get(name)))
        self._staged = None

    @property
    def is_staged(self) -> bool:
        """There is something to apply."""
        return self._staged is not None
