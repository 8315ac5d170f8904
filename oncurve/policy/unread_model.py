"""A model whose weights are still in their files: built without them, cut into parts, and filled part by part.

No process ever has a whole model that is to be cut: matrices are places without memory until FSDP has divided them, and
then each process reads its own rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from oncurve.algorithm.precision import narrow, parameter_keys
from oncurve.model.lora_linear import linear_layers
from oncurve.model.stand_in import FAILURES, stand_in
from oncurve.model.weights import set_trust, trust_of
from oncurve.policy.backend import TensorFiles
from oncurve.policy.half_precision import frozen_copy
from oncurve.policy.model_folder import is_converted
from oncurve.policy.packed_attention import IN_BLOCKS, use_packed_attention
from oncurve.policy.passport import (
    check_names,
    compare_names,
    files_of,
    make_passport,
    quantization_of,
    set_passport,
    switch_off,
)
from oncurve.policy.scoring_path import ScoringPath, find_scoring_path
from oncurve.policy.sharding import ReplicaLocation, fill


class NotByParts(Exception):
    """The reason why a model has to be loaded whole."""


@dataclass(frozen=True)
class Unread:
    """A model whose weights are still in their files."""

    files: TensorFiles
    names: Mapping[str, str]
    """Names in the files by those in the model."""
    device: torch.device
    """Device of the parts."""

    def find_scoring_path(
        self, model: PreTrainedModel, compute_type: torch.dtype, *, packing: bool, in_parts: bool
    ) -> ScoringPath:
        """As that of ``scoring_path``, proven on a stand-in."""
        other = stand_in(model, self.device)
        path = find_scoring_path(other, compute_type, packing=packing, in_parts=in_parts)
        set_trust(model, trust_of(other))
        if path.is_packed:
            use_packed_attention(model, in_blocks=other.config.get_text_config()._attn_implementation == IN_BLOCKS)
        return path

    @torch.no_grad()
    def put_on(self, model: nn.Module) -> None:
        """Move to the device what a model has beside its unread weights, which FSDP takes as of no device."""

        def moved(_: str, weight: nn.Parameter) -> nn.Parameter:
            device = "meta" if is_unread(weight) else self.device
            return nn.Parameter(weight.detach().to(device), weight.requires_grad)

        _replace(model, moved)
        for module in model.modules():
            for key, buffer in module._buffers.items():
                module._buffers[key] = None if buffer is None else buffer.to(self.device)

    @torch.no_grad()
    def fill(self, model: nn.Module, *, offload: bool) -> None:
        """Give a model that was cut the memory of its parts, and read them."""
        device = torch.device("cpu") if offload else self.device

        def made(name: str, weight: nn.Parameter) -> nn.Parameter:
            if not weight.is_meta:
                return weight
            own = torch.empty_like(weight, device=device if weight.ndim > 1 else self.device)
            fill(own, self.files.reader(self.names[name.replace(".base_layer.", ".")]))
            return nn.Parameter(own, weight.requires_grad)

        _replace(model, made)


def unread_model(
    folder: str,
    known: tuple[PreTrainedConfig, PreTrainedTokenizerBase],
    device: torch.device,
    *,
    revision: str | None,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, Unread]:
    """A model in float32 without its weights, and where they are, by its configuration and tokenizer.

    Raises NotByParts for a model whose files are no safetensors files, or name or cut weights otherwise than it does;
    CheckpointError for files that hold something else than it, as ``load_model``.
    """
    config, tokenizer = known
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    if quantization_of(config) is not None:
        raise NotByParts("its weights are of few bits and become whole numbers first")
    files = TensorFiles(_paths(folder, revision))
    with no_init_weights(), _without_weights():
        model = AutoModelForCausalLM.from_config(config, **options)
    model.eval().tie_weights()
    if is_converted(model) or any(weight.ndim == 0 for weight in model.parameters()):
        raise NotByParts("transformers names or cuts its weights otherwise in files than in modules")
    names = _names(model, files)
    for name, buffer in model.named_buffers():
        if name in names:
            buffer.copy_(files[names[name]])
    if model.can_generate() and _find(folder, "generation_config.json", revision):
        model.generation_config = GenerationConfig.from_pretrained(folder, revision=revision or "main")
    switched = switch_off(model.config)
    if (account := files_of(folder, revision)) is not None:
        _, compared = compare_names(model.config, account, kind=type(model))
        check_names(folder, model, compared, config, account)
    set_passport(model, make_passport(folder, model, tokenizer, account, switched=switched, numbers=None))
    try:
        stand_in(model, "cpu")
    except FAILURES as error:
        raise NotByParts(f"there is no smaller model of its kind ({type(error).__name__}: {error})") from None
    return model, Unread(files, names, device)


def _find(folder: str, name: str, revision: str | None) -> str | None:
    return cached_file(
        folder,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
    )


def _paths(folder: str, revision: str | None) -> list[str | Path]:
    if (single := _find(folder, SAFE_WEIGHTS_NAME, revision)) is not None:
        return [single]
    if (index := _find(folder, SAFE_WEIGHTS_INDEX_NAME, revision)) is not None:
        return [*(get_checkpoint_shard_files(folder, index, revision=revision)[0] or ())]
    raise NotByParts("it has no safetensors files, and others cannot be read in parts")


def _names(model: PreTrainedModel, files: TensorFiles) -> dict[str, str]:
    """Names in the files by those in the model, under the first name of each tensor."""
    prefix = f"{model.base_model_prefix}."
    same: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        same.setdefault(id(tensor), []).append(name)
    tensors, names_in_files = model.state_dict(keep_vars=True), dict[str, str]()
    for names in same.values():
        known = [other for name in names for other in (name, name.removeprefix(prefix)) if other in files]
        if not known or files.shape(known[0]) != tensors[names[0]].shape:
            raise NotByParts(f"its files have no tensor {names[0]} of this shape")
        names_in_files[names[0]] = known[0]
    return names_in_files


@contextmanager
def _without_weights() -> Iterator[None]:
    """While it lasts, parameters that modules register have a shape and no memory."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not is_unread(param):
            nothing = param.detach().new_zeros(()).expand(param.shape)
            param = nn.Parameter(nothing, param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_empty
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def is_unread(weight: Tensor) -> bool:
    """All numbers of the weight are one place in memory: it was not read yet."""
    return weight.ndim > 0 and not any(weight.stride())


def copy_unread(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model, of whose unread weights no memory is made."""
    known: dict[int, object] = {
        id(weight): nn.Parameter(weight.detach(), weight.requires_grad)
        for weight in model.parameters()
        if is_unread(weight)
    }
    return copy.deepcopy(model, known)


@torch.no_grad()
def whole_copy(model: PreTrainedModel, device: torch.device, *, halved: bool) -> PreTrainedModel:
    """A copy of an unread model with memory for all weights, which are not trained, in the types of ``frozen_copy``."""
    copied = copy_unread(model)
    linear = {id(part.weight) for part in linear_layers(copied)} if halved else set()

    def made(_: str, weight: nn.Parameter) -> nn.Parameter:
        dtype = torch.bfloat16 if id(weight) in linear else weight.dtype
        return nn.Parameter(torch.empty(weight.shape, dtype=dtype, device=device), requires_grad=False)

    _replace(copied, made)
    for module in copied.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)
    return copied


def make_replica(
    model: PreTrainedModel, location: ReplicaLocation, device: torch.device, *, halved: bool, is_unread: bool = False
) -> PreTrainedModel | None:
    """A copy of all weights of a model that is about to be cut, where this process is to have one."""
    if location == "none":
        return None
    target = device if location == "device" else torch.device("cpu")
    return (whole_copy if is_unread else frozen_copy)(model, target, halved=halved)


@torch.no_grad()
def fill_copy(
    copied: nn.Module | None, model: nn.Module, whole: Callable[[Tensor], Tensor], *, only_trained: bool
) -> None:
    """Put the weights of a model in parts into a whole copy, one after the other. All processes must call it."""
    copies = {} if copied is None else dict(copied.named_parameters())
    keys = parameter_keys(model)
    for name, weight in model.named_parameters():
        if weight.requires_grad or not only_trained:
            together = whole(weight)
            if name in copies:
                copies[name].copy_(narrow(together, copies[name].dtype, keys.get(name)))
            del together  # before the next one is put together


def _replace(model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Another parameter in the place of each, the same one where it was the same."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in made:
                    made[id(weight)] = weight, make(f"{prefix}.{key}" if prefix else key, weight)
                module._parameters[key] = made[id(weight)][1]
