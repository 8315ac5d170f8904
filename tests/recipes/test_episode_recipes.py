"""Do the recipes with tools and environments go their whole way, from the cold start to a page to look at?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oncurve.coldstart.supervised import ColdStart, coldstart, fine_tune
from oncurve.coldstart.tiny_model import tiny_model, tiny_tokenizer
from oncurve.policy.model_folder import save_model
from oncurve.recipes.find import SHIPPED
from oncurve.rollouts.episodes.calculator import evaluate
from oncurve.sandbox import describe_isolation
from oncurve.tasks.calculator_problems import TAGS

if TYPE_CHECKING:
    from nursery import Nursery

SMALL = ColdStart(num_texts=96, batch_size=8, hidden_size=32, num_layers=1, lesson_fraction=0.25)
SHORT = ["run.steps=2", "run.prompts_per_step=4", "evaluation.num_prompts=8", "evaluation.num_prompts_during=4"]


def completions_of(run: Path) -> list[dict[str, Any]]:
    """All completions of the steps that the run kept."""
    found = []
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            found += json.loads(line)["completions"]
    return found


@pytest.mark.parametrize(
    ("recipe", "task"),
    [
        ("calculator", "calculator"),
        ("calculator/chained", "calculator_chains"),
        ("guess_number", "guess_number"),
        ("maze", "maze"),
    ],
)
def test_a_recipe_trains_from_the_base_of_its_cold_start(
    recipe: str, task: Any, nursery: Nursery, tmp_path: Path
) -> None:
    base = coldstart(tmp_path / "base", task=task, updates=60, settings=SMALL)
    words = [f"model={base}", f"run.folder={tmp_path}", "run.name=run", "run.rollouts_every_steps=1", *SHORT]
    status, said = nursery.run("train", recipe, *words)
    assert status == 0, said
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "episode/turns" in rows[-1]
    assert rows[-1]["reward/error_fraction"] == 0.0
    assert (tmp_path / "run" / "report.html").is_file()
    assert len(completions_of(tmp_path / "run")) == 2 * 4 * 8


@pytest.mark.skipif(describe_isolation().strongest != "bubblewrap", reason="bubblewrap does not work on this machine")
def test_python_is_called_in_the_sandbox_and_what_it_says_is_answered(nursery: Nursery, tmp_path: Path) -> None:
    shown = []
    for line in (SHIPPED / "python_tool" / "tiny" / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        operations = re.findall(r"(\d+)([+-]\d+):", row["answer"])
        call = operations[0][0] + "".join(operation for _, operation in operations)
        told = evaluate(call)
        answer = row["answer"].rpartition("#### ")[2]
        parts = ((f" <tool>print({call})</tool>", True), (f"<result>{told}</result>", False))
        shown.append((f"User: {row['question']}\nAssistant:", (*parts, (f"<answer>{answer}</answer>", True))))
    texts = [prompt + text for prompt, parts in shown for text, _ in parts]
    tokenizer = tiny_tokenizer(texts, more_tags=TAGS)
    model = tiny_model(tokenizer, seed=0, hidden_size=64, num_layers=2)
    fine_tune(model, tokenizer, [(shown, 120)], seed=0)
    save_model(model, tokenizer, tmp_path / "caller")
    words = [f"run.folder={tmp_path}", "run.name=run", "run.rollouts_every_steps=1", f"model={tmp_path / 'caller'}"]
    status, said = nursery.run("train", "python_tool/tiny", *words)
    assert status == 0, said
    assert (tmp_path / "run" / "report.html").is_file()
    calls = [call for one in completions_of(tmp_path / "run") for call in one.get("calls", [])]
    assert any(call["answer"].strip().isdigit() for call in calls), calls[:5]
