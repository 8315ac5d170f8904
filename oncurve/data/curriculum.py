"""Selection of prompts by how often the policy has solved them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oncurve.core.order import Prompts
from oncurve.core.records import Group, Prompt, Reward

if TYPE_CHECKING:
    from oncurve.data.prompts_on_demand import PromptsOnDemand

MEMORY = 0.5
"""Share of the old pass rate in the running one when a prompt is seen again."""
SPARE_STEPS = 64
"""Steps of the spare order that belong to one step of the run; more are never needed."""


class Curriculum:
    """The prompts of a run: the plain order, or one that leaves out what teaches nothing.

    Without options a step's prompts are those of ``Prompts``. ``retire_above`` replaces prompts whose running pass
    rate reached it; ``prefer_half_solved`` chooses, among twice as many prompts as a step takes, those whose running
    pass rate is nearest to one half, where a group's rewards differ most (an unseen prompt counts as one half).
    Replacements come from a second order of the same prompts. Everything is a function of (seed, step) and the running
    pass rates, which ``state`` gives and ``load_state`` takes back. With a ``lag``, for samplers that are so many steps
    ahead, the prompts of a step follow from the grades of the steps up to ``lag + 1`` before it, whenever they are
    asked for.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt] | PromptsOnDemand,
        prompts_per_step: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        retire_above: float | None = None,
        prefer_half_solved: bool = False,
        lag: int = 0,
    ) -> None:
        self._data = Prompts(prompts, prompts_per_step, seed=seed, shuffle=shuffle)
        self._spare = Prompts(prompts, prompts_per_step, seed=seed + 7919)
        self.prompts_per_step = prompts_per_step
        self.retire_above, self.prefer_half_solved = retire_above, prefer_half_solved
        self._chooses = prefer_half_solved or retire_above is not None
        self.lag = lag
        self.pass_rates: dict[int, float] = {}
        self._late: dict[int, list[tuple[int, float]]] = {}
        """Rates of steps, prompt by prompt, that do not choose the prompts of every coming step yet."""

    def __len__(self) -> int:
        return len(self._data)

    def at(self, step: int) -> list[Prompt]:
        """The prompts of a step, counted from 0; retired ones only when too few others are left."""
        planned = self._data.at(step)
        if not self._chooses:
            return planned
        rates = self._rates(step)
        active = [prompt for prompt in planned if not self.is_retired(prompt, rates)]
        num_candidates = self.prompts_per_step * (2 if self.prefer_half_solved else 1)
        planned_indices = {prompt.index for prompt in planned}
        candidates = active + self._spares(step, num_candidates - len(active), planned_indices)
        if self.prefer_half_solved:
            candidates.sort(key=lambda prompt: abs(rates.get(prompt.index, 0.5) - 0.5))
        candidates += [prompt for prompt in planned if self.is_retired(prompt, rates)]
        return candidates[: self.prompts_per_step]

    def more(self, step: int, count: int, excluded: Collection[int]) -> list[Prompt]:
        """Up to ``count`` further prompts for a step, none of those whose index is taken."""
        return self._spares(step, count, excluded)

    def observe(self, groups: Sequence[Group], graded: Sequence[Sequence[Reward]], *, step: int = 0) -> None:
        """Remember how many completions of each prompt of a step were right, if that chooses prompts; groups that could
        not be graded say nothing."""
        if not self._chooses:
            return
        for old in sorted(number for number in self._late if number < step - self.lag):
            _add(self.pass_rates, self._late.pop(old))
        for group, rewards in zip(groups, graded, strict=True):
            solved = [is_solved(reward) for reward in rewards if reward.error is None]
            if solved:
                rate = (group.prompt.index, sum(solved) / len(solved))
                if self.lag:
                    self._late.setdefault(step, []).append(rate)
                else:
                    _add(self.pass_rates, [rate])

    def _rates(self, step: int) -> dict[int, float]:
        """The running pass rates that choose the prompts of a step."""
        known = [number for number in sorted(self._late) if number < step - self.lag]
        rates = dict(self.pass_rates) if known else self.pass_rates
        for number in known:
            _add(rates, self._late[number])
        return rates

    def is_retired(self, prompt: Prompt, rates: Mapping[int, float] | None = None) -> bool:
        """The prompt has been solved so often that it is left out."""
        rate = (self.pass_rates if rates is None else rates).get(prompt.index)
        return self.retire_above is not None and rate is not None and rate >= self.retire_above

    def state(self) -> dict[Any, Any]:
        """The running pass rates, by index of the prompt, as plain data."""
        late = {step: list(rates) for step, rates in self._late.items()}
        return {**self.pass_rates, **({"late": late} if late else {})}

    def load_state(self, state: Mapping[Any, Any]) -> None:
        """Go on from a saved state."""
        self.pass_rates = {int(index): rate for index, rate in state.items() if index != "late"}
        late = state.get("late", {}).items()
        self._late = {int(step): [(int(index), rate) for index, rate in rates] for step, rates in late}
        if not self.lag:  # the run was resumed without look-ahead
            for step in sorted(self._late):
                _add(self.pass_rates, self._late.pop(step))

    def _spares(self, step: int, count: int, excluded: Collection[int]) -> list[Prompt]:
        spares: list[Prompt] = []
        seen, rates = set(excluded), self._rates(step)
        for offset in range(SPARE_STEPS):
            if len(spares) >= count:
                break
            for prompt in self._spare.at(step * SPARE_STEPS + offset):
                if prompt.index not in seen and not self.is_retired(prompt, rates):
                    seen.add(prompt.index)
                    spares.append(prompt)
        return spares[: max(count, 0)]


def _add(rates: dict[int, float], observed: Sequence[tuple[int, float]]) -> None:
    """Let running pass rates follow those of some prompts."""
    for index, rate in observed:
        rates[index] = MEMORY * rates.get(index, rate) + (1 - MEMORY) * rate


def is_solved(reward: Reward) -> bool:
    """The completion is right: its "correct" part where there is one, a reward of at least 1 otherwise."""
    if reward.value is None:
        return False
    return reward.parts.get("correct", reward.value) >= 1.0
