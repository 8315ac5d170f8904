"""Code of a program in a model that it passes: layers, forward passes and hooks that are not its libraries'."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from oncurve.core.errors import ConfigError

LIBRARIES = (
    "torch", "transformers", "transformers_modules", "peft", "bitsandbytes", "accelerate", "liger_kernel", "oncurve",
)  # fmt: skip
"""Packages whose code is known here: it is read, or compared with the model's own logits."""
METHODS = ("forward", "generate")


def refuse_own_code(model: nn.Module) -> None:
    """Raises ConfigError for a model whose own code would not be called: here layers are read, and sampled from."""
    description = next(_own_code(model), None)
    if description is not None:
        raise ConfigError(
            f"model: {description}, which would not be called: training and sampling read the layers of the "
            f"architecture. Remove it, or put what it does into a reward or a loss of your own (docs/own_algorithm.md)"
        )


def _own_code(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        where = f"{name or type(model).__name__}"
        for method in METHODS:
            patched = vars(module).get(method)
            code = inspect.getattr_static(type(module), method, None) if patched is None else patched
            if code is not None and not _is_known(code):
                yield f"{where} has a {method} of its own ({_home(code)})"
        allowed = _gradient_hooks(module)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in hooks.items():
                if number not in allowed and not _is_known(hook):
                    yield f"{where} has a hook on its forward pass ({_home(hook)})"


def _gradient_hooks(module: nn.Module) -> set[int]:
    """The hooks of ``enable_input_require_grads``, which change no number."""
    handles = vars(module).get("_require_grads_hooks") or []
    return {handle.id for handle in handles}


def _code(thing: Any) -> Any:
    while True:
        if isinstance(thing, partial):
            thing = thing.func
        elif inspect.ismethod(thing) or isinstance(thing, (staticmethod, classmethod)):
            thing = thing.__func__
        else:
            return thing


def _home(thing: Any) -> str:
    code = _code(thing)
    module = code.__module__ if inspect.isroutine(code) else type(code).__module__
    return str(module)


def _is_known(thing: Any) -> bool:
    return _home(thing).partition(".")[0] in LIBRARIES
