"""Adapters beside the base in vLLM, through its own LoRA layers.

A server is started with one adapter under a name of ours (``--lora-modules``), which all requests ask for. What vLLM
would read from a path for it comes from here: the adapter of the last FINISH. vLLM forgets its adapters after each
update of weights and asks again before the next token, so that a new one takes effect for all rows at once, under the
version of the weights that vLLM tells. Until the first one comes, the adapter is empty.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none  # pyright: ignore[reportMissingImports]
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA  # pyright: ignore[reportMissingImports]
from vllm.lora.lora_model import LoRAModel  # pyright: ignore[reportMissingImports]
from vllm.lora.peft_helper import PEFTHelper  # pyright: ignore[reportMissingImports]
from vllm.lora.worker_manager import WorkerLoRAManager  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers import utils  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.linear import UnquantizedLinearMethod  # pyright: ignore[reportMissingImports]

from oncurve.algorithm.precision import HALF
from oncurve.fleet.servers.protocol import ADAPTER_MODEL as NAME
from oncurve.model.lora_weights import AnotherModel, LoraWeights

OPTIONS = f"--enable-lora --max-lora-rank RANK --lora-modules {NAME}={NAME}"


class PendingAdapter:
    """The adapter of this worker's current version."""

    def __init__(self) -> None:
        self.adapter: LoraWeights | None = None


PENDING = PendingAdapter()


def check_adapter(thin: LoraWeights, vllm_config: Any, model: Any) -> None:
    """Raises AnotherModel for a server that cannot apply an adapter beside its base."""
    lora = vllm_config.lora_config
    rank = max(len(a) for a, _ in thin.pairs.values())
    if lora is None:
        raise AnotherModel(f"it was started without {OPTIONS.replace('RANK', str(rank))}, and cannot apply the adapter")
    if rank > lora.max_lora_rank:
        raise AnotherModel(
            f"it was started with --max-lora-rank {lora.max_lora_rank}, and the adapter has rank {rank}; start it with "
            f"that, or set policy.lora.rank={lora.max_lora_rank}"
        )
    manager = model.lora_manager
    modules = set(manager.modules) | {part for together in manager.packed_modules.values() for part in together}
    if lost := sorted(set(_model_of(thin, manager, 1, torch.float32).loras) - modules):
        raise AnotherModel(
            f"vLLM applies no adapter beside {lost[0]}; leave it out of policy.lora.target_modules, or send whole "
            f"weights with rollouts.adapter=merged"
        )


def _model_of(thin: LoraWeights, manager: Any, number: int, dtype: torch.dtype) -> Any:
    """vLLM's form of an adapter. The scale is in B, before it is rounded."""
    tensors = {}
    for name in thin.pairs:
        plain = "base_model.model." + thin.names.get(name, name).removesuffix(".weight")
        a, b = thin.copies(name, dtype)
        tensors |= {f"{plain}.lora_A.weight": a, f"{plain}.lora_B.weight": b}
    rank = max(len(a) for a, _ in thin.pairs.values())
    helper_config = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": []})
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    names = None if mapper is None else mapper.get_rename_mapper()
    return LoRAModel.from_lora_tensors(number, tensors, helper_config, device="cpu", dtype=dtype, weights_mapper=names)


def _load(plain: Any) -> Any:
    @wraps(plain)
    def load(self: Any, request: Any) -> Any:
        if request.lora_path != NAME:
            return plain(self, request)
        if PENDING.adapter is None:
            rank = self.lora_config.max_lora_rank
            return self._adapter_manager.create_dummy_lora(request.lora_int_id, rank, self.embedding_modules)
        return _model_of(PENDING.adapter, self._adapter_manager, request.lora_int_id, self.lora_config.lora_dtype)

    return load


def _single_sum(plain: Any) -> Any:
    @wraps(plain)
    def apply(self: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """W x + b and the adapter's output in one sum, which is rounded once: added to a rounded W x, as vLLM does it,
        most of a small adapter is lost."""
        is_plain = type(self.base_layer.quant_method) is UnquantizedLinearMethod
        if x.dtype not in HALF or not is_plain or self.base_layer.weight.dim() != 2:
            return plain(self, x, bias)
        flat, weight = x.flatten(0, -2), self.base_layer.weight
        thin = torch.zeros(len(flat), len(weight), dtype=x.dtype, device=x.device)
        self.punica_wrapper.add_lora_linear(
            thin, flat, self.lora_a_stacked, self.lora_b_stacked, 1.0, self.output_slices
        )
        out = torch.addmm(thin, flat, weight.t())
        return (out if bias is None else out + bias).unflatten(0, x.shape[:-1])

    return apply


def _keep_weight(plain: Any) -> Any:
    @wraps(plain)
    def arrange(layer: Any, remove_weight: bool) -> None:
        """On a CPU vLLM packs matrices and drops them; beside an adapter in half width they are used as they are."""
        config = get_current_vllm_config_or_none()
        has_adapter = config is not None and config.lora_config is not None and layer.weight.dtype in HALF
        plain(layer, remove_weight and not has_adapter)

    return arrange


def install() -> None:
    """Let vLLM ask here for the adapter, and apply it in one sum with its base."""
    WorkerLoRAManager._load_adapter = _load(WorkerLoRAManager._load_adapter)
    BaseLinearLayerWithLoRA._apply_sync = _single_sum(BaseLinearLayerWithLoRA._apply_sync)
    utils.dispatch_cpu_unquantized_gemm = _keep_weight(utils.dispatch_cpu_unquantized_gemm)
