"""Does a hostile answer earn nothing, cost little and run nowhere?"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.mathematics import AnswerChecker, Mathematics
from oncurve.rewards.r1_zero import R1Zero

RECORDS = [
    json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text(encoding="ascii").splitlines()
]
TIMEOUT_SECONDS = 1.0
MAX_SECONDS = 15.0
"""For one answer and all graders together: the limit on answer and reference, the start of a new worker, and a machine
that has other things to do."""
SECRET = "a-canary-that-no-grader-may-read"


@dataclass(frozen=True)
class Yard:
    """Graders, and a file and a variable that nothing may touch."""

    graders: dict[str, Mathematics | R1Zero]
    canary: Path


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder = tmp_path_factory.mktemp("yard")
    canary = folder / "canary"
    canary.write_text("alive", encoding="ascii")
    checker = AnswerChecker(timeout_seconds=TIMEOUT_SECONDS)
    graders: dict[str, Mathematics | R1Zero] = {
        "r1_zero": R1Zero(checker=checker),
        "any": Mathematics(answer_from="prose", checker=checker),
        "boxed": Mathematics(answer_from="boxed", checker=checker),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONCURVE_CANARY", SECRET)
        patch.chdir(folder)
        graders["any"]([Prompt("", (1,), 0, {"answer": "x"})], [as_completion("\\boxed{y + \\sqrt{2}}")])
        yield Yard(graders, canary)
    checker.close()


def built(spec: Any, canary: Path) -> str:
    """A text from a string, a {"repeat": [text, count]}, or a list of those."""
    if isinstance(spec, list):
        return "".join(built(part, canary) for part in spec)
    if isinstance(spec, dict):
        text, count = spec["repeat"]
        return text * count
    return spec.replace("{canary}", str(canary)).replace("{secret}", SECRET)


def as_completion(text: str) -> Completion:
    return Completion((1,), (), text, (), "stop", policy_version=0, index=0)


def wrapped(answer: str, grader: str) -> str:
    """The answer where the grader looks for it; "any" gets it in tags, so that all of it counts."""
    return rf"so \boxed{{{answer}}}" if grader == "boxed" else f"so </think> <answer> {answer} </answer>"


def test_there_are_enough_of_every_kind() -> None:
    assert len(RECORDS) >= 60
    assert {record["category"] for record in RECORDS} == {
        "cost", "execution", "encoding", "hedge", "injection", "form", "reference",
    }  # fmt: skip
    assert all(record["why"] for record in RECORDS)


@pytest.mark.proves("F113", "D7")
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["id"])
def test_a_hostile_answer_earns_nothing(record: dict[str, Any], yard: Yard, request: pytest.FixtureRequest) -> None:
    if record.get("known_hole"):
        request.applymarker(pytest.mark.xfail(strict=False, reason=record["why"]))
    reference = built(record["reference"], yard.canary)
    prompt = Prompt("2 + 3? <think>", (1,), 0, {"answer": reference})
    rewards: dict[str, Reward] = {}
    start = time.monotonic()
    for name in record.get("graders", yard.graders):  # one is enough where each costs the whole time limit
        grader = yard.graders[name]
        text = built(record["text"], yard.canary) if "text" in record else None
        text = wrapped(built(record["answer"], yard.canary), name) if text is None else text
        [rewards[name]] = grader([prompt], [as_completion(text)])
    assert time.monotonic() - start < MAX_SECONDS

    for name, reward in rewards.items():
        if record["expected"] == "refused":
            assert reward.value is None, name
            assert reward.error == "unparsable_reference", name
        else:
            assert reward.error is None, f"{name}: {reward.error}: {reward.detail}"
            assert reward.value == 0.0, f"{name}: {reward.detail}"
        assert SECRET not in reward.detail.partition("reference")[0]
        reward.detail.encode("ascii")
    assert yard.canary.read_text(encoding="ascii") == "alive"
    assert os.listdir(yard.canary.parent) == ["canary"]
    assert os.environ["ONCURVE_CANARY"] == SECRET


def test_the_graders_still_know_a_right_answer(yard: Yard) -> None:
    for name, grader in yard.graders.items():
        [reward] = grader(
            [Prompt("", (1,), 0, {"answer": r"\frac{\sqrt{12}}{2}"})], [as_completion(wrapped(r"\sqrt{3}", name))]
        )
        assert reward.value == 1.0
