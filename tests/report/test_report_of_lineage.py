"""Does the report of a run show the runs that its model came from?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import CONFIG
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.report.dashboard import Site
from oncurve.report.overview import overview, stages
from oncurve.report.write import write_report

MakeRun = Callable[..., Path]


@pytest.fixture
def chain(made_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GRPO on what a supervised stage learned, named as the recipe of a user would."""
    monkeypatch.chdir(tmp_path)
    made_run("taught", steps=3, right=(True, True, False, False), config={**CONFIG, "sft": {"epochs": 1}})
    return made_run("rewarded", config={**CONFIG, "model": "runs/taught"})


def test_the_stage_before_is_shown_with_its_accuracy(chain: Path) -> None:
    before, own = overview(chain)["stages"]
    assert (before["name"], before["what"], before["steps"], before["is_own"]) == ("taught", "supervised", 3, False)
    assert (before["before"]["fraction"], before["after"]["fraction"]) == (0.25, 0.5)
    assert (own["name"], own["what"], own["is_own"], own["after"]["fraction"]) == ("rewarded", "grpo", True, 0.75)
    assert before["href"] is None
    write_report(chain.parent / "taught")
    assert overview(chain)["stages"][0]["href"] == "../taught/report.html"


def test_the_command_prints_the_stages(chain: Path) -> None:
    done = CliRunner().invoke(app, ["report", "runs/rewarded"])
    assert done.exit_code == 0, done.output
    assert "taught    supervised   25.0% to 50.0% correct" in done.output
    assert "rewarded  grpo         25.0% to 75.0% correct" in done.output
    alone = CliRunner().invoke(app, ["report", "runs/taught"])
    assert "Stages" not in alone.output


@pytest.mark.parametrize("named", ["runs/taught/model", "runs/taught/checkpoints/step_000003", "ABSOLUTE"])
def test_a_model_or_checkpoint_of_a_run_is_a_stage(chain: Path, named: str) -> None:
    model = str(chain.parent / "taught") if named == "ABSOLUTE" else named
    assert [stage["name"] for stage in stages(chain, {"model": model})] == ["taught", "rewarded"]


def test_the_report_finds_the_stage_from_another_folder(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert len(overview(chain)["stages"]) == 2


@pytest.mark.parametrize("named", ["embedded", "Qwen/Qwen2.5-0.5B", "runs/rewarded", "runs/gone", ""])
def test_a_model_that_is_no_earlier_run_is_no_stage(chain: Path, named: str) -> None:
    assert stages(chain, {"model": named}) == []


def test_runs_that_name_each_other_end_the_chain(chain: Path) -> None:
    config = (chain.parent / "taught" / "config.yaml").read_text()
    (chain.parent / "taught" / "config.yaml").write_text(config.replace("model: embedded", "model: runs/rewarded"))
    assert len(overview(chain)["stages"]) <= 3


def test_a_page_leads_to_the_stage_before(chain: Path, open_page: Callable[..., Any]) -> None:
    write_report(chain.parent / "taught")
    page = open_page(write_report(chain).path.as_uri(), offline=True)
    rows = page.locator("#stages tbody tr").all_inner_texts()
    assert "demonstrations" in rows[0]
    assert "this run" in rows[1]
    page.click("#stages a")
    page.wait_for_selector("h1 >> text=taught")


def test_a_dashboard_leads_to_the_stage_before(chain: Path) -> None:
    assert b'"href":"/run/taught"' in Site([chain.parent]).run_page("rewarded").value
    assert b'"href":"/run/taught"' not in Site([chain]).run_page("rewarded").value
