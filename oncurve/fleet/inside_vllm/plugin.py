"""Weights from files for vLLM. This module is loaded inside vLLM, which knows only ways that need GPUs.

It registers the backend ``file`` of vLLM's own interface for new weights, so that the routes and the names of versions
are vLLM's. Files are fetched and checked first, and the model is touched by FINISH alone. A server has one backend for
its whole life, and one that was lost is brought up to date by files: so vLLM's own ways are reached through this one.
Of this package it imports only what needs nothing but torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from oncurve.fleet.inside_vllm.adapter import PENDING, check_adapter, install
from oncurve.fleet.inside_vllm.device import DeviceTransfer, check_nccl
from oncurve.fleet.inside_vllm.own_files import OwnFiles
from oncurve.fleet.servers.protocol import SAME_NCCL
from oncurve.fleet.weights.fetch import Fetcher
from oncurve.model.lora_weights import AnotherModel, LoraWeights, check_base, read_thin
from oncurve.model.same_model import described_config

BACKEND = "file"


class WeightExtension:
    """The extension that vLLM loads into its workers. Importing this module has registered the backend."""

    weight_transfer_engine: Any

    def tell_model(self) -> dict[str, Any]:
        """The configuration of the model; empty where the transformers in this environment does not know its kind."""
        return read_config(self.weight_transfer_engine.model_config)


@dataclass
class FileInit(WeightTransferInitInfo):
    """The way in which weights come from now on. Nothing has to be set up to read files."""

    way: str = "file"
    """``nccl`` is vLLM's own engine, which gets ``settings``; ``same_nccl`` only asks."""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One version of the weights, as the trainer announces it."""

    label: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    folder: str | None = None
    address: str | None = None
    token: str | None = None
    adapter: dict[str, Any] | None = None
    """Configuration of an adapter that is applied beside the base; None for whole weights."""
    chain: list[dict[str, Any]] = field(default_factory=list)
    """The differences that lead from older versions to this one; empty where all files are sent."""
    dither: int | None = None
    """Seed of the trainer's dither. What comes here is dithered already, and adapters bring their keys."""
    give_up: bool = False
    """End an update that somebody left in its middle."""


