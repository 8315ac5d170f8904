"""Programs earn what their tests say: right ones everything, wrong ones nothing, broken tests an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_records import completion_of, prompt_of

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction
from oncurve.core.records import Reward
from oncurve.rewards.late_graders import ProgramsReward
from oncurve.rewards.programs import Programs
from oncurve.rewards.weighted_sum import Term, WeightedSum, categorize
from oncurve.sandbox.failures import SandboxDied
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.pool import SandboxPool
from oncurve.sandbox.tiers import describe_isolation

ROOT = Path(__file__).resolve().parents[2]
HUMANEVAL = ROOT.parent / "shared" / "data" / "humaneval.jsonl"

if describe_isolation().strongest is None:
    pytest.skip("no isolation works here: sudo apt-get install bubblewrap", allow_module_level=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(allow="landlock", num_workers=2, limits=Limits(cpu_seconds=1, wall_seconds=4.0)) as made:
        yield made


def graded(pool: SandboxPool, row: dict[str, Any], *programs: str, **options: Any) -> list[Reward]:
    limits = Limits(cpu_seconds=1, wall_seconds=4.0, max_exhausted_tests=options.pop("max_exhausted_tests", 2))
    reward = Programs(ProgramsReward(**options), limits=limits, pool=pool)
    texts = [f"My program:\n```python\n{program}\n```" for program in programs]
    return reward([prompt_of(row=row)] * len(texts), [completion_of(text) for text in texts])


def values(pool: SandboxPool, row: dict[str, Any], *programs: str) -> list[float | None]:
    return [reward.value for reward in graded(pool, row, *programs, scale="pass_rate")]


SQUARE, DOUBLE = "def f(n):\n    return n * n", "def f(n):\n    return n + n"
ROW = {"entry_point": "f", "tests": [{"input": [n], "output": n * n} for n in (0, 2, 3, 4)]}


@pytest.mark.proves("F104", "F106")
def test_it_is_a_reward_function_with_the_fixed_parts(pool: SandboxPool) -> None:
    reward = Programs(pool=pool)
    assert isinstance(reward, RewardFunction)
    right, wrong = graded(pool, ROW, SQUARE, DOUBLE)
    assert right == Reward(1.0, {"correct": 1.0, "passed_fraction": 1.0, "format": 1.0}, None, "4 of 4 tests passed")
    assert wrong.value == 0.0
    assert wrong.parts == {"correct": 0.0, "passed_fraction": 0.5, "format": 1.0}
    assert wrong.detail == "2 of 4 tests passed; test 3: wrong: got 6"
    assert categorize(right) == "correct"
    assert categorize(wrong) == "wrong"


@pytest.mark.proves("F106")
def test_the_share_of_passed_tests_can_be_paid(pool: SandboxPool) -> None:
    assert values(pool, ROW, SQUARE, DOUBLE, "x = 1") == [1.0, 0.5, 0.0]


def test_a_completion_without_a_program_is_badly_formatted(pool: SandboxPool) -> None:
    (reward,) = Programs(pool=pool)([prompt_of(row=ROW)], [completion_of("I do not know.")])
    assert reward.value == 0.0
    assert categorize(reward) == "bad_format"


def test_a_bare_expression_can_be_put_into_a_template(pool: SandboxPool) -> None:
    reward = Programs(ProgramsReward(require_fence=False), pool=pool, template="def f(n):\n    return {program}")
    texts = ["<answer> n * n </answer>", "n ** 2", "n +", "exit()"]
    rewards = reward([prompt_of(row=ROW)] * 4, [completion_of(text) for text in texts])
    assert [graded.value for graded in rewards] == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="template"):
        Programs(pool=pool, template="def f(): pass")


def test_scripts_are_judged_by_what_they_print(pool: SandboxPool) -> None:
    row = {"tests": [{"input": f"{n}\n{n}\n", "output": f"{2 * n}\n"} for n in (1, 2)]}
    right = "a, b = int(input()), int(input())\nprint(a + b)"
    slow = "import sys\nprint(sum(map(int, sys.stdin)))\nsys.stdout.flush()\nwhile True: pass"
    rewards = graded(pool, row, right, "print(2)", "print(int(input()) * 2); exit(0)", slow)
    assert [graded.parts["passed_fraction"] for graded in rewards] == [1.0, 0.5, 1.0, 0.0]
    assert "timeout" in rewards[3].detail


def test_large_input_and_output_pass(pool: SandboxPool) -> None:
    text = "1234567\n" * 200_000
    row = {"tests": [{"input": text, "output": text}]}
    assert values(pool, row, "import sys\nsys.stdout.write(sys.stdin.read())") == [1.0]
    called = {"entry_point": "f", "tests": [{"input": [list(range(200_000))], "output": list(range(200_000))}]}
    assert values(pool, called, "def f(x):\n    return x") == [1.0]


@pytest.mark.proves("F104")
def test_assertions_as_in_mbpp(pool: SandboxPool) -> None:
    row = {"test_list": ["assert f(2) == 4", "assert f(3) == 9", "assert isinstance(f(1), int)"]}
    assert values(pool, row, SQUARE, DOUBLE) == [1.0, pytest.approx(2 / 3)]


def test_a_program_may_bear_the_name_of_a_builtin(pool: SandboxPool) -> None:
    row = {"test_list": ["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"]}
    right = "def sum(a, b):\n    total = 0\n    for d in range(1, a + 1):\n"
    right += "        total += d * (a % d == b % d == 0)\n    return total"
    assert values(pool, row, right) == [1.0]
    assert values(pool, {"test_list": ["assert len(f([3])) == 1"]}, "def f(x): return []\ndef len(x): return 1") == [
        0.0
    ]


def test_modules_that_test_code_forgot_to_import_are_there(pool: SandboxPool) -> None:
    row = {"test_list": ["assert math.isclose(f(2), 4)"]}
    assert values(pool, row, SQUARE, "class math:\n    isclose = lambda *a: True\ndef f(n): return 0") == [1.0, 0.0]


def test_helpers_of_the_task_are_not_taken_from_the_program(pool: SandboxPool) -> None:
    row = {
        "prompt": "def poly(x):\n    return x - 3\n\ndef zero():\n    '''A zero of poly.'''\n",
        "entry_point": "zero",
        "test": "def check(candidate):\n    assert poly(candidate()) == 0\n",
    }
    assert values(pool, row, "def zero():\n    return 3", "poly = lambda x: 0\ndef zero():\n    return 5") == [1.0, 0.0]
    assert values(pool, row, "    return poly(6)") == [1.0]


def test_unittest_classes(pool: SandboxPool) -> None:
    code = """
