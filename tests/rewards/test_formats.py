"""Forms: order, uniqueness and nesting count, and repetition pays nothing."""

from __future__ import annotations

import pytest
from reward_records import completion_of, prompt_of

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction
from oncurve.recipe.load import parse_config
from oncurve.rewards.formats import BoxedFormat, HashFormat, StepFormat, TagFormat, is_tagged, paid_tags
from oncurve.rewards.terms import make_reward_function

GOOD = "<think> a </think> <answer> b </answer>"


def value_of(function: RewardFunction, text: str, prompt: str = "Q:") -> float | None:
    return function([prompt_of(text=prompt)], [completion_of(text)])[0].value


@pytest.mark.proves("D33")
@pytest.mark.parametrize(
    ("text", "has_form"),
    [
        (GOOD, True),
        ("\n" + GOOD + "\n", True),
        ("<think></think><answer>b</answer>", True),
        (GOOD + " and more words", True),
        ("<think> a </think>\n\n<answer>\nb\n</answer>", True),
        ("<think> a </think> <answer> </answer>", False),
        ("<answer> b </answer> <think> a </think>", False),
        ("<think> a <answer> b </answer> </think>", False),
        ("<think> a </think> so <answer> b </answer>", False),
        ("so <think> a </think> <answer> b </answer>", False),
        (GOOD + GOOD, False),
        ("<think> a <think> a </think> <answer> b </answer>", False),
        ("<think> a </think> <answer> b", False),
        ("a </think> <answer> b </answer>", False),
        ("<THINK> a </THINK> <answer> b </answer>", False),
        ("", False),
    ],
)
def test_blocks_stand_once_each_in_order(text: str, has_form: bool) -> None:
    assert is_tagged(text, ("think", "answer")) == has_form
    assert value_of(TagFormat(), text) == float(has_form)


def test_the_first_tag_may_stand_in_the_prompt() -> None:
    assert value_of(TagFormat(), "a </think> <answer> b </answer>", prompt="Q: <think>\n") == 1.0
    assert value_of(TagFormat(), GOOD, prompt="Q: <think>") == 1.0
    assert value_of(TagFormat(), "a </think> <answer> b </answer>", prompt="Q: <think> x") == 0.0


@pytest.mark.proves("F89")
def test_other_tags_can_be_asked_for() -> None:
    text = "<reasoning> a </reasoning> <answer> b </answer>"
    assert value_of(TagFormat(("reasoning", "answer")), text) == 1.0
    assert value_of(TagFormat(("reasoning", "answer")), GOOD) == 0.0
    assert value_of(TagFormat(("answer",)), "<answer> b </answer>") == 1.0


@pytest.mark.proves("F100", "D33")
@pytest.mark.parametrize(
    ("text", "num_paid"),
    [
        (GOOD, 4),
        ("<think> a </think> b", 2),
        ("<think> a <answer> b", 2),
        ("<think> <think> a </think> <answer> b </answer>", 3),
        ("<answer> b </answer> <think> a </think>", 2),
        ("<think></think>" * 50, 0),
        ("</answer> <answer> </think> <think>", 1),
        ("nothing", 0),
    ],
)
def test_each_tag_pays_once_and_only_at_its_place(text: str, num_paid: int) -> None:
    assert paid_tags(text, ("think", "answer")) == num_paid
    assert value_of(TagFormat(per_tag=True), text) == num_paid / 4


def test_credit_per_tag_leaves_out_the_tag_of_the_prompt() -> None:
    function = TagFormat(per_tag=True)
    prompt = prompt_of(text="Q: <think>")
    for text, share in [("a </think> <answer> b </answer>", 1.0), ("a </think> b", 1 / 3), (GOOD, 1.0), ("a", 0.0)]:
        reward = function([prompt], [completion_of(text)])[0]
        assert reward.value == pytest.approx(share)
        assert reward.parts["format"] == float(share == 1.0)


