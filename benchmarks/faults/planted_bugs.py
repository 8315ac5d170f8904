"""Plausible bugs in each folder of the package: do the tests of that folder find them?

    python benchmarks/faults/planted_bugs.py [FOLDER ...]  (all, or these; benchmarks/results/planted_bugs.json)

Each bug is planted in a copy of the tree, alone, and the tests that belong to the folder run until one fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "planted_bugs.json"


@dataclass(frozen=True)
class Bug:
    """Some text of a file and what a tired person would have written instead."""

    file: str
    right: str
    wrong: str
    what: str
    tests: tuple[str, ...] = ()
    """Where its folder is tested; empty: in the folder of the same name."""

    @property
    def folder(self) -> str:
        """The folder of the package."""
        return self.file.split("/")[0]

    @property
    def where(self) -> tuple[str, ...]:
        """Tests to run."""
        return self.tests or (f"tests/{self.folder}",)


SCHEDULER = ("tests/sample/test_scheduler.py",)
BUGS = (
    Bug("algorithm/advantages.py", "count / (count - 1).clamp(min=1)", "count / count.clamp(min=1)",
        "RLOO's baseline holds the completion itself"),
    Bug("sandbox/program_results.py", "return bool(self.results) and self.num_passed", "return self.num_passed",
        "a program without tests is correct",
        ("tests/sandbox/test_program_results.py",)),
    Bug("observe/measure.py", "        if reward.error is None:\n            for name",
        "        if True:\n            for name",
        "parts of completions that could not be graded count in the metrics"),
    Bug("tasks/word_problems.py", "results[-1] = _slip(steps[-1])", "results[0] = _slip(steps[0])",
        "a wrong answer key has its first equation wrong"),
    Bug("recipe/files.py", ' if other != path}', "}", "a recipe's main file is listed as a variant of itself",
        ("tests/recipes/test_recipe_files.py",)),
    Bug("model/packing.py", "torch.arange(self.prompt) < self.spans[:, 3, None]",
        "torch.arange(self.prompt) <= self.spans[:, 3, None]", "a row sees one token behind its prompt",
        ("tests/model/test_packing.py",)),
    Bug("recipe/load.py", "if not key.isdigit() or int(key) >= len(items)",
        "if not key.isdigit() or int(key) > len(items)",
        "an override one behind the end of a list is a traceback"),
    Bug("rewards/shaping.py", "completion.num_tokens - (self.max_tokens - self.buffer_tokens)",
        "completion.num_tokens - self.max_tokens", "the overlong penalty begins at the limit"),
    Bug("core/draw.py", "return any(tail.rfind(text) > before.rfind(text) for text in self.stop)",
        "return any(text in tail for text in self.stop)",
        "a stop string before the minimum ends a completion after it",
        ("tests/sample/test_stops.py", "tests/sample/test_engine.py",)),
    Bug("core/requests.py", "return moved, to\n", "return moved, to[::-1]\n",
        "rows that are moved together lie in each other's slots", SCHEDULER),
    Bug("core/scheduler.py", "self._draw(logits, self.rows.keys[chosen], written)",
        "self._draw(logits, self.rows.keys[self.rows.addresses[chosen, SLOT]], written)",
        "a random stream belongs to a slot", SCHEDULER),
    Bug("core/scheduler.py", "stopped = (tokens[:, None] ==",
        "stopped = (rows.tokens[chosen, rows.lengths[chosen] - 2][:, None] ==",
        "an end token is seen one token late", SCHEDULER),
    Bug("core/scheduler.py", "(written >= rows.limits[chosen])", "(written > rows.limits[chosen])",
        "a completion gets one token more than there is room for", SCHEDULER),
    Bug("core/requests.py", "return self.serials[rows] == serials", "return self.serials[rows] >= 0",
        "a row gets the token of the one whose place it took", SCHEDULER),
    Bug("model/layer_decoders.py",
        "np.where(past < rows.lengths[running], rows.tokens[running, past], NEWEST)", "rows.tokens[running, past]",
        "a step reads tokens of the one before that have not arrived", SCHEDULER),
    Bug("core/order.py", "~np.isin(order, previous[-num_used:])", "~np.isin(order, previous[:num_used])",
        "a step that ends an epoch can hold a prompt twice", ("tests/data/test_order.py",)),
    Bug("plan/activations.py", "if run.policy.packing else constants.SAVED_QUERIES_PADDED",
        "if not run.policy.packing else constants.SAVED_QUERIES_PADDED", "packed and padded activations are swapped",
        ("tests/plan/test_plan_memory.py", "tests/plan/test_plan_command.py",)),
    Bug("trl/trl_batch.py", "trl_updates / (self.updates * self.iterations)", "trl_updates / self.updates",
        "a converted recipe passes num_iterations times as often over the data"),
    Bug("core/policy.py", "if is_allowed and math.isfinite(norm) and norm > 0:", "if is_allowed and norm > 0:",
        "an infinite gradient moves the weights",
        ("tests/policy/test_policy.py",)),
    Bug("evaluate/resumable.py", "len(rows) // part * part", "len(rows)",
        "a part of an evaluation that was cut off counts as whole",
        ("tests/evaluate/test_resumable.py",)),
    Bug("doctor/rollouts.py", "if not cut or cut.values[0] <= 0.1:",
        "if not cut:", "truncation that came later is blamed on the base",
        ("tests/doctor/test_checks.py",)),
    Bug("fleet/launch/placement.py", " and wants.heads % 2**power == 0", "",
        "a server gets GPUs over which its heads cannot be cut",
        ("tests/fleet/test_placement.py",)),
    Bug("run/guards.py", "self.num_silent + 1 if fraction >= 1 else 0",
        "self.num_silent + 1 if fraction >= 1 else self.num_silent", "silent steps need not follow each other",
        ("tests/resilience/test_guards.py",)),
    Bug("recipe/preflight.py", "max_staleness=config.rollouts.staleness", "max_staleness=0",
        "losses that need no stale samples go with servers that run ahead", ("tests/recipe",)),
    Bug("observe/columns.py", "if after < before) + (clock[-1] if clock else 0.0)", "if after < before)",
        "the time since the last resume is not paid",
        ("tests/report/test_report_parts.py", "tests/report/test_report_commands.py",)),
    Bug("data/demonstrations.py", "demonstrations=count - lessons,", "demonstrations=count,",
        "demonstrations come on top of the rows that were asked for", ("tests/data", "tests/coldstart",)),
    Bug("run/resume.py", "if key not in harmless and old.get", "if old.get",
        "resume refuses a change that changes no number"),
    Bug("run/publish.py", " and not Path(name).exists()", "",
        "a folder with a slash in its name passes for a repository on the hub",
        ("tests/cli/test_publish.py",)),
    Bug("trl/translation.py", "if note.is_loss and note.changes_learning and note.option not in SETTINGS.accepted",
        "if note.is_loss and note.option not in SETTINGS.accepted", "options that only change the log stop a script",
        ("tests/trl/test_lost_and_older.py",)),
    Bug("cli/arguments.py", 'key.rpartition(".")[2] == word', "key.endswith(word)",
        "a hint names a key that only ends like the option", ("tests/cli/test_mistakes.py",)),
)  # fmt: skip


def find(bug: Bug, tree: Path) -> dict[str, object]:
    """Plant a bug, run the tests of its folder, take it out again."""
    path = tree / "oncurve" / bug.file
    text = path.read_text(encoding="utf-8")
    if text.count(bug.right) != 1:
        raise SystemExit(f"{bug.file}: {bug.right!r} stands there {text.count(bug.right)} times; mend the list")
    path.write_text(text.replace(bug.right, bug.wrong), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *bug.where]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    path.write_text(text, encoding="utf-8")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode and not found:
        raise SystemExit(f"{bug.file}: pytest itself failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return {
        "folder": bug.folder,
        "file": bug.file,
        "bug": bug.what,
        "right": bug.right,
        "wrong": bug.wrong,
        "found_by": found.group(1) if found else None,
    }


def main(folders: Sequence[str]) -> None:
    """Plant every bug, say who found it, and keep the results."""
    known = json.loads(RESULTS.read_text(encoding="utf-8"))["bugs"] if RESULTS.is_file() else []
    results = {(bug["file"], bug["bug"]): bug for bug in known}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
        for bug in BUGS:
            if not folders or bug.folder in folders:
                results[bug.file, bug.what] = found = find(bug, tree)
                print(f"{bug.file}: {found['found_by'] or 'NOT FOUND'}", flush=True)
                bugs = [results[one.file, one.what] for one in BUGS if (one.file, one.what) in results]
                total = {"planted": len(bugs), "found": sum(one["found_by"] is not None for one in bugs)}
                RESULTS.write_text(json.dumps({**total, "bugs": bugs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