import unittest
from solution import f

class TestF(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.n = 3
    def setUp(self): self.two = 2
    def test_square(self): self.assertEqual(f(self.n), 9)
    def test_two(self): self.assertIn(f(self.two), (4,))
    def test_many(self):
        for n in range(4):
            with self.subTest(n=n):
                self.assertEqual(f(n), n * n)
    @unittest.skip("not here")
    def test_skipped(self): self.fail()
    def test_raises(self):
        with self.assertRaises(TypeError):
            f(None)
"""
    assert values(pool, {"test": code}, SQUARE, DOUBLE) == [1.0, 0.5]


def test_classes_of_the_program_can_be_tested(pool: SandboxPool) -> None:
    code = """
def check(candidate):
    stack = Stack([1])
    stack.push(2)
    assert len(stack) == 2
    assert list(stack) == [1, 2]
    assert stack[0] == 1
    assert stack.pop() == 2
    assert stack.items == [1]
    assert str(stack) == "[1]"
    assert Stack([1]) == stack
    assert Stack([2]) != stack
    assert make(3).items == [3]
    try:
        Stack([]).pop()
        assert False
    except EmptyError:
        pass
"""
    program = """
class EmptyError(Exception): pass
class Stack:
    def __init__(self, items): self.items = list(items)
    def push(self, x): self.items.append(x)
    def pop(self):
        if not self.items: raise EmptyError()
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, k): return self.items[k]
    def __str__(self): return str(self.items)
    def __eq__(self, other): return self.items == other.items
def make(x): return Stack([x])
"""
    (reward,) = graded(pool, {"test": code, "entry_point": "make"}, program)
    assert reward.detail == "10 of 10 tests passed"


def test_functions_can_be_given_and_returned(pool: SandboxPool) -> None:
    code = """
