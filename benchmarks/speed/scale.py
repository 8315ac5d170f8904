"""Large runs: a step of 8,192 rows of 4,096 tokens, ten million training rows, the pages of 100,000 steps.

    python benchmarks/speed/scale.py [--before COMMIT] [--rows 8192] [--output FILE]    # benchmarks/results/scale.json

Each part runs in a process of its own; CPU seconds and the growth of its peak memory. Nothing is sampled or trained:
answers of a server are made up, and graded, collated, laid out and recorded as a run does it. ``--before`` does the
step with the code of another commit too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "scale.json"
GROUP, PROMPT, MICROBATCH, MEASURES = 8, 128, 8192, 60
RECIPE = "{{model: embedded, data: {{type: jsonl, path: {path}, template: boxed}}, rewards: [{{type: mathematics}}]}}"


def peak() -> int:
    """The most memory that this process ever had, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def seconds() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Clock:
    """CPU seconds and the growth of the peak, part by part."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """The result of a part, which is measured."""
        before, start, wall = peak(), seconds(), time.perf_counter()
        result = call()
        self.found[name] = {
            "cpu_seconds": round(seconds() - start, 2),
            "wall_seconds": round(time.perf_counter() - wall, 2),
            "gib": round((peak() - before) / 2**30, 2),
        }
        return result


def step(num_rows: int, num_tokens: int) -> dict[str, Any]:
    """A step behind the sampling: parse, grade, collate, lay out, record. Runs with older trees, too."""
    import torch

    from oncurve.core.batch import collate
    from oncurve.core.records import Completion, Group, Prompt
    from oncurve.model.packing import make_layout
    from oncurve.observe.record import RunFolder
    from oncurve.rewards.mathematics import Mathematics

    place = "fleet" if (Path(sys.modules["oncurve"].__path__[0]) / "fleet").is_dir() else "rollouts"
    read_response = import_module(f"oncurve.{place}.servers.protocol").read_response
    draw = random.Random(0)
    body = json.dumps({"request_id": "r", "choices": [{
        "index": index, "finish_reason": "stop", "weight_versions": [{"version": "1", "start": 0, "end": num_tokens}],
        "token_ids": [draw.randrange(1000, 150_000) for _ in range(num_tokens)],
        "logprobs": {"content": [{"token": "token", "logprob": -draw.random()} for _ in range(num_tokens)]},
    } for index in range(GROUP)]})  # fmt: skip
    clock, count = Clock(), num_rows // GROUP
    groups = []

    def parse() -> Any:
        return [read_response(json.loads(body), request_id="r", count=GROUP) for _ in range(count)]

    answers = clock("parse", parse)
    for number, answer in enumerate(answers):
        prompt = Prompt("What?", tuple(range(PROMPT)), number, {"question": "What?", "answer": f"{number}/7"})
        said = [f"{'so it is. ' * (num_tokens // 3)}\\boxed{{\\frac{{{number + odd}}}{{7}}}}" for odd in (0, 1)]
        rows = [
            Completion(prompt.prompt_ids, one.token_ids, said[index % 2], one.logprobs, "stop", 0, index)
            for index, one in enumerate(answer)
        ]
        groups.append(Group(prompt, tuple(rows)))
    del answers
    reward = Mathematics()
    asked = [group.prompt for group in groups for _ in group.completions]
    written = [one for group in groups for one in group.completions]

    def grade() -> Any:
        rewards = reward(asked, written)
        reward.close()
        return [rewards[first : first + GROUP] for first in range(0, len(rewards), GROUP)]

    graded = clock("grade", grade)
    batch = clock("collate", lambda: collate(groups, torch.ones(count, GROUP)))

    def lay_out() -> None:
        for rows in batch.plan_microbatches(MICROBATCH, share_prompts=True):
            make_layout(batch.select(rows), torch.device("cpu"))

    clock("layout", lay_out)
    with tempfile.TemporaryDirectory() as folder, RunFolder(Path(folder) / "run") as run:
        clock("record", lambda: run.write_rollouts(1, groups, graded))
    return {"rows": num_rows, "tokens": num_tokens, "peak_gib": round(peak() / 2**30, 2), **clock.found}


def rows(count: int) -> dict[str, Any]:
    """Training rows of a file, to the prompts of the first step."""
    from oncurve.recipe.load import parse_config
    from oncurve.run.builder import make_parts

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f'{{"question": "What is {n} + 1?", "answer": "{n + 1}"}}\n' for n in range(count))
        config = parse_config(RECIPE.format(path=path))
        clock("to the first step", lambda: make_parts(config).data.at(0))
    return {"rows": count, **clock.found}


def pages(steps: int) -> dict[str, Any]:
    """The pages of a long run: doctor, report, and the page of the dashboard."""
    from oncurve.cli.report import report
    from oncurve.observe.metrics import GLOSSARY
    from oncurve.report.write import report_page

    draw, clock = random.Random(0), Clock()
    keys = [metric.key for metric in GLOSSARY if "<" not in metric.key][:MEASURES]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        with (run / "metrics.jsonl").open("w", encoding="utf-8") as file:
            for number in range(1, steps + 1):
                file.write(json.dumps({"step": number, **{key: draw.random() for key in keys}}) + "\n")
        command = [sys.executable, "-m", "oncurve", "doctor", str(run)]
        clock("doctor", lambda: subprocess.run(command, check=False, capture_output=True))
        clock("report", lambda: report(run))
        clock("dashboard", lambda: sum(map(len, report_page(run)[0])))
    return {"steps": steps, "metrics": len(keys), **clock.found}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"step": step, "rows": rows, "pages": pages}


def in_process(tree: Path, part: str, *numbers: int) -> dict[str, Any]:
    """A part in a process of its own, with the code of a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--part", part, *map(str, numbers)]
    done = subprocess.run(command, env=environment, cwd=tree, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(part, json.dumps(found), flush=True)
    return found


def main() -> None:
    """All parts, and what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--before", help="commit whose code does the step as well")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--data-rows", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.part:
        print(json.dumps(PARTS[asked.part[0]](*map(int, asked.part[1:]))))
        return
    from oncurve.observe.manifest import describe_run

    found: dict[str, Any] = {"made": describe_run(load_average=round(os.getloadavg()[0], 1))}
    found["step"] = in_process(ROOT, "step", asked.rows, asked.tokens)
    if asked.before:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", asked.before], cwd=ROOT, check=True, stdout=subprocess.PIPE)
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            found["step before"] = {
                "commit": asked.before,
                **in_process(Path(folder), "step", asked.rows, asked.tokens),
            }
    found["rows"] = in_process(ROOT, "rows", asked.data_rows)
    found["pages"] = in_process(ROOT, "pages", asked.steps)
    asked.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
