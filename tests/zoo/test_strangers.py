"""Settings that seldom stand together, the whole way: right numbers, and every command, or a sentence."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from families import STRANGERS, make_zoo_model
from lanes import gate
from tiny_models import make_tokenizer
from trial import try_family
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.errors import OncurveError

if TYPE_CHECKING:
    from nursery import Nursery

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's word to transformers
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of peft and transformers about kinds of models
    pytest.mark.filterwarnings("ignore:target_parameters=:RuntimeWarning"),  # of peft about kinds without experts
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),  # of peft alone
]
FIRST = next(iter(STRANGERS))
REWARD = "def letters(completion, **row):\n    return sum(map(ord, completion)) % 7 / 7\n"


@pytest.mark.parametrize("name", gate(STRANGERS, FIRST))
def test_numbers_are_right_or_the_model_is_refused(name: str, tmp_path: Path) -> None:
    trial = try_family(name, tmp_path / "trial", make_tokenizer, plans_here=True)
    assert trial.faults == []
    assert trial.cells["trainer"] == trial.cells["sampler"] == "right"


def run(*words: object) -> str:
    """The output of a command that succeeds."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    said = str(done.exception) if isinstance(done.exception, OncurveError) else ""
    assert done.exit_code == 0, f"{words[0]}: {done.exception!r} {said}\n{done.output[-2000:]}"
    return done.output


@pytest.mark.parametrize("name", gate(STRANGERS, FIRST))
def test_every_command_takes_it(name: str, tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_zoo_model(name).save_pretrained("base")
    make_tokenizer().save_pretrained("base")
    Path("reward.py").write_text(REWARD)
    rows = [{"question": f"{one}+3?", "answer": str(one + 3)} for one in range(1, 9)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.yaml").write_text(
        "model: base\ndata: {path: rows.jsonl, template: question_only}\n"
        "rewards: [{type: custom, function: reward.py:letters}]\nalgorithm: {group_size: 2}\n"
        "run: {name: mine, steps: 2, prompts_per_step: 2, save_every_steps: 1}\n"
        "rollouts: {max_completion_tokens: 24}\nevaluation: {num_prompts: 2}\n"
    )
    run("check", "mine.yaml")
    run("train", "mine.yaml")
    second = Path("runs/mine/rollouts/step_000002.jsonl")
    words = [json.loads(line)["completions"] for line in second.read_text().splitlines()]
    shutil.rmtree("runs/mine/model")
    shutil.rmtree("runs/mine/checkpoints/step_000002")
    run("resume", "runs/mine")
    again = [json.loads(line)["completions"] for line in second.read_text().splitlines()]
    assert [[one["text"] for one in group] for group in again] == [[one["text"] for one in group] for group in words]
    metrics = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    assert all(row["mismatch/kl"] < 1e-5 for row in metrics if "mismatch/kl" in row)
    run("evaluate", "runs/mine", "--output", "measured")
    run("sample", "runs/mine", "2+3?", "--max-tokens", 4)
    server = nursery.start("serve", "base", "--port", 0)
    try:
        while not (found := re.search(r"serving on (\S+)", server.output)):
            assert server.is_running(), server.output
            time.sleep(0.05)
        run("train", "mine.yaml", "run.name=served", "rollouts.type=servers", f"rollouts.servers=[{found[1]}]")
    finally:
        server.kill()
        server.wait()
