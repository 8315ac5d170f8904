"""Do runs with a chat template go from rows to a saved model, with tools, and on another day as well?"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import oncurve
from oncurve.cli.app import app
from oncurve.core.errors import ConfigError
from oncurve.data import chat_template
from oncurve.recipe.load import read_run_config
from oncurve.run.trainer import Trainer

MakeModel = Callable[..., PreTrainedModel]
ROWS = [{"question": f"How much is {a} + {b}?", "answer": a + b} for a in range(1, 7) for b in range(1, 6)]
SMALL: dict[str, Any] = {
    "evaluation": {"num_prompts": 2},
    "algorithm": {"group_size": 2},
    "rollouts": {"max_completion_tokens": 12},
}
DATED_HEAD = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "<|end|>system Today Date: {{ date_string }}<|end|>\n"
)
TURNS = (
    "{% for m in messages %}<|end|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|end|>assistant\n{% endif %}"
)
THINKING = """{% if tools %}<|end|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{% set last = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set last.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}user
<tool_response>
{{ m.content }}
</tool_response><|end|>
{% elif m.role == 'assistant' %}{% set words = m.content.split('</think>')[-1].lstrip('\\n') %}\
{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}\
assistant
{% if loop.index0 > last.asked and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ words }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% else %}{{ m.role }}
{{ m.content }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}assistant
{% endif %}"""


@pytest.fixture
def model(tmp_path: Path, tiny_model: MakeModel, tokenizer: PreTrainedTokenizerFast) -> Callable[[str], str]:
    """The folder of a tiny model with a chat template."""

    def make(template: str) -> str:
        folder = tmp_path / "model"
        tiny_model("qwen2", max_position_embeddings=2048).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        return str(folder)

    return make


def nothing(completion: str) -> float:
    return float(len(completion))


class Day(datetime):
    """A clock that a test sets."""

    today_is = datetime(2026, 11, 25, 23, 50)

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return cls.today_is


def test_a_run_whose_template_writes_the_date_is_resumed_on_another_day(
    model: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "datetime", Day)
    given: dict[str, Any] = {
        **SMALL,
        "run": {"steps": 3, "prompts_per_step": 2, "folder": str(tmp_path), "name": "run"},
    }
    given["run"]["save_every_steps"] = 1
    folder = model(DATED_HEAD + TURNS)
    trainer = Trainer(folder, ROWS, nothing, **given)
    for step in trainer.steps():
        assert "25 Nov 2026" in step.groups[0].prompt.text
        break
    monkeypatch.setattr(Day, "today_is", datetime(2026, 11, 26, 0, 10))
    again = Trainer(folder, ROWS, nothing, **given)
    for step in again.resume_steps():
        assert "25 Nov 2026" in step.groups[0].prompt.text
    config = read_run_config((tmp_path / "run" / "config.yaml").read_text(), source="run")
    assert config.data.now == datetime(2026, 11, 25, 23, 50)
    another = Trainer(folder, ROWS, nothing, **{**given, "run": {**given["run"], "name": "other"}})
    assert "26 Nov 2026" in next(iter(another.steps())).groups[0].prompt.text


def test_a_policy_with_a_tool_and_a_thinking_template_is_trained_and_saved(
    model: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    folder = model(THINKING)
    trainer = Trainer(
        folder,
        ROWS,
        nothing,
        tools=[add],
        evaluation={"num_prompts": 2},
        algorithm={"group_size": 2},
        rollouts={"max_completion_tokens": 24},
        run={"steps": 2, "prompts_per_step": 2, "folder": str(tmp_path), "name": "run"},
    )
    result = trainer.train()
    assert "prompts: in the chat template of" in capsys.readouterr().out
    assert "Add two numbers" in trainer.sample("2 + 3?")[0].prompt.text
    saved = AutoTokenizer.from_pretrained(result.folder / "model")
    talk: list[dict[str, Any]] = [{"role": "user", "content": "2 + 3?"}]
    texts = [saved.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)]
    for thought in ("<think>\nhm\n</think>\n\nFirst.", "Second."):
        talk.append({"role": "assistant", "content": thought})
        texts.append(saved.apply_chat_template(talk, tokenize=False))
        talk.append({"role": "user", "content": "And?"})
        texts.append(saved.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))
    assert "<think>\nhm\n</think>\n\nFirst." in texts[-1]


def test_rows_and_chat_are_passed_together(model: Callable[[str], str], tmp_path: Path) -> None:
    folder, run = model(TURNS), {"steps": 1, "prompts_per_step": 2, "folder": str(tmp_path)}
    asked = [{"question": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["question"]}]}
             for row in ROWS]  # fmt: skip
    for data, text in (
        (ROWS, "assistant\n"),
        ({"rows": ROWS, "chat": False}, "Assistant: <think>"),
        ({"rows": ROWS, "chat": True, "template": "boxed"}, "inside \\boxed{}.<|end|>assistant\n"),
        (asked, "<|end|>system\nBe brief.<|end|>user\n"),
    ):
        trainer = Trainer(folder, data, nothing, **SMALL, run={**run, "name": f"run{len(text)}"})
        assert text in next(iter(trainer.steps())).groups[0].prompt.text
    with pytest.raises(ConfigError, match="list of messages, and prompts are written as plain text"):
        Trainer(folder, {"rows": asked, "chat": False}, nothing, **SMALL, run=run).train()
    with pytest.raises(ConfigError, match="list of messages, and prompts are written as plain text"):
        Trainer("embedded", asked, nothing, **SMALL, run=run).train()
    seen = [{"question": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}] * 9
    with pytest.raises(oncurve.core.errors.DataError, match="a part of type 'image'"):
        Trainer(folder, seen, nothing, **SMALL, run=run).train()


def test_files_of_messages_are_rendered_as_rows_from_python_are(model: Callable[[str], str], tmp_path: Path) -> None:
    folder = model(TURNS)
    lines = [{"question": [{"role": "user", "content": row["question"]}], "answer": str(row["answer"])} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {folder}\ndata: {{path: {tmp_path / 'rows.jsonl'}, template: boxed}}\n"
        f"rewards: [{{type: mathematics}}]\n",
        encoding="utf-8",
    )
    done = CliRunner().invoke(app, ["check", str(recipe)])
    assert "prompts: in the chat template of" in done.output
    assert "    <|end|>user\n    How much is" in done.output
    assert "a completion ends with '<|end|>'" in done.output


def test_the_tokenizer_and_template_of_an_adapters_folder_count(model: Callable[[str], str], tmp_path: Path) -> None:
    folder = model(TURNS)
    run = {"steps": 1, "prompts_per_step": 2, "folder": str(tmp_path), "name": "lora"}
    result = oncurve.train(folder, ROWS, nothing, **SMALL, policy={"lora": {"rank": 2}}, run=run)
    adapter = result.folder / "model"
    own = TURNS.replace("<|end|>assistant", "<|end|>model")
    (adapter / "chat_template.jinja").write_text(own, encoding="utf-8")
    for section in ({}, {"policy": {"lora": {"rank": 2}}}):
        trainer = Trainer(str(adapter), ROWS, nothing, **SMALL, **section)
        assert trainer.sample("2 + 3?")[0].prompt.text.endswith("<|end|>model\n<think>")
    asked = CliRunner().invoke(app, ["sample", str(adapter), "2 + 3?", "--max-tokens", "4"])
    assert "<|end|>model\n<think>" in asked.output
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / name).unlink()
    [group] = Trainer(str(adapter), ROWS, nothing, **SMALL).sample("2 + 3?")
    assert group.prompt.text.endswith("<|end|>model\n<think>")
