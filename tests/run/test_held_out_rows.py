"""Which rows are trained on, validated on and tested on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bits.runs import trained

from oncurve.core.errors import DataError
from oncurve.core.records import ENDED_BY_ITSELF, Completion, Group, Prompt, Reward, Segment
from oncurve.data.check import find_repeats
from oncurve.data.curriculum import Curriculum
from oncurve.data.datasets import count_rows
from oncurve.recipe.load import parse_config
from oncurve.recipe.schema import Config
from oncurve.run.first_groups import MOST_TURNS, _first_prompts, describe_episode, describe_groups
from oncurve.run.rendered import describe_validation, refuse_shared, split_rows

Row = dict[str, Any]
SUMS: list[Row] = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(40)]
OWN: list[Row] = [{"question": f"{n} + 2 =", "answer": str(n + 2)} for n in range(20)]
GAMES: list[Row] = [{"question": f"Heap {n % 4}", "seed": n} for n in range(240)]


def recipe(folder: Path, rows: list[Row], *, own: list[Row] | None = None, more: str = "", **evaluation: int) -> Config:
    """A recipe of these rows, and of one's own to evaluate on."""
    section: dict[str, Any] = {"num_prompts": 6, "num_prompts_during": 5, **evaluation}
    for name, some in (("rows", rows), ("own", own or [])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)), encoding="utf-8")
    if own is not None:
        section["data"] = {"type": "jsonl", "path": str(folder / "own.jsonl")}
    data = f"{{type: jsonl, path: {folder / 'rows.jsonl'}}}"
    return parse_config(
        f"{{model: embedded, data: {data}, evaluation: {json.dumps(section)}, run: {{prompts_per_step: 4}} {more}}}"
    )


@pytest.mark.parametrize("own", [None, OWN])
def test_what_is_measured_during_the_run_changes_no_row(own: list[Row] | None, tmp_path: Path) -> None:
    never, always = (split_rows(recipe(tmp_path, SUMS, own=own, every_steps=every)) for every in (0, 1))
    assert never == always
    train, _, during, test = never
    assert (len(train), len(during), len(test)) == (40 if own else 29, 5, 6)
    assert not any(row in train or row in test for row in during)
    assert not own or all(row["question"].endswith("+ 2 =") for row in (*during, *test))


def test_a_run_ends_with_the_same_weights_whether_it_is_validated_or_not(tmp_path: Path) -> None:
    ends = [trained(tmp_path / str(every), evaluation={"every_steps": every}) for every in (0, 1)]
    assert ends[0] == ends[1]


def test_few_rows_are_validated_on_test_problems_which_is_said(tmp_path: Path) -> None:
    config = recipe(tmp_path, SUMS, own=OWN[:8], every_steps=1)
    _, _, during, test = split_rows(config)
    assert (len(during), len(test)) == (5, 6)
    assert all(row in test for row in during)
    assert "test problems too" in describe_validation(config, during, test)
    assert len(split_rows(recipe(tmp_path, SUMS[:5]))[2]) == 1


def test_rows_of_one_question_are_told_and_are_problems_of_their_own_in_an_environment(tmp_path: Path) -> None:
    by_question = split_rows(recipe(tmp_path, [{**row, "answer": "1"} for row in GAMES]))
    sides = [{row["question"] for row in side} for side in by_question if side]
    assert not sides[0] & sides[1]
    assert count_rows(by_question[3], "test") == "60 test of 1 question"
    game = ", rollouts: {environments: {heap: heap.py:Heap}}, rewards: [{type: environment}]"
    train, _, during, test = split_rows(recipe(tmp_path, GAMES, more=game))
    assert (len(train), len(during), len(test)) == (229, 5, 6)
    assert len({row["question"] for row in test}) > 1
    assert count_rows(train, "training rows") == "229 training rows of 4 questions"


def test_a_training_row_in_the_test_file_is_refused(tmp_path: Path) -> None:
    config = recipe(tmp_path, SUMS, own=[*OWN, {"question": " 3 + 1 =", "answer": "4"}], num_prompts=21)
    with pytest.raises(DataError, match=r"1 of 40 training rows is in the evaluation data too, such as '3 \+ 1 ='"):
        refuse_shared(split_rows(config), config)
    apart = recipe(tmp_path, SUMS, own=OWN)
    refuse_shared(split_rows(apart), apart)
    games = ", rollouts: {environments: {heap: heap.py:Heap}}, rewards: [{type: environment}]"
    others = recipe(tmp_path, GAMES[:200], own=GAMES[200:], more=games)
    refuse_shared(split_rows(others), others)


def test_rows_of_an_environment_repeat_only_where_all_their_columns_do() -> None:
    assert len(find_repeats([{**row, "answer": ""} for row in GAMES])[0].rows) == 236
    assert find_repeats([{**row, "answer": ""} for row in GAMES], by_row=True) == []
    [again] = find_repeats([{**row, "answer": ""} for row in (*GAMES, GAMES[7])], by_row=True)
    assert again.rows == (240,)


