"""Do TRL's examples with tools and environments run with the import changed, and are their tokens masked?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from oncurve.core.errors import ConfigError, DataError
from oncurve.trl import GRPOConfig, GRPOTrainer

HERMES = """{% if tools %}<system>{% for t in tools %}{{ t.function.name }} {% endfor %}
{% endif %}{% for m in messages %}\
{% if m.role == 'tool' %}<user><tool_response>
{{ m.content }}
</tool_response>{{ end }}
{% elif m.role == 'assistant' %}<assistant>{{ m.content }}{% for c in m.tool_calls or [] %}\
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ end }}
{% else %}<{{ m.role }}>{{ m.content }}{{ end }}
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>\
{% if thinks is defined and not thinks %}<think></think>{% endif %}{% endif %}"""
SHORT: dict[str, Any] = {
    "output_dir": "out", "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "use_cpu": True,
    "max_completion_length": 12, "bf16": False, "learning_rate": 1e-4, "logging_steps": 1,
}  # fmt: skip
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _written_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of these tests are written and not drawn: the model finds them unlikely, which ends a real run."""
    for limit in ("MISMATCH_LIMIT", "SAMPLED_LIMIT"):
        monkeypatch.setattr(f"oncurve.run.guards.{limit}", float("inf"))


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    return a + b


def untyped(a) -> None:  # type: ignore[no-untyped-def]
    """Says nothing of its argument."""


class IncrementEnv:
    """TRL's example: a counter that the model raises to a number."""

    def reset(self, **kwargs: Any) -> str | None:
        """Begin with nothing."""
        self.counter, self.asked = 0, kwargs
        return " Now."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class Scored(IncrementEnv):
    """One that owns its reward."""

    def get_reward(self) -> float:
        """One for a counter that was raised."""
        return float(self.counter > 0)


class ScoredTwice(Scored):
    """Another that owns its reward."""

    def get_reward(self) -> float:
        """Two for such a counter."""
        return 2 * super().get_reward()


@pytest.fixture
def talking() -> Any:
    """The embedded model's tokenizer with a chat template that knows tools."""
    from transformers import AutoTokenizer

    from oncurve.observe.run_model import EMBEDDED

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.chat_template = HERMES.replace("{{ end }}", str(tokenizer.eos_token))
    return tokenizer


@pytest.fixture
def talks() -> Rows:
    return [
        {"prompt": [{"role": "user", "content": f"How much is {number} * 2?"}], "answer": 2 * number}
        for number in range(24)
    ]


def forced(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, answer: Callable[[str], str]) -> None:
    """Let a script decide what the policy writes."""
    from oncurve.sample.engine import InProcessEngine

    end = str(tokenizer.eos_token)

    class Forced:
        def __init__(self) -> None:
            self.waiting: list[Any] = []

        def ask(self, request: Any) -> None:
            self.waiting.append(request)

        def advance(self) -> bool:
            if not self.waiting:
                return False
            request = self.waiting.pop(0)
            ids = tokenizer.encode(answer(tokenizer.decode(list(request.token_ids))) + end, add_special_tokens=False)
            for index in range(len(request.keys)):
                request.deliver(index, (list(ids), [-0.5] * len(ids), "stop"))
            return True

        def close(self) -> None:
            self.waiting = []

    monkeypatch.setattr(InProcessEngine, "turns", lambda self, params, **_: Forced())


CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


