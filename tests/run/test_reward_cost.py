"""Is the cost of a slow reward told before it is spent, and a quick one left alone?"""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.recipe.load import parse_config
from oncurve.run import reward_cost
from oncurve.run.reward_cost import MeteredGrade

RECIPE = (
    "{model: embedded, data: {type: word_problems}, run: {steps: 10, prompts_per_step: 2}, algorithm: {group_size: 4}}"
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets forward."""
    now = [0.0]
    monkeypatch.setattr(reward_cost.time, "perf_counter", lambda: now[0])
    return now


def metered(clock: list[float], costs: Sequence[float], *, count: int) -> tuple[str, list[int], list[Reward]]:
    """What is told while completions are graded that cost so many seconds each, the sizes of calls, and the rewards."""
    sizes: list[int] = []

    def grade(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        clock[0] += sum(costs[min(sum(sizes) + k, len(costs) - 1)] for k in range(len(completions)))
        sizes.append(len(completions))
        return [Reward(float(completion.index)) for completion in completions]

    text = io.StringIO()
    meter = MeteredGrade(grade, parse_config(RECIPE), num_completions=100, console=Console(file=text, width=500))
    prompts = [Prompt("p", (1,), index) for index in range(count)]
    rewards = meter(prompts, [Completion((1,), (), "", (), "stop", 0, index) for index in range(count)])
    return text.getvalue(), sizes, rewards


def test_a_slow_reward_tells_the_cost_of_check_step_and_run(clock: list[float]) -> None:
    text, sizes, rewards = metered(clock, [9.0, 3.0], count=20)
    assert (
        "the reward takes 3 s for one completion. One after the other, this check takes 5:00 "
        "(100 completions), a step 24s (8 completions) and the run 4:00 (10 steps)" in text
    )
    assert "graded 2 of 100, 4:54 left" in text
    assert sizes == [1, 1, 8, 8, 2]
    assert [reward.value for reward in rewards] == list(map(float, range(20)))


@pytest.mark.parametrize(("costs", "sizes"), [([0.01], [1, 19]), ([5.0, 0.01], [1, 1, 18])])
def test_a_quick_reward_is_called_for_all_at_once(clock: list[float], costs: list[float], sizes: list[int]) -> None:
    """The first completion may cost the start of processes."""
    text, called, rewards = metered(clock, costs, count=20)
    assert (text, called, len(rewards)) == ("", sizes, 20)


def test_nothing_to_grade_measures_nothing(clock: list[float]) -> None:
    assert metered(clock, [9.0], count=0) == ("", [0], [])


def test_the_command_tells_the_cost_before_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_cost, "SLOW_SECONDS", 0.0)
    few = ["data.limit=40", "evaluation.num_prompts=4", "evaluation.every_steps=0"]
    result = CliRunner().invoke(app, ["check", "word_problems", *few])
    assert result.exit_code == 0, result.output
    cost, table = (result.output.index(text) for text in ("the reward takes ", "Rewards of made-up completions"))
    assert cost < table
    assert "a step " in result.output[cost:table]
    assert "data.limit=50 checks fewer rows" in result.output[cost:table]
    assert "\n\n\n" not in result.output
