"""An adapter as weights: added to those of its base, or apart from them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from oncurve.algorithm.precision import key_of, narrow, saved_name, weight_key
from oncurve.core.errors import ConfigError
from oncurve.model.lora_weights import LoraWeights, fingerprint

_TIED = (
    "the adapter adds to the head or to the embedding of a model in which both are one matrix: as one model they would "
    "both change. Use the adapter as it is, beside its base, or train one without lm_head and embed_tokens"
)


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights that a model with an adapter would have after ``merge``; the model stays as it is.

    Those that differ from the model's are in the CPU's memory: beside a base that fills a GPU there is room for one.

    Raises ConfigError for a base in few bits, which has no such weights, and for an adapter that is more than other
    weights of its base.
    """
    from peft.tuners.lora import LoraLayer

    _refuse_few_bits(part for part in model.modules() if isinstance(part, LoraLayer))
    refuse_tied(model)
    weights, wrapped = model.state_dict(), list(_wrapped(model))
    for name, part in wrapped:
        weights = {key: weight for key, weight in weights.items() if not key.startswith(f"{name}.")}
        weights |= {f"{name}.{key}": weight.cpu() for key, weight in _merged(part).state_dict().items()}
    if wrapped and model.config.get_text_config().tie_word_embeddings:
        ends = [_weight_name(model, get()) for get in (model.get_input_embeddings, model.get_output_embeddings)]
        if all(end in weights for end in ends) and not torch.equal(*(weights[end].cpu() for end in ends)):
            raise ConfigError(_TIED)
    return weights


@torch.no_grad()
def arrived_share(model: PreTrainedModel, kind: torch.dtype, seed: int | None) -> float:
    """How much of an adapter is in the merged weights after they were rounded to another type: ``c D / D D`` over all
    weights W to which the adapter adds D, with c = round(W + D) - round(W).

    Rounding is by the dither of the seed, to the nearest if it is None. 1 for an adapter that adds nothing. The model
    stays as it is. Raises ConfigError as ``merged_weights`` does.
    """
    along = added = 0.0
    for prefix, part in _wrapped(model):
        before = part.get_base_layer().state_dict()
        for name, weight in _merged(part).state_dict().items():
            key = None if seed is None else key_of(seed, saved_name(f"{prefix}.{name}"))
            change = (weight - before[name]).double()
            seen = narrow(weight, kind, key).double() - narrow(before[name], kind, key).double()
            along += float((seen * change).sum())
            added += float((change * change).sum())
    return along / added if added else 1.0


def _wrapped(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The wrappers of peft around modules of the base: adapters and trained copies, the outermost of each place."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    prefix = ""
    for name, part in model.named_modules():
        if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not (prefix and name.startswith(prefix)):
            prefix = f"{name}."
            yield name, part


def _merged(part: nn.Module) -> nn.Module:
    """The module that peft makes of one of its own when a model is merged; the part itself stays as it is.

    Raises ConfigError for what is not the base's with other weights.
    """
    own: Any = copy.deepcopy(part)
    with mergeable():
        if "unload_and_optionally_merge_module" in dir(own):
            return own.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        own.merge()
    return own.get_base_layer()


@contextmanager
def mergeable() -> Iterator[None]:
    """Raises ConfigError for an adapter that peft cannot add to the weights of its base."""
    try:
        yield
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"the adapter cannot become part of its base's weights ({' '.join(str(error).split())[:200]}). Use it as "
            f"it is, beside its base"
        ) from None


def _weight_name(model: nn.Module, end: nn.Module | None) -> str:
    return next((f"{name}.weight" for name, part in model.named_modules() if part is end and end is not None), "")


def _base_weight(part: Any) -> Tensor:
    from peft.tuners.lora import ParamWrapper

    return part.get_param() if isinstance(part, ParamWrapper) else part.get_base_layer().weight


