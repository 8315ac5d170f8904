"""Ranges with names in a trace of torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import record_function

P = ParamSpec("P")
R = TypeVar("R")


def traced(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function whose calls are ranges of this name while the profiler traces; at other times it is only called."""

    def around(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch._C._autograd._profiler_enabled():
                return function(*args, **kwargs)
            with record_function(name):
                return function(*args, **kwargs)

        return call

    return around
