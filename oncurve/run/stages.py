"""The supervised stage from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from oncurve.run.result import Result
from oncurve.run.trainer import Trainer


def sft(
    model: str | os.PathLike[str],
    data: Any,
    rewards: Any = None,
    *,
    evaluation_data: Any = None,
    **sections: Mapping[str, Any],
) -> Result:
    """Train a model on completions in the data (supervised fine-tuning) and return the result.

    Rows are {"prompt", "completion"}, {"messages"}, {"text"}, or {"question", "solution", "answer"} in the template of
    ``data``. The other arguments are those of ``Trainer``; ``rewards`` only measure, before, during and after.

    Example: ``oncurve.sft("embedded", rows, sft={"epochs": 2}, optimizer={"learning_rate": 1e-4})``
    """
    return Trainer(model, data, rewards, evaluation_data=evaluation_data, **{"sft": {}, **sections}).train()
