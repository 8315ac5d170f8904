"""Are the tokens of tools, environments and agents trained on as they were sampled, and no others?"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("episode_tokens")
    monkeypatch.setattr(module, "PROMPTS", 2)
    return module


def test_tokens_of_mixed_episodes_are_trained_on_as_they_were_sampled(script: ModuleType) -> None:
    found = script.measure(400)
    assert set(found["kinds"]) == {"tool", "methods", "steps_in_chat", "agents"}
    assert found["trained_tokens"] == found["trained_tokens_in_float64"] >= 400
    assert found["told_tokens"] == found["told_tokens_in_float64"] > 100
    assert found["turns"] > found["rows"] > found["episodes"], "there are turns, and there are forks"
    assert found["changed_by_tokenizing_again"] > 0, "going by text would have changed some"
    assert found["retokenized_tokens"] == 0
    assert found["largest_gradient_of_told_tokens"] == 0.0
    assert found["largest_packed_padded_difference"] <= 1e-10
    assert found["largest_logprob_difference"] <= 1e-5
    assert (found["episodes_alone"], found["episodes_alone_that_differ"]) == (4 * found["steps"], 0)
    assert found["failures"] == 0
