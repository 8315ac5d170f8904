"""Does an evaluation count what a model did, and keep every example?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from evaluation_fakes import GREEDY, Anywhere, Boxed, Reciter, evaluation_of, prompts_of

from oncurve.core.errors import DataError
from oncurve.core.records import Completion, Prompt, Reward, SamplingParams
from oncurve.evaluate.evaluate import evaluate
from oncurve.evaluate.evaluation import read_evaluation
from oncurve.evaluate.settings import EvaluationSection
from oncurve.observe.metrics import unknown_keys
from oncurve.observe.record import RunFolder
from oncurve.stats import wilson_interval

TEXTS = ["[1]", "[9]", "3", "boom", "nonsense"]


@pytest.mark.proves("F140")
def test_every_example_falls_into_one_category() -> None:
    found = evaluation_of(TEXTS)
    assert [example.category for example in found.examples] == ["correct", "wrong", "bad_format", "error", "bad_format"]
    assert found.counts == {"correct": 1, "wrong": 1, "bad_format": 2, "graded": 0, "error": 1}
    assert [example.correct_any_format for example in found.examples] == [True, False, True, None, False]


def test_shares_are_over_what_was_graded_with_wilson_intervals() -> None:
    found = evaluation_of(TEXTS)
    assert (found.correct.successes, found.correct.total) == (1, 4)
    assert (found.correct.low, found.correct.high) == wilson_interval(1, 4)
    assert found.any_format is not None
    assert found.any_format.fraction == 0.5
    assert found.category_share("bad_format").fraction == 0.4
    assert str(found.correct).startswith("1/4 = 25.0% [")


def test_examples_keep_question_answer_text_and_why_it_ended() -> None:
    sampler = Reciter(["[1]", "[2"], ["stop", "length"])
    found = evaluate(prompts_of(2), sampler, Boxed(), params=GREEDY, step=40)
    second = found.examples[1]
    assert (second.index, second.question, second.answer) == (1, "What is 1 plus 1?", "2")
    assert (second.completion, second.num_tokens, second.finish_reason) == ("[2", 2, "length")
    assert (second.reward, second.detail, second.correct_any_format) == (0.0, "read [2", None)
    told = replace(second, episode={"turns": 2})
    assert found.any_format is None
    assert found.step == 40
    assert 0.0 <= found.seconds < 60.0
    assert ["episode" in row for row in (*found.rows(), *replace(found, examples=(told,)).rows())] == [
        False,
        False,
        True,
    ]
    assert [found.summary()[key] for key in ("any_format", "pass_at_k")] == [None, {"1": 0.5}]


def test_a_prompt_without_a_question_column_is_shown_as_it_is() -> None:
    prompt = Prompt("text of the prompt", (1,), 0, {"answer": "1"})
    (example,) = evaluate([prompt], Reciter(["[1]"]), Boxed(), params=GREEDY).examples
    assert example.question == "text of the prompt"


def test_the_metrics_are_all_in_the_glossary() -> None:
    sampler = Reciter([*TEXTS, "[6"], ["stop", "done", "malformed", "stop", "stop", "length"])
    found = evaluate(prompts_of(6), sampler, Boxed(), lenient_reward_function=Anywhere(), params=GREEDY)
    metrics = found.metrics()
    assert unknown_keys(metrics) == []
    low, high = wilson_interval(1, 5)
    assert metrics == pytest.approx({
        "evaluation/mean_reward": 0.2, "evaluation/mean_reward_low": 0.0, "evaluation/mean_reward_high": 0.6,
        "evaluation/error_fraction": 1 / 6, "evaluation/truncated_fraction": 1 / 6, "evaluation/mean_tokens": 3.5,
        "evaluation/num_examples": 6.0, "evaluation/correct_fraction": 0.2, "evaluation/correct_low_fraction": low,
        "evaluation/correct_high_fraction": high, "evaluation/wrong_fraction": 2 / 6,
        "evaluation/any_format_fraction": 0.6, "evaluation/bad_format_fraction": 2 / 6,
    })  # fmt: skip
    summary = found.summary()
    assert summary["any_format"] == pytest.approx({
        "successes": 3, "total": 5, "low": 0.23072, "high": 0.88238, "fraction": 0.6
    }, abs=1e-5)  # fmt: skip
    assert summary["mean_reward"] == {"value": 0.2, "total": 5, "low": 0.0, "high": 0.6}
    assert repr(found) == "<Evaluation evaluation after step 0: correct 1/5 = 20.0% [3.6%, 62.4%]>"
    assert "evaluation/any_format_fraction" not in evaluation_of(TEXTS, loose=False).metrics()


@pytest.mark.proves("D43")
def test_prompts_go_to_the_sampler_in_parts_with_the_given_decoding() -> None:
    sampler, told = Reciter(["[1]"] * 5), []
    evaluate(
        prompts_of(5),
        sampler,
        Boxed(),
        params=GREEDY,
        step=7,
        prompts_per_call=2,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert sampler.calls == [(2, 1, 7, GREEDY), (2, 1, 7, GREEDY), (1, 1, 7, GREEDY)]
    assert told == [(0, 5), (2, 5), (4, 5), (5, 5)]


def test_several_completions_of_a_prompt_are_counted_and_drawn_together() -> None:
    texts = [["[1]"] * 4, ["[9]"] * 4] * 1 + [["[3]", "[3]", "[9]", "[9]"]]
    found = evaluation_of(texts, samples=4)
    assert (found.correct.successes, found.correct.total) == (6, 12)
    first = [example for example in found.examples if example.index != 2]
    told = replace(
        found, examples=(*first, *(replace(e, category="error", error="timeout") for e in found.examples[8:]))
    )
    assert (told.correct.successes, told.correct.total, told.mean_reward.total) == (4, 8, 8)
    assert [example.sample for example in found.examples] == [0, 1, 2, 3] * 3
    assert found.correct.high - found.correct.low > wilson_interval(6, 12)[1] - wilson_interval(6, 12)[0]
    assert found.pass_at_k(1) == pytest.approx(0.5)
    assert found.pass_at_k(2) == pytest.approx((1 + 0 + 5 / 6) / 3)
    assert list(found.summary()["pass_at_k"]) == ["1", "2", "4"]
    assert found.summary()["intervals"] == "95 %, bootstrap over prompts"
    assert evaluation_of(texts, samples=1).summary()["intervals"] == "95 %, wilson"


def test_where_none_of_many_completions_hold_the_interval_keeps_a_width() -> None:
    found = evaluation_of([["[x]"] * 4] * 10, samples=4)
    assert (found.correct.low, found.correct.high) == wilson_interval(0, 10)
    wrong = found.category_share("wrong")
    assert (wrong.low, wrong.high) == wilson_interval(10, 10)


def test_a_reward_function_that_raises_costs_its_own_examples_only() -> None:
    class Fragile(Boxed):
        def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
            if any(completion.text == "[9]" for completion in completions):
                raise RuntimeError("cannot read this")
            return super().__call__(prompts, completions)

    found = evaluate(prompts_of(2), Reciter(["[1]", "[9]"]), Fragile(), params=GREEDY)
    assert [example.category for example in found.examples] == ["correct", "error"]
    assert "cannot read this" in found.examples[1].detail


def test_a_right_answer_in_the_right_form_is_right_in_any_form() -> None:
    class Never(Anywhere):
        def _one(self, prompt: Prompt, text: str) -> Reward:
            return Reward(0.0, {"correct": 0.0})

    found = evaluate(prompts_of(1), Reciter(["[1]"]), Boxed(), lenient_reward_function=Never(), params=GREEDY)
    assert found.examples[0].correct_any_format is True


@pytest.mark.proves("D41")
def test_nothing_to_evaluate_twice_the_same_row_and_greedy_repetition_are_refused() -> None:
    with pytest.raises(DataError, match="no prompt"):
        evaluate([], Reciter([]), Boxed(), params=GREEDY)
    with pytest.raises(ValueError, match="row 1 is among the prompts more than once"):
        evaluate([*prompts_of(2), prompts_of(2)[1]], Reciter(["[1]"] * 2), Boxed(), params=GREEDY)
    with pytest.raises(ValueError, match="greedy"):
        evaluate(prompts_of(1), Reciter(["[1]"]), Boxed(), params=GREEDY, samples_per_prompt=2)


def test_an_evaluation_survives_its_files(tmp_path: Path) -> None:
    written = replace(evaluation_of(TEXTS), name="base", params={"temperature": 0.0, "stop": ["x"]})
    with RunFolder(tmp_path) as run:
        run.write_evaluation("base", written.rows(), written.summary())
    assert read_evaluation(tmp_path / "evaluations", "base") == written
    json.dumps(written.summary(), allow_nan=False)


def test_files_of_another_shape_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"name": "old"}')
    (tmp_path / "old.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(DataError, match=r"old\.jsonl: is no evaluation"):
        read_evaluation(tmp_path, "old")
    with pytest.raises(DataError, match="cannot be read"):
        read_evaluation(tmp_path, "missing")


@pytest.mark.proves("F139")
def test_the_sampler_may_draw_by_any_setting() -> None:
    found = evaluate(prompts_of(1), Reciter(["[1]"]), Boxed(), params=SamplingParams(temperature=0.6, stop=("]",)))
    assert found.params["temperature"] == 0.6
    assert found.params["stop"] == ("]",)


def test_measurements_are_drawn_by_their_own_settings_and_by_no_cut_of_the_training() -> None:
    training = SamplingParams(temperature=0.7, top_p=0.5, top_k=3, min_p=0.1, max_completion_tokens=9, seed=1)
    section = EvaluationSection(temperature=0.6, top_p=0.95, samples=2)
    drawn = section.sampling(training)
    assert (drawn.temperature, drawn.top_p, drawn.active_cuts) == (0.6, 0.95, ("top_p",))
    assert drawn.max_completion_tokens == 9
    assert drawn.seed == 1_000_004
