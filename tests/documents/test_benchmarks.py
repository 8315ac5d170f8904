"""Do pages name benchmarks that exist, and is a result saved, resumed and read in its one form?"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import bench
import pytest
from record import Record, read_result

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py"),
    *(ROOT / "oncurve").rglob("*.md"), *(ROOT / "examples").rglob("*.md"), ROOT / "oncurve" / "plan" / "constants.py",
    *(ROOT / "benchmarks").rglob("*.py"), ROOT / "benchmarks" / "results" / "evidence.md",
]  # fmt: skip


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record("a study", {"steps": 2, "folder": Path("/a/b/c")}, tmp_path / "a.json", command=["bench.py", "a"])


def test_pages_name_benchmarks_and_studies_that_exist() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    named = set(re.findall(r"benchmarks/bench\.py ([a-z_0-9]+)", text))
    assert named >= {"vs_trl", "chart", "study"}
    assert named - {*bench.scripts()} == set()
    studies = (ROOT / "benchmarks" / "learning" / "studies.py").read_text(encoding="utf-8")
    for name in set(re.findall(r"bench\.py study ([a-z_0-9]+)", text)) | set(re.findall(r"`study ([a-z_0-9]+)`", text)):
        assert f'"{name}": ' in studies, f"there is no study {name}"
    paths = set(re.findall(r"benchmarks/(?:speed|learning|faults|gpu)/\w+\.py", text))
    assert {path for path in paths if not (ROOT / path).is_file()} == set()


def test_every_benchmark_says_what_it_is() -> None:
    assert {name for name, script in bench.scripts().items() if not script.about.strip()} == set()
    assert bench.main(["no_such_benchmark"]) == 2


def test_rows_are_saved_as_they_come_and_resumed(record: Record) -> None:
    record.facts["goal"] = 0.9
    record.add({"cell": "one", "seed": 0})
    found = json.loads(record.path.read_text(encoding="utf-8"))
    assert [*found][:7] == ["what", "command", "commit", "machine", "settings", "facts", "rows"]
    assert found["settings"] == {"steps": 2, "folder": "c"}, "no folders of this machine"
    again = Record("a study", {}, record.path, command=[])
    again.resume()
    assert again.has(cell="one", seed=0)
    assert not again.has(cell="one", seed=1)
    with pytest.raises(SystemExit, match="another result"):
        Record("another", {}, record.path, command=[]).resume()


def test_ctrl_c_keeps_the_rows_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(asked: object, record: Record) -> None:
        record.rows.append({"row": 1})
        raise KeyboardInterrupt

    module = ModuleType("stopped", "A benchmark that is stopped.")
    monkeypatch.setattr(module, "bench", stopped, raising=False)
    monkeypatch.setitem(sys.modules, "stopped", module)
    assert bench.run("stopped", ["--output", str(tmp_path)]) == bench.INTERRUPTED
    assert read_result(tmp_path / "stopped.json")["rows"] == [{"row": 1}]


def test_both_forms_of_a_result_are_read_alike(record: Record, tmp_path: Path) -> None:
    record.facts["checks"] = {"a": 1}
    record.add({"run": "one"})
    old = tmp_path / "old.json"
    old.write_text(json.dumps({"checks": {"a": 1}, "runs": [{"run": "one"}]}), encoding="utf-8")
    for path in (record.path, old):
        found = read_result(path, rows="runs")
        assert found["runs"] == [{"run": "one"}]
        assert found["checks"] == {"a": 1}
