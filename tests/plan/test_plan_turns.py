"""Does ``oncurve plan`` count what turns with tools cost?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from oncurve.cli.plan import plan_recipe
from oncurve.core.errors import ConfigError
from oncurve.recipe.files import find_recipe


def planned(recipe: str, overrides: list[str], **wishes: Any) -> str:
    return plan_recipe(find_recipe(recipe), overrides, **wishes)


def test_turns_cost_context_reading_and_waiting() -> None:
    """The context grows by answers, rows that come back are read again, and the longest one is waited for."""
    plain = json.loads(planned("gsm8k", [], gpu="H100", as_json=True))
    tools = ["rollouts.tools=[python]", "rollouts.episodes.max_turns=4", "rollouts.episodes.max_answer_tokens=100"]
    said = {"mean_turns": 3, "answer_tokens": 50, "tool_seconds": 2}
    data = json.loads(planned("gsm8k", tools, gpu="H100", as_json=True, **said))
    completions = data["work"]["prompts"] * data["work"]["group_size"]
    prompt, mean = data["work"]["prompt_tokens"], data["work"]["mean_completion_tokens"]
    # two answers: the prompt twice, one turn with its answer, then two turns with theirs
    by_hand = 2 * prompt + 3 * (mean / 3 + 50)
    assert data["seconds"]["read_again_tokens"] == pytest.approx(completions * by_hand)
    rows = min(completions, data["work"]["max_rows"])
    assert data["seconds"]["wait"] == pytest.approx(max(-(-completions // rows) * 3 * 2, completions * 2 * 2 / 64))
    many = json.loads(planned("gsm8k", [*tools, "rollouts.episodes.threads=512"], gpu="H100", as_json=True, **said))
    assert many["seconds"]["wait"] == pytest.approx(-(-completions // rows) * 3 * 2), (
        "of the longest one, if all may wait"
    )
    assert data["seconds"]["sample"] > plain["seconds"]["sample"] + data["seconds"]["wait"]
    assert data["seconds"]["train"] > plain["seconds"]["train"]
    assert plain["seconds"]["wait"] == plain["seconds"]["read_again_tokens"] == 0
    kept = [need["phases"]["sample"]["KV cache"] for need in (*plain["memory"], *data["memory"])]
    assert kept[1] > 1.5 * kept[0]


def test_servers_keep_what_a_completion_has_read() -> None:
    tools = ["rollouts.tools=[python]", "rollouts.type=servers", "rollouts.vllm_servers=1"]
    wishes = {"gpu": "H100", "placement": "split", "mean_turns": 3, "answer_tokens": 50}
    data = json.loads(planned("gsm8k", tools, as_json=True, **wishes))
    assert data["seconds"]["read_again_tokens"] == 32 * 8 * 2 * 50
    assert "what came before is kept" in planned("gsm8k", tools, **wishes)


def test_a_cpu_keeps_what_a_completion_has_read() -> None:
    data = json.loads(
        planned("word_problems", ["rollouts.tools=[python]"], mean_turns=2, answer_tokens=5, as_json=True)
    )
    completions = data["work"]["prompts"] * data["work"]["group_size"]
    assert data["seconds"]["read_again_tokens"] == completions * 5


def test_the_assumptions_about_turns_are_printed() -> None:
    text = planned("gsm8k", ["rollouts.tools=[python]"], gpu="H100")
    assert "3 on average and 8 at most; answers of 64 tokens on average and 256 at most, after 0.1 s" in text
    assert "--mean-turns, --answer-tokens, --tool-seconds" in text
    assert "read again after answers" in text
    assert "memory is for 2304 tokens" in text
    assert "in turns" not in planned("gsm8k", [], gpu="H100")


@pytest.mark.parametrize(
    ("overrides", "wishes", "says"),
    [
        ([], {"mean_turns": 2}, "--mean-turns is for completions with tools"),
        (["rollouts.tools=[python]"], {"mean_turns": 9}, "--mean-turns 9 is more than rollouts.episodes.max_turns, 8"),
        (["rollouts.tools=[python]"], {"answer_tokens": 300}, "more than rollouts.episodes.max_answer_tokens, 256"),
    ],
)
def test_turns_that_cannot_be_are_refused(overrides: list[str], wishes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        planned("gsm8k", overrides, gpu="H100", **wishes)
