"""Training, step by step: the loop, what it stands on, and what surrounds it.

The package can be called: ``oncurve.train(...)`` is the function of the public interface, before and after anything has
imported this package, whose name it shares.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import oncurve


class _Callable(ModuleType):
    """A package that stands for a function of the same name."""

    def __call__(self, *arguments: Any, **sections: Any) -> Any:
        return oncurve.__getattr__("train")(*arguments, **sections)


sys.modules[__name__].__class__ = _Callable
