"""Do the figures show what was measured, and say what was not?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from oncurve.errors import DataError
from oncurve.observe.plots import Series, plot_run

KEYS = (
    "reward/correct",
    "reward/format",
    "reward/mean",
    "group/mean_min",
    "group/mean_max",
    "group/std_mean",
    "group/zero_signal_fraction",
    "policy/loss",
    "policy/entropy",
    "policy/kl",
    "completion/mean_tokens",
    "completion/min_tokens",
    "completion/max_tokens",
)


def run_of(steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"step": step, **{key: 0.1 * place + 0.001 * step for place, key in enumerate(KEYS)}}
        for step in range(1, steps + 1)
    ]
    for row in rows[:: max(1, steps // 3)]:
        row |= {"evaluation/correct_fraction": 0.5, "evaluation/any_format_fraction": 0.6}
        row |= {"evaluation/correct_low_fraction": 0.45, "evaluation/correct_high_fraction": 0.55}
    return rows


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, to look at what is on them."""
    figures: list[Figure] = []
    save = Figure.savefig

    def remember(self: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", remember)
    return figures


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)


def size_of(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_a_whole_run_has_seven_panels_and_nothing_missing(tmp_path: Path, drawn: list[Figure]) -> None:
    path = plot_run(run_of(60), tmp_path / "new" / "run.png", title="a title")
    assert size_of(path)[0] >= 1200
    (figure,) = drawn
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]
    assert len(titles) == 7
    assert "Surrogate loss: not a measure of progress" in titles
    assert "not recorded" not in texts(figure)
    assert [entry.name for entry in path.parent.iterdir()] == ["run.png"]


def test_what_was_not_recorded_is_named_and_not_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = [
        {k: v for k, v in row.items() if k not in ("policy/kl", "reward/format") and not k.startswith("evaluation")}
        for row in run_of(10)
    ]
    plot_run(rows, tmp_path / "run.png")
    noted = texts(drawn[0])
    for key in ("policy/kl", "reward/format", "evaluation/correct_fraction", "evaluation/any_format_fraction"):
        assert key in noted
    kl = next(axes for axes in drawn[0].axes if axes.get_title(loc="left").startswith("KL"))
    assert not kl.lines


def test_a_loss_that_is_not_finite_is_a_gap_with_a_note(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = run_of(10)
    rows[4]["policy/loss"] = math.nan
    plot_run(rows, tmp_path / "run.png")
    assert "steps without a finite loss: 1" in texts(drawn[0])


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": 0, "evaluation/correct_fraction": 0.2}],
        [{"step": 1, "reward/mean": 0.5}],
        [{"step": 1}],
        [{"step": 1, "policy/loss": math.nan}],
        [{"step": 1, "reward/mean": -5.0}, {"step": 2, "reward/mean": 70.0}],
    ],
    ids=["evaluation only", "one step", "nothing", "nan only", "large rewards"],
)
def test_a_run_with_hardly_anything_in_it_can_be_drawn(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    assert size_of(plot_run(rows, tmp_path / "run.png"))[0] >= 1200


def test_no_metrics_at_all_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no metrics"):
        plot_run([], tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []


def test_a_gap_stays_a_gap_when_smoothed() -> None:
    rows = [{"step": step, "a": value} for step, value in enumerate([1.0, math.nan, 3.0, 5.0])]
    smooth = Series.of([*rows, {"step": 9}], "a").smoothed(3)
    assert smooth[0] == 1.0
    assert math.isnan(smooth[1])
    assert smooth[2:] == (4.0, 4.0)


def test_a_series_without_a_finite_value_counts_as_missing() -> None:
    assert not Series.of([{"step": 1, "a": math.nan}], "a")
    assert not Series.of([{"step": 1}], "a")
    assert Series.of([{"step": 1, "a": 0.0}], "a")


def test_rounding_errors_of_a_loss_are_not_magnified(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_run([{"step": step, "policy/loss": 1e-9 * (-1) ** step} for step in range(5)], tmp_path / "run.png")
    loss = next(axes for axes in drawn[0].axes if "loss" in axes.get_title(loc="left"))
    assert loss.get_ylim() == (-0.001, 0.001)