def test_an_episode_is_shown_part_by_part() -> None:
    parts = (Segment(True, 0, 2, "9"), Segment(False, 2, 3, "\n left 7"), Segment(True, 3, 4, "3"))
    completion = Completion((1,), (1, 2, 3, 4), "9\n left 73", (0.0,) * 4, "done", 0, 0, segments=parts)
    groups = [Group(Prompt("Heap 1. left 9", (1,), 0), (completion,))]
    assert describe_episode(groups, [[Reward(0.5)]]) == [
        "an episode: 2 turns, ended by done, reward 0.5",
        "  prompt      'Heap 1. left 9'",
        "  model       '9'",
        "  answer      '\\n left 7'",
        "  model       '3'",
    ]
    assert describe_episode([Group(groups[0].prompt, (replace(completion, segments=()),))], [[Reward(0.5)]]) == []


def test_pages_call_the_same_completions_cut_off_as_everybody_else() -> None:
    pages = Path(__file__).parents[2] / "oncurve" / "report" / "pages"
    text = (pages / "episode.js").read_text(encoding="utf-8")
    [listed] = re.findall(r"CUT_OFF = new Set\(\[(.*?)\]\)", text)
    ends = set(re.findall(r"^  (\w+):|, (\w+): \[", text[: text.index("CUT_OFF")], re.MULTILINE))
    known = {name for pair in ends for name in pair if name}
    assert set(re.findall(r"\w+", listed)) == known - set(ENDED_BY_ITSELF)


def test_a_long_episode_is_cut_and_one_that_failed_says_so() -> None:
    for count, more in ((MOST_TURNS, None), (MOST_TURNS + 1, "  ... and 1 further part")):
        parts = tuple(Segment(place % 2 == 0, place, place + 1, str(place)) for place in range(count))
        short = Completion((1,), (1,), "", (0.0,), "done", 0, 0, segments=(Segment(True, 0, 1, "x"),))
        long = Completion((1,), (1,) * count, "", (0.0,) * count, "done", 0, 1, segments=parts)
        groups = [Group(Prompt("q", (1,), 0), (short, long))]
        lines = describe_episode(groups, [[Reward(1.0), Reward(None, error="timeout")]])
        assert lines[0].endswith("ended by done, not graded (timeout)")
        assert len(lines) == 2 + MOST_TURNS + (more is not None)
        assert more is None or lines[-1] == more


@pytest.mark.parametrize(
    ("right", "reason", "said"),
    [
        ((0, 0, 0, 0, 0), "stop", "a signal, so GRPO would learn nothing from them. The prompts are too hard"),
        ((2, 2, 2, 2, 2), "stop", "a signal, so GRPO would learn nothing from them. The prompts are too easy"),
        ((2, 2, 0, 0, 1), "stop", "of the 10 groups of a step, about 2 would be learned from"),
        ((2, 2, 2, 0, 0, 0, 1), "stop", "most of the sampling would be wasted at first. The prompts are too hard"),
        ((2, 2, 2, 2, 0, 0, 1), "stop", "most of the sampling would be wasted at first. The prompts are too easy"),
        ((2, 0, 0, 0, 0, 0, 1), "length", "wasted at first. Most completions are cut off before their answer"),
        ((1, 1, 0), "length", "of the 10 groups of a step, about 7 would be learned from"),
    ],
)  # fmt: skip
def test_the_first_groups_say_how_many_could_be_learned_from(
    right: tuple[int, ...], reason: Any, said: str, tmp_path: Path
) -> None:
    config = recipe(tmp_path, SUMS)
    config = config.model_copy(update={"run": config.run.model_copy(update={"prompts_per_step": 10})})
    made = [tuple(Completion((n,), (1,), "", (0.0,), reason, 0, k) for k in range(2)) for n in range(len(right))]
    groups = [Group(Prompt("", (n,), n), completions) for n, completions in enumerate(made)]
    rewards = [[Reward(float(k < count), parts={"correct": float(k < count)}) for k in range(2)] for count in right]
    lines = describe_groups(config, groups, rewards, 3.4)
    signals, total = right.count(1), len(right)
    assert lines[0].startswith(f"{total} groups of {config.algorithm.group_size} from the untrained model, in 3 s: ")
    assert f"in 3 s: {signals} have a signal ({signals / total:.0%}, 95 % interval " in lines[0]
    assert f"mean reward {sum(right) / 2 / total:.3g}, correct {sum(right) / 2 / total:.0%}" in lines[1]
    assert f"cut off by the limit {float(reason == 'length'):.0%}" in lines[1]
    assert f"solved by all {right.count(2) / total:.0%}, solved by none {right.count(0) / total:.0%}" in lines[1]
    assert said in lines[-1]
    assert len(lines) == (3 if signals == 0 or signals / total >= 0.2 else 4)


def test_the_first_prompts_are_those_of_the_first_steps_each_once() -> None:
    data = Curriculum([Prompt("", (n,), n) for n in range(10)], 4)
    order = [prompt.index for step in range(5) for prompt in data.at(step)]
    for count in (1, 4, 5, 10):
        assert [prompt.index for prompt in _first_prompts(data, count)] == order[:count]
    assert len(_first_prompts(data, 12)) == 10
