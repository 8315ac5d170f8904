"""Small runs whose every step is recorded."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

BITS = Path(__file__).resolve().parents[1] / "bits"
sys.path.insert(0, str(BITS))

from runs import REWARD, tiny_model, write_rows  # noqa: E402

ENVIRONMENT = '''"""A game of three turns."""


class Echo:
    """Three turns, each worth its digits."""

    deterministic = True

    def reset(self, seed=None):
        self.turns = 0
        return " begin", {}

    def step(self, action):
        self.turns += 1
        return f"heard {len(action)}", sum(map(str.isdigit, action)) / 10, self.turns == 3, False, {}


def even_odds(completion, answer):
    """Half of all groups of two have no signal."""
    return float(sum(map(ord, completion)) % 2)


def many_calls(completion, answer):
    """A call is worth more than its letters cost."""
    return completion.count("tool>") - len(completion) / 100
'''


def recorded_run(folder: Path, **asked: Any) -> Path:
    """A run of a few steps with everything kept."""
    from oncurve.recipe.schema import Config
    from oncurve.run.training import run_recipe

    config = Config.model_validate(recorded_recipe(folder, **asked))
    run_recipe(config, "", console=Console(file=io.StringIO()))
    return folder / "run"


def recorded_recipe(
    folder: Path, *, steps: int = 4, calls: bool = False, reward: str = "mine.py:reward", **changes: Any
) -> dict[str, Any]:
    """The recipe of such a run, with its model and data written; ``changes`` are sections of it."""
    write_rows(folder)
    (folder / "mine.py").write_text(REWARD, encoding="utf-8")
    (folder / "game.py").write_text(ENVIRONMENT, encoding="utf-8")
    model = folder / "model"
    if not model.is_dir():
        tiny_model(model, calls=calls)
    tree: dict[str, Any] = {
        "model": str(model),
        "data": {"type": "jsonl", "path": str(folder / "rows.jsonl"), "template": "plain"},
        "rewards": [{"type": "custom", "function": f"{folder}/{reward}"}],
        "algorithm": {"group_size": 4},
        "rollouts": {"max_completion_tokens": 12},
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"num_prompts": 2, "every_steps": 0},
        "policy": {"device": "cpu"},
        "run": {
            "steps": steps,
            "prompts_per_step": 4,
            "folder": str(folder),
            "name": "run",
            "record": "all",
            "save_every_steps": 1,
            "keep_every_steps": 1,
        },
    }
    for name, keys in changes.items():
        tree[name] = {**tree.get(name, {}), **keys} if isinstance(keys, dict) else keys
    if (tree["rollouts"] or {}).get("environments") == {"echo": "its own"}:
        tree["rollouts"]["environments"] = {"echo": f"{folder}/game.py:Echo"}
    return {name: keys for name, keys in tree.items() if keys is not None}
