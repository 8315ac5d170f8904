"""Tasks with many right outputs: a checker decides, in a sandbox of its own, and neither it nor a program gets out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lanes import gate
from reward_records import completion_of, prompt_of

from oncurve.core.errors import ConfigError
from oncurve.core.records import Reward
from oncurve.rewards.late_graders import ProgramsReward
from oncurve.rewards.programs import Programs
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.pool import SandboxPool
from oncurve.sandbox.tiers import describe_isolation

TASKS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "golden" / "checkers.jsonl").read_text(encoding="utf-8").splitlines()
]
TIERS = [tier.name for tier in describe_isolation().tiers if tier.works]
SQUARE = "def f(n):\n    return n * n"
ROW = {"entry_point": "f", "tests": [{"input": [3], "output": 9}]}

if not TIERS:
    pytest.skip("no isolation works here: sudo apt-get install bubblewrap", allow_module_level=True)


@pytest.fixture(scope="module", params=gate(TIERS, TIERS[0]))  # the strongest
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    with SandboxPool(tier=request.param, num_workers=2, limits=Limits(cpu_seconds=1, wall_seconds=20.0)) as made:
        yield made


def graded(pool: SandboxPool, rows: list[dict[str, Any]], programs: list[str], **options: Any) -> list[Reward]:
    reward = Programs(ProgramsReward(**options), limits=Limits(cpu_seconds=1, wall_seconds=20.0), pool=pool)
    completions = [completion_of(f"```python\n{program}\n```") for program in programs]
    return reward([prompt_of(row=row) for row in rows], completions)


def test_right_outputs_are_paid_however_they_differ_and_wrong_ones_are_not(pool: SandboxPool) -> None:
    assert len(TASKS) >= 20
    cases = [(task, program, True) for task in TASKS for program in task["right"]]
    cases += [(task, program, False) for task in TASKS for program in task["wrong"]]
    rewards = graded(pool, [task["row"] for task, _, _ in cases], [program for _, program, _ in cases])
    wrong = [
        f"{task['name']}: {program!r} got {reward.value} {reward.error}: {reward.detail}"
        for (task, program, is_right), reward in zip(cases, rewards, strict=True)
        if reward.error is not None or reward.value != float(is_right)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "checker",
    [
        "check = 3",
        "def check(a, b, c): return undefined",
        "def check(a, b, c):\n    while True: pass",
        "def check(a, b, c): return None",
        "import os\ndef check(a, b, c): os._exit(0)",
        "def check(a, b, c): return 7",
        "def check(a, b, c): return open('/etc/passwd').read() != ''",
        "import socket\ndef check(a, b, c):\n    socket.create_connection(('127.0.0.1', 80))\n    return True",
        "import subprocess\ndef check(a, b, c):\n    subprocess.run(['true'])\n    return True",
        "def check(a, b, c): return bytearray(1 << 40)",
        "def check(",
    ],
)
def test_a_checker_that_is_broken_or_hostile_is_an_error_of_its_row(checker: str, pool: SandboxPool) -> None:
    [reward] = graded(pool, [ROW | {"checker": checker}], [SQUARE])
    assert reward.error == "unparsable_reference", reward


def test_a_hostile_program_cannot_reach_its_checker(pool: SandboxPool) -> None:
    checker = "def check(given, output, expected):\n    return output == given[0] ** 2"
    attacks = [
        "class A(int):\n    def __eq__(s, o): return True\ndef f(n): return A(1)",
        "class A:\n    def __eq__(s, o): return True\ndef f(n): return A()",
        "import sys\ndef f(n):\n    import builtins\n    builtins.check = lambda *_: True\n    return 1",
        "def f(n): return [[[]]] * 10**6",
        "import os\ndef f(n): os.kill(os.getppid(), 9)",
        "def check(*_): return True\ndef f(n): return True",
        "def f(n):\n    while True: pass",
    ]
    rewards = graded(pool, [ROW | {"checker": checker}] * (len(attacks) + 1), [*attacks, SQUARE])
    assert [reward.value for reward in rewards] == [0.0] * len(attacks) + [1.0]


def test_the_checker_of_a_recipe_is_a_file_and_that_of_a_row_goes_before_it(pool: SandboxPool, tmp_path: Path) -> None:
    path = tmp_path / "checker.py"
    path.write_text("def check(given, output, expected):\n    return output > expected\n", encoding="utf-8")
    own = ROW | {"judge": "def check(given, output, expected):\n    return output == expected"}
    options = {"checker": str(path), "checker_column": "judge"}
    programs = ["def f(n): return 10", SQUARE]
    assert [reward.value for reward in graded(pool, [ROW] * 2, programs, **options)] == [1.0, 0.0]
    assert [reward.value for reward in graded(pool, [own] * 2, programs, **options)] == [0.0, 1.0]
    with pytest.raises(ConfigError, match="cannot be read"):
        Programs(ProgramsReward(checker=str(tmp_path / "missing.py")), pool=pool)


def test_packages_are_importable_only_where_they_are_named(pool: SandboxPool) -> None:
    program = "import numpy\ndef f(n): return int(numpy.square(n))"
    assert graded(pool, [ROW], [program])[0].value == 0.0
    reward = Programs(ProgramsReward(isolation="landlock", packages=("numpy",), workers=1))
    [right] = reward([prompt_of(row=ROW)], [completion_of(f"```python\n{program}\n```")])
    [outside] = reward([prompt_of(row=ROW)], [completion_of("```python\nimport torch\ndef f(n): return 9\n```")])
    reward.close()
    assert (right.value, outside.value) == (1.0, 0.0)
    with pytest.raises(ConfigError, match="not installed here"):
        Programs(ProgramsReward(isolation="landlock", packages=("a-package-nobody-has",)))
