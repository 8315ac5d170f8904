"""Liger kernels for norms, SwiGLU and rotary embeddings, after a proof on this model and GPU.

Liger Kernel (https://github.com/linkedin/Liger-Kernel) does in one Triton kernel each what transformers' modules do in
several passes over memory. Nothing else of it is used: attention, head and loss stay what they were.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oncurve.algorithm.precision import in_full_precision
from oncurve.errors import ConfigError, one_line
from oncurve.policy.forward import completion_logprobs
from oncurve.policy.policy import ComputeType, compute_context
from oncurve.policy.self_check import disagreement, example_batch

log = logging.getLogger(__name__)

KERNELS = ("rope", "rms_norm", "swiglu")
"""What is asked of the library; whatever else it can replace is refused."""
DEVICES = ("cuda",)
"""Where its kernels run; under Triton's interpreter that may also be the CPU."""
TOLERANCE = 1e-3
"""Largest difference from transformers' modules, as a part of the size, that counts as rounding in float32."""
ROUNDING = 3.0
"""In half width, Liger may be so many times as far from the result in float32 as transformers' modules are, or by an
epsilon of the type."""
Passed = Mapping[str, Tensor]
"""What a pass gave, by name."""
NARROW, MANY_ROWS = 256, 2**15
"""Norms of so few numbers over so many rows, as those of heads (Qwen3), are done by a kernel of their own."""


class Unusable(Exception):
    """Why Liger's kernels are not used."""

    def __init__(self, reason: str, *, is_expected: bool = False) -> None:
        super().__init__(reason)
        self.is_expected = is_expected


def use_liger(
    model: PreTrainedModel,
    wanted: bool | Literal["auto"],
    *,
    compute_type: ComputeType,
    stand_in: PreTrainedModel | None = None,
) -> bool:
    """Put Liger's kernels into a model that is to be trained; whether they are in it.

    With "auto" that happens on a CUDA device where the package is installed and knows the model. They stay only if
    log-probabilities and gradients of a small batch, computed before and after in the compute type, are equal up to
    rounding; otherwise the model is what it was and a warning says why. So "auto" is the default although no GPU was
    there to try it on: who installs the package wants it, and each machine proves it for itself. The proof sees no
    speed, and of kernels that are chosen by the number of rows only those that are known here (``NARROW``).

    The library binds its code to the parts of this model: an adapter may be in it before or come later, and a deep
    copy has the kernels too. Only the rotary embedding is replaced in transformers' file, for all models of the family
    on a GPU. A model whose weights are not read yet has a ``stand_in`` on the device, for which it is proven.

    Raises ConfigError where ``wanted`` is True and the kernels cannot be used.
    """
    if wanted is False:
        return False
    try:
        apply = _entry_point(stand_in or model)
        _put_in(stand_in or model, apply, compute_type)
        if stand_in is not None:
            originals = Originals.of(model)
            apply(model=model)
            originals.restore_classes()
    except Unusable as reason:
        if wanted is True:
            raise ConfigError(f"policy.liger is true, but {reason}. Set policy.liger to auto or false") from None
        level = logging.INFO if reason.is_expected else logging.WARNING
        log.log(level, "transformers' modules are trained without Liger's kernels: %s", reason)
        return False
    log.info("Liger's kernels compute norms, SwiGLU and rotary embeddings")
    return True


def _entry_point(model: PreTrainedModel) -> Callable[..., None]:
    """The library's function for models of this type, asked for our kernels alone."""
    device, family = model.device.type, model.config.model_type
    if device not in DEVICES:
        raise Unusable(f"the model is on {device}, and Liger needs a CUDA device (policy.device)", is_expected=True)
    if importlib.util.find_spec("liger_kernel") is None:
        raise Unusable("liger-kernel is not installed (`pip install 'oncurve[liger]'`)", is_expected=True)
    try:
        known = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise Unusable(f"liger-kernel cannot be loaded: {one_line(error)}") from None
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it warns of every rival of Triton that is not installed
    choices = inspect.signature(known[family]).parameters if family in known else ()
    if not set(KERNELS) & set(choices):
        raise Unusable(f"liger-kernel has no kernels for models of type {family}", is_expected=True)
    return partial(known[family], **{name: name in KERNELS for name in choices if name != "model"})


def _put_in(model: PreTrainedModel, apply: Callable[..., None], compute_type: ComputeType) -> None:
    """Put the kernels in and keep them if they compute the same; otherwise the model is what it was.

    Raises Unusable where they do not.
    """
    with in_full_precision(model):
        _prove(model, apply, compute_type)


def _prove(model: PreTrainedModel, apply: Callable[..., None], compute_type: ComputeType) -> None:
    originals = Originals.of(model)
    try:
        exact = _small_pass(model, "float32")
        ordinary = exact if compute_type == "float32" else _small_pass(model, compute_type)
        apply(model=model)
        _compare(_small_pass(model, compute_type), ordinary, exact, compute_type)
        _compare_narrow(model, compute_type)
    except (Unusable, *_failures()) as error:
        originals.restore()
        raise error if isinstance(error, Unusable) else Unusable(f"trying them raises {one_line(error)}") from None
    originals.restore_classes()


