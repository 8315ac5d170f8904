"""Do the recipes with tools and environments go their whole way, from the cold start to a page to look at?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lanes import gate

from oncurve.coldstart.tiny_model import tiny_model, tiny_tokenizer
from oncurve.coldstart.untrained import write_untrained
from oncurve.episodes.calculator import evaluate
from oncurve.policy.model_folder import save_model
from oncurve.recipe.files import SHIPPED
from oncurve.run.stages import sft
from oncurve.sandbox.tiers import describe_isolation
from oncurve.tasks.calculator_problems import TAGS

if TYPE_CHECKING:
    from nursery import Nursery

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GAMES = [
    (str(EXAMPLES / name), f"{EXAMPLES / name}/base", f"{EXAMPLES / name / name}.py")
    for name in ("guess_number", "maze")
]
SHORT = ["run.steps=2", "run.prompts_per_step=4", "evaluation.num_prompts=8", "evaluation.num_prompts_during=4"]


def completions_of(run: Path) -> list[dict[str, Any]]:
    """All completions of the steps that the run kept."""
    found = []
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            found += json.loads(line)["completions"]
    return found


@pytest.mark.parametrize(
    ("recipe", "stage", "task"),
    gate(
        [
            ("calculator", "calculator/base", "calculator"),
            ("calculator/chained", "calculator/chained_base", "calculator_chains"),
            *GAMES,
        ],
        ("calculator", "calculator/base", "calculator"),
    ),
)
def test_a_recipe_trains_from_the_base_that_its_stage_makes(
    recipe: str, stage: str, task: str, nursery: Nursery, tmp_path: Path
) -> None:
    random = write_untrained(tmp_path / "random", task, hidden_size=32, num_layers=1, num_texts=96)
    words = [f"run.folder={tmp_path}", "run.name=base", "run.prompts_per_step=8", "optimizer.warmup_updates=3"]
    more = ["data.limit=480", "data.lesson_fraction=0.25", "evaluation.num_prompts=4", "run.save_every_steps=0"]
    status, said = nursery.run("sft", stage, f"model={random}", *words, *more)
    assert status == 0, said
    words = [
        f"model={tmp_path / 'base'}",
        f"run.folder={tmp_path}",
        "run.name=run",
        "run.rollouts_every_steps=1",
        *SHORT,
    ]
    status, said = nursery.run("train", recipe, *words)
    assert status == 0, said
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "episode/turns" in rows[-1]
    assert rows[-1]["reward/error_fraction"] == 0.0
    assert (tmp_path / "run" / "report.html").is_file()
    assert len(completions_of(tmp_path / "run")) == 2 * 4 * 8


@pytest.mark.skipif(
    describe_isolation().strongest != "bubblewrap",
    reason="bubblewrap does not work here: sudo apt-get install bubblewrap",
)
def test_python_is_called_in_the_sandbox_and_what_it_says_is_answered(nursery: Nursery, tmp_path: Path) -> None:
    shown = []
    for line in (SHIPPED / "python_tool" / "tiny" / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        operations = re.findall(r"(\d+)([+-]\d+):", row["answer"])
        call = operations[0][0] + "".join(operation for _, operation in operations)
        told = evaluate(call)
        answer = row["answer"].rpartition("#### ")[2]
        told_part = {"text": f"<result>{told}</result>", "learned": False}
        parts = [{"text": f" <tool>print({call})</tool>"}, told_part, {"text": f"<answer>{answer}</answer>"}]
        shown.append({"prompt": f"User: {row['question']}\nAssistant:", "parts": parts})
    texts = [row["prompt"] + part["text"] for row in shown for part in row["parts"]]
    tokenizer = tiny_tokenizer(texts, more_tags=TAGS)
    save_model(tiny_model(tokenizer, seed=0, hidden_size=64, num_layers=2), tokenizer, tmp_path / "random")
    sft(
        tmp_path / "random", shown, run={"steps": 120, "folder": str(tmp_path), "name": "caller"},
        optimizer={"type": "muon", "learning_rate": 3e-3, "warmup_updates": 6, "schedule": "linear"},
        evaluation={"num_prompts": 4}, rollouts={"max_completion_tokens": 8},
    )  # fmt: skip
    words = [f"run.folder={tmp_path}", "run.name=run", "run.rollouts_every_steps=1", f"model={tmp_path / 'caller'}"]
    status, said = nursery.run("train", "python_tool/tiny", *words)
    assert status == 0, said
    assert (tmp_path / "run" / "report.html").is_file()
    calls = [call for one in completions_of(tmp_path / "run") for call in one.get("calls", [])]
    assert any(call["answer"].strip().isdigit() for call in calls), calls[:5]