@pytest.mark.proves("F88")
@pytest.mark.parametrize(
    ("text", "has_form"),
    [
        (r"so \boxed{5}", True),
        (r"<think> \boxed{4} </think> \boxed{5}", True),
        (r"\boxed{4} \boxed{5}", False),
        (r"\boxed{}", False),
        (r"\boxed{5", False),
        ("5", False),
    ],
)
def test_one_box_after_the_thinking(text: str, has_form: bool) -> None:
    assert value_of(BoxedFormat(), text) == float(has_form)


@pytest.mark.proves("F90")
@pytest.mark.parametrize(
    ("text", "has_form"),
    [
        ("a\n#### 5", True),
        ("#### 5\n", True),
        ("#### 5\nbye", False),
        ("#### 4\n#### 5", False),
        ("a #### 5", False),
        ("####", False),
        ("", False),
    ],
)
def test_the_marked_answer_is_the_last_line(text: str, has_form: bool) -> None:
    assert value_of(HashFormat(), text) == float(has_form)


@pytest.mark.proves("F103")
@pytest.mark.parametrize(
    ("text", "has_form"),
    [
        ("Step 1: a\nStep 2: b", True),
        ("1. a\n2. b\n3) c", True),
        ("**Step 1:** a\n**Step 2:** b", True),
        ("Step 1: a\nStep 3: b", False),
        ("Step 1: a\nStep 1: b", False),
        ("Step 1: a\nStep 2: a", False),
        ("Step 1: a", False),
        ("Step 1:\nStep 2:", False),
        ("no steps", False),
    ],
)
def test_steps_are_counted_from_one_and_differ(text: str, has_form: bool) -> None:
    assert value_of(StepFormat(), text) == float(has_form)


def test_tags_must_be_named_once() -> None:
    for tags in ((), ("a", "a")):
        with pytest.raises(ConfigError, match="each once"):
            TagFormat(tags)


@pytest.mark.proves("F99")
def test_a_signed_form_pays_one_half_and_takes_one_half_at_a_weight_of_one_half() -> None:
    config = parse_config(
        "{model: embedded, data: {type: word_problems}}",
        ["rewards=[{type: format, weight: 0.5, scale: signed}, {type: format, name: reasons, weight: 0.5, "
         "scale: signed, tags: [reasoning, answer]}]"],
    )  # fmt: skip
    function = make_reward_function(config.rewards)
    texts = ["<think>a</think><answer>5</answer>", "<reasoning>a</reasoning><answer>5</answer>", "5"]
    rewards = function([prompt_of("q")] * 3, [completion_of(text) for text in texts])
    assert [reward.value for reward in rewards] == [0.0, 0.0, -1.0]
    alone = TagFormat(is_signed=True)([prompt_of("q")] * 2, [completion_of(texts[0]), completion_of("5")])
    assert [0.5 * (reward.value or 0) for reward in alone] == [0.5, -0.5]
    assert [reward.parts["format"] for reward in alone] == [1.0, 0.0]
    function.close()


@pytest.mark.parametrize(
    ("text", "has_form"),
    [
        ("### Step 1: add\n### Step 2: halve", True),
        ("1. add\n2. halve", True),
        ("1.5 is a\n2.5 is b", False),
        ("Step 1: add\nStep 3: halve", False),
    ],
)
def test_a_decimal_is_no_step_and_a_heading_is_one(text: str, has_form: bool) -> None:
    assert StepFormat()([prompt_of()], [completion_of(text)])[0].value == float(has_form)


@pytest.mark.parametrize(
    ("text", "has_form"),
    [("#### 5", True), ("##### 5", False), ("<think>#### 5", False), ("<think>\n#### 4</think>\n#### 5", True)],
)
def test_the_mark_has_four_signs_and_stands_outside_of_the_thinking(text: str, has_form: bool) -> None:
    assert HashFormat()([prompt_of(text="2 + 3?")], [completion_of(text)])[0].value == float(has_form)


@pytest.mark.parametrize(
    ("text", "has_form"),
    [
        (r"<think>\boxed{5}", False),
        (r"<think>\boxed{5}</think> five", False),
        (r"<think>\boxed{4}</think>\boxed{5}", True),
    ],
)
def test_a_box_in_the_thinking_is_none(text: str, has_form: bool) -> None:
    assert BoxedFormat()([prompt_of(text="2 + 3?")], [completion_of(text)])[0].value == float(has_form)
