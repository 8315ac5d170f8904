"""Answers and small programs graded per second, by kind of answer and by isolation.

    python benchmarks/bench.py grading_speed                               # 4,000 answers, 2,000 programs, two cores
    python benchmarks/bench.py grading_speed --answers 200 --programs 40

Answers are those of tests/golden, each with a number of its own at the end so that no verdict is remembered; they are
graded in batches of 256 as in training, on ``--workers`` processes. Programs are short functions with five tests each.
Processes are started before the clock.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

from record import ROOT, Record

from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.mathematics import AnswerChecker, Mathematics
from oncurve.rewards.programs import Programs
from oncurve.sandbox.pool import SandboxPool
from oncurve.sandbox.tiers import describe_isolation

BATCH = 256
NUMBERS, EXPRESSIONS = "numbers, ranges, units, words", "expressions"
EXPRESSION_KINDS = ("roots", "constants", "complex numbers", "expressions", "inequalities", "intervals", "matrices")


def completion_of(text: str) -> Completion:
    """A completion with a text."""
    return Completion((1,), (), text, (), "stop", policy_version=0, index=0)


def answers(kind: str, count: int) -> tuple[list[Prompt], list[Completion]]:
    """Golden pairs of one kind, over and over, none twice the same."""
    lines = [json.loads(line) for line in (ROOT / "tests/golden/mathematics.jsonl").read_text("utf-8").splitlines()]
    kept = [
        line
        for line in lines
        if line["place"] == "boxed"
        and line["category"] != "hostile"
        and (line["category"] in EXPRESSION_KINDS) == (kind == EXPRESSIONS)
    ]
    prompts, completions = [], []
    for number, line in enumerate(islice(cycle(kept), count)):
        prompts.append(Prompt("", (1,), 0, {"answer": line["reference"] + " " * (number // len(kept))}))
        completions.append(completion_of(line["completion"]))
    return prompts, completions


def programs(count: int) -> tuple[list[Prompt], list[Completion]]:
    """Different programs of a few lines, with five tests each; every fourth is wrong."""
    row = {"entry_point": "f", "tests": [{"input": [n], "output": n * n + 1} for n in range(5)]}
    texts = [
        f"```python\ndef f(n):\n    total = {number}\n    for _ in range(n):\n        total += n\n"
        f"    return total - {number} + {2 if number % 4 == 3 else 1}\n```"
        for number in range(count)
    ]
    return [Prompt("", (1,), 0, row)] * count, [completion_of(text) for text in texts]


def rate(
    grade: Callable[[Sequence[Prompt], Sequence[Completion]], list[Reward]],
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
) -> dict[str, Any]:
    """How many per second, and what came of them."""
    grade(prompts[:4], completions[:4])
    graded: list[Reward] = []
    started = time.perf_counter()
    for start in range(0, len(prompts), BATCH):
        graded += grade(prompts[start : start + BATCH], completions[start : start + BATCH])
    seconds = time.perf_counter() - started
    return {
        "count": len(graded),
        "seconds": round(seconds, 3),
        "per_second": round(len(graded) / seconds, 1),
        "right": sum(reward.value == 1.0 for reward in graded),
        "errors": sum(reward.error is not None for reward in graded),
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--answers", type=int, default=4000)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)


def bench(asked: argparse.Namespace, record: Record) -> None:
    checker = AnswerChecker(workers=asked.workers)
    for kind in (NUMBERS, EXPRESSIONS):
        graded = rate(Mathematics(checker=checker), *answers(kind, asked.answers // 2))
        record.add({"what": f"answers: {kind}", **graded})
    checker.close()
    for tier in describe_isolation().tiers:
        if tier.works:
            with SandboxPool(tier=tier.name, num_workers=2 * asked.workers) as pool:
                graded = rate(Programs(pool=pool), *programs(asked.programs))
            record.add({"what": f"programs: {tier.name}", **graded})
