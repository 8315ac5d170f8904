"""Does the chat template's end of a turn end completions where the tokenizer of a base model names another token?"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

import oncurve
from oncurve.observe.record import read_rollouts
from oncurve.observe.run_model import EMBEDDED

TURNS = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\nAssistant:{% endif %}"
)
SETTINGS = {
    "algorithm": {"group_size": 4},
    "run": {"steps": 1, "prompts_per_step": 4, "name": "ended"},
    "evaluation": {"num_prompts": 4},
    "rollouts": {"max_completion_tokens": 96},
}


@pytest.fixture
def base_model(tmp_path: Path) -> Path:
    """The embedded model, whose tokenizer and generation settings name a token that it never writes as the end."""
    folder = tmp_path / "base"
    shutil.copytree(EMBEDDED, folder)
    for name, key, value in (
        ("tokenizer_config.json", "eos_token", "<|pad|>"),
        ("generation_config.json", "eos_token_id", 592),
        ("config.json", "eos_token_id", 592),
    ):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    (folder / "chat_template.jinja").write_text(TURNS)
    return folder


def test_it_ends_completions_and_is_named_in_the_trained_model(
    base_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SETTINGS, "run": {**SETTINGS["run"], "folder": str(tmp_path)}}
    with caplog.at_level(logging.WARNING):
        oncurve.Trainer(base_model, {"type": "word_problems", "limit": 40}, "r1_zero", **settings).train()
    assert "<|endoftext|> ends a completion" in caplog.text
    folder = tmp_path / "ended"
    completions = [one for group in read_rollouts(folder, 1) for one in group["completions"]]
    ended = [one for one in completions if one["finish_reason"] == "stop"]
    assert len(ended) > len(completions) / 2
    assert not any("<|endoftext|>" in one["text"] for one in ended)
    saved = json.loads((folder / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [592, 591]
