"""Do the commands say what they did, and are a user's mistakes messages?"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import CONFIG
from rich.console import Console

from oncurve.cli.report import report
from oncurve.core.errors import ConfigError, DataError
from oncurve.observe.record import iterate_metrics
from oncurve.report.comparing import MOST_COLUMNS, compare_runs, comparison_tables

MakeRun = Callable[..., Path]


def oncurve(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    code = "from oncurve.cli.app import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.proves("F134")
def test_report_writes_the_page_and_prints_the_summary(made_run: MakeRun, tmp_path: Path) -> None:
    run = made_run()
    done = oncurve("report", run, "--output", tmp_path / "page.html", "--usd-per-hour", "3600")
    assert done.returncode == 0, done.stderr
    assert "training steps: 8 (1 to 8)" in done.stdout
    assert "page.html (0.1 MiB)" in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert '"usd":16.0' in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_report_reads_the_metrics_once(made_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted(path: Path) -> Any:
        read.append(path)
        return iterate_metrics(path)

    monkeypatch.setattr("oncurve.observe.columns.iterate_metrics", counted)
    monkeypatch.setattr("oncurve.observe.record.iterate_metrics", counted)
    run = made_run()
    (run / "status.json").write_text('{"step": 8}')
    report(run)
    assert read == [run]


def test_report_needs_no_torch(made_run: MakeRun) -> None:
    code = (
        "import sys; from pathlib import Path; from oncurve.report.write import write_report; "
        f"write_report(Path({str(made_run())!r})); print({{'torch', 'transformers', 'matplotlib'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("report", "nowhere"), "is no run folder"),
        (("report", "RUN", "--output", "/proc/nothing/page.html"), "cannot be written"),
        (("compare", "RUN"), "name at least two run folders"),
        (("compare", "RUN", "nowhere"), "is no run folder"),
        (("doctor", "RUN/evaluations"), "is no run folder, metrics.jsonl is missing. Its run is "),
        (("dashboard", "nowhere"), "there is no such folder"),
    ],
)
def test_mistakes_are_messages(made_run: MakeRun, arguments: tuple[str, ...], said: str) -> None:
    run = made_run()
    done = oncurve(*(argument.replace("RUN", str(run)) for argument in arguments))
    assert done.returncode != 0
    assert done.stderr.startswith("oncurve: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_runs_are_compared_with_intervals_and_recipes(made_run: MakeRun, tmp_path: Path) -> None:
    first = made_run("first", right=[True, False] * 20)
    other = {**CONFIG, "optimizer": {"learning_rate": 3e-5}, "run": {**CONFIG["run"], "name": "second"}}
    second = made_run("second", config=other, right=[True] * 38 + [False] * 2)
    compared = compare_runs([first, second])
    rows = {name.strip(): cells for name, cells in compared.rows}
    assert rows["test problems, after"][1].text == "95.0%"
    against = rows["difference from the first"]
    assert against[0].text == "-"
    assert against[1].text == "+45.0 points"
    assert against[1].more.startswith("[+2")
    assert "p < 0.0001" in against[1].more
    assert compared.differences == [("optimizer.learning_rate", ["0.0001", "3e-05"])]
    done = oncurve("compare", first, second, "--output", tmp_path / "both.html")
    assert done.returncode == 0, done.stderr
    assert "optimizer.learning_rate" in done.stdout
    assert (tmp_path / "both.html").is_file()


@pytest.mark.parametrize("count", [2, 5, 6, 8])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_breaks_no_word_of_a_comparison(made_run: MakeRun, count: int, width: int) -> None:
    config = {**CONFIG, "optimizer": {"learning_rate": 3e-5}}
    compared = compare_runs([made_run(f"run-number-{n}", config=config if n % 2 else CONFIG) for n in range(count)])
    out = Console(width=width, file=io.StringIO())
    out.print(*comparison_tables(compared, width))
    printed = out.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= width
    words = {word for _, cells in compared.rows for cell in cells for word in cell.text.split()}
    assert len(compared.sides) > MOST_COLUMNS or words <= set(printed.split())
    assert {f"run-number-{n}" for n in range(count)} | {"optimizer.learning_rate"} <= set(printed.split())


def test_other_problems_are_not_paired(made_run: MakeRun) -> None:
    compared = compare_runs([made_run("a"), made_run("b", right=[True] * 5)])
    assert all(name.strip() != "difference from the first" for name, _ in compared.rows)
    assert any("cannot be paired" in note for note in compared.notes)


def test_runs_of_one_name_are_told_apart(made_run: MakeRun) -> None:
    compared = compare_runs([made_run("a/same"), made_run("b/same")])
    assert [side.name for side in compared.sides] == ["a/same", "b/same"]


def test_one_run_is_no_comparison(made_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two"):
        compare_runs([made_run()])
    with pytest.raises(DataError, match="no run folder"):
        compare_runs([made_run("other"), tmp_path])


def test_a_comparison_is_drawn(made_run: MakeRun, open_page: Callable, tmp_path: Path) -> None:
    done = oncurve(
        "compare", made_run("one"), made_run("two <img src=x onerror=alert(1)>"), "--output", tmp_path / "c.html"
    )
    assert done.returncode == 0, done.stderr
    page = open_page((tmp_path / "c.html").as_uri(), offline=True)
    assert page.locator("#curves svg").count() >= 6
    assert page.locator("img").count() == 0
    page.select_option('select[aria-label="horizontal axis"]', "hours")
    page.wait_for_selector("#curves svg text:has-text('hours')")
    assert "The recipes are the same" in page.inner_text("#recipes")


def test_twenty_runs_fit_the_page_and_their_curves_are_bands_by_recipe(
    made_run: MakeRun, open_page: Callable, tmp_path: Path
) -> None:
    runs = []
    for name, rate in (("grpo", 1e-4), ("mine", 3e-5)):
        for seed in range(10):
            changed = {"run": {**CONFIG["run"], "seed": seed}, "optimizer": {"learning_rate": rate}}
            runs.append(
                made_run(f"{name}-seed{seed}", config={**CONFIG, **changed}, metrics={"reward/mean": 0.01 * seed})
            )
    page_file = tmp_path / "c.html"
    done = oncurve("compare", *runs, "--output", page_file)
    assert done.returncode == 0, done.stderr
    page = open_page(page_file.as_uri(), offline=True)
    assert page.inner_text("h1") == "20 runs"
    assert page.locator("#by-recipe tbody tr").count() == 2
    assert page.locator("#table .card").first.locator("tbody tr").count() == 20
    reward = page.locator("#curves .chart", has_text="Reward, training")
    assert reward.locator("path.band").count() == 2
    assert "grpo 0.045" in reward.locator(".legend").inner_text()  # the mean of 0.00 to 0.09
    assert "mine-seed1" in page.inner_text("#recipes")
    assert "optimizer.learning_rate 3e-05 · run.seed 1" in page.inner_text("#recipes")
    fits = "[...document.querySelectorAll('.wide, html')].every((one) => one.scrollWidth <= one.clientWidth)"
    assert page.evaluate(fits)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate(fits)
    assert page.evaluate("document.querySelector('#table td:nth-child(2)').dataset.head") == "test problems, before"
