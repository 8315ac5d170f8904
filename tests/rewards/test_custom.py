"""Functions that were written for other trainers run unchanged."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import custom_examples as examples
import pytest
from reward_records import completion_of, prompt_of

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction, grade
from oncurve.core.records import Reward
from oncurve.data.datasets import adapt_python_rows
from oncurve.rewards.custom import from_function, reads_answer, to_reward
from oncurve.rewards.parameters import check_parameters
from oncurve.rewards.section import RunLength
from oncurve.rewards.weighted_sum import Term, WeightedSum
from oncurve.user_code import load_function

ROW = {"answer": "5", "level": 1}


def rewards_of(function: Any, *texts: str, **options: Any) -> list[Reward]:
    """What a sum of one function gives: exceptions have become errors."""
    total = WeightedSum([Term(from_function(function, **options), name="f")])
    return total([prompt_of(row=ROW)] * len(texts), [completion_of(text) for text in texts])


def values_of(function: Any, *texts: str, **options: Any) -> list[float | None]:
    return [reward.value for reward in rewards_of(function, *texts, **options)]


@pytest.mark.proves("F86", "D34")
@pytest.mark.parametrize(
    ("function", "values"),
    [
        (examples.trl_columns, [1.0, 0.0]),
        (examples.trl_without_kwargs, [1.0, 2.0]),
        (examples.trl_positional_prompts, [0.0, 0.0]),
        (examples.trl_messages, [1.0, 0.0]),
        (examples.trl_async, [1.0, 1.0]),
        (examples.trl_async_messages, [1.0, 2.0]),
        (examples.Callable(), [1.0, 1.0]),
        (examples.sample, [1.0, 0.0]),
        (examples.sample_by_place, [1.0, 0.0]),
        (examples.trl_by_place, [1.0, 0.0]),
        (examples.sample_other_names, [1.0, 0.0]),
        (examples.sample_any_second_name, [1.0, 0.0]),
        (examples.sample_columns, [1.0, 1.0]),
        (examples.sample_row, [1.0, 1.0]),
        (examples.sample_alone, [1.0, 2.0]),
        (examples.sample_messages, [1.0, 0.0]),
        (examples.sample_async, [1.0, 1.0]),
        (examples.Native(), [2.0, 2.0]),
        (lambda completion, answer: 0.25, [0.25, 0.25]),
    ],
)
def test_functions_of_every_style_run_unchanged(function: Any, values: list[float]) -> None:
    assert values_of(function, "5", "67") == values


def test_a_misspelt_column_is_no_other_name_for_the_answer() -> None:
    def levels(completion: str, levle: int) -> float:
        return float(levle)

    reward = rewards_of(levels, "5")[0]
    assert reward.error == "crashed"
    assert "levle" in reward.detail


@pytest.mark.proves("F114")
def test_a_function_for_text_gets_text_even_beside_a_chat_prompt() -> None:
    chat = prompt_of(messages=({"role": "user", "content": "hi"},))
    reward = from_function(examples.trl_text)
    completions = [completion_of("<answer> 5 </answer>"), completion_of("5")]
    assert [result.value for result in reward([chat] * 2, completions)] == [0.5, -0.5]


def test_a_function_for_messages_gets_prompts_as_messages_too() -> None:
    chat = prompt_of(messages=({"role": "user", "content": "hi"},))
    assert from_function(examples.trl_chat_prompts)([chat], [completion_of("567")])[0].value == 3.0


@pytest.mark.proves("F114")
def test_the_form_of_completions_can_be_fixed() -> None:
    assert rewards_of(examples.trl_messages, "5", completions_as="text")[0].error == "crashed"
    assert values_of(examples.trl_without_kwargs, "567", completions_as="text") == [3.0]
    assert rewards_of(examples.trl_text, "5", completions_as="messages")[0].error == "crashed"


@pytest.mark.proves("D34")
def test_the_form_that_worked_once_stays() -> None:
    function = from_function(examples.trl_messages)
    prompt = prompt_of(row=ROW)
    assert function([prompt], [completion_of("5")])[0].value == 1.0
    assert function([prompt], [completion_of("")])[0].value == 0.0  # not misread as an empty text


def test_none_does_not_apply_and_nan_is_an_error_unless_it_means_none() -> None:
    rewards = rewards_of(examples.trl_none, "", "nan", "x")
    assert [reward.error for reward in rewards] == ["not_applicable", "nan", None]
    rewards = rewards_of(examples.trl_none, "", "nan", "x", nan_is_none=True)
    assert [reward.error for reward in rewards] == ["not_applicable", "not_applicable", None]


def test_a_dictionary_gives_a_value_and_named_parts() -> None:
    reward = rewards_of(examples.trl_dicts, "x")[0]
    assert reward.value == 1.0
    assert reward.parts == {"f": 1.0, "format": 1.0, "correct": 0.0, "words": 3.0}


def test_one_bad_sample_of_a_plain_function_is_an_error_by_itself() -> None:
    rewards = rewards_of(examples.sample_divides, "1", "0", "x", "2")
    assert [reward.value for reward in rewards] == [1.0, None, None, 0.5]
    assert "ZeroDivisionError" in rewards[1].detail
    assert "ValueError" in rewards[2].detail


def test_async_samples_run_together_and_the_late_and_the_bad_are_errors() -> None:
    started = time.monotonic()
    rewards = rewards_of(examples.sample_async, *["x"] * 20, "slow", "bad", timeout_seconds=0.5)
    assert time.monotonic() - started < 5.0
    assert [reward.error for reward in rewards] == [None] * 20 + ["timeout", "crashed"]


@pytest.mark.parametrize(
    ("function", "detail"),
    [
        (examples.trl_bug, "KeyError"),
        (examples.trl_wrong_length, "returned 1 reward for 2 completions"),
        (examples.trl_one_number, "not one value per completion"),
        (lambda completion, answer: "good", "the function returned 'good'; a reward is a number"),
        (lambda completion, answer: (1.0, 0.5), "the function returned (1.0, 0.5); a reward is a number"),
        (lambda completion, answer: float("inf"), "finite"),
        (lambda completion, answer: -1e303, "the function returned -1e+303; a reward is finite, within"),
        (
            lambda completion, answer: [0.5],
            "[0.5]; a reward is a number, None, or {'reward': number}. A function of lists has",
        ),
        (lambda completions: {len(text) for text in completions}, "returned set, not one value per completion"),
        (examples.stops_by_itself, "Odd: enough"),
        (lambda completion, answer: {"points": 1.0}, "without a 'reward'"),
        (lambda completion, answer: {3: 1.0, "points": 1.0}, "a dictionary of '3', 'points', without a 'reward'"),
        (
            lambda completion, answer: {"reward": 1.0, "words": float("nan")},
            "'words' as NaN; a part is a finite number",
        ),
        (lambda completion, answer: {"reward": 1.0, "words": float("inf")}, "finite"),
    ],
)
def test_a_mistake_in_the_function_is_an_error_that_says_what(function: Any, detail: str) -> None:
    rewards = rewards_of(function, "b", "c")
    assert [reward.error for reward in rewards] == ["crashed", "crashed"]
    assert detail in rewards[0].detail


def test_numbers_of_other_libraries_are_accepted() -> None:
    numpy = pytest.importorskip("numpy")
    for number in (numpy.float32(0.5), numpy.array(0.5), numpy.array([0.5])[0]):
        assert to_reward(number).value == 0.5
    assert to_reward(True).value == 1.0
    assert values_of(lambda completions: numpy.array([0.5] * len(completions)), "a", "b") == [0.5, 0.5]
    values = {
        "reward": numpy.float32(0.5),
        "correct": numpy.bool_(True),
        "words": Fraction(3),
        7: 2,
        "why": "x",
        "no": None,
    }
    assert to_reward(values).parts == {"correct": 1.0, "words": 3.0, "7": 2.0}


@pytest.mark.parametrize("correct", ["yes", 2, -1.0, float("inf"), [1.0]])
def test_a_part_correct_is_a_number_from_0_to_1(correct: object) -> None:
    with pytest.raises(ValueError, match=r"returned 'correct' as .*; it says from 0 to 1 how right the answer is"):
        to_reward({"reward": 0.5, "correct": correct})
    assert to_reward({"reward": 0.5, "correct": None}).parts == {}


def test_names_come_from_the_function_the_class_or_the_caller() -> None:
    assert from_function(examples.sample).name == "sample"
    assert from_function(examples.Callable()).name == "Callable"
    assert from_function(examples.sample, name="mine").name == "mine"
    assert isinstance(from_function(examples.sample), RewardFunction)


def test_a_missing_column_is_an_error_of_the_sample() -> None:
    function = from_function(examples.sample_columns)
    reward = grade(function, [prompt_of(row={"answer": "5"})], [completion_of("5")])[0]
    assert reward.error == "crashed"
    assert "level" in reward.detail


@pytest.mark.proves("F110")
def test_a_function_is_loaded_from_a_module_and_from_a_file(tmp_path: Path) -> None:
    assert load_function("custom_examples:sample") is examples.sample
    path = tmp_path / "mine.py"
    path.write_text("def pays(completion, answer):\n    return 0.5\n")
    assert values_of(load_function(f"{path}:pays"), "x") == [0.5]
    assert values_of(load_function("custom_examples:Callable"), "x") == [1.0]
    assert load_function("custom_examples:Native").name == "native"
    assert load_function(f"{path}:pays") is load_function(f"{path}:pays")  # what a file holds is there once
    path.write_text(path.read_text() + "\n")
    assert load_function(f"{path}:pays") is load_function(f"{path}:pays")


def test_a_file_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pays_in_cwd.py").write_text("def pays(completion, answer):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert values_of(load_function("pays_in_cwd:pays"), "x") == [0.5]
    assert values_of(load_function("pays_in_cwd.py:pays"), "x") == [0.5]


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("sample", "module:name or path/to/file.py:name"),
        (":sample", "module:name or path/to/file.py:name"),
        ("custom_examples:", "module:name or path/to/file.py:name"),
        ("custom_examples:no_such", "has no 'no_such'. It has: .*sample"),
        ("no_such_module:f", "module 'no_such_module' cannot be imported: ModuleNotFoundError"),
        ("no/such/file.py:f", "there is no file"),
        ("custom_examples:NOT_CALLABLE", "is of type int, which cannot be called"),
        ("custom_examples:NeedsArguments", "cannot be made without arguments.*threshold"),
    ],
)
def test_what_cannot_be_loaded_is_said(location: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_function(location)


def test_a_file_with_a_mistake_is_said(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("from .helpers import f\n")
    with pytest.raises(ConfigError, match=r"relative import .*A file beside it is imported by its name, without a dot"):
        load_function(f"{path}:f")
    path.write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"broken\.py cannot be imported: SyntaxError"):
        load_function(f"{path}:f")


@pytest.mark.parametrize("answer", [["25", "25 shells"], {"value": 25}, False, True])
def test_answers_that_are_no_text_reach_a_function_as_they_are(answer: Any) -> None:
    [row] = adapt_python_rows([{"question": "2+3?", "answer": answer}])
    seen: list[Any] = []

    def single(completion: str, answer: Any) -> float:
        seen.append(answer)
        return 1.0

    def batched(completions: list[str], answer: list[Any], **columns: Any) -> list[float]:
        seen.append(answer[0])
        assert "answer_as_given" not in columns or columns["answer_as_given"][0] == answer[0]
        return [1.0]

    for function in (single, batched):
        assert from_function(function)([prompt_of(row=row)], [completion_of("x")])[0].value == 1.0
    assert seen == [answer, answer]


def test_a_reward_file_imports_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "words_beside_rewards.py").write_text("WORD = 'yes'\n")
    (tmp_path / "mine.py").write_text(
        "from words_beside_rewards import WORD\n\ndef says(*, completion):\n    return float(WORD in completion)\n"
    )
    function = from_function(load_function(f"{tmp_path / 'mine.py'}:says"))
    assert function([prompt_of(row=ROW)], [completion_of("yes")])[0].value == 1.0


def reward_file(folder: Path, name: str, word: str) -> Path:
    """A file of a reward in a new folder, and beside it the module of the name that it imports."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(f"WORD = {word!r}\n")
    path = folder / "own_reward.py"
    path.write_text(f"def says(*, completion):\n    from {name} import WORD\n\n    return float(WORD in completion)\n")
    return path


