"""Do reward functions get the environments also in several processes, and when a step is sampled ahead?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.observe.record import read_metrics

if TYPE_CHECKING:
    from nursery import Nursery

OWN = '''
class Counting:
    """Answers every turn and notes it."""

    def reset(self, seed=None, **row):
        self.turns, self.is_open = 0, True
        return "count", {}

    def step(self, action):
        self.turns += 1
        return "go on", 1.0, self.turns == 2, False, {}

    def close(self):
        self.is_open = False


def turns(completions, environments, **columns):
    assert len(environments) == len(completions)
    return [1 + made.turns / 2 if made.is_open else 1 / 0 for made in environments]
'''
SHORT: dict[str, Any] = {
    "run": {"steps": 2, "prompts_per_step": 2, "name": "run"},
    "algorithm": {"group_size": 2},
    "rollouts": {"max_completion_tokens": 24, "episodes": {"max_turns": 3}},
    "evaluation": {"num_prompts": 2, "every_steps": 0},
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def graded(run: Path) -> None:
    rows = [row for row in read_metrics(run) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["reward/error_fraction"] == 0, row
        assert row["reward/turns"] >= 1


@pytest.mark.nightly
def test_two_processes_grade_the_environments_that_they_hold(nursery: Nursery, own: Path) -> None:
    words = ["train", "word_problems", "run.steps=2", "run.prompts_per_step=2", f"run.folder={own}", "run.name=run"]
    words += ["algorithm.group_size=2", "rollouts.max_completion_tokens=24", "rollouts.episodes.max_turns=3"]
    words += ["evaluation.num_prompts=2", "evaluation.every_steps=0"]
    words += ["rollouts.environments={count: own.py:Counting}", "rewards=[{type: custom, function: own.py:turns}]"]
    status, said = nursery.run(*words, "--processes", 2)
    assert status == 0, said
    graded(own / "run")


AHEAD = """
import oncurve
from own import Counting, turns
rows = [{{"question": f"{{number}}", "answer": str(number)}} for number in range(12)]
print(oncurve.train("embedded", rows, turns, environments=Counting, **{options}).folder)
"""


def test_environments_of_a_step_that_was_sampled_ahead_are_open_until_it_is_graded(nursery: Nursery, own: Path) -> None:
    ahead = {"type": "servers", "own_servers": 1, "staleness": 1, **SHORT["rollouts"]}
    (own / "program.py").write_text(AHEAD.format(options={**SHORT, "rollouts": ahead}))
    done = nursery.run_python("program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    graded(Path(done.stdout.splitlines()[-1]))


def test_a_reward_in_a_process_of_its_own_cannot_ask_for_environments(own: Path) -> None:
    words = ["train", "word_problems", "rollouts.environments={count: own.py:Counting}", "run.name=run"]
    words += ["rewards=[{type: custom, function: own.py:turns, isolate: true}]"]
    done = CliRunner().invoke(app, words)
    assert "own.py:turns asks for environments" in str(done.exception)
    assert "isolate=false" in str(done.exception)
