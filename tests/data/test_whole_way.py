"""The whole way of each kind of tokenizer: checked, trained for a step, resumed for another, and asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_fourteen_tokenizers import CASES, HEADERS, IM, NAMES, of_bytes, of_pieces
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.errors import OncurveError

CLOCK = "{{ strftime_now('%d %b %Y') }}\n" + IM
SPEAKS = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + IM


def padded_beyond() -> Any:
    tokenizer = of_bytes(IM, eos="<|im_end|>")
    tokenizer.add_special_tokens({"pad_token": AddedToken("[PAD]", special=True)})
    return tokenizer


WAYS: dict[str, tuple[Callable[[], Any], str, int]] = {
    **{name: (make, template, 0) for name, (make, template, _, _) in CASES.items()},
    "a clock": (lambda: of_bytes(CLOCK, eos="<|im_end|>"), "boxed", 0),
    "a system message of its own": (lambda: of_bytes(SPEAKS, eos="<|im_end|>"), "boxed", 0),
    "two marks of the beginning": (lambda: of_bytes("{{ bos_token }}" + HEADERS, eos="<|eot|>"), "boxed", 0),
    "pieces without a space before": (lambda: of_pieces(IM, eos="<|im_end|>", leads=False), "think_answer", 0),
    "a mark for padding beyond the embedding": (padded_beyond, "boxed", 1),
    "words beyond the embedding": (padded_beyond, "boxed", 1 + len(NAMES)),
}
"""A tokenizer, a template, and how many rows the embedding has too few."""


REFUSED = ("words beyond the embedding",)


def run(*words: str) -> tuple[int, str]:
    """Exit code and output of a command, which ends without a traceback."""
    done = CliRunner().invoke(app, [*words])
    unexpected = done.exception if not isinstance(done.exception, (SystemExit, OncurveError)) else None
    assert unexpected is None, f"{words[0]}: {unexpected!r}\n{done.output[-2000:]}"
    said = str(done.exception) if isinstance(done.exception, OncurveError) else ""
    return done.exit_code, done.output + said


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_a_tokenizer_goes_the_whole_way_or_is_refused_in_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, template, short = WAYS[name]
    tokenizer = make()
    tokenizer.save_pretrained("base")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer) - short, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
        )
    ).save_pretrained("base")  # fmt: skip
    rows = [{"question": f"What is {one}+3?", "answer": str(one + 3)} for one in range(1, 9)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    chat = CASES[name][2] if name in CASES else "auto"
    Path("mine.yaml").write_text(
        f"model: base\ndata: {{path: rows.jsonl, template: {template}, chat: {str(chat).lower()}}}\n"
        "rewards: [{type: mathematics}]\nalgorithm: {group_size: 2}\n"
        "run: {name: mine, steps: 2, prompts_per_step: 2, save_every_steps: 1}\n"
        "rollouts: {max_completion_tokens: 8}\nevaluation: {num_prompts: 2}\n",
        encoding="utf-8",
    )
    run("check", "mine.yaml")
    trained, output = run("train", "mine.yaml")
    assert (trained != 0) == (name in REFUSED), output
    if trained:
        assert "beyond" in output or "embedding" in output
        return
    second = Path("runs/mine/rollouts/step_000002.jsonl")
    words = [json.loads(line)["completions"] for line in second.read_text(encoding="utf-8").splitlines()]
    shutil.rmtree("runs/mine/model")
    shutil.rmtree("runs/mine/checkpoints/step_000002")
    resumed = run("resume", "runs/mine")
    assert resumed[0] == 0, resumed[1]
    again = [json.loads(line)["completions"] for line in second.read_text(encoding="utf-8").splitlines()]
    assert [[one["text"] for one in group] for group in again] == [[one["text"] for one in group] for group in words]
    asked = run("sample", "runs/mine", "What is 2+3?", "--max-tokens", "8")
    assert asked[0] == 0, asked[1]
    [first, *_] = Path("runs/mine/rollouts/step_000001.jsonl").read_text(encoding="utf-8").splitlines()
    assert "What is" in json.dumps(json.loads(first))
