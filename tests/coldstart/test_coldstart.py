"""Is the base of a task what its recipe makes of random weights, and is the shipped one what it says?"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.cli.coldstart import BASES, prepare_base
from oncurve.coldstart.tiny_model import tiny_tokenizer
from oncurve.coldstart.untrained import NUM_TEXTS, write_untrained
from oncurve.core.errors import ConfigError
from oncurve.observe.record import read_metrics
from oncurve.observe.run_model import EMBEDDED
from oncurve.policy.model_folder import load_model
from oncurve.tasks.texts import TASKS, demonstrated_texts
from oncurve.tasks.word_problems import word_problems

SHORT = ["data.limit=40", "run.prompts_per_step=8", "optimizer.warmup_updates=2", "evaluation.num_prompts=4",
         "rollouts.max_completion_tokens=12"]  # fmt: skip


def checksum(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_command_trains_random_weights_by_the_recipe_of_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["coldstart", "--task", "word_problems", "--output", "runs/base", *SHORT]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    run = tmp_path / "runs" / "base"
    losses = [row["sft/loss"] for row in read_metrics(run) if row["step"]]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 1
    assert checksum(run / "model") != checksum(run / "untrained")
    first = (run / "rollouts" / "step_000001.jsonl").read_text()
    last = (run / "rollouts" / "step_000005.jsonl").read_text()
    assert "<answer>" not in first  # lessons come first
    assert "<answer>" in last
    again = CliRunner().invoke(app, ["sample", "runs/base", "User: How many?\nAssistant:", *SHORT[-1:]])
    assert again.exit_code == 0, again.output
    with pytest.raises(ConfigError, match=r"already holds a run\. Choose another --output"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_task_without_a_base_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no such task\. Use one of word_problems"):
        prepare_base(tmp_path / "base", task="chess", seed=0)


def test_a_seed_names_the_random_weights(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_layers": 1, "num_texts": 32}
    one, same, other = (
        write_untrained(tmp_path / name, "calculator", seed=seed, **small)
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert checksum(one) == checksum(same) != checksum(other)
    model, tokenizer = load_model(str(one))
    assert model.config.vocab_size == len(tokenizer)
    assert len(tokenizer.encode("<tool>")) == 1


def test_every_task_has_lessons_demonstrations_and_a_recipe() -> None:
    assert set(TASKS) == set(BASES)
    for task in TASKS:
        taught = demonstrated_texts(task, lessons=3, demonstrations=2)
        assert len(taught) == 5
        assert all(prompt and any(text for text, is_learned in parts if is_learned) for prompt, parts in taught)


def test_the_shipped_base_is_what_its_provenance_says() -> None:
    provenance = json.loads((EMBEDDED / "provenance.json").read_text())
    assert provenance["sha256"]["model.safetensors"] == checksum(EMBEDDED)
    assert provenance["updates"] == 800
    assert provenance["settings"]["learning_rate"] == 3e-3


def test_the_shipped_base_is_small_and_its_tokenizer_is_the_one_that_would_be_built() -> None:
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 8 * 1024**2
    _, shipped = load_model("embedded")
    shown = demonstrated_texts("word_problems", lessons=0, demonstrations=NUM_TEXTS)
    rebuilt = tiny_tokenizer(prompt + text for prompt, parts in shown for text, _ in parts)
    assert shipped.get_vocab() == rebuilt.get_vocab()


def test_the_shipped_base_solves_some_unseen_problems_and_not_most() -> None:
    model, tokenizer = load_model("embedded")
    problems = word_problems("test", 96)
    prompts = [f"User: {problem.question}\nAssistant: <think>" for problem in problems]
    tokenizer.padding_side = "left"
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.no_grad():
        written = model.generate(**inputs, max_new_tokens=72, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    solved = sum(
        text.endswith(f"</think> <answer> {problem.answer} </answer>")
        for text, problem in zip(texts, problems, strict=True)
    )
    assert 0.1 < solved / len(problems) < 0.45
