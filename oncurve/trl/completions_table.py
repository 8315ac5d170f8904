"""The table of completions of a step that TRL writes with ``log_completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import stack_rewards
from oncurve.core.records import SOURCE_ROW
from oncurve.run.step_log import Step


def write_table(
    folder: Path, step: Step, algorithm: Algorithm, names: Sequence[tuple[str, str]], extra: Mapping[str, list[Any]]
) -> None:
    """One row for each completion of a step, with its rewards, its advantage and what rewards logged beside it.

    ``names`` are those of rewards, in TRL and here. What was logged before the step, when the model was measured, is
    left out, and so is a column that is shorter than the step.
    """
    import pandas

    pairs = [(group, index) for group in step.groups for index in range(len(group.completions))]
    flat = [reward for row in step.rewards for reward in row]
    advantages = algorithm.advantages(stack_rewards(step.groups, step.rewards)).reshape(-1).tolist()
    table = {
        "step": [step.number] * len(pairs),
        "prompt": [group.prompt.row.get(SOURCE_ROW, {}).get("prompt", group.prompt.text) for group, _ in pairs],
        "completion": [group.completions[index].text for group, index in pairs],
        **{theirs: [reward.parts.get(ours) for reward in flat] for theirs, ours in names},
        **{column: values[-len(pairs) :] for column, values in extra.items() if len(values) >= len(pairs)},
        "advantage": advantages,
    }
    folder.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(table).to_parquet(folder / f"completions_{step.number:05d}.parquet")