def test_tools_are_told_called_and_answered_and_only_the_policy_s_tokens_are_trained_on(
    talks: Rows, talking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def answer_to(text: str) -> str:
        read.append(text)
        if "tool_response" not in text:
            return CALL % ("multiply", '{"a": 3, "b": 4}')
        return CALL % ("async_add", '{"a": 5, "b": 1}') if text.count("tool_response") < 4 else "It is 12."

    seen: list[Any] = []

    def reward(completions: list[Any], answer: list[int], **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [float(index % 2) for index in range(len(completions))]

    forced(monkeypatch, talking, answer_to)
    args = GRPOConfig(**{**SHORT, "max_completion_length": 400}, chat_template_kwargs={"thinks": False})
    trainer = GRPOTrainer("embedded", reward, args, talks, processing_class=talking, tools=[multiply, async_add])
    masks: list[Any] = []
    for step in trainer._watched(trainer.oncurve.steps()):
        for group in step.groups:
            masks += [(completion.segments, completion.token_ids) for completion in group.completions]
        assert step.metrics["episode/calls"] == 2
        assert step.metrics["episode/turns"] == 3
    assert read[0].startswith("<system>multiply async_add"), "the template tells of the tools"
    assert read[0].endswith("<assistant><think></think>"), "and gets the script's own arguments"
    roles = [message["role"] for message in seen[0]]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["content"] for message in seen[0] if message["role"] == "tool"] == ["12", "6"]
    for segments, ids in masks:
        answers = [talking.decode(ids[part.start : part.end]) for part in segments if not part.is_policy]
        assert ["12" in answers[0], "6" in answers[1]] == [True, True]
        assert sum(part.end - part.start for part in segments) == len(ids)


def test_the_number_of_turns_with_calls_is_limited_as_in_trl(
    talks: Rows, talking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    forced(monkeypatch, talking, lambda text: CALL % ("multiply", '{"a": 3, "b": 4}'))
    args = GRPOConfig(**{**SHORT, "max_completion_length": 400, "max_steps": 1}, max_tool_calling_iterations=2)
    trainer = GRPOTrainer("embedded", reward, args, talks, processing_class=talking, tools=[multiply])
    trainer.train()
    [row] = [row for row in trainer.state.log_history if "reward" in row]
    assert row["episode/turns"] == 3, "two with calls that are answered, and one more"
    assert row["rewards/reward/mean"] == 5
    assert (row["tools/call_frequency"], row["tools/failure_frequency"]) == (2, 0)


@pytest.mark.parametrize("several", [False, True])
def test_an_environment_is_reset_with_the_row_used_and_handed_to_rewards(
    several: bool, talks: Rows, talking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def answer(text: str) -> str:
        read.append(text)
        return "Done." if "tool_response" in text else CALL % ("increment", '{"step": 5}')

    counters: list[int] = []

    def reward(environments: list[Any], prompts: list[Any], **kwargs: Any) -> list[float]:
        assert all(prompt[-1]["content"].endswith("Now.") for prompt in prompts)
        counters.extend(environment.counter for environment in environments)
        assert all(environment.asked["answer"] in range(48) for environment in environments)
        return [float(index % 2) for index in range(len(environments))]

    forced(monkeypatch, talking, answer)
    factory: Any = {"one": IncrementEnv, "two": Scored, "three": ScoredTwice} if several else IncrementEnv
    rows = [{**row, **({"environment": list(factory)[index % 3]} if several else {})} for index, row in
            enumerate(talks)]  # fmt: skip
    args = GRPOConfig(**{**SHORT, "max_completion_length": 400})
    trainer = GRPOTrainer("embedded", reward, args, rows, processing_class=talking, environment_factory=factory)
    if several:
        trainer.reward_weights = [1.0, 1.0, 10.0]
    trainer.train()
    assert set(counters) == {5}
    assert "? Now." in read[0]
    logged = [row for row in trainer.state.log_history if "reward" in row]
    assert trainer.reward_func_names == (["reward", "Scored", "ScoredTwice"] if several else ["reward"])
    for name, value in (("Scored", 1.0), ("ScoredTwice", 2.0)):
        assert {row.get(f"rewards/{name}/mean") for row in logged} <= {value if several else None, None}
        assert not several or any(f"rewards/{name}/mean" in row for row in logged)
    assert not several or max(row["reward"] for row in logged) > 5, "with the weight that the script set"


def test_an_environment_that_owns_the_data_and_the_reward_needs_neither(
    talking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced(monkeypatch, talking, lambda text: "Done." if "</tool" in text else CALL % ("increment", '{"step": 5}'))
    args = GRPOConfig(**{**SHORT, "max_completion_length": 400})
    trainer = GRPOTrainer("embedded", args=args, processing_class=talking, environment_factory=Scored)
    trainer.train()
    assert {row["reward"] for row in trainer.state.log_history if "reward" in row} == {1.0}
    assert {row["rewards/Scored/mean"] for row in trainer.state.log_history if "reward" in row} == {1.0}
    with pytest.raises(ConfigError, match="Set max_steps"):
        GRPOTrainer(
            "embedded", args=GRPOConfig("out", use_cpu=True), processing_class=talking, environment_factory=Scored
        )
    with pytest.raises(ConfigError, match="reward_funcs: there is none"):
        GRPOTrainer("embedded", args=args, processing_class=talking, environment_factory=IncrementEnv)
    with pytest.raises(ConfigError, match="whose column environment names one of"):
        GRPOTrainer("embedded", args=args, processing_class=talking, environment_factory={"one": Scored})


def test_rows_that_cannot_be_episodes_are_said(talks: Rows, talking: Any) -> None:
    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    args = GRPOConfig(**SHORT)
    with pytest.raises(DataError, match=r"row 0: its prompt is text, and the chat template"):
        GRPOTrainer("embedded", reward, args, [{"prompt": "Hi"}], processing_class=talking, tools=[multiply])
    with pytest.raises(DataError, match=r"row 0: its column environment is None; environment_factory has 'one'"):
        GRPOTrainer(
            "embedded", reward, args, talks, processing_class=talking, environment_factory={"one": IncrementEnv}
        )
    trainer = GRPOTrainer("embedded", reward, args, talks, processing_class=talking, tools=[untyped])
    with pytest.raises(ConfigError, match=r"tool untyped: no type is given for"):
        trainer.train()


SCRIPT = '''
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from oncurve.observe.run_model import EMBEDDED

def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b

class Counter:
    def reset(self, **kwargs):
        self.counter = 0

    def increment(self, step: int) -> int:
        """
        Raises the counter.

        Args:
            step: By how much.
        """
        self.counter += step
        return self.counter

def reward(completions, environments=None, **kwargs):
    return [float(len(c[-1]["content"])) for c in completions]

if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.chat_template = TEMPLATE.replace("{{ end }}", tokenizer.eos_token)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i} * 2?"}]} for i in range(24)])
    args = GRPOConfig(output_dir="out", max_steps=2, num_generations=4, per_device_train_batch_size=8, bf16=False,
                      max_completion_length=8, use_cpu=True, chat_template_kwargs={"thinks": False})
    GRPOTrainer("embedded", reward, args, rows, processing_class=tokenizer, EPISODES).train()
'''


@pytest.mark.parametrize("episodes", ["tools=[multiply]", "environment_factory=Counter"])
def test_the_command_runs_and_converts_a_script_with_them(episodes: str, trl: Callable[..., Result]) -> None:
    text = SCRIPT.replace("EPISODES", episodes).replace("TEMPLATE", repr(HERMES), 1)
    ran = trl(text, head="")
    assert ran.exit_code == 0, ran.output
    assert next(Path("out").glob("*/metrics.jsonl")).read_text().count("episode/turns") == 2
    made = trl(text, head="", before=("--recipe", "recipe.yaml"))
    assert "tools" in made.output
    import yaml

    [path] = Path().glob("*.yaml")
    recipe = yaml.safe_load(path.read_text())
    assert recipe["data"]["chat"] == {"thinks": False}
    if "tools" in episodes:
        assert recipe["rollouts"]["tools"] == ["train.py:multiply"]
    else:
        assert recipe["rollouts"]["environments"] == {"default": "train.py:Counter"}
