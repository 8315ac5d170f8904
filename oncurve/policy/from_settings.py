"""The model of a recipe, loaded and put where it is trained: its weights, tokenizer, adapter, device and parts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve.algorithm.table import ReferenceName
from oncurve.core.errors import ConfigError
from oncurve.core.policy import ComputeType
from oncurve.data.python_objects import NOTHING, PythonObjects
from oncurve.observe.machine import unseen_gpu
from oncurve.observe.run_model import base_of, is_adapter, locate, read_adapter
from oncurve.policy.distributed import ALONE, Processes, start
from oncurve.policy.environment import read_rank_info
from oncurve.policy.model_folder import load_base, load_model, load_tokenizer
from oncurve.policy.settings import OptimizerSettings, PolicySection
from oncurve.policy.sharding import ReplicaLocation, Sharding, ZeroSettings

if TYPE_CHECKING:
    from oncurve.policy.lora import Adapter
    from oncurve.policy.unread_model import Unread

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """The model that a recipe names, how it is loaded, and what a Python program passed in its place."""

    name: str
    section: PolicySection
    seed: int = 0
    """Seed of a fresh adapter."""
    objects: PythonObjects = NOTHING


@dataclass(frozen=True)
class LoadedModel:
    """A model with what belongs to it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    adapter: Adapter | None = None
    unread: Unread | None = None
    """Weights that stay in their files until they are cut into parts."""


def make_device(name: str) -> torch.device:
    """The device of a recipe; auto takes a GPU if there is one.

    Raises ConfigError for a device that is not here, and for a GPU that is here but not for torch.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if wrong := unseen_gpu(torch.__version__, torch.version.cuda):
            raise ConfigError(f"policy.device is auto. {wrong}; or train on the CPU with policy.device=cpu")
        return torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(
            f"policy.device is {name!r}, which this machine or its torch does not have. Set policy.device=auto"
        ) from None
    return device


def own_device(name: str) -> torch.device:
    """This process's device of that name: with several GPUs on a machine, the one of its number there."""
    device, rank_info = make_device(name), read_rank_info()
    if device.type == "cuda" and device.index is None and rank_info.count > 1:
        return torch.device("cuda", rank_info.local_rank)
    return device


def own_compute_type(section: PolicySection, device: torch.device) -> ComputeType:
    """Type of the arithmetic: the recipe's, or bfloat16 on a GPU and float32 on a CPU."""
    if section.compute_type != "auto":
        return section.compute_type
    return "bfloat16" if device.type == "cuda" else "float32"


def make_processes(section: PolicySection) -> Processes:
    """The processes of the run, which are joined here.

    Raises ConfigError where the recipe wants one process and the launcher started more.
    """
    count = read_rank_info().count
    if count == 1:
        return ALONE
    if section.parallel == "none":
        raise ConfigError(
            f"policy.parallel is none, but {count} processes were started. Set it to ddp or fsdp, or start one process"
        )
    device = own_device(section.device)
    return start(device, timeout_seconds=section.timeout_seconds, silent_seconds=section.silent_seconds)


def make_sharding(
    section: PolicySection, optimizer: OptimizerSettings, processes: Processes
) -> Sharding | ZeroSettings | None:
    """The way in which weights, gradients and moments are cut; None where each process has all of them.

    DeepSpeed is asked also by one process alone, whose moments it can leave to the CPU.

    Raises ConfigError for what cannot be cut into parts.
    """
    degree = section.shard_degree
    if degree is not None and (section.parallel != "fsdp" or (processes.count > 1 and processes.count % degree)):
        raise ConfigError(
            f"policy.shard_degree is {degree}, which needs policy.parallel=fsdp (here {section.parallel}) and a "
            f"multiple of {degree} processes (here {processes.count}). Set another one, or leave it out"
        )
    if section.parallel != "deepspeed" and (section.parallel != "fsdp" or processes.count == 1):
        return None
    zero: ZeroSettings | None = None
    if section.parallel == "deepspeed":
        from oncurve.policy.deepspeed_settings import read_settings  # lazy

        zero = read_settings(section.deepspeed, offload=section.offload)
    keeps_weights = zero is not None and zero.stage < 3  # it cuts what belongs to the adapter alone
    if optimizer.type == "muon":
        raise ConfigError(
            f"optimizer.type is muon, which needs whole matrices, and policy.parallel is {section.parallel}. Set "
            f"policy.parallel=ddp, or optimizer.type=adamw"
        )
    if (section.quantization and not keeps_weights) or optimizer.type != "adamw":
        raise ConfigError(
            f"policy.parallel is {section.parallel}, which cannot cut weights or moments of few bits into parts. "
            "Set it to ddp, or leave out policy.quantization and optimizer.type; DeepSpeed takes quantized weights "
            "in its stages 1 and 2"
        )
    if zero is not None:
        return zero
    return Sharding(reshard_after_forward=section.reshard_after_forward, offload=section.offload, degree=degree)


def where_whole(
    processes: Processes, sharding: Sharding | ZeroSettings | None, *, sent_from: ReplicaLocation | None
) -> ReplicaLocation:
    """The place in which this process has all weights when they are cut: to sample, or to send them to servers.

    ``sent_from``: the place from which the one process that sends does it; None if each samples. Under DeepSpeed each
    has them on its device.
    """
    if sent_from is None or not isinstance(sharding, Sharding):
        return "device"
    return sent_from if processes.is_main else "none"