def test_a_file_beside_a_reward_is_not_taken_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = reward_file(tmp_path / "a", "words_of_two_folders", "yes")
    function = from_function(load_function(f"{path}:says"))
    assert function([prompt_of(row=ROW)], [completion_of("yes")])[0].value == 1.0
    other = reward_file(tmp_path / "b", "words_of_two_folders", "no")
    place = re.escape(str(tmp_path / "a" / "words_of_two_folders.py"))
    with pytest.raises(ConfigError, match=f"imports 'words_of_two_folders', of which {place} has been imported"):
        load_function(f"{other}:says")
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(ConfigError, match=f"names 'words_of_two_folders', of which {place} has been imported"):
        load_function("words_of_two_folders:WORD")
    hidden = reward_file(tmp_path / "c", "colorsys", "yes")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(ConfigError, match=r"imports 'colorsys', of which .*colorsys\.py is found first, not "):
        load_function(f"{hidden}:says")


def of_one(completion: str, step: int, trainer_state: Any, log_metric: Any, log_extra: Any) -> float:
    log_metric("letters", len(completion))
    log_extra("read as", completion.upper())
    log_extra("words", completion.split())
    assert trainer_state.epoch == 0.75
    return step + trainer_state.max_steps / 100


def of_lists(completions: list[str], trainer_state: Any, log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    log_metric("letters", sum(map(len, completions)))
    log_metric("letters", 0)
    log_extra("read as", [text.upper() for text in completions])
    return [trainer_state.global_step + trainer_state.max_steps / 100 for _ in completions]


async def later(completion: str, step: int, log_extra: Any) -> float:
    log_extra("read as", completion.upper())
    return step + 0.5


def test_functions_know_the_step_and_what_they_log_is_kept() -> None:
    prompts = [prompt_of(row={"answer": "5"})] * 2
    texts = [replace(completion_of(text), policy_version=3) for text in ("ab", "cde")]
    by_sample = from_function(of_one, length=RunLength(50, 4.0))(prompts, texts)
    many = from_function(of_lists, length=RunLength(50, 4.0))(prompts, texts)
    awaited = from_function(later, length=RunLength(50, 4.0))(prompts, texts)
    assert [reward.value for reward in (*by_sample, *many, *awaited)] == [3.5] * 6
    assert [reward.detail for reward in by_sample] == ["read as: AB; words: ['ab']", "read as: CDE; words: ['cde']"]
    for rewards in (many, awaited):
        assert [reward.detail for reward in rewards] == ["read as: AB", "read as: CDE"]
    assert [dict(reward.parts) for reward in by_sample] == [{"letters": 2.0}, {"letters": 3.0}]
    assert [dict(reward.parts) for reward in many] == [{"letters": 2.5}, {}]
    check_parameters(of_one, ["answer"], location="mine.py:of_one")
    assert not reads_answer(of_one)
    assert not reads_answer(lambda completion, question: 0.0), "a column that every row has"
    assert reads_answer(lambda completion, expected: 0.0)


def test_a_column_goes_before_a_name_of_ours() -> None:
    prompts = [prompt_of(row={"answer": "5", "step": 7})]
    assert from_function(lambda completion, step: step)(prompts, [completion_of("a")])[0].value == 7.0
    assert from_function(lambda completions, step: step)(prompts, [completion_of("a")])[0].value == 7.0


@pytest.mark.parametrize(
    ("function", "message"),
    [(lambda completions, log_metric: [log_metric("correct", 1.0) or 0.0], "'correct' has a fixed meaning"),
     (lambda completions, log_extra: [log_extra("x", [1, 2]) or 0.0], "got 2 values for 1 completions")],
)  # fmt: skip
def test_what_cannot_be_logged_is_an_error_that_says_so(function: Any, message: str) -> None:
    [reward] = grade(from_function(function), [prompt_of(row=ROW)], [completion_of("a")])
    assert reward.error is not None
    assert message in reward.detail
