"""The policy of a recipe, and its sampler."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from oncurve.data.given import NOTHING, Given
from oncurve.errors import ConfigError
from oncurve.extensions import extension
from oncurve.recipe.schema import Config
from oncurve.sample.event_loop import require_aiohttp
from oncurve.wiring.algorithm import is_served

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from oncurve.policy.deepspeed_settings import ZeroSettings
    from oncurve.policy.distributed import Processes
    from oncurve.policy.lora import Adapter
    from oncurve.policy.policy import ComputeType, ReplicaPlace, TrainedPolicy
    from oncurve.policy.sharding import Sharding
    from oncurve.policy.unread_model import Unread


log = logging.getLogger(__name__)


def make_device(name: str) -> torch.device:
    """The device of a recipe; auto takes a GPU if there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"policy.device is {name!r}, which this machine or its torch does not have. Set policy.device=auto"
        ) from None
    return device


def own_compute_type(config: Config, device: torch.device) -> ComputeType:
    """Type of the arithmetic: the recipe's, or bfloat16 on a GPU and float32 on a CPU."""
    if config.policy.compute_type != "auto":
        return config.policy.compute_type
    return "bfloat16" if device.type == "cuda" else "float32"


def make_policy(
    config: Config, *, with_reference: bool = False, processes: Processes | None = None, given: Given = NOTHING
) -> TrainedPolicy:
    """The model of the recipe, or the ``given`` one, ready to be trained, with a reference if the algorithm needs one.

    The reference is a copy of the model; or, with a fresh adapter, the base under it, which takes no memory.
    Without ``processes`` to train it, a policy is only there to be sampled from, and nothing of it is kept in parts.
    """
    import torch
    from torch import nn

    from oncurve.model.allocator import keep_freed_memory  # lazy
    from oncurve.policy.distributed import ALONE  # lazy
    from oncurve.policy.half_precision import halve_frozen_matrices  # lazy
    from oncurve.policy.policy import TrainedPolicy  # lazy
    from oncurve.policy.sharding import Sharding  # lazy

    device = own_device(config)
    if device.type == "cpu":
        keep_freed_memory(always=not config.policy.gradient_checkpointing)
    compute = own_compute_type(config, device)
    sharding = None if processes is None else make_sharding(config, processes)
    few_bits = config.policy.quantization is not None  # which are packed on the device itself
    by_parts = isinstance(sharding, Sharding) and given.model is None and config.algorithm.teacher is None
    loaded = _load_unread(config, device) if by_parts else None
    unread, loaded = loaded or (None, _load(config, device if few_bits else torch.device("cpu"), given))
    model, tokenizer, adapter = loaded
    if device.type == "cuda" and compute == "bfloat16" and sharding is None and not few_bits:
        halve_frozen_matrices(model)
    if not few_bits and unread is None:
        nn.Module.to(model, device)
    teacher = None
    if with_reference and is_served(config.algorithm.teacher):
        require_aiohttp()
        asked = str(config.algorithm.teacher), tokenizer, config.model, config.rollouts.deadlines
        teacher = extension("teacher behind a server")(*asked)
    reference = _make_reference(config, model, tokenizer, device, given) if with_reference and not teacher else None
    return TrainedPolicy(
        model,
        tokenizer,
        optimizer=config.optimizer,
        total_updates=config.run.steps * config.updates_per_step,
        temperature=config.rollouts.temperature,
        compute_type=compute,
        tokens_per_microbatch=config.policy.tokens_per_microbatch,
        gradient_checkpointing=config.policy.gradient_checkpointing,
        offload_activations=config.policy.offload_activations,
        packing=config.policy.packing,
        reference=reference,
        adapter=adapter,
        processes=processes or ALONE,
        sharding=sharding,
        replica_place=where_whole(config, processes or ALONE, sharding),
        unread=unread,
        teacher=teacher,
    )


def where_whole(config: Config, processes: Processes, sharding: Sharding | ZeroSettings | None) -> ReplicaPlace:
    """Where this process has all weights when they are cut: to sample, or to publish files, which one process does.

    Under DeepSpeed each has them on its device.
    """
    from oncurve.policy.sharding import Sharding  # lazy

    apart = config.rollouts.type == "servers" and config.rollouts.transfer in ("auto", "fetch")
    if not apart or not isinstance(sharding, Sharding):
        return "device"
    return "cpu" if processes.is_main else "none"


