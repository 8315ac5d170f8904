"""Does every kind of reward train, resume in a program that starts again, and get refused when its source changed?"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import run_programs

if TYPE_CHECKING:
    from nursery import Nursery

PROGRAM = '''
import sys
from pathlib import Path
import oncurve

WEIGHT = {weight}


def bonus(completion):
    return WEIGHT * float(len(completion) % 5)


def ours(completion, answer):
    return bonus(completion) + float(answer in completion)


def trls(prompts, completions, answer, **columns):
    return [bonus(text) + float(gold in text) for text, gold in zip(completions, answer)]


async def awaited(completion, answer):
    return bonus(completion) + float(answer in completion)


def made(scale):
    def reward(completion, answer):
        return {weight} * scale * float(len(completion) % 5) + float(answer in completion)

    return reward


class Judge:
    """Has state: how often it was asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, completion, answer):
        self.asked += 1
        return {weight} * float(len(completion) % 5) + float(answer in completion)

    def method(self, completion, answer):
        return self(completion, answer)


rewards = {{
    "lambda": lambda completion, answer: {weight} * float(len(completion) % 5) + float(answer in completion),
    "closure": made(1.0),
    "method": Judge().method,
    "async": awaited,
    "trl": trls,
    "ours": ours,
    "object": Judge(),
}}
rows = [{{"question": f"How much is {{a}} + {{b}}?", "answer": a + b}} for a in range(1, 9) for b in range(1, 6)]
folder, action, *kinds = sys.argv[1:]
for kind in kinds:
    trainer = oncurve.Trainer(
        "embedded", rows, rewards[kind],
        run={{"steps": 2, "prompts_per_step": 2, "folder": folder, "name": kind}},
        evaluation={{"num_prompts": 4}}, algorithm={{"group_size": 4}}, rollouts={{"max_completion_tokens": 24}},
    )
    if action == "begin":
        next(trainer.steps())
        continue
    try:
        said = "finished" if not trainer.resume().is_interrupted else "stopped"
    except oncurve.OncurveError as error:
        said = " ".join(str(error).split())
    print(f"{{kind}}: {{said}}")
'''
KINDS = ("closure", "trl", "object")
"""Of each way in which a reward's source and state are found again, one; the others differ in their signature."""


@pytest.fixture(scope="module")
def told(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """What a program with another source, and then the one that began, say when they resume."""
    folder = tmp_path_factory.mktemp("kinds")
    for name, weight in (("mine", 0.5), ("changed", 0.25)):
        (folder / name).mkdir()
        (folder / name / "program.py").write_text(PROGRAM.format(weight=weight))
    begun = run_programs(nursery, [folder / "mine" / "program.py", folder, "begin", *KINDS])
    assert begun.returncode == 0, begun.stderr
    changed = run_programs(nursery, [folder / "changed" / "program.py", folder, "resume", *KINDS])
    assert changed.returncode == 0, changed.stderr
    resumed = run_programs(nursery, [folder / "mine" / "program.py", folder, "resume", *KINDS])
    assert resumed.returncode == 0, resumed.stderr
    return changed.stdout, resumed.stdout, folder


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused_when_its_source_changed(kind: str, told: tuple[str, str, Path]) -> None:
    line = next(line for line in told[0].splitlines() if line.startswith(f"{kind}: "))
    assert "this run was saved with other settings: reward " in line
    assert "not as when the run began" in line


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_resumed_by_the_same_program(kind: str, told: tuple[str, str, Path]) -> None:
    assert f"{kind}: finished" in told[1].splitlines()


def test_all_of_them_end_with_the_same_weights(told: tuple[str, str, Path]) -> None:
    models = [told[2] / kind / "model" / "model.safetensors" for kind in KINDS]
    assert len({hashlib.sha256(model.read_bytes()).hexdigest() for model in models}) == 1