def load(source: ModelSource, device: torch.device) -> LoadedModel:
    """The model and the adapter in it: a fresh one, or that of the folder which the recipe names as its model.

    Without ``policy.lora``, the adapter of such a folder becomes part of the weights.
    """
    if source.objects.model is not None:
        return _take(source)
    chosen = source.section
    adapter_folder, base, revision = _locations(source)
    options: dict[str, Any] = {
        "device": device, "trust_remote_code": chosen.trust_remote_code, "quantization": chosen.quantization,
    }  # fmt: skip
    if adapter_folder is None:
        model, tokenizer = load_model(base, revision=revision, **options)
    else:  # whose own tokenizer counts
        model, _ = load_base(adapter_folder, options)
        tokenizer = load_tokenizer(source.name, trust_remote_code=chosen.trust_remote_code)[1]
    tokenizer = source.objects.tokenizer or tokenizer
    if adapter_folder is not None and chosen.lora is None:
        from oncurve.policy.lora import open_adapter  # lazy

        return LoadedModel(open_adapter(model, adapter_folder).merge(), tokenizer)
    return LoadedModel(model, tokenizer, _put_adapter(source, model))


def load_by_parts(source: ModelSource, device: torch.device) -> LoadedModel | None:
    """The same with weights that stay in their files until they are cut; None where they must be loaded whole."""
    from oncurve.policy.unread_model import NotByParts, unread_model  # lazy

    adapter_folder, base, revision = _locations(source)
    options = {"revision": revision, "trust_remote_code": source.section.trust_remote_code}
    try:
        if adapter_folder is not None and (source.section.lora is None or is_adapter(locate(base))):
            raise NotByParts("an adapter is to be added to its weights")
        config, tokenizer = load_tokenizer(base if adapter_folder is None else source.name, **options)
        model, unread = unread_model(locate(base), (config, tokenizer), device, **options)
    except NotByParts as reason:
        log.warning("%s is loaded whole by every process before it is cut: %s", source.name, reason)
        return None
    return LoadedModel(model, tokenizer, _put_adapter(source, model), unread)


def _take(source: ModelSource) -> LoadedModel:
    """A model that a program loaded: its own weights are trained, in float32 unless they have few bits."""
    from oncurve.policy.lora import around  # lazy

    objects = source.objects
    adapter = around(objects.model)
    model = objects.model if adapter is None else adapter.model
    if source.section.quantization is None:
        model.float()
    model.eval()
    adapter = adapter or _put_adapter(source, model)
    return LoadedModel(model, objects.tokenizer or load_tokenizer(source.name)[1], adapter)


def _locations(source: ModelSource) -> tuple[str | None, str, str | None]:
    """The folder of the adapter that the recipe names as its model, if it does; the base and its revision."""
    path = locate(source.name)
    if not is_adapter(path):
        return None, source.name, source.section.revision
    _check_continued(source, path)
    return path, *base_of(path)


def _put_adapter(source: ModelSource, model: PreTrainedModel) -> Adapter | None:
    """The adapter of the recipe, put into the model: that of the folder which it names, or a fresh one."""
    if source.section.lora is None:
        return None
    from oncurve.policy.lora import add_adapter, open_adapter  # lazy

    adapter_folder, base, revision = _locations(source)
    if adapter_folder is not None:
        return open_adapter(model, adapter_folder, dropout=source.section.lora.dropout)
    folder = locate(base)
    name = base if base == "embedded" or not Path(folder).is_dir() else str(Path(folder).resolve())
    return add_adapter(model, source.section.lora, base=name, revision=revision, seed=source.seed)


def _check_continued(source: ModelSource, folder: str) -> None:
    """Refuse to train further an adapter that is not the one that the recipe describes."""
    lora = source.section.lora
    if lora is None:
        return
    saved = read_adapter(folder)
    if (kind := saved.get("peft_type")) != "LORA":
        raise ConfigError(
            f"{source.name}: an adapter of kind {kind}, which a recipe does not train further: policy.lora is LoRA. "
            f"Merge it into its base with `oncurve merge`, or give Trainer the model with it"
        )
    for key, expected, actual in (("rank", lora.rank, saved.get("r")), ("alpha", lora.alpha, saved.get("lora_alpha"))):
        if expected != actual:
            raise ConfigError(
                f"policy.lora.{key} is {expected}, but the adapter {source.name!r} has {actual}. Set it so"
            )


def needs_copy(source: ModelSource, reference: ReferenceName) -> bool:
    """Whether a reference must be a model of its own.

    Raises ConfigError where the base is asked for and training changes it.
    """
    objects, lora = source.objects, source.section.lora
    if objects.reference_is_named and objects.model is not None and (lora is None or lora.bias == "none"):
        from oncurve.policy.lora import around  # lazy

        if around(objects.model) is not None:  # the model that is named is the base under the adapter
            return False
    if source.section.lora is None:
        return True
    from oncurve.policy.lora import is_trained  # lazy

    keeps_base = source.section.lora.bias == "none"
    if reference == "base" and not keeps_base:
        raise ConfigError(
            f"policy.lora.bias is {source.section.lora.bias}, which trains biases of the base, so that algorithm."
            f"reference base would move. Set policy.lora.bias to none, or algorithm.reference to frozen"
        )
    fresh = not is_adapter(locate(source.name)) and not is_trained(source.objects.model)
    return not (reference == "base" or (reference == "frozen" and fresh and keeps_base))
