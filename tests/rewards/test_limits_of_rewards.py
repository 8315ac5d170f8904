"""Does every limit of the rewards hold exactly where it stands? Each row is the last value on one side of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oncurve.core.errors import ConfigError
from oncurve.core.records import Reward
from oncurve.rewards import custom, llm_judge, mathematics, probes, statement, strict_json, tool_calls
from oncurve.rewards.languages import language_of
from oncurve.rewards.references import MAX_PROSE_WORDS, marked_reference
from oncurve.rewards.shaping import CosineLength, LengthWindow, Overlong, Repetition, correctness_format_length
from oncurve.rewards.statement import is_computation
from oncurve.rewards.weighted_sum import Term, categorize, check_errors


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def probe(mean: float, name: str = "a") -> probes.ProbeResult:
    return probes.ProbeResult(name, mean, mean, "text", 0, 8)


ALLOWED: list[tuple[Callable[[Any], Any], Any, Any]] = [
    # a call, the last value that is allowed, the first that is not
    (strict_json.parse_json, nested(strict_json.MAX_NESTING), nested(strict_json.MAX_NESTING + 1)),
    (strict_json.parse_json, "1" * strict_json.MAX_DIGITS, "1" * (strict_json.MAX_DIGITS + 1)),
    (strict_json.parse_json, "0." + "1" * (strict_json.MAX_DIGITS - 2), "0." + "1" * (strict_json.MAX_DIGITS - 1)),
    (lambda size: strict_json.parse_json('"' + "a" * (size - 2) + '"'), strict_json.MAX_TEXT_CHARACTERS,
     strict_json.MAX_TEXT_CHARACTERS + 1),
    (lambda size: tool_calls._limited([tool_calls.Call("a", {})] * size), tool_calls.MAX_CALLS,
     tool_calls.MAX_CALLS + 1),
    (custom.to_reward, 0.999e15, 1e15),
    (custom.to_reward, -0.999e15, -1e15),
    (lambda correct: custom.to_reward({"reward": 1, "correct": correct}), 1.0, 1.001),
    (lambda correct: custom.to_reward({"reward": 1, "correct": correct}), 0.0, -0.001),
    (lambda low: LengthWindow(low, 5), 5, 6),
    (lambda low: LengthWindow(low, 5), 0, -1),
    (lambda buffer: Overlong(10, buffer), 10, 11),
    (lambda buffer: Overlong(10, buffer), 1, 0),
    (Repetition, 1, 0),
    (lambda limit: CosineLength(mathematics.Mathematics(), max_tokens=limit), 1, 0),
    (lambda partial: mathematics.Mathematics(partial=partial), 0.999, 1.0),
    (lambda partial: mathematics.Mathematics(partial=partial), 0.0, -0.001),
    (lambda weight: correctness_format_length(
        mathematics.Mathematics(), LengthWindow(1, 2), Repetition(), weights=(1.0, 0.5, -weight)), 0.5, 0.501),
    (lambda failed: check_errors([Reward(None, error="timeout")] * failed + [Reward(1.0)] * (10 - failed)), 2, 3),
]  # fmt: skip
VALUES: list[tuple[Callable[..., Any], dict[Any, Any]]] = [
    # a call, its results by argument
    (lambda score: llm_judge.read_scores(f"VERDICT ab: {score}", "ab", (2, 7)),
     {1: None, "1.999": None, 2: [2.0], 7: [7.0], "7.001": None}),
    (lambda size: len(llm_judge._excerpt("a" * size)) - size,
     {llm_judge.MAX_CHARACTERS: 0, llm_judge.MAX_CHARACTERS + 2: 28}),
    (lambda size: mathematics._excerpt("a" * size), {60: f"'{'a' * 60}'", 61: f"'{'a' * 57}...'"}),
    (probes._cell, {float("nan"): "-", 0.0: "0.000", 99.9: "99.900", -100.0: "-100", 99_999.0: "99,999", 1e5: "1e+05"}),
    (lambda gold: [one.mean_reward for one in probes.suspicious([probe(0.4), probe(0.5)], gold, max_share=0.5)],
     {1.0: [], 0.99: [0.5], 0.79: [0.4, 0.5], 0.0: [0.4, 0.5], 0.4: [0.4, 0.5]}),
    (lambda gold: [one.mean_reward for one in probes.suspicious([probe(-0.5), probe(-0.4)], gold, max_share=0.5)],
     {-0.4: [], -0.5: [-0.4], -0.6: [-0.5, -0.4], 0.0: []}),
    (lambda words: marked_reference(" ".join(["word"] * words) + " 5"), {MAX_PROSE_WORDS + 1: None}),
    (lambda words: bool(marked_reference(" ".join(["word"] * words) + " 5")), {MAX_PROSE_WORDS: True}),
    (lambda words: bool(marked_reference(" ".join(["Word"] * words) + " is 5.")), {3: True}),
    (lambda size: is_computation("1" * (size - 2) + "+1"), {200: True, 201: False}),
    (is_computation,
     {"5 + 7": True, "3/4": False, "-3/4": False, r"6 \times 10^3": False, r"2 \cdot 3": True,
      r"2\cdot 3\cdot x": False,
      "2^3": False, r"3\pi": False, r"-1\cdot 5": False, r"2\cdot\sqrt{3}": False, "x+1": False, "5": False}),
    (statement.stated_answer,
     {"The answer is one two three four five six": "one two three four five six",
      "The answer is one two three four five six seven": None, "Answer: 12. No, it is 13.": None,
      "The answer is 12. (Check: 12 - 7 = 5.)": "12", "Answer: red, because it is": "red", "The answer is clear": None,
      "Answer: 36, not 35": "36", "The answer is 5 + 7": None, "The answer is": None, "no statement": None,
      "The answer is 12\nbut wait": None, "The answer is red. 5 more": None, "answer: $x$": "$x$",
      "The answer is 3. The answer is 4.": "4", "The answer is 5ではない": None, "The answer to it is **7**.": "7",
      "answer: 5" + " " * (statement.MAX_CLAUSE_CHARACTERS - 9): "5",
      "answer: 5" + " " * (statement.MAX_CLAUSE_CHARACTERS - 8): None}),
    (statement.formulas,
     {r"$$a$$ \(b\) \[c\]": [(0, 5, "a"), (6, 11, "b"), (12, 17, "c")], "$5 cm$": [], r"\$5$x$": [(3, 6, "x")],
      r"$5\text{ cm}$": [(0, 13, r"5\text{ cm}")]}),
    (lambda count: language_of("я" * 8 + "a" * count), {2: None}),
    (lambda count: language_of("한" * 8 + "a" * count), {2: "ko", 3: None}),
    (lambda count: language_of("漢" * 20 + "の" * count), {1: "ja", 0: "zh"}),
    (lambda count: language_of("漢" * 21 + "の" * count), {1: "zh"}),
    (lambda step: Term(None, 2.0, [(10, 0.0), (20, 1.0), (20, 3.0), (40, 5.0)]).weight_at(step),
     {0: 0.0, 10: 0.0, 15: 1.0, 19: 1.8, 21: 6.2, 30: 8.0, 40: 10.0, 99: 10.0}),
    (lambda step: Term(None, 2.0, [(10, 0.5)]).weight_at(step), {9: 1.0, 10: 1.0, 11: 1.0}),
    (lambda parts: categorize(Reward(0.5, parts=dict(parts))),
     {(): "graded", (("format", 0.99),): "bad_format", (("format", 1.0),): "graded", (("correct", 0.99),): "wrong",
      (("correct", 1.0),): "correct", (("correct", 1.0), ("format", 0.0)): "bad_format"}),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(ALLOWED)))
def test_the_last_value_is_allowed_and_the_next_refused(row: int) -> None:
    call, allowed, refused = ALLOWED[row]
    call(allowed)
    with pytest.raises((ValueError, ConfigError, RuntimeError)):
        call(refused)


@pytest.mark.parametrize("row", range(len(VALUES)))
def test_values_on_both_sides_of_a_limit(row: int) -> None:
    call, expected = VALUES[row]
    assert {argument: call(argument) for argument in expected} == expected


RIGHT = {"correct": 1.0}
JUDGED: list[tuple[float, list[float], dict[str, Any], str | None]] = [
    # the mean of the reference answers and those of probes, more of the results, what is said
    (1.0, [1.0, 1.0], {}, "error: the reward does not tell right from wrong: all 2"),
    (1.0, [1.0, 1.5], {}, "error: the reward does not tell right from wrong"),
    (1.0, [1.0, 0.9], {}, "warning: 2 of 2 probes earn more than 20% of"),
    (0.0, [0.0, 0.0], {}, "error: the reward pays every completion the same (0): all 2"),
    (0.0, [0.0], {}, None),
    (0.0, [0.0, 0.1], {}, "warning: 1 of 2 probes earn more than what the reference"),
    (-1.0, [-1.0, -0.5], {}, "warning: 1 of 2 probes earn more than what"),
    (1.0, [0.2, 0.0], {}, None),
    (1.0, [0.21, 0.0], {}, "warning: 1 of 2 probes earn more than 20% of"),
    (1.0, [0.2, 0.0], {"parts": RIGHT}, "error: every completion counts as correct, all 2"),
    (1.0, [0.2], {"parts": RIGHT}, None),
    (1.0, [0.2, 0.0], {"parts": {"correct": 0.9}}, None),
    (1.0, [0.3] * 4, {}, "(a, a, a, a; marked"),
    (1.0, [0.3] * 5, {}, "(a, a, a, a, ...; marked"),
    (1.0, [0.0, 0.0], {"num_failed": 2, "num_tried": 4, "failure": "no"},
     "warning: the reward function fails on 4 of 8"),
    (1.0, [float("nan"), 1.0], {}, "error: the reward does not tell right from wrong: all 1"),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(JUDGED)))
def test_a_reward_is_judged_by_what_probes_earn_beside_reference_answers(row: int) -> None:
    gold, means, more, said = JUDGED[row]
    made = [probes.ProbeResult("a", mean, mean, "text", **more) for mean in (gold, *means)]
    verdicts = [f"{severity}: {text}" for severity, text in probes.judge_probes(made[1:], made[0])]
    assert (said is None and verdicts == []) or (said is not None and len(verdicts) == 1 and said in verdicts[0])
    blind = probes.judge_probes(made[1:], made[0], has_right_answer=False)
    is_flat = len(means) > 1 and set(means) == {gold}
    assert len(blind) == bool(more.get("num_failed")) + is_flat
