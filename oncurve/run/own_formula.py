"""Formulas of the user's: a loss or an advantage that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from oncurve.core.batch import Rewards
from oncurve.core.errors import Failure, TrainingError, attempt, is_out_of_memory
from oncurve.user_code import load_function


def own_formula(location: str, *, where: str) -> Callable[..., Any]:
    """A function of the user's; what it raises, beside a lack of memory, says whose it is and where."""
    function = load_function(location, where=where)

    @wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        made = attempt(lambda: function(*args, **named), passing=is_out_of_memory)
        if isinstance(made, Failure):
            raise TrainingError(f"{where}: {location} raised {made.detail}. It happened here:\n{made.trace.rstrip()}")
        is_advantage = isinstance(args[0], Rewards)
        shape = args[0].values.shape if is_advantage else args[0].shape
        numbers, statistics = made if isinstance(made, tuple) and len(made) == 2 and not is_advantage else (made, None)
        _require_numbers(numbers, shape, f"{where}: {location} gave")
        if statistics is None:
            return numbers
        if not isinstance(statistics, Mapping):
            raise TrainingError(
                f"{where}: {location} gave {type(statistics).__name__} beside the loss, not a dictionary of statistics "
                f"(docs/own_algorithm.md)"
            )
        for name, values in statistics.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise TrainingError(f"{where}: {location} gave a statistic {name!r}; name it as a variable is named")
            _require_numbers(values, shape, f"{where}: {location} gave for the statistic {name!r}")
        return numbers, {f"loss/{name}": values for name, values in statistics.items()}

    return called


def _require_numbers(numbers: Any, shape: torch.Size, what: str) -> None:
    """Raise TrainingError unless these are a tensor of a shape; ``what`` begins the sentence."""
    if not isinstance(numbers, Tensor) or numbers.shape != shape:
        returned = f"a tensor of {list(numbers.shape)}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise TrainingError(f"{what} {returned}, not a tensor of {list(shape)} (docs/own_algorithm.md)")
