"""Does a notebook show a run in place, survive an interrupt, and train again in the same kernel?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nursery import Nursery

ROOT = Path(__file__).resolve().parents[2]
START = """
import os, signal
import oncurve

rows = [{"question": f"How much is {a} + {b}?", "answer": a + b} for a in range(1, 9) for b in range(1, 6)]
small = dict(evaluation={"num_prompts": 4}, algorithm={"group_size": 4}, rollouts={"max_completion_tokens": 24})

def holds(completion, answer):
    return float(answer in completion)

result = oncurve.train("embedded", rows, holds, run={"steps": 3, "prompts_per_step": 2, "name": "first"}, **small)
"""
AGAIN = """
trainer = oncurve.Trainer("embedded", rows, holds, run={"steps": 3, "prompts_per_step": 2, "name": "second"}, **small)
for step in trainer.steps():
    if step.number == 2:
        os.kill(os.getpid(), signal.SIGINT)  # between two steps it is this cell's own
"""
AFTER = """
again = trainer.resume()
assert [row.get("reward/mean") for row in again.metrics] == [row.get("reward/mean") for row in result.metrics]
"""
INTERRUPTED = """
asked = []
def interrupting(completion, answer):
    asked.append(completion)
    if len(asked) == 16:  # four measured before, eight of the first step: the second is being graded
        os.kill(os.getpid(), signal.SIGINT)
    return float(answer in completion)

run = {"steps": 3, "prompts_per_step": 2, "name": "third"}
third = oncurve.Trainer("embedded", rows, interrupting, run=run, **small)
stopped = third.train()
assert stopped.is_interrupted and "resume() continues it" in repr(stopped)
assert third.sample("How much is 2 + 2?", n=2)[0].completions
assert not third.resume().is_interrupted
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.fixture(scope="module")
def cells(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outputs of the cells, run one after the other in one kernel, which is forked."""
    needed = "pip install 'oncurve[docs]'"
    nbformat = pytest.importorskip("nbformat", reason=f"nbformat is not installed: {needed}")
    nbclient = pytest.importorskip("nbclient", reason=f"nbclient is not installed: {needed}")
    pytest.importorskip("ipykernel", reason=f"ipykernel is not installed: {needed}")
    folder = tmp_path_factory.mktemp("notebook")
    sources = [START, "result", "trainer_of_none = oncurve.Trainer('embedded', rows, holds, **small)\n"
               "trainer_of_none.evaluate()", AGAIN, AFTER, INTERRUPTED]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.cells[3].metadata["tags"] = ["raises-exception"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(nursery.stand_in(folder / "python")))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in notebook.cells]


def text_of(outputs: Any) -> str:
    return "".join(one.get("text", "") + one.get("data", {}).get("text/html", "") for one in outputs)


def test_progress_is_one_output_that_changes_in_place(cells: Any) -> None:
    shown = [one.data["text/html"] for one in cells[0] if "step 3/3" in one.get("data", {}).get("text/html", "")]
    assert len(shown) == 1
    assert "reward" in shown[0]
    assert "step 1/3" not in text_of(cells[0])
    assert "batch arithmetic" not in text_of(cells[0])


def test_results_show_as_tables(cells: Any) -> None:
    assert "report.html" in text_of(cells[1])
    assert "<table>" in text_of(cells[2])
    assert "correct" in text_of(cells[2])


def test_an_interrupt_between_two_steps_is_the_cells_own_and_the_run_goes_on_later(cells: Any) -> None:
    assert any(one.output_type == "error" and one.ename == "KeyboardInterrupt" for one in cells[3])
    assert not any(one.output_type == "error" for one in cells[4])


def test_an_interrupt_inside_of_a_step_stops_and_saves(cells: Any) -> None:
    assert "checkpoint saved after step 1" in text_of(cells[5])