def check(candidate):
    assert candidate(lambda x: x + 1, [1, 2]) == [2, 3]
    assert candidate(str, [1]) == ["1"]
    assert candidate(abs, [-1]) == [1]
    def bad(x): raise KeyError(x)
    try:
        candidate(bad, [1])
        assert False
    except KeyError:
        pass
    assert adder(2)(3) == 5
"""
    program = "def apply(f, xs):\n    return [f(x) for x in xs]\ndef adder(n):\n    return lambda x: x + n"
    (reward,) = graded(pool, {"test": code, "entry_point": "apply"}, program)
    assert reward.detail == "5 of 5 tests passed"


def test_arguments_that_are_changed_in_place_are_changed_for_the_test(pool: SandboxPool) -> None:
    code = """
def check(candidate):
    xs = [3, 1, 2]
    assert candidate(xs) is None
    assert xs == [1, 2, 3]
    grid = [[2, 1], [4, 3]]
    candidate(grid)
    assert grid == [[2, 1], [4, 3]]
    d = {"a": 1}
    assert fill(d) is None and d == {"a": 1, "b": 2}
"""
    program = "def sort(xs):\n    xs.sort()\ndef fill(d):\n    d['b'] = 2"
    (reward,) = graded(pool, {"test": code, "entry_point": "sort"}, program)
    assert reward.detail == "4 of 4 tests passed"


def test_a_test_that_kills_the_program_costs_that_test_only(pool: SandboxPool) -> None:
    program = (
        "import os, time\ndef f(n):\n    if n == 2: os._exit(0)\n    if n == 3: raise SystemExit\n    return n * n"
    )
    row = {"entry_point": "f", "test": "def check(f):\n    for n in range(5):\n        assert f(n) == n * n\n"}
    assert values(pool, row, program) == [0.6]
    assert values(pool, ROW, program) == [0.5]


def test_tests_after_too_many_timeouts_are_not_run(pool: SandboxPool) -> None:
    program = "import time\ndef f(n):\n    while n: pass\n    return 0"
    row = {"entry_point": "f", "test": "def check(f):\n    for n in range(6):\n        assert f(n) == n * n\n"}
    rewards = graded(pool, row, program, max_exhausted_tests=1)
    rewards += graded(pool, ROW, program, max_exhausted_tests=1)
    assert [graded.parts["passed_fraction"] for graded in rewards] == [pytest.approx(1 / 6), 0.25]
    assert all("timeout" in graded.detail for graded in rewards)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "?"},
        {"tests": [], "entry_point": "f"},
        {"test_list": ["assert f(1) =="]},
        {"entry_point": "f", "test": "import no_such_module\ndef check(f):\n    assert f(1) == 1\n"},
        {"entry_point": "f", "test": "def check(f):\n    raise RuntimeError('broken')\n    assert f(1)\n"},
        {"entry_point": "f", "test": "def check(f):\n    for n in []:\n        assert f(1)\n"},
        {"entry_point": "f", "test": "def check(f):\n    import os\n    os._exit(0)\n    assert f(1)\n"},
        {"entry_point": "f", "test": "class Node: pass\ndef check(f):\n    assert f(Node()) == 1\n"},
        {"test_list": ["assert f(1) == 1"], "test_setup_code": "1 / 0"},
    ],
)
def test_tests_that_cannot_be_run_are_nobody_s_wrong_answer(pool: SandboxPool, row: dict[str, Any]) -> None:
    (reward,) = graded(pool, row, SQUARE)
    assert reward.value is None
    assert reward.error == "unparsable_reference"
    assert reward.detail


@pytest.mark.parametrize(
    "program",
    [
        "def f(n):\n    raise ImportError",
        "def f(n):\n    raise SyntaxError",
        "import os\nos._exit(0)",
        "def f(n):\n    return [[[[]]]]",
        "def g(n):\n    return n",
        "def f(n):\n    x = []\n    for _ in range(95): x = [x]\n    return x",
    ],
)
def test_no_program_can_make_its_tests_look_broken(pool: SandboxPool, program: str) -> None:
    code = "def check(f):\n    x = f(1)\n    y = f([[[[[[[[[x]]]]]]]]])\n    z = x + 1\n    assert x == 1 and y and z\n"
    for row in ({"entry_point": "f", "test": code}, {"test": code + "check(f)\n", "entry_point": "f"}):
        (reward,) = graded(pool, row, program)
        assert reward.value == 0.0, reward


def test_equal_programs_are_graded_once(pool: SandboxPool) -> None:
    reward = Programs(pool=pool)
    prompt, starts = prompt_of(row=ROW), []
    submit = pool.submit
    pool.submit = lambda work: starts.append(1) or submit(work)  # type: ignore[method-assign, assignment]
    try:
        text = f"```\n{SQUARE}\n```"
        rewards = reward([prompt] * 5, [completion_of(text, index=n) for n in range(5)])
    finally:
        pool.submit = submit  # type: ignore[method-assign]
    assert [graded.value for graded in rewards] == [1.0] * 5
    assert len(starts) == 1


def test_every_failure_is_counted_under_its_kind(pool: SandboxPool) -> None:
    reward = Programs(limits=Limits(cpu_seconds=1, wall_seconds=4.0, max_exhausted_tests=1), pool=pool)
    kinds = {
        "passed": SQUARE,
        "wrong": DOUBLE,
        "raised": "def f(n): return m",
        "exited": "exit()",
        "crashed": "import os\nos.abort()",
        "memory": "def f(n): return [0] * 10**12",
        "not_data": "def f(n): return object()",
        "too_much_output": "def f(n): return 'x' * 10**7",
        "timeout": "def f(n):\n    while True: pass",
    }
    prompt = prompt_of(row=ROW)
    reward([prompt] * len(kinds), [completion_of(f"```\n{text}\n```") for text in kinds.values()])
    assert dict(reward.kinds) == dict.fromkeys(kinds, 1)


def test_a_sandbox_that_cannot_work_is_an_error_and_not_a_wrong_answer(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(*_: Any, **__: Any) -> Any:
        raise SandboxDied("no processes left")

    monkeypatch.setattr("oncurve.rewards.programs.run_cases", dead)
    (reward,) = graded(pool, ROW, SQUARE)
    assert reward.error == "sandbox"
    assert "no processes left" in reward.detail


def test_a_program_that_kills_its_sandbox_every_time_earns_nothing(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oncurve.sandbox.program_cases import run_cases

    def fragile(sandbox: Any, sources: list[str], *args: Any, **options: Any) -> Any:
        if "bomb" in sources[0]:
            raise SandboxDied("gone")
        return run_cases(sandbox, sources, *args, **options)

    monkeypatch.setattr("oncurve.rewards.programs.run_cases", fragile)
    bomb, right = graded(pool, ROW, "bomb = 1", SQUARE)
    assert (bomb.value, bomb.error) == (0.0, None)
    assert right.value == 1.0


def test_it_fits_into_a_weighted_sum(pool: SandboxPool) -> None:
    total = WeightedSum([Term(Programs(pool=pool), weight=2.0)])
    (reward,) = total([prompt_of(row=ROW)], [completion_of(f"```\n{SQUARE}\n```")])
    assert reward.value == 2.0
    assert reward.parts["correct"] == 1.0
    total.close()


def test_it_closes_its_own_pool_and_no_other(pool: SandboxPool) -> None:
    own = Programs(ProgramsReward(isolation="landlock", workers=1))
    assert own([prompt_of(row=ROW)], [completion_of(f"```\n{SQUARE}\n```")])[0].value == 1.0
    own.close()
    own.close()
    Programs(pool=pool).close()
    assert values(pool, ROW, SQUARE) == [1.0]


def test_importing_it_brings_neither_torch_nor_transformers() -> None:
    import subprocess

    code = "import sys, oncurve.rewards.programs; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.strip() == "[]"


@pytest.mark.skipif(not HUMANEVAL.exists(), reason="the public data sets are not at ../shared/data beside the project")
def test_every_reference_solution_of_humaneval_is_paid(pool: SandboxPool) -> None:
    rows = [json.loads(line) for line in HUMANEVAL.read_text(encoding="utf-8").splitlines()]
    reward = Programs(limits=Limits(wall_seconds=20.0), pool=pool)
    texts = [f"```python\n{row['prompt']}{row['canonical_solution']}\n```" for row in rows]
    prompts = [prompt_of(row=row, index=number) for number, row in enumerate(rows)]
    rewards = reward(prompts, [completion_of(text) for text in texts])
    unpaid = [(row["task_id"], graded.detail) for row, graded in zip(rows, rewards, strict=True) if graded.value != 1.0]
    assert unpaid == []
