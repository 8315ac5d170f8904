"""Linear layers that an adapter can be put on: those that a text goes through, and that files give back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oncurve.model.stand_in import find_stand_in

if TYPE_CHECKING:
    from peft import PeftModel

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def linear_names(model: nn.Module) -> list[str]:
    """The linear layers of a model."""
    return [name for name, part in model.named_modules() if isinstance(part, (nn.Linear, Conv1D))]


def forbidden_endings(model: nn.Module) -> set[str]:
    """Endings of linear layers on which peft puts no adapter in models of this kind, such as those of Mamba."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    endings = set()
    for ending in {name.rpartition(".")[2] for name in linear_names(model)}:
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, ending)
        except ValueError:
            endings.add(ending)
    return endings


def unreached(model: PreTrainedModel) -> set[str]:
    """Linear layers in which an adapter would be lost or wrong, found by sending two tokens through the model.

    Those of towers for pictures and sounds, which a text never enters; those of which the model reads the matrix
    without calling them, past an adapter; and those with a forward pass of their own, such as routers that give more
    than a product.
    """
    seen = find_stand_in(model) or model
    calls: set[str] = set()

    def note(name: str, part: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        if _is_product(part, inputs, output):
            calls.add(name)

    hooks = [part.register_forward_hook(partial(note, name)) for name, part in seen.named_modules()]
    try:
        with torch.no_grad():
            seen(input_ids=torch.ones(1, 2, dtype=torch.long, device=seen.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    parts: dict[str, nn.Module] = dict(seen.named_modules())
    kinds = {_kind(name) for name in linear_names(seen) if _is_apart(name, parts, calls)}
    return {name for name in linear_names(model) if _kind(name) in kinds}


def _is_product(part: nn.Module, inputs: tuple[Any, ...], output: object) -> bool:
    """Not a linear layer, or one that gave its product and nothing else."""
    if not isinstance(part, nn.Linear) or type(part).forward is nn.Linear.forward:
        return True
    if not inputs or not isinstance(output, torch.Tensor):
        return False
    product = nn.functional.linear(inputs[0], part.weight, part.bias)
    return product.shape == output.shape and torch.allclose(product, output, rtol=1e-3, atol=1e-5)


def _is_apart(name: str, parts: dict[str, nn.Module], calls: set[str]) -> bool:
    """A layer, or what it is in, is not called by a part that is; experts in a list may just not have been chosen."""
    pieces = name.split(".")
    for end in range(1, len(pieces) + 1):
        inner, outer = ".".join(pieces[:end]), ".".join(pieces[: end - 1])
        is_silent = not any(call == inner or call.startswith(f"{inner}.") for call in calls)
        if is_silent and outer in calls and not isinstance(parts[inner], _CONTAINERS):
            return True
    return False


def _kind(name: str) -> str:
    """A name without the numbers of layers."""
    return re.sub(r"\d+", "#", name)


def lost_by_files(peft_model: PeftModel) -> set[str]:
    """Layers whose adapter would not be found again in the files that peft writes, since it would rename them."""
    from peft import get_peft_model_state_dict
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    saved = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    config: Any = peft_model.peft_config["default"]
    back = convert_peft_adapter_state_dict_for_transformers(peft_model.get_base_model(), config, dict(saved))
    lost = saved.keys() - back.keys()
    return {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in lost}


def describe(model: PreTrainedModel) -> str:
    """The layers that have an adapter, and the matrices that have none, in words."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    adapted = [(name, part) for name, part in model.named_modules() if isinstance(part, LoraLayer)]
    names = Counter(
        part.parameter_name if isinstance(part, ParamWrapper) else name.rpartition(".")[2] for name, part in adapted
    )
    has = ", ".join(f"{name} ({count})" for name, count in names.items())
    left = Counter(_left(model, [name for name, _ in adapted]))
    lacks = ", ".join(f"{name} ({count})" for name, count in left.items())
    return f"adapters on {has}" + (f"; none on {lacks}" if lacks else "")


def _left(model: PreTrainedModel, adapted: list[str]) -> Iterator[str]:
    """Matrices without an adapter, by the ends of their names; embedding and head stand for themselves."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    wrapped = {
        id(part.get_param() if isinstance(part, ParamWrapper) else part.get_base_layer().weight)
        for part in model.modules()
        if isinstance(part, LoraLayer)
    }
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and ".lora_" not in name and id(weight) not in wrapped:
            yield ".".join(name.removesuffix(".weight").replace(".base_layer", "").split(".")[-2:])