def make_processes(config: Config) -> Processes:
    """The processes of the run, which are joined here.

    Raises ConfigError where the recipe wants one process and the launcher started more.
    """
    from oncurve.policy.distributed import ALONE, start  # lazy
    from oncurve.policy.environment import read_place  # lazy

    count = read_place().count
    if count == 1:
        return ALONE
    chosen = config.policy
    if chosen.parallel == "none":
        raise ConfigError(
            f"policy.parallel is none, but {count} processes were started. Set it to ddp or fsdp, or start one process"
        )
    device = own_device(config)
    return start(device, timeout_seconds=chosen.timeout_seconds, silent_seconds=chosen.silent_seconds)


def own_device(config: Config) -> torch.device:
    """This process's device: with several GPUs on a machine, the one of its number there."""
    import torch

    from oncurve.policy.environment import read_place  # lazy

    device, place = make_device(config.policy.device), read_place()
    if device.type == "cuda" and device.index is None and place.count > 1:
        return torch.device("cuda", place.local_rank)
    return device


def make_sharding(config: Config, processes: Processes) -> Sharding | ZeroSettings | None:
    """How weights, gradients and moments are kept in parts; None where each process has all of them.

    DeepSpeed is asked also by one process alone, whose moments it can leave to the CPU.

    Raises ConfigError for what cannot be cut into parts.
    """
    from oncurve.policy.deepspeed_settings import read_settings  # lazy
    from oncurve.policy.sharding import Sharding  # lazy

    chosen = config.policy
    if chosen.parallel != "deepspeed" and (chosen.parallel != "fsdp" or processes.count == 1):
        return None
    zero = read_settings(chosen.deepspeed, offload=chosen.offload) if chosen.parallel == "deepspeed" else None
    keeps_weights = zero is not None and zero.stage < 3  # it cuts what belongs to the adapter alone
    if config.optimizer.type == "muon":
        raise ConfigError(
            f"optimizer.type is muon, which needs whole matrices, and policy.parallel is {chosen.parallel}. Set "
            f"policy.parallel=ddp, or optimizer.type=adamw"
        )
    if (chosen.quantization and not keeps_weights) or config.optimizer.type != "adamw":
        raise ConfigError(
            f"policy.parallel is {chosen.parallel}, which cannot cut weights or moments of few bits into parts. "
            "Set it to ddp, or leave out policy.quantization and optimizer.type; DeepSpeed takes quantized weights "
            "in its stages 1 and 2"
        )
    if zero is not None:
        return zero
    return Sharding(reshard_after_forward=chosen.reshard_after_forward, offload=chosen.offload)


def _load(
    config: Config, device: torch.device, given: Given = NOTHING
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Adapter | None]:
    """The model and the adapter in it: a fresh one, or that of the folder which the recipe names as its model.

    Without ``policy.lora``, the adapter of such a folder becomes part of the weights.
    """
    from oncurve.policy.lora import open_adapter  # lazy
    from oncurve.policy.model_folder import load_model  # lazy

    if given.model is not None:
        return _take(config, given)
    chosen = config.policy
    place, base, revision = _places(config)
    model, tokenizer = load_model(
        base,
        device=device,
        revision=revision,
        trust_remote_code=chosen.trust_remote_code,
        quantization=chosen.quantization,
    )
    tokenizer = given.tokenizer or tokenizer
    if place is not None and chosen.lora is None:
        return open_adapter(model, place).merge(), tokenizer, None
    return model, tokenizer, _put_adapter(config, model)


def _take(config: Config, given: Given) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Adapter | None]:
    """A model that a program loaded: its own weights are trained, in float32 unless they have few bits."""
    from oncurve.policy.lora import around  # lazy
    from oncurve.policy.model_folder import load_tokenizer  # lazy

    adapter = around(given.model)
    model = given.model if adapter is None else adapter.model
    if config.policy.quantization is None:
        model.float()
    model.eval()
    adapter = adapter or _put_adapter(config, model)
    return model, given.tokenizer or load_tokenizer(config.model)[1], adapter