class FileEngine(WeightTransferEngine):
    """Takes whole checkpoints.

    vLLM stacks q, k and v into one matrix, which a part of a checkpoint would leave in ruins without a word: a part is
    refused.
    """

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._staged: ExitStack | None = None
        self._opened: list[Any] = []
        self._thin: LoraWeights | None = None
        self._known_base: str | None = None
        """The fingerprint of a base that is this server's."""
        self._fetcher = Fetcher(group=self.vllm_config.instance_id)  # the workers of a server share a copy
        self._own = OwnFiles(self.model_config.model)
        self._device: DeviceTransfer | None = None
        """The way of weights without files, where that was agreed on."""

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Agree on a way. Raises ValueError for one that there is not."""
        self.shutdown()
        if init_info.way == SAME_NCCL:
            check_nccl(list(init_info.settings["version"]))
        elif init_info.way != BACKEND:
            self._device = DeviceTransfer(init_info.way, init_info.settings, self)

    def start_weight_update(self) -> None:
        """Forget what an update before this one left behind."""
        self._forget()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Fetch and check; unlike the base's, without a GPU to wait for."""
        if self._device is None or update_info.get("give_up"):
            self.receive_weights(self.parse_update_info(update_info))
        else:
            self._device.receive(update_info)

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Open the announced files. Raises ValueError if they are not whole, or not those of this model."""
        if update_info.give_up:
            raise ValueError("the update is given up, as asked")
        self._forget()
        with ExitStack() as stack, self._fetcher.fetch(vars(update_info)) as paths:
            if update_info.adapter is not None:
                self._thin = self._read_adapter(read_thin(paths[0], update_info.adapter))
                return
            if self.vllm_config.lora_config is not None:
                raise AnotherModel("it was started with --enable-lora, and takes adapters, not whole weights")
            # open files are mapped into memory, and can be read when their names are gone
            opened = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
            check_all(opened, update_info.names)
            self._opened, self._staged = opened, stack.pop_all()

    def _read_adapter(self, thin: LoraWeights) -> LoraWeights:
        """An adapter that can be applied here. Raises AnotherModel for another."""
        check_adapter(thin, self.vllm_config, self.model)
        if thin.base != self._known_base:
            with ExitStack() as stack:
                opened = [stack.enter_context(safe_open(path, framework="pt")) for path in self._own.base_paths()]
                locations = {name: self._own.find(thin.names.get(name, name)) for name in thin.pairs}
                check_base(thin, lambda name: weight_named(opened, locations[name]))
            self._known_base = thin.base
        return thin

    def finish_weight_update(self) -> None:
        """Load what was opened, and pack again what vLLM packs but forgets."""
        if self._device is not None:
            self._device.finish()
            return
        if self._thin is not None:  # vLLM forgets the one before by itself
            PENDING.adapter, self._thin = self._thin, None
            return
        if self._staged is None:
            raise ValueError("no weights were sent")
        try:
            initialize_layerwise_reload(self.model)
            names = {name for name, _ in self.model.named_parameters()}
            loaded = self.model.load_weights(self._weights())
            finalize_layerwise_reload(self.model, self.model_config)
            repack_for_cpu(self.model)
            if self.model_config.quantization is None:  # else scales and packed weights have names of vLLM's own
                check_loaded(names, loaded)
        finally:
            self._forget()

    def shutdown(self) -> None:
        """Let go of open files, and of a group."""
        self._forget()
        device, self._device = self._device, None
        if device is not None:
            device.close()

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self._opened:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)

    def _forget(self) -> None:
        staged, self._staged, self._opened, self._thin = self._staged, None, [], None
        if staged is not None:
            staged.close()


def read_config(chosen: Any) -> dict[str, Any]:
    """The configuration of a model's part for text, as its folder says it and the server's options change it."""
    changes = chosen.hf_overrides if isinstance(chosen.hf_overrides, dict) else {}
    own_code = chosen.trust_remote_code
    try:
        return described_config(
            AutoConfig.from_pretrained(chosen.model, revision=chosen.revision, trust_remote_code=own_code, **changes)
        )
    except (OSError, ValueError, KeyError, ImportError):
        return {}


def check_all(opened: list[Any], names: list[str]) -> None:
    """Raises ValueError unless files hold the weights that were announced, all of them and no others."""
    wrong = {name for file in opened for name in file.keys()} ^ set(names)  # noqa: SIM118
    if wrong:
        raise ValueError(f"the files do not hold what was announced: see {', '.join(sorted(wrong)[:3])}")


def check_loaded(names: set[str], loaded: set[str] | None) -> None:
    """Raises AnotherModel if vLLM found no place for some weights of a part, such as the one for text, of which it took
    others: its model is half old and half new. A tower for pictures may be left out as a whole."""
    parts = {name.partition(".")[0] for name in loaded or ()}
    left = sorted(name for name in names - set(loaded or names) if name.partition(".")[0] in parts)
    if left or (not parts and loaded is not None):
        raise AnotherModel(f"vLLM found nothing for {len(left)} of its weights, such as {', '.join(left[:3])}")


def weight_named(opened: list[Any], name: str) -> torch.Tensor:
    """A tensor of one of several files. Raises KeyError if none has it."""
    for file in opened:
        if name in file.keys():  # noqa: SIM118
            return file.get_tensor(name)
    raise KeyError(name)


@torch.no_grad()
def repack_for_cpu(model: torch.nn.Module) -> None:
    """Pack again what kernels for CPUs have packed and reloading does not: a head that shares its matrix with the
    embedding, which would be the old one, and experts, which would be read as if they were packed."""
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # pyright: ignore[reportMissingImports]
        CPUUnquantizedExperts,
    )
    from vllm.model_executor.layers.fused_moe.routed_experts import (  # pyright: ignore[reportMissingImports]
        RoutedExperts,
    )

    for part in model.modules():
        layer: Any = part
        if "cpu_linear" in vars(layer) and layer.weight is not None and layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)
        elif isinstance(layer, RoutedExperts) and layer.quant_method.moe_kernel is not None:
            experts: Any = layer.quant_method.moe_kernel.fused_experts
            if isinstance(experts, CPUUnquantizedExperts):
                experts.process_weights_after_loading(layer)


if BACKEND not in WeightTransferEngineFactory._registry:
    install()
    WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)
