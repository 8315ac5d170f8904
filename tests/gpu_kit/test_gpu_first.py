"""The first hour on a GPU as a script: its runner, its table, the rows it writes and the wheels it takes along."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks" / "gpu"
sys.path.insert(0, str(BENCHMARKS))

import gpu_first_rows  # noqa: E402
import gpu_wheels  # noqa: E402
from gpu_first_items import ITEMS, Item, chosen  # noqa: E402
from gpu_first_run import Place, Result, run_all, table  # noqa: E402

if TYPE_CHECKING:
    from nursery import Nursery

PROBES = """
import os, subprocess, sys, time
from gpu_first_probe import Answer, judged

def passes(setting):
    return judged(True, f"on {setting.device}", seen=sorted(setting.options))

def fails(setting):
    return judged(False, "3 | 4")

def raises(setting):
    raise RuntimeError("no such kernel")

def dies(setting):
    os.abort()

def counts(setting):
    (setting.work / "calls").open("a").write("x")
    return judged((setting.work / "calls").read_text() == "xx", "at the second call")

def hangs(setting):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (setting.folder / "child").write_text(str(child.pid))
    time.sleep(60)
"""


def item(name: str, probe: str, seconds: int = 30, **options: object) -> Item:
    return Item(name, f"own_probes:{probe}", f"what {probe} does", "nothing", seconds, options)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "own_probes.py").write_text(PROBES)
    return Place(tmp_path / "work", "cpu", True, variables={"PYTHONPATH": str(tmp_path)})


def test_failures_stop_nothing_and_each_item_leaves_a_record(place: Place) -> None:
    items = [item("A1", "raises"), item("A2", "dies"), item("A3", "fails"), item("A4", "passes", rank=1)]
    results = run_all(items, place, jobs=2, seconds=60, again=False)
    assert [result.outcome for result in results] == ["failed", "failed", "failed", "passed"]
    assert "no such kernel" in results[0].said
    assert "Traceback" in results[0].output
    assert results[3].figures == {"seen": ["rank"]}
    assert {json.loads(place.result(one).read_text())["outcome"] for one in items} == {"failed", "passed"}
    printed = table(items, results)
    assert "| A3 | what fails does | nothing | failed | 3 \\| 4 |" in printed


def test_an_item_that_hangs_is_ended_with_its_children(place: Place) -> None:
    [result] = run_all([item("A1", "hangs", seconds=2)], place, jobs=1, seconds=60, again=False)
    assert result.outcome == "timed out"
    child = int((place.work / "items" / "A1" / "child").read_text())
    for _ in range(100):
        try:
            state = Path(f"/proc/{child}/stat").read_text().split()[2]
        except OSError:
            break
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("its child still runs")


def test_a_second_call_goes_on_with_what_has_not_passed(place: Place) -> None:
    items = [item("A1", "counts"), item("A2", "passes")]
    first = run_all(items, place, jobs=1, seconds=60, again=False)
    assert [result.outcome for result in first] == ["failed", "passed"]
    kept = place.result(items[1]).stat().st_mtime_ns
    second = run_all(items, place, jobs=1, seconds=60, again=False)
    assert [result.outcome for result in second] == ["passed", "passed"]
    assert place.result(items[1]).stat().st_mtime_ns == kept


def test_an_item_for_which_there_is_no_time_is_left_for_another_call(place: Place) -> None:
    [result] = run_all([item("A1", "passes")], place, jobs=1, seconds=0, again=False)
    assert result.outcome == "left"
    assert not place.result(item("A1", "passes")).exists()


def test_every_probe_is_there_and_items_fit_into_a_call() -> None:
    for one in ITEMS.values():
        module, function = one.probe.split(":")
        tree = ast.parse((BENCHMARKS / f"{module}.py").read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, one.probe
        assert one.seconds <= 570


def test_items_are_chosen_by_name_or_by_its_beginning() -> None:
    assert [one.name for one in chosen("A", ["A3"])] == ["A3"]
    assert {one.name for one in chosen("B", ["B2.1.5B"])} == {
        f"B2.1.5B.{way}" for way in ("shared", "packed", "padded")
    }
    assert len(chosen("C", [])) == 5
    with pytest.raises(SystemExit, match="stage A has no item A99"):
        chosen("A", ["A99"])


def record(tmp_path: Path, **changes: object) -> Path:
    """What stages A and B would write on an H100."""
    machine = {"gpu": "NVIDIA H100 80GB HBM3", "memory_gib": 79.2, "packages": {"torch": "2.11.0+cu130"}}
    results = [
        Result("A1", "passed", 5.0, "", machine),
        Result("A3", "passed", 20.0, "3 steps"),
        Result("A4.float32", "failed", 20.0, "no step moved the weights"),
        Result("B2.1.5B.shared", "passed", 60.0, "", {"train_utilization": 0.25391}),
        Result("B3.1.5B.engine", "timed out", 60.0, "", {"sample_utilization": 0.9}),
    ]
    content = {"stage": "A", "finished": "2027-01-02T03:04:05", "device": "cuda", "tiny": False} | changes
    path = tmp_path / "stage_A.json"
    path.write_text(json.dumps({**content, "items": [vars(result) for result in results]}))
    return path


def test_results_become_rows_of_the_status_page(tmp_path: Path) -> None:
    page = gpu_first_rows.STATUS.read_text(encoding="utf-8")
    changed = gpu_first_rows.status_with(page, gpu_first_rows.joined([record(tmp_path)]))
    rows = {line.split(" | ")[0]: line.split(" | ") for line in changed.splitlines() if line.startswith("| ")}
    said = "NVIDIA H100 80GB HBM3, torch 2.11.0+cu130, 2027-01-02"
    assert rows["| bfloat16 compute with float32 master weights"][3] == f"{said}: passed (A3)"
    assert rows["| train, engine sampler, float32"][3] == f"{said}: failed (A4.float32)"
    assert [len(row) for row in rows.values()] == [5] * len(rows)
    assert changed.count("\n") == page.count("\n")


def test_every_row_that_an_item_speaks_for_is_on_the_status_page() -> None:
    page = gpu_first_rows.STATUS.read_text(encoding="utf-8")
    for one in ITEMS.values():
        for row in one.rows:
            assert len(re.findall(rf"^\| {re.escape(row)}", page, flags=re.MULTILINE)) == 1, row


def test_measured_shares_go_to_the_entry_of_the_device(tmp_path: Path) -> None:
    text = gpu_first_rows.DEVICES.read_text(encoding="utf-8")
    results = gpu_first_rows.joined([record(tmp_path)])
    changed = gpu_first_rows.devices_with(text, results)
    before, after = yaml.safe_load(text), yaml.safe_load(changed)
    assert after.pop("H100") == before.pop("H100") | {"train_utilization": 0.254}
    assert after == before
    assert gpu_first_rows.devices_with(changed, results) == changed


@pytest.mark.parametrize(
    ("gpu", "memory", "entry"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX-4090"),
        ("NVIDIA GH300", 140.0, None),
    ],
)
def test_the_driver_s_name_of_a_device_finds_its_entry(gpu: str, memory: float, entry: str | None) -> None:
    assert gpu_first_rows.entry_of(gpu, memory, gpu_first_rows.DEVICES.read_text(encoding="utf-8")) == entry


def test_records_of_no_hardware_are_refused(tmp_path: Path) -> None:
    for changes in ({"tiny": True}, {"device": "pretended"}, {"device": "cpu"}):
        with pytest.raises(SystemExit, match="says nothing about a GPU"):
            gpu_first_rows.joined([record(tmp_path, **changes)])


def test_the_changes_are_printed_as_a_patch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = gpu_first_rows.STATUS.read_bytes(), gpu_first_rows.DEVICES.read_bytes()
    gpu_first_rows.main(argparse.Namespace(results=[record(tmp_path)], write=False))
    printed = capsys.readouterr().out
    assert "+++ b/docs/status.md" in printed
    assert "train_utilization: 0.254" in printed
    assert before == (gpu_first_rows.STATUS.read_bytes(), gpu_first_rows.DEVICES.read_bytes())


def test_wheels_and_the_image_together_have_all_that_the_project_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = {gpu_wheels.normal(re.split(r"[<>=!\[ ;]", one)[0]) for one in asked}
    there = set(gpu_wheels.THERE.split())
    assert names <= there | set(gpu_wheels.NEEDED)
    assert not there & set(gpu_wheels.NEEDED)


def test_wheels_have_the_versions_that_the_tests_were_made_with() -> None:
    listed = dict(one.split("==") for one in gpu_wheels.pinned() if "==" in one)
    assert {"datasets", "pydantic", "beartype", "dill"} <= set(listed)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert {f"{name}=={number}" for name, number in listed.items() if name not in gpu_wheels.PINS} <= set(lines)


def test_a_way_to_draw_by_two_levels_draws_the_same_tokens() -> None:
    """It is timed against the one in use."""
    torch = pytest.importorskip("torch")
    from gpu_first_choices import two_levels

    from oncurve.core.draw import draw
    from oncurve.core.records import SamplingParams

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 5000, generator=generator)
    uniform = torch.rand(64, dtype=torch.float64, generator=generator)
    assert two_levels(logits, uniform).equal(draw(logits, uniform, SamplingParams(), forbidden=[])[0])


@pytest.mark.slow
def test_a_stage_of_the_script_writes_its_record_and_its_table(nursery: Nursery, tmp_path: Path) -> None:
    words = ["A", "--items", "A7", "--tiny", "--device", "cpu"]
    places = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]
    done = nursery.run_python(BENCHMARKS / "gpu_first.py", *words, *places)
    assert done.returncode == 0, done.stdout + done.stderr
    [kept] = json.loads((tmp_path / "out" / "stage_A.json").read_text())["items"]
    assert (kept["name"], kept["outcome"]) == ("A7", "passed")
    assert kept["figures"]["gaps"]["float32"]["kl"] < 1e-6
    assert "A7" in (tmp_path / "out" / "stage_A.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the pretend GPU is compiled: sudo apt-get install g++")
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_stage_a_passes_on_the_pretend_gpu(tmp_path: Path) -> None:
    """Imports and operators, a run of the recipe, and one with an adapter over its base as the reference."""
    words = ["A", "--pretend", "--seconds", "850", "--patience", "7", "--items", "A1", "A3", "A4.lora"]
    places = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]
    subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_first.py"), *words, *places],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    record = json.loads((tmp_path / "out" / "stage_A.json").read_text())
    found = {one["name"]: (one["outcome"], one["output"][-2000:]) for one in record["items"]}
    assert found == dict.fromkeys(("A1", "A3", "A4.lora"), ("passed", ""))
    assert record["device"] == "pretended"


@pytest.mark.slow
@pytest.mark.nightly
def test_probes_of_sizes_and_parts_run_with_tiny_models_on_a_cpu(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--tiny", "--patience", "8", "--work", str(tmp_path / "work"), "--output"]
    for stage, items in (("B", ["B0", "B1.0.5B", "B2.0.5B.packed", "B3.0.5B"]), ("C", ["C5"])):
        command = [sys.executable, str(BENCHMARKS / "gpu_first.py"), stage, "--items", *items, *options, str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        written = json.loads((tmp_path / f"stage_{stage}.json").read_text())
        assert {one["outcome"] for one in written["items"]} == {"passed"}
