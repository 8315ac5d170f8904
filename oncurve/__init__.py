"""oncurve: train reasoning models with GRPO on one code path, from a laptop CPU to a cluster.

Names of the public interface are imported when they are first used: ``import oncurve`` loads neither torch nor
transformers. ``docs/api.md`` describes each of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from oncurve.core.batch import Batch, collate
    from oncurve.core.errors import OncurveError
    from oncurve.core.records import Completion, Group, Prompt, Reward
    from oncurve.evaluate.evaluation import Evaluation
    from oncurve.history.past import PastRun, PastStep, open_run
    from oncurve.history.regrade import Regrade, regrade
    from oncurve.history.replay import Replay, replay
    from oncurve.run.result import Result
    from oncurve.run.stages import sft
    from oncurve.run.step_log import Step
    from oncurve.run.trainer import Trainer, train
    from oncurve.run.verbs import Engine, Policy, Scores, advantages, load_policy, score

_HOMES = {
    "Batch": "core.batch",
    "Completion": "core.records",
    "Engine": "run.verbs",
    "Evaluation": "evaluate.evaluate",
    "Group": "core.records",
    "OncurveError": "core.errors",
    "PastRun": "history.past",
    "PastStep": "history.past",
    "Policy": "run.verbs",
    "Prompt": "core.records",
    "Regrade": "history.regrade",
    "Replay": "history.replay",
    "Result": "run.result",
    "Reward": "core.records",
    "Scores": "run.verbs",
    "Step": "run.step_log",
    "Trainer": "run.trainer",
    "advantages": "run.verbs",
    "collate": "core.batch",
    "load_policy": "run.verbs",
    "open_run": "history.past",
    "regrade": "history.regrade",
    "replay": "history.replay",
    "score": "run.verbs",
    "sft": "run.stages",
    "train": "run.trainer",
}
"""The module of every public name. The package of the name "train" can be called like the function."""

__all__ = [
    "Batch",
    "Completion",
    "Engine",
    "Evaluation",
    "Group",
    "OncurveError",
    "PastRun",
    "PastStep",
    "Policy",
    "Prompt",
    "Regrade",
    "Replay",
    "Result",
    "Reward",
    "Scores",
    "Step",
    "Trainer",
    "__version__",
    "advantages",
    "collate",
    "load_policy",
    "open_run",
    "regrade",
    "replay",
    "score",
    "sft",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oncurve' has no attribute {name!r}. Public names: {', '.join(__all__)}")
    return getattr(import_module(f"oncurve.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