def adapter_weights(model: PreTrainedModel) -> LoraWeights | None:
    """The adapter in a model apart from it; None if it is more than a pair of matrices for each of the base's matrices,
    as those of experts and embeddings are, or if a checkpoint does not have these matrices one by one.

    Raises ConfigError for a base in few bits, over which servers would not have the policy's weights.
    """
    layers = _lora_layers(model)
    _refuse_few_bits(layers.values())
    if _unlike_pairs(model, layers) is not None:
        return None
    bases = {name: part.get_base_layer().weight for name, part in layers.items()}
    named = _checkpoint_names(model, bases)
    pairs = {name: (part.lora_A["default"].weight, part.lora_B["default"].weight) for name, part in layers.items()}
    return LoraWeights(
        pairs,
        {name: float(part.scaling["default"]) for name, part in layers.items()},
        is_transposed=any(part.fan_in_fan_out for part in layers.values()),
        base=fingerprint(pairs, lambda name: bases[name]),
        names={name: module_name for name, module_name in named.items() if module_name != name},
        keys={name: keys for name, part in layers.items() if None not in (keys := _dither_keys(part))},
    )


def _dither_keys(part: Any) -> tuple[Any, Any]:
    return weight_key(part.lora_A["default"]), weight_key(part.lora_B["default"])


def why_not_apart(model: PreTrainedModel) -> str | None:
    """The reason why servers cannot apply the adapter in a model beside its base, with what to change; None if they
    can."""
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad and ".lora_" not in name]
    if trained and all(name.endswith(".bias") for name in trained):
        return "policy.lora.bias trains biases of the base. Set policy.lora.bias to none"
    if trained:
        return f"{trained[0]} is trained beside the adapter's matrices. Leave it out (modules_to_save in peft)"
    return _unlike_pairs(model, _lora_layers(model))


def _lora_layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {f"{name}.weight": part for name, part in model.named_modules() if isinstance(part, LoraLayer)}


def _unlike_pairs(model: PreTrainedModel, layers: dict[str, Any]) -> str | None:
    """The first layer whose adapter is more than two matrices beside one of a checkpoint, with what to change."""
    from peft.tuners.lora import Linear

    for name, part in layers.items():
        if not isinstance(part, Linear):
            return f"the adapter of {name} is not that of a linear layer. Leave it out of policy.lora.target_modules"
        if any(part.use_dora.values()):
            return f"the adapter of {name} is of the kind DoRA. Train one without (use_dora in peft)"
        if any(part.lora_bias.values()):
            return f"the adapter of {name} has a bias of its own. Train one without (lora_bias in peft)"
    bases = {name: part.get_base_layer().weight for name, part in layers.items()}
    lost = sorted(bases.keys() - _checkpoint_names(model, bases).keys())
    if lost:  # files have them in pieces, or several in one
        return f"a checkpoint does not have {lost[0]} as a matrix. Leave it out of policy.lora.target_modules"
    return None


def _checkpoint_names(model: PreTrainedModel, bases: dict[str, Tensor]) -> dict[str, str]:
    """The names of matrices in a checkpoint, for those that it has."""
    named = {id(weight): name for name, weight in revert_weight_conversion(model, bases).items()}
    return {name: named[id(weight)] for name, weight in bases.items() if id(weight) in named}


def trains_pairs_only(model: nn.Module) -> bool:
    """Nothing but the thin matrices of an adapter is trained: no bias of the base, no other weight."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return all(".lora_A." in name or ".lora_B." in name for name in trained)


def _refuse_few_bits(layers: Iterable[Any]) -> None:
    if any(not _base_weight(part).is_floating_point() for part in layers):
        raise ConfigError(
            "policy.quantization keeps the base in few bits, of which rollout servers cannot be given whole "
            "weights. Leave it out, or sample with rollouts.type engine"
        )


def refuse_tied(model: nn.Module) -> None:
    """Head and embedding that are one matrix cannot both have what an adapter adds to one of them.

    Raises ConfigError if they are and one has an adapter.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    ends = [getattr(model, f"get_{end}_embeddings")() for end in ("input", "output")]
    plain = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    is_tied = all(end is not None for end in plain) and plain[0].weight is plain[1].weight
    if is_tied and plain != ends:
        raise ConfigError(_TIED)
