"""Is a batch of rollouts trained on as often as the recipe says, against the probabilities it was sampled with?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from oncurve.algorithm.presets import build
from oncurve.core.records import Prompt, SamplingParams
from oncurve.observe.record import read_metrics, read_rollouts
from oncurve.observe.summary import batch_arithmetic
from oncurve.recipe.load import parse_config

if TYPE_CHECKING:
    from oncurve.policy.trained_policy import TrainedPolicy
    from oncurve.run.services import Run

SAMPLING = SamplingParams(max_completion_tokens=6)


@pytest.fixture
def trained(
    make_policy: Callable[..., TrainedPolicy], make_prompts: Callable[..., list[Prompt]], train_in: Callable[..., Run]
) -> Callable[..., tuple[TrainedPolicy, Run]]:
    """A policy after a step of sixteen completions, and its run."""

    def start(*, passes: int, updates: int = 1, clip: float = 0.9) -> tuple[TrainedPolicy, Run]:
        policy = make_policy()
        run = train_in(
            policy, make_prompts("a b", "c", "d e"), lambda p, c: sum(c.token_ids) % 2 == 0,
            build("grpo", group_size=8, max_completion_tokens=6, clip_low=clip, clip_high=clip), SAMPLING, steps=1,
            prompts_per_step=2, updates_per_step=updates, passes_per_step=passes, folder=f"{passes}-{updates}",
        )  # fmt: skip
        return policy, run

    return start


@pytest.mark.proves("F17")
def test_every_pass_is_an_update_on_all_completions_of_the_step(
    trained: Callable[..., tuple[TrainedPolicy, Run]],
) -> None:
    policy, run = trained(passes=3)
    once, _ = trained(passes=1)
    assert run.updates_per_step == 3
    assert (once.num_updates, policy.num_updates) == (1, 3)
    assert len(read_rollouts(run.log.folder.path, 1)) == 2, "sampled once"


@pytest.mark.proves("F10", "F17")
def test_later_passes_are_clipped_against_the_policy_that_sampled(
    trained: Callable[..., tuple[TrainedPolicy, Run]],
) -> None:
    [alone], [again] = (read_metrics(trained(passes=passes, clip=1e-4)[1].log.folder.path) for passes in (1, 2))
    assert alone["policy/clip_fraction"] == 0.0
    assert alone["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert 0.2 < again["policy/clip_fraction"] <= 0.5, "none in the first pass, most in the second"


def test_passes_and_smaller_updates_multiply(trained: Callable[..., tuple[TrainedPolicy, Run]]) -> None:
    policy, run = trained(passes=2, updates=2)
    assert run.updates_per_step == 4
    assert policy.num_updates == 4


def test_the_recipe_counts_them() -> None:
    words = [
        "run.prompts_per_step=4",
        "algorithm.group_size=8",
        "run.completions_per_update=16",
        "run.passes_per_step=3",
    ]
    config = parse_config("{model: embedded, data: {type: word_problems}}", words)
    assert config.updates_per_step == 6
    table = dict(batch_arithmetic(config.model_dump(mode="json"), {}))
    assert table["x passes over the completions of a step"] == "3"
    assert table["= updates per step"] == "6"