def _failures() -> tuple[type[Exception], ...]:
    """What a kernel that does not fit, and a compiler that is not there, may raise."""
    triton = sys.modules.get("triton")
    own = RuntimeError if triton is None else vars(triton).get("TritonError", RuntimeError)
    ordinary = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError)
    return (*ordinary, OSError, RuntimeError, TypeError, ValueError, subprocess.SubprocessError, own)


@dataclass(frozen=True)
class Originals:
    """All that the library may change: attributes of a model's parts, names in the files of their classes."""

    parts: list[tuple[nn.Module, dict[str, Any]]]
    files: list[tuple[ModuleType, dict[str, Any]]]

    @classmethod
    def of(cls, model: nn.Module) -> Originals:
        """Those of a model as it is."""
        files = {type(part).__module__ for part in model.modules()} & set(sys.modules)
        return cls(
            [(part, dict(vars(part))) for part in model.modules()],
            [(file, dict(vars(file))) for file in (sys.modules[name] for name in sorted(files))],
        )

    def restore(self) -> None:
        """Undo everything."""
        for part, attributes in self.parts:
            vars(part).clear()
            vars(part).update(attributes)
        for file, name, original, _ in self._renamed():
            setattr(file, name, original)

    def restore_classes(self) -> None:
        """Let models that are made later be ordinary ones, and those on a CPU keep their rotary embeddings."""
        for file, name, original, replacement in self._renamed():
            is_final = isinstance(original, (type, ByDevice))
            setattr(file, name, original if is_final else ByDevice(original, replacement))

    def _renamed(self) -> list[tuple[ModuleType, str, Any, Any]]:
        return [
            (file, name, original, vars(file)[name])
            for file, names in self.files
            for name, original in names.items()
            if vars(file).get(name) is not original
        ]


@dataclass(frozen=True)
class ByDevice:
    """A function of tensors that Liger computes where it can."""

    ordinary: Callable[..., Any]
    fused: Callable[..., Any]

    def __call__(self, first: Tensor, *arguments: Any, **options: Any) -> Any:
        """On the device of the first tensor."""
        function = self.fused if first.device.type in DEVICES else self.ordinary
        return function(first, *arguments, **options)


def _small_pass(model: PreTrainedModel, compute_type: ComputeType) -> dict[str, Tensor]:
    """Log-probabilities of a small batch, their gradient behind the embedding, and that of trained norms and biases.

    Gradients of matrices are not made: they would need the memory of the model once more.
    """
    batch = example_batch(min(model.config.get_text_config().vocab_size, 64))
    embedded: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _part, _inputs, output: embedded.append(output.requires_grad_())
    )
    try:
        with torch.enable_grad(), compute_context(model.device, compute_type):
            logprobs, _ = completion_logprobs(model, batch, temperature=1.0)
    finally:
        hook.remove()
    vectors = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim == 1]
    behind_embedding, *gradients = torch.autograd.grad(logprobs.sum(), [embedded[0], *vectors], materialize_grads=True)
    passed = {"log-probabilities": logprobs.detach(), "gradients of the inputs": behind_embedding}
    return passed | ({"gradients of vectors": torch.cat(gradients)} if gradients else {})


def _compare_narrow(model: nn.Module, compute_type: ComputeType) -> None:
    """The same for norms that get another kernel in training, over as many rows; their class has the ordinary code."""
    for part, weight in _narrow_norms(model):
        rows = torch.randn(MANY_ROWS, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device)
        rounded = rows.to(vars(torch)[compute_type])
        ordinary = partial(type(part).forward, part)
        exact = _norm_pass(ordinary, rounded.float(), weight)
        _compare(_norm_pass(part, rounded, weight), _norm_pass(ordinary, rounded, weight), exact, compute_type)


def _narrow_norms(model: nn.Module) -> list[tuple[nn.Module, Tensor]]:
    """Norms that Liger computes over rows of few numbers, one of each class and width, with their weights."""
    found: dict[tuple[type, int], tuple[nn.Module, Tensor]] = {}
    for part in model.modules():
        weight = dict(part.named_parameters(recurse=False)).get("weight")
        if "forward" in vars(part) and weight is not None and weight.ndim == 1 and len(weight) <= NARROW:
            found.setdefault((type(part), len(weight)), (part, weight))
    return list(found.values())


def _norm_pass(norm: Callable[[Tensor], Tensor], rows: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """A norm's outputs, the gradient of its inputs, and that of its weight where it is trained."""
    with torch.enable_grad():
        inputs = rows.clone().requires_grad_()
        outputs = norm(inputs)
        gradients = torch.autograd.grad(outputs.square().sum(), [inputs, *([weight] if weight.requires_grad else [])])
    names = ("gradients of narrow norms' inputs", "gradients of narrow norms")
    return {"narrow norms": outputs.detach()} | dict(zip(names, gradients, strict=False))


def _compare(fused: Passed, ordinary: Passed, exact: Passed, compute_type: ComputeType) -> None:
    """Raises Unusable if anything is further from the exact result than rounding explains."""
    least = max(TOLERANCE, torch.finfo(vars(torch)[compute_type]).eps)
    kinds = ((name, fused[name], ordinary[name], truth) for name, truth in exact.items())
    if found := disagreement(kinds, "Liger's kernels give", times=ROUNDING, floor=least):
        raise Unusable(f"they give {found}")
