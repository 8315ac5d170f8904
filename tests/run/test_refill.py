"""Does dynamic sampling replace groups without a signal, and stop?"""

from __future__ import annotations

from collections.abc import Sequence

from oncurve.core.grading import has_signal, replace_silent
from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.core.sampler import SamplingRequest
from oncurve.data.curriculum import Curriculum

PROMPTS = [Prompt(text=f"q{i}", prompt_ids=(i,), index=i) for i in range(20)]


class FakeSampler:
    """Two completions per prompt."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def sample(self, request: SamplingRequest) -> list[Group]:
        self.asked += [prompt.index for prompt in request.prompts]
        return [
            Group(
                p,
                tuple(
                    Completion(p.prompt_ids, (1,), str(i), (0.0,), "stop", request.step, i)
                    for i in range(request.group_size)
                ),
            )
            for p in request.prompts
        ]

    def load_weights(self, policy: object, version: int) -> None: ...

    def close(self) -> None: ...


class Useful:
    """A signal for prompts of the given indices only."""

    name = "useful"

    def __init__(self, indices: set[int]) -> None:
        self.indices = indices

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        return [
            Reward(float(c.index == 0 and p.index in self.indices)) for p, c in zip(prompts, completions, strict=True)
        ]

    def close(self) -> None: ...


def run(useful: set[int], rounds: int) -> tuple[list[Group], list[list[Reward]], FakeSampler]:
    data, sampler, reward = Curriculum(PROMPTS, 4), FakeSampler(), Useful(useful)
    groups = sampler.sample(SamplingRequest(data.at(0), 2, step=0))
    rewards = iter(reward([g.prompt for g in groups for _ in range(2)], [c for g in groups for c in g.completions]))
    graded = [[next(rewards) for _ in range(2)] for _ in groups]
    kept, rewards_kept = replace_silent(groups, graded, data, sampler, reward, step=0, rounds=rounds)
    return kept, rewards_kept, sampler


def test_groups_without_a_signal_are_replaced_until_the_step_is_full() -> None:
    first = [prompt.index for prompt in Curriculum(PROMPTS, 4).at(0)]
    kept, graded, sampler = run(set(range(20)) - set(first[:2]), rounds=5)
    assert [group.prompt.index for group in kept] == [*first[2:], *sampler.asked[4:]]
    assert all(one.policy_version == 0 and len(group.completions) == 2 for group in kept for one in group.completions)
    assert len(kept) == 4
    assert all(has_signal(rewards) for rewards in graded)
    assert len(sampler.asked) == 6


def test_a_step_keeps_its_size_when_nothing_has_a_signal() -> None:
    kept, graded, sampler = run(set(), rounds=3)
    assert len(kept) == 4
    assert not any(has_signal(rewards) for rewards in graded)
    assert len(sampler.asked) == len(set(sampler.asked)) == 16


def test_no_prompt_is_asked_twice_and_the_search_ends_with_the_data() -> None:
    _, _, sampler = run(set(), rounds=100)
    assert sorted(sampler.asked) == list(range(20))
