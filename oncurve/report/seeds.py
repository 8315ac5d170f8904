"""Recipes over several seeds: their means, and the differences between them, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from oncurve import tables
from oncurve.evaluate.evaluation import Evaluation
from oncurve.report.comparing import OWN_KEYS, RunComparison, Side, rewards_of
from oncurve.stats import t_interval
from oncurve.wording import decimals, interval, percent, signed_decimals, signed_points

if TYPE_CHECKING:
    from rich.table import Table

SEED = "run.seed"
MOST_SEEDS = 200
"""More than this many are never proposed: then the difference is not worth the runs."""


@dataclass(frozen=True)
class RecipeRuns:
    """The runs of one recipe, which differ in their seed alone."""

    name: str
    scores: Mapping[str, float]
    """By seed: what its test problems say after training, a share or a mean reward."""
    num_unmeasured: int
    runs: tuple[str, ...]
    """Names of the runs."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return fmean(self.scores.values()) if self.scores else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the mean over seeds (Student's t); NaN for fewer than two, and for equal ones."""
        return t_interval(list(self.scores.values()))


@dataclass(frozen=True)
class SeedDifference:
    """A recipe against the first one."""

    name: str
    first: str
    differences: tuple[float, ...]
    """Difference for each seed that both have."""

    @property
    def mean(self) -> float:
        """Over these seeds."""
        return fmean(self.differences)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the mean difference (Student's t, paired by seed)."""
        return t_interval(self.differences)

    @property
    def seeds_needed(self) -> float:
        """Seeds with which a difference of this size would be found four times in five.

            n = ((1.96 + 0.84) s / d)^2

        d is the mean and s the standard deviation of the differences. Infinite for equal means.
        """
        spread, mean = stdev(self.differences), abs(self.mean)
        return math.inf if mean == 0 else max(math.ceil((2.8 * spread / mean) ** 2), len(self.differences) + 1)


@dataclass(frozen=True)
class SeedComparison:
    """Recipes of several seeds each; the first is the one that the others are measured against."""

    recipes: tuple[RecipeRuns, ...]
    differences: tuple[SeedDifference, ...]
    is_share: bool
    """Scores are shares of correct problems, shown in percent; else mean rewards."""
    apart: tuple[str, ...] = ()
    """Recipes with other test problems, or mean rewards of other rewards, than the first."""

    def sentences(self) -> list[str]:
        """The differences in sentences."""
        apart = f"{', '.join(self.apart)}: other test problems or rewards than {self.recipes[0].name}, not compared."
        return [*(self._sentence(difference) for difference in self.differences), *([apart] if self.apart else [])]

    def _sentence(self, difference: SeedDifference) -> str:
        count = len(difference.differences)
        if count < 2:
            return f"{difference.name} and {difference.first} have {count} seed in common; two or more tell something."
        low, high = difference.interval
        text = f"{self.number_text(difference.mean, signed=True)}{self.ends(difference)} over {count} seeds"
        if low > 0 or high < 0:
            return f"{difference.name} is {'better' if low > 0 else 'worse'} than {difference.first}: {text}."
        if all(value == 0 for value in difference.differences):
            return f"{difference.name} and {difference.first} are equal on every one of {count} seeds."
        if math.isnan(low):
            return (
                f"{difference.name} against {difference.first}: {text}, the same on each, which says nothing of other "
                "seeds."
            )
        needed = difference.seeds_needed
        more = f"about {needed:.0f} would" if needed <= MOST_SEEDS else f"not even {MOST_SEEDS} would"
        pair = f"{difference.name} from {difference.first}"
        return f"{count} seeds cannot tell {pair}: {text}; {more}, if this is the difference."

    def ends(self, difference: SeedDifference) -> str:
        """The interval of a difference as text; nothing for one seed, or where all have the same."""
        if math.isnan(difference.interval[0]):
            return ""
        least = -1.0 if self.is_share else -math.inf
        low, high = (min(max(end, least), -least) for end in difference.interval)
        return f" {interval(low, high, signed_points if self.is_share else signed_decimals)}"

    def number_text(self, value: float, *, signed: bool = False) -> str:
        """A score or a difference as text."""
        if math.isnan(value) or not self.is_share:
            return signed_decimals(value) if signed else decimals(value)
        return f"{signed_points(value)} points" if signed else percent(value)


def compare_seeds(compared: RunComparison) -> SeedComparison | None:
    """The runs by recipe; None where no recipe has two seeds."""
    groups: dict[tuple[tuple[str, str], ...], list[Side]] = {}
    for side in compared.sides:
        key = tuple(sorted((name, value) for name, value in side.config.items() if name not in (*OWN_KEYS, SEED)))
        groups.setdefault(key, []).append(side)
    if all(len({side.config.get(SEED) for side in group}) < 2 for group in groups.values()):
        return None
    measured = [recipe for side in compared.sides if (recipe := side.evaluations.get("trained")) is not None]
    is_share = all(recipe.is_binary for recipe in measured)
    ordered = sorted(groups.values(), key=lambda group: len({side.config.get(SEED) for side in group}) < 2)
    names = _names(ordered)
    recipes = tuple(_recipe(name, group, is_share) for name, group in zip(names, ordered, strict=True))
    first, others = recipes[0], recipes[1:]
    apart = [name for name, group in zip(names, ordered, strict=True) if not _are_alike(ordered[0], group, is_share)]
    differences = tuple(
        SeedDifference(recipe.name, first.name, tuple(recipe.scores[seed] - first.scores[seed] for seed in shared))
        for recipe in others
        if recipe.name not in apart and (shared := [seed for seed in first.scores if seed in recipe.scores])
    )
    return SeedComparison(recipes, differences, is_share, tuple(apart))


def _are_alike(first: Sequence[Side], other: Sequence[Side], is_share: bool) -> bool:
    """Their scores are of the same problems and, where they are mean rewards, of the same rewards."""
    pair = [next((side for side in group if "trained" in side.evaluations), None) for group in (first, other)]
    if pair[0] is None or pair[1] is None:
        return True
    questions, again = ([example.question for example in side.evaluations["trained"].examples] for side in pair if side)
    return questions == again and (is_share or rewards_of(pair[0]) == rewards_of(pair[1]))


def _recipe(name: str, group: Sequence[Side], is_share: bool) -> RecipeRuns:
    measured = [side for side in group if "trained" in side.evaluations]
    scores = {side.config.get(SEED, ""): _score(side.evaluations["trained"], is_share) for side in measured}
    return RecipeRuns(name, scores, len(group) - len(measured), tuple(side.name for side in group))


def _score(evaluation: Evaluation, is_share: bool) -> float:
    return evaluation.correct.fraction if is_share else evaluation.mean_reward.value


def _names(groups: Sequence[Sequence[Side]]) -> list[str]:
    """The common beginning of the names of a recipe's runs; the first one's name where that is empty."""
    common_names = []
    for group in groups:
        names = [side.name for side in group]
        first, last = min(names), max(names)
        shared = [character for character, other in zip(first, last, strict=False) if character == other]
        common = (
            "".join(shared if first.startswith("".join(shared)) else [])
            .rstrip("-_. ")
            .removesuffix("seed")
            .rstrip("-_. ")
        )
        common_names.append(common if common and common not in common_names else names[0])
    return common_names


def seeds_table(comparison: SeedComparison, width: int) -> Iterator[Table]:
    """One row per recipe, in parts that a terminal of ``width`` characters can show."""
    return tables.in_parts("by recipe, over seeds", *_texts(comparison), width, num_fixed=1)


def _texts(comparison: SeedComparison) -> tuple[list[str], list[list[str]]]:
    """Names of the table's columns, and a row for each recipe."""
    what = "correct after training" if comparison.is_share else "test reward after training"
    seeds = comparison.recipes[0].scores.keys()
    are_same = all(difference.scores.keys() == seeds for difference in comparison.recipes)
    by_name = {difference.name: difference for difference in comparison.differences}
    rows: list[list[str]] = []
    for recipe in comparison.recipes:
        low, high = (min(max(end, 0.0), 1.0) if comparison.is_share else end for end in recipe.interval)
        per_seed = (", " if are_same else ",\n").join(
            comparison.number_text(score) if are_same else f"{seed}: {comparison.number_text(score)}"
            for seed, score in sorted(recipe.scores.items(), key=lambda item: item[0])
        )
        other = by_name.get(recipe.name)
        against = (
            "-"
            if other is None
            else f"{comparison.number_text(other.mean, signed=True)}\n{comparison.ends(other).strip()}"
        )
        missing = f" ({recipe.num_unmeasured} unmeasured)" if recipe.num_unmeasured else ""
        mean = comparison.number_text(recipe.mean) + (
            "" if math.isnan(recipe.interval[0]) else f"\n{interval(low, high, comparison.number_text)}"
        )
        cells = [f"{len(recipe.scores)}{missing}", mean, per_seed, against.rstrip()]
        rows.append([recipe.name, *cells])
    per_seed = f"of seeds {', '.join(sorted(seeds))}" if are_same and len(seeds) < 10 else "of each seed"
    return ["recipe", "seeds", f"{what}, mean", per_seed, "against the first"], rows


def recipes_block(compared: RunComparison) -> dict[str, Any] | None:
    """The same for a page, with the places of each recipe's runs; None where no recipe has two seeds."""
    comparison = compare_seeds(compared)
    if comparison is None:
        return None
    heads, rows = _texts(comparison)
    numbers = {side.name: number for number, side in enumerate(compared.sides)}
    groups = [{"name": recipe.name, "runs": [numbers[name] for name in recipe.runs]} for recipe in comparison.recipes]
    return {"heads": heads, "rows": rows, "sentences": comparison.sentences(), "groups": groups}