def _load_unread(
    config: Config, device: torch.device
) -> tuple[Unread, tuple[PreTrainedModel, PreTrainedTokenizerBase, Adapter | None]] | None:
    """The same with weights that stay in their files until they are cut; None where they must be loaded whole."""
    from oncurve.observe.run_model import locate  # lazy
    from oncurve.policy.model_folder import load_tokenizer  # lazy
    from oncurve.policy.unread_model import NotByParts, unread_model  # lazy

    place, base, revision = _places(config)
    options = {"revision": revision, "trust_remote_code": config.policy.trust_remote_code}
    try:
        if place is not None and config.policy.lora is None:
            raise NotByParts("an adapter is to be added to its weights")
        found, tokenizer = load_tokenizer(base, **options)
        model, unread = unread_model(locate(base), found, device, **options)
    except NotByParts as reason:
        log.warning("%s is loaded whole by every process before it is cut: %s", config.model, reason)
        return None
    return unread, (model, tokenizer, _put_adapter(config, model))


def _places(config: Config) -> tuple[str | None, str, str | None]:
    """The folder of the adapter that the recipe names as its model, if it does; the base and its revision."""
    from oncurve.observe.run_model import locate  # lazy
    from oncurve.policy.lora import base_of, is_adapter  # lazy

    place = locate(config.model)
    if not is_adapter(place):
        return None, config.model, config.policy.revision
    _check_continued(config, place)
    return place, *base_of(place)


def _put_adapter(config: Config, model: PreTrainedModel) -> Adapter | None:
    """The adapter of the recipe, put into the model: that of the folder which it names, or a fresh one."""
    from oncurve.observe.run_model import locate  # lazy
    from oncurve.policy.lora import add_adapter, open_adapter  # lazy

    if config.policy.lora is None:
        return None
    place, base, revision = _places(config)
    if place is not None:
        return open_adapter(model, place)
    folder = locate(base)
    name = base if base == "embedded" or not Path(folder).is_dir() else str(Path(folder).resolve())
    return add_adapter(model, config.policy.lora, base=name, revision=revision, seed=config.run.seed)


def _check_continued(config: Config, place: str) -> None:
    """Refuse to train further an adapter that is not the one that the recipe describes."""
    from oncurve.policy.lora import read_adapter  # lazy

    lora = config.policy.lora
    if lora is None:
        return
    saved = read_adapter(place)
    for key, wanted, found in (("rank", lora.rank, saved.get("r")), ("alpha", lora.alpha, saved.get("lora_alpha"))):
        if wanted != found:
            raise ConfigError(f"policy.lora.{key} is {wanted}, but the adapter {config.model!r} has {found}. Set it so")


def _make_reference(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device: torch.device, given: Given
) -> PreTrainedModel | None:
    """The teacher, or a copy of the model; None where the base under the adapter is the reference."""
    from torch import nn

    from oncurve.policy.teacher import load_teacher  # lazy
    from oncurve.policy.unread_model import copy_unread  # lazy

    if config.algorithm.teacher is None:
        return copy_unread(model).requires_grad_(False) if _needs_copy(config, given) else None
    teacher = load_teacher(config.algorithm.teacher, config.model, tokenizer)
    nn.Module.to(teacher, device)
    return teacher


def _needs_copy(config: Config, given: Given = NOTHING) -> bool:
    """Whether a reference must be a model of its own.

    Raises ConfigError where the base is asked for and training changes it.
    """
    from oncurve.algorithm.table import resolve  # lazy
    from oncurve.observe.run_model import locate  # lazy
    from oncurve.policy.lora import is_adapter, is_trained  # lazy
    from oncurve.wiring.algorithm import algorithm_choices, algorithm_name  # lazy

    if config.policy.lora is None:
        return True
    reference = resolve(algorithm_name(config), **algorithm_choices(config)).reference
    keeps_base = config.policy.lora.bias == "none"
    if reference == "base" and not keeps_base:
        raise ConfigError(
            f"policy.lora.bias is {config.policy.lora.bias}, which trains biases of the base, so that algorithm."
            f"reference base would move. Set policy.lora.bias to none, or algorithm.reference to frozen"
        )
    fresh = not is_adapter(locate(config.model)) and not is_trained(given.model)
    return not (reference == "base" or (reference == "frozen" and fresh and keeps_base))
