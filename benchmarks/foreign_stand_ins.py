"""Stand-ins for the networks behind published examples: clients of OpenEnv's servers, and data sets of a hub.

Each client has the methods and fields that the examples use, and plays a small game in this process in the place of
its server. ``put_in_place`` makes them importable under the clients' names.
"""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

ROWS, COLUMNS = 10, 5
WORD = "crane"


class Action(SimpleNamespace):
    """An action of any client: the fields that it is made with."""


class EchoEnv:
    """Says again what it is told; a letter is worth a tenth."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def step(self, action: Any) -> Any:
        """The message back."""
        seen = SimpleNamespace(echoed_message=action.message, reward=len(action.message) / 10)
        return SimpleNamespace(observation=seen, reward=seen.reward, done=False)

    def close(self) -> None:
        """Nothing is held."""


class TextArenaEnv(EchoEnv):
    """Wordle, whose one message grows with every guess."""

    def reset(self) -> Any:
        """Six guesses."""
        self.left, self.text = 6, "You are playing Wordle. You have 6 guesses."
        return self._result(0.0, done=False)

    def step(self, action: Any) -> Any:
        """Colours for a guess between square brackets."""
        guess = action.message.strip("[]").lower()
        self.left -= 1
        if len(guess) != len(WORD):
            self.text += "\nYou attempted an invalid move."
            return self._result(0.0, done=self.left == 0)
        colours = ("G" if a == b else "Y" if a in WORD else "X" for a, b in zip(guess, WORD, strict=True))
        self.text += f"\n{' '.join(guess.upper())}\n{' '.join(colours)}"
        return self._result(float(guess == WORD), done=guess == WORD or self.left == 0)

    def _result(self, reward: float, *, done: bool) -> Any:
        message = SimpleNamespace(content=self.text, category="MESSAGE")
        return SimpleNamespace(observation=SimpleNamespace(messages=[message]), reward=reward, done=done)


class OpenSpielEnv(EchoEnv):
    """Catch: a ball falls, and a paddle moves below it."""

    def reset(self) -> Any:
        """The ball at the top."""
        self.ball, self.paddle, self.row = random.Random(len(self.base_url)).randrange(COLUMNS), COLUMNS // 2, 0
        return self._result()

    def step(self, action: Any) -> Any:
        """0 is left, 2 is right."""
        self.paddle = min(COLUMNS - 1, max(0, self.paddle + action.action_id - 1))
        self.row += 1
        return self._result()

    def _result(self) -> Any:
        done = self.row == ROWS - 1
        state = [0.0] * (ROWS * COLUMNS)
        for row, column in ((self.row, self.ball), (ROWS - 1, self.paddle)):
            state[row * COLUMNS + column] = 1.0
        reward = (1.0 if self.ball == self.paddle else -1.0) if done else None
        seen = SimpleNamespace(info_state=state, done=done, legal_actions=[0, 1, 2])
        return SimpleNamespace(observation=seen, reward=reward, done=done)


class CarlaEnv:
    """A car that comes closer to somebody; its methods are to be awaited."""

    def __init__(self, base_url: str, **options: Any) -> None:
        self.base_url = base_url

    async def reset(self, scenario_name: str) -> Any:
        """On its way."""
        self.distance, self.speed, self.lane = 60.0, 40.0, 0
        return self._result()

    async def step(self, action: Any) -> Any:
        """A tick."""
        if action.action_type == "emergency_stop":
            self.speed = 0.0
        elif action.action_type == "lane_change":
            self.lane = 1
        self.distance -= self.speed / 10
        return self._result()

    def _result(self) -> Any:
        hit = self.distance <= 0 and self.lane == 0
        near = [{"type": "pedestrian", "distance": round(self.distance)}]
        seen = SimpleNamespace(
            speed_kmh=self.speed,
            nearby_actors=near,
            collision_detected=hit,
            collided_with="pedestrian" if hit else None,
            rubric_reward=0.0 if hit else 1.0,
        )
        return SimpleNamespace(observation=seen, reward=seen.rubric_reward, done=self.distance <= 0)


def load_dataset(name: str, *_: Any, split: str | None = None, **__: Any) -> Any:
    """Interactions of genes as a table, or questions about them."""
    from datasets import Dataset

    genes = ["JNKK", "TP53", "BRCA1", "EGFR"]
    if name.endswith("_qa"):
        rows = [{"question": f"Does the gene {gene} interact?", "answer": ("Yes", "No")[n % 2]} for n, gene in
                enumerate(genes * 4)]  # fmt: skip
    else:
        rows = [{"Alt IDs Interactor A": gene, "Aliases Interactor A": gene.lower()} for gene in genes]
    return Dataset.from_list(rows)


def put_in_place() -> None:
    """Let the examples find them."""
    import datasets

    found: dict[str, dict[str, Any]] = {
        "echo_env": {"EchoEnv": EchoEnv},
        "echo_env.models": {"EchoAction": Action},
        "textarena_env": {"TextArenaEnv": TextArenaEnv, "TextArenaAction": Action},
        "openspiel_env": {"OpenSpielEnv": OpenSpielEnv},
        "openspiel_env.models": {"OpenSpielAction": Action},
        "carla_env": {"CarlaEnv": CarlaEnv, "CarlaAction": Action},
    }
    for name, contents in found.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    datasets.load_dataset = load_dataset
