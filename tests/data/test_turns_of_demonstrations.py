"""Are turns of a demonstration tokens as the policy would have written them, end tokens included?"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from transformers import AutoTokenizer

import oncurve
from oncurve.core.errors import ConfigError, DataError
from oncurve.data.demonstrations import demonstrated_row, render_demonstrations
from oncurve.data.python_objects import data_section, reward_section
from oncurve.observe.run_model import EMBEDDED


def test_every_turn_of_the_policy_ends_and_only_those_are_learned() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED)
    row = demonstrated_row("row 0", {"prompt": "Guess.", "turns": ["ab", " no", "ba", " yes"]})
    assert row is not None
    [[made], _] = render_demonstrations([row], tokenizer)
    end = tokenizer.eos_token_id
    learned = [made.token_ids[part.start : part.end] for part in made.segments if part.is_policy]
    assert [ids[-1] for ids in learned] == [end, end]
    assert [tokenizer.decode(ids[:-1]) for ids in learned] == ["ab", "ba"]
    answers = [made.token_ids[part.start : part.end] for part in made.segments if not part.is_policy]
    assert end not in answers[0]


def test_turns_must_be_texts() -> None:
    with pytest.raises(DataError, match="turns must be texts"):
        demonstrated_row("row 0", {"prompt": "Guess.", "turns": ["ab", 3]})


def test_an_endless_stream_is_read_as_far_as_the_steps_need(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = ({"question": f"{n}?", "answer": str(n)} for n in itertools.count())
    trainer = oncurve.Trainer(
        "embedded", endless, lambda completion, answer: 1.0, run={"steps": 2, "prompts_per_step": 4}
    )
    assert trainer.config.run.steps == 2
    monkeypatch.setattr("oncurve.data.python_objects.MOST_ROWS", 50)
    with pytest.raises(ConfigError, match="goes on"):
        data_section(({"question": f"{n}?"} for n in itertools.count()), {})


def test_a_pair_of_a_reward_and_a_number_is_a_weight() -> None:
    assert reward_section(("format", 0.5), {}) == {"type": "format", "weight": 0.5}
    assert reward_section(("format", 2), {})["weight"] == 2.0
    assert "weight" not in reward_section("format", {})
