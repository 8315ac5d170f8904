"""A run with tools is killed at random, often inside a call, and resumed: does it end with the same bits?

    python benchmarks/episode_kills.py --kills 40 --inside 10 --output benchmarks/results/episode_kills.json

The environment and its run are those of the tests (tests/resilience). It is deterministic and says so, and leaves a
mark while it works on a call, so that a kill can be aimed there. After each kill the run is resumed; when it is done, a
new one begins. All of them are compared with one that nobody disturbed: weights, optimizer, metrics, completions.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

RESILIENCE = Path(__file__).resolve().parents[1] / "tests" / "resilience"
ENVIRONMENT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {resilience!r})
from echoing import Echoing

class Marked(Echoing):
    def step(self, action):
        mark = Path({mark!r})
        mark.touch()
        found = super().step(action)
        mark.unlink(missing_ok=True)
        return found
"""
STOPS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ,;:?-<>/=()"]


def module(name: str, folder: Path = RESILIENCE) -> Any:
    """A module of the tests."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def make_recipe(folder: Path, mark: Path, model: Path, tree: dict[str, Any]) -> Path:
    """The recipe of the tests, with an environment that marks its calls."""
    folder.mkdir(parents=True)
    (folder / "marked.py").write_text(ENVIRONMENT.format(resilience=str(RESILIENCE), mark=str(mark)), encoding="utf-8")
    rows = [{"question": f"{number} words and {number * 7}", "answer": str(number)} for number in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    made = json.loads(json.dumps(tree)) | {"model": str(model), "rewards": [{"type": "environment"}]}
    made["data"]["path"] = str(folder / "data.jsonl")
    made["rollouts"] |= {"environments": {"echo": f"{folder / 'marked.py'}:Marked"}, "stop": STOPS}
    made["run"] |= {"folder": str(folder), "name": "run"}
    (folder / "run.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
    return folder / "run.yaml"


def strike(child: Any, mark: Path, draw: random.Random, *, inside: bool) -> bool:
    """Kill a run inside a call, or at a random moment; False if it ended before."""
    until = time.monotonic() + draw.random() * 4.0
    while child.is_running():
        if mark.exists() if inside else time.monotonic() > until:
            if inside and time.monotonic() < until - 3.0:
                time.sleep(0.001)
                continue
            child.kill()
            return bool(child.wait() == -9)
        time.sleep(0.001)
    return False


def is_same(shared: Any, run: Path, clean: Path) -> bool:
    """All that must not depend on kills is the same; the first difference is printed."""
    one, other = shared.result_of(run), shared.result_of(clean)
    for key in one:
        if one[key] != other[key]:
            pairs = zip(json.dumps(one[key], default=str), json.dumps(other[key], default=str), strict=False)
            at = next((place for place, (left, right) in enumerate(pairs) if left != right), 0)
            for text in (json.dumps(one[key], default=str), json.dumps(other[key], default=str)):
                sys.stdout.write(f"{key} differs: {text[max(0, at - 300) : at + 100]}\n")
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--inside", type=int, default=10, help="of them inside a call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    from episode_soak import small_model
    from machine import describe_machine

    from oncurve.session.run_status import progress_of

    nursery_module = module("nursery", RESILIENCE.parent)
    shared = module("conftest")
    draw = random.Random(arguments.seed)
    found: dict[str, Any] = {"kills": 0, "inside_a_call": 0, "runs": 0, "equal": 0}
    with tempfile.TemporaryDirectory() as place:
        home, mark = Path(place), Path(place) / "in-a-call"
        nursery = nursery_module.Nursery(home)
        model = small_model(home / "model")
        status, said = nursery.run("train", make_recipe(home / "clean", mark, model, shared.TREE))
        assert status == 0, said
        while found["kills"] < arguments.kills:
            found["runs"] += 1
            folder = home / f"killed-{found['runs']}"
            child = nursery.start("train", make_recipe(folder, mark, model, shared.TREE))
            while found["kills"] < arguments.kills:
                inside = found["inside_a_call"] < arguments.inside
                mark.unlink(missing_ok=True)
                if not strike(child, mark, draw, inside=inside):
                    break
                found["kills"] += 1
                found["inside_a_call"] += inside
                if progress_of(folder / "run") == "finished":
                    break  # killed after its last line: there is nothing to resume
                has_run = (folder / "run" / "checkpoints").is_dir()
                child = nursery.start(*(["resume", folder / "run"] if has_run else ["train", folder / "run.yaml"]))
            assert child.wait() == 0 or progress_of(folder / "run") == "finished", child.output
            found["equal"] += is_same(shared, folder / "run", home / "clean" / "run")
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
        nursery.close()
    if arguments.output:
        text = json.dumps(found | {"run": describe_machine()}, indent=1)
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
