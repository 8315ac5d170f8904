"""Adapters through peft; this is the only door to peft. A recipe has LoRA, a program every kind in a model's layers."""

from __future__ import annotations

import importlib.util
import logging
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oncurve.constants import ADAPTER_CONFIG
from oncurve.core.errors import ConfigError
from oncurve.observe.model_files import read_model_files
from oncurve.observe.run_model import read_adapter
from oncurve.policy.lora_files import changed_base, check_adapter
from oncurve.policy.lora_forward import sum_at_once
from oncurve.policy.lora_merge import mergeable, refuse_tied
from oncurve.policy.lora_targets import describe, forbidden_endings, linear_names, lost_by_files, unreached
from oncurve.policy.passport import passport_of, set_passport, with_adapter
from oncurve.policy.settings import LoraSettings
from oncurve.run_errors import CheckpointError

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

log = logging.getLogger(__name__)

Quantization = Literal["nf4", "int8"]


class Savable(Protocol):
    """Something that transformers or peft know how to write into a folder."""

    def save_pretrained(self, folder: str | Path, /) -> object:
        """Write it."""
        ...


class Adapter:
    """The adapter inside a model. The model itself stays the transformers module that it was."""

    def __init__(self, peft_model: PeftModel) -> None:
        self._peft = peft_model
        sum_at_once(peft_model)
        self._parts = list(_own_parts(peft_model))

    @property
    def model(self) -> PreTrainedModel:
        """The module with the adapter in it."""
        return self._peft.get_base_model()  # type: ignore[return-value]

    @property
    def peft_model(self) -> PeftModel:
        """The same with peft around it."""
        return self._peft

    @property
    def has_dropout(self) -> bool:
        """Two training passes over the same tokens may differ."""
        config = self._peft.peft_config["default"]
        return config.peft_type != "LORA" or any("dropout" in name and value for name, value in vars(config).items())

    @contextmanager
    def off(self) -> Iterator[None]:
        """While it lasts, the model computes with its base weights alone.

        peft switches the gradients of the adapter along; what is trained stays what it was here.
        """
        trained = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        try:
            with self._peft.disable_adapter():
                _restore(trained)
                yield
        finally:
            _restore(trained)

    @contextmanager
    def dropping_out(self) -> Iterator[None]:
        """While it lasts, the adapter is in training mode, in which it drops or draws what its kind does; nothing else
        of the model leaves evaluation mode."""
        for part in self._parts:
            part.training = True
        try:
            yield
        finally:
            for part in self._parts:
                part.training = False

    def save_pretrained(self, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapter in peft's format; ``state_dict`` gives the trained weights where they are in pieces."""
        provided = {f"base_model.model.{name}": weight for name, weight in (state_dict or {}).items()}
        whole = {**self._peft.state_dict(), **provided}  # some kinds have matrices that are drawn once and not trained
        self._peft.save_pretrained(str(folder), save_embedding_layers=False, state_dict=whole)

    def merge(self) -> PreTrainedModel:
        """The model with the adapter added to its weights, an ordinary model from then on; the adapter is gone.

        All of its weights can be trained again: peft leaves those of the base frozen.

        Raises ConfigError where head and embedding are one matrix and one of them has an adapter, and for an adapter
        that is more than other weights of its base.
        """
        refuse_tied(self.model)
        with mergeable():
            return self._peft.merge_and_unload().requires_grad_(True)  # type: ignore[operator]


def _own_parts(peft_model: PeftModel) -> Iterator[nn.Module]:
    """The layers that peft put into a model, with all in them but what they were put around."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in peft_model.modules():
        if isinstance(layer, BaseTunerLayer):
            inside = {id(part) for part in layer.get_base_layer().modules()}
            yield from (part for part in layer.modules() if id(part) not in inside)


def _restore(trained: Iterable[tuple[nn.Parameter, bool]]) -> None:
    for parameter, is_trained in trained:
        parameter.requires_grad_(is_trained)


def add_adapter(
    model: PreTrainedModel, settings: LoraSettings, *, base: str, revision: str | None = None, seed: int = 0
) -> Adapter:
    """Freeze a model and put a fresh adapter into it, which changes nothing until it is trained.

    ``base`` is the model's name, under which the adapter's files will look for it.

    Raises ConfigError for layers that are not there, and for the head or the embedding, which may share one matrix.
    """
    apart = unreached(model)
    _refuse_ends(model, settings.target_modules)
    _refuse_apart(settings.target_modules, linear_names(model), apart)
    peft_model = _with_adapter(model, settings, seed, left_out=apart)
    if lost := lost_by_files(peft_model):
        if settings.target_modules != "all-linear":
            raise ConfigError(
                f"policy.lora.target_modules asks for {sorted(lost)[0]}, whose adapter peft would write into files "
                f"under a name that it does not find again. Leave it out"
            )
        peft_model.unload()
        peft_model = _with_adapter(model, settings, seed, left_out=apart | lost)
    log.info("LoRA: %s", describe(model))
    _settings(peft_model).base_model_name_or_path = base
    _settings(peft_model).revision = revision
    return _finished(peft_model)


def _with_adapter(model: PreTrainedModel, settings: LoraSettings, seed: int, *, left_out: set[str]) -> PeftModel:
    """peft's model around a fresh adapter. Raises ConfigError for layers that are not there, with peft's reason."""
    from peft import LoraConfig, get_peft_model

    targets, names = settings.target_modules, linear_names(model)
    if targets == "all-linear" and (forbidden := forbidden_endings(model)):
        head = model.get_output_embeddings()
        fit = [name for name in names if name.rpartition(".")[2] not in forbidden]
        targets = tuple(name for name in fit if model.get_submodule(name) is not head)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=sorted(left_out) or None,
        bias=settings.bias,
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(part, Conv1D) for part in model.modules()),
    )
    try:
        with torch.random.fork_rng(devices=[]), without_old_names():
            torch.manual_seed(seed)
            return get_peft_model(model, config)  # type: ignore[return-value]
    except (ValueError, NotImplementedError) as error:
        endings = dict.fromkeys(name.rpartition(".")[2] for name in names)
        raise ConfigError(
            f"policy.lora.target_modules is {settings.target_modules!r}, which does not fit {type(model).__name__} "
            f"({' '.join(str(error).split())[:200]}). Its linear layers end in: {', '.join(endings)}"
        ) from None


def _refuse_apart(targets: str | tuple[str, ...], names: list[str], apart: set[str]) -> None:
    """Raises ConfigError for endings that name no layer but such as an adapter would be lost in."""
    for target in [] if isinstance(targets, str) else targets:
        named = {name for name in names if name == target or name.endswith(f".{target}")}
        if named and named <= apart:
            raise ConfigError(
                f"policy.lora.target_modules names {target!r}, which a text does not go through as through a linear "
                f"layer, so that an adapter there would be lost. Leave it out"
            )


UNREAD = {
    "layer_replication": "its layers are repeated, so that the base is another model",
    "alora_invocation_tokens": "it acts only after certain tokens",
    "arrow_config": "it is a choice among several adapters",
    "monteclora_config": "it draws its weights anew in each pass",
}
"""Keys of an adapter_config.json that ask for what is not computed here, each with the reason."""


_OTHER_SHAPE = re.compile(r"mismatch for (\S+?): .*? torch\.Size\((\[.*?\])\) .*? torch\.Size\((\[.*?\])\)")


def _misfit(error: Exception, rank: int | None) -> str:
    """The fault that peft or torch finds in an adapter, in the words of its files."""
    text = " ".join(str(error).split())
    if not (shapes := _OTHER_SHAPE.findall(text)):
        return textwrap.shorten(text, 400, placeholder=" ...")
    name, stored, needed = shapes[0]
    by, correct = (f" (r: {rank})", "Correct r, or name") if rank is not None else ("", "Name")
    return (
        f"{len(shapes)} of its weights have another shape, such as {name}, {stored} in the file and {needed} by the "
        f"base and {ADAPTER_CONFIG}{by}. {correct} the base that the adapter was trained on"
    )


def open_adapter(model: PreTrainedModel, folder: str | Path, *, dropout: float = 0.0) -> Adapter:
    """Put the adapter of a folder into the base model that it was made for, ready to be trained further.

    In training ``dropout`` of its inputs are dropped, whatever its files say.

    Raises CheckpointError if the folder holds no adapter in the layers, one for another model, or not all of it.
    """
    from peft import PeftModel

    described = read_adapter(folder)
    for key, reason in UNREAD.items():
        if described.get(key):
            raise CheckpointError(
                f"{folder}: its {ADAPTER_CONFIG} has {key}: {reason}. Merge it into its base with peft"
            )
    rank = r if isinstance(r := described.get("r"), int) else None
    if described.get("peft_type") == "LORA" and rank is None:
        raise CheckpointError(f"{folder}: {ADAPTER_CONFIG} has r: {r!r}, which is no whole number. Correct it")
    files = read_model_files(folder)
    changed = changed_base(model, files)
    try:
        with without_old_names():
            peft_model = PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the adapter does not fit its base model: {_misfit(error, rank)}") from None
    if (outside := _outside(peft_model)) is not None:
        raise CheckpointError(f"{folder}: {outside}, which alone are read. Use it with peft")
    check_adapter(peft_model, files, changed)
    _set_dropout(peft_model, dropout)
    if (passport := passport_of(model)) is not None:
        set_passport(model, with_adapter(passport, described, files, dropout))
    return _finished(peft_model)


def _set_dropout(peft_model: PeftModel, dropout: float) -> None:
    """Let an adapter of LoRA drop this share of its inputs in training, and its files say so."""
    from peft.tuners.lora import LoraLayer

    if _settings(peft_model).peft_type != "LORA":
        return
    for part in peft_model.modules():
        if isinstance(part, LoraLayer) and "default" in part.lora_dropout:
            part.lora_dropout["default"] = nn.Dropout(dropout) if dropout else nn.Identity()
    _settings(peft_model).lora_dropout = dropout


def around(model: nn.Module) -> Adapter | None:
    """The adapter of a model that a program made with peft; None for an ordinary model.

    Raises ConfigError for an adapter with weights outside of the model's layers, or with nothing to train.
    """
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        return None
    if list(model.peft_config) != ["default"]:
        kinds = ", ".join(f"{name} ({settings.peft_type.value})" for name, settings in model.peft_config.items())
        raise ConfigError(f"model: its adapters are {kinds}. Train one adapter, named default")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model: none of its adapter's weights is trained. Load it with is_trainable=True")
    if (outside := _outside(model)) is not None:
        raise ConfigError(
            f"model: {outside}, which alone are sampled from and trained. Train an adapter in the layers, such as LoRA "
            f"or IA3"
        )
    return _finished(model)


def _outside(peft_model: PeftModel) -> str | None:
    """The first weight of an adapter outside of the model's layers, in words; None where all of it is in them."""
    inside = {id(weight) for weight in peft_model.get_base_model().parameters()}
    names = [name for name, weight in peft_model.named_parameters() if id(weight) not in inside]
    kind = peft_model.peft_config["default"].peft_type.value
    return f"its adapter of kind {kind} holds {names[0]} outside of the model's layers" if names else None


def lora_section(model: nn.Module) -> dict[str, object] | None:
    """The recipe's section for an adapter that a program made with peft; None for an ordinary model, and for an adapter
    of another kind, which no recipe can say."""
    if around(model) is None or (config := _settings(model)).peft_type != "LORA":  # type: ignore[arg-type]
        return None
    targets = config.target_modules
    return {
        "rank": config.r,
        "alpha": float(config.lora_alpha) * (config.r**0.5 if config.use_rslora else 1.0),
        "dropout": float(config.lora_dropout),
        "target_modules": targets if isinstance(targets, str) else sorted(targets or ()),
        "bias": config.bias,
    }


def is_trained(model: nn.Module | None) -> bool:
    """Whether a model that a program made with peft has an adapter that already changes something."""
    if model is None or (adapter := around(model)) is None:
        return False
    config = _settings(adapter.peft_model)
    if config.peft_type != "LORA" or config.modules_to_save or config.trainable_token_indices:  # which may be any
        return True
    return any(".lora_B." in name and bool(part.any()) for name, part in model.named_parameters())


@contextmanager
def without_old_names() -> Iterator[None]:
    """peft asks transformers for a property by its old name, and transformers warns whoever is near; of experts peft
    doubles the rank of a part that it then does not find, which changes nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys", category=RuntimeWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # which check_adapter refuses
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield


def _finished(peft_model: PeftModel) -> Adapter:
    """The adapter with weights of the model's own precision, and no dropout outside training passes."""
    peft_model.eval()
    return Adapter(peft_model)


def _settings(peft_model: PeftModel) -> LoraConfig:
    """The settings of the adapter; of another kind than LoRA they have those attributes alone that every kind has."""
    return peft_model.peft_config["default"]  # type: ignore[return-value]


def _refuse_ends(model: PreTrainedModel, targets: str | tuple[str, ...]) -> None:
    """Head and embedding are read as plain matrices, and are one matrix in many models."""
    ends = {id(end) for end in (model.get_output_embeddings(), model.get_input_embeddings()) if end is not None}
    names = {name.rsplit(".")[-1] for name, part in model.named_modules() if id(part) in ends}
    endings = {target.rsplit(".")[-1] for target in ([targets] if isinstance(targets, str) else targets)}
    if refused := sorted(names & endings):
        raise ConfigError(
            f"policy.lora.target_modules names {refused[0]!r}; the head and the embedding take no adapter"
        )


def quantized(kind: Quantization, device: torch.device | str) -> dict[str, Any]:
    """Arguments with which transformers loads linear layers in few bits: QLoRA's nf4, arXiv:2305.14314, or int8.

    Raises ConfigError if bitsandbytes is not installed.
    """
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"policy.quantization is {kind}, which needs bitsandbytes, and it is not installed. "
            f"Run `pip install bitsandbytes`, or leave policy.quantization out"
        )
    on_gpu = torch.device(device).type == "cuda"
    config = (
        BitsAndBytesConfig(load_in_8bit=True)
        if kind == "int8"
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if on_gpu else torch.float32,
        )
    )
    return {"quantization_config": config, "device_map": {"": str(device)}}
