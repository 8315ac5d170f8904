"""The result of a run: its measurements, and how it is shown in a terminal and in a notebook."""

from __future__ import annotations

import html
import io
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from oncurve.core.errors import DataError, OncurveError
from oncurve.evaluate.compare import Comparison, compare
from oncurve.evaluate.evaluation import Evaluation
from oncurve.observe.columns import read_columns
from oncurve.observe.record import read_manifest, read_metrics
from oncurve.observe.run_model import MODEL
from oncurve.observe.summary import summarize
from oncurve.report.write import write_report
from oncurve.run.step_log import Step


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    folder: Path
    base: Evaluation
    trained: Evaluation | None
    """None if the run was stopped before its end."""
    is_interrupted: bool
    exit_code: int = 0
    """130 after Ctrl-C, 143 after SIGTERM: what a scheduler requeues."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one per step; step 0 is the model before training."""
        return read_metrics(self.folder)

    def __repr__(self) -> str:
        ending = "stopped early; resume() continues it" if self.is_interrupted else "finished"
        return f"<Result {self.folder}: {ending}; {self._before_and_after()}>"

    def _before_and_after(self) -> str:
        measured = [evaluation for evaluation in (self.base, self.trained) if evaluation is not None]
        if all(evaluation.is_binary for evaluation in measured):
            return " -> ".join(f"{100 * evaluation.correct.fraction:.1f} % correct" for evaluation in measured)
        return " -> ".join(f"mean reward {evaluation.mean_reward.value:.3f}" for evaluation in measured)

    def _repr_html_(self) -> str:
        """Before and after as a table, and where the curves are, for a notebook."""
        parts = [f"<p><b>{html.escape(str(self.folder))}</b>: {html.escape(self._before_and_after())}</p>"]
        if (comparison := _comparison(self, Console(file=io.StringIO()))) is not None:
            parts.append(f"<pre>{html.escape(plain_text(comparison.table()))}</pre>")
        parts.append(f"<p>curves and completions: {html.escape(str(self.folder / 'report.html'))}</p>")
        return "".join(parts)


Steps = Generator[Step, None, Result]
"""A run that goes on to the end of its next step whenever it is asked to, and ends with its result."""


def finish(steps: Steps) -> Result:
    """Everything that is left of a run."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def plain_text(renderable: Any, *, width: int = 100) -> str:
    """A console's output, as text, also where FORCE_COLOR is set, as in a notebook's kernel."""
    console = Console(file=io.StringIO(), width=width, force_jupyter=False, force_terminal=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def _comparison(result: Result, console: Console) -> Comparison | None:
    """Before and after side by side; None, with a sentence, where they were measured on other problems."""
    if result.trained is None:
        return None
    try:
        return compare(result.base, result.trained)
    except DataError:
        console.print(
            f"The data or the decoding changed since the model was measured before training, so before and after are "
            f"not compared. The model is saved; measure it with: oncurve evaluate {result.folder}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
        return None


def report(result: Result, *, console: Console) -> None:
    """The table of before and after, examples, summary and report of a run that is finished."""
    metrics = read_columns(result.folder)
    comparison = _comparison(result, console)
    if len(metrics.steps) > 1:
        compared = comparison.summary() if comparison is not None else None
        text = summarize(metrics, manifest=read_manifest(result.folder), comparison=compared, title=str(result.folder))
        (result.folder / "summary.txt").write_text(f"{text}\n", encoding="utf-8")
    if comparison is not None:
        comparison.write(result.folder)
        if not console.is_jupyter:  # where the result shows itself
            comparison.print(console)
            console.print(comparison.examples_text(limit=1), markup=False, highlight=False)
        try:
            from oncurve.run.publish import write_card  # lazy

            write_card(result.folder / MODEL, name=result.folder.name, run=result.folder)
        except (OncurveError, OSError) as error:  # the recipe's file may be gone; the model is saved all the same
            console.print(f"no model card ({error})", markup=False, highlight=False)
    try:
        console.print(f"report: {write_report(result.folder).path}", highlight=False)
    except OSError as error:  # the run is over and safe; its page can be made at any time
        console.print(f"no report ({error}); make one with: oncurve report {result.folder}", markup=False)
    console.print(f"run finished: {result.folder}", highlight=False)
    for line in comparison.headline() if comparison is not None else ():
        console.print(line, highlight=False, soft_wrap=True)
