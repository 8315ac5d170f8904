"""Tests are read from the rows of the usual data sets, and rows that hold none say so."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from oncurve.sandbox.program_tests import (
    ProgramCase,
    ProgramCases,
    TestProgram,
    UnusableTests,
    read_tests,
    sources_of,
    starts_of,
)

HUMANEVAL = {
    "prompt": 'import math\n\ndef helper(x):\n    return x\n\ndef f(x: int) -> int:\n    """ Twice. """\n',
    "entry_point": "f",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 4\n",
}


def cases(row: dict[str, Any]) -> ProgramCases:
    tests = read_tests(row)
    assert isinstance(tests, ProgramCases)
    return tests


def program(row: dict[str, Any]) -> TestProgram:
    tests = read_tests(row)
    assert isinstance(tests, TestProgram)
    return tests


def test_humaneval() -> None:
    tests = program(HUMANEVAL)
    assert (tests.style, tests.entry_point, tests.count) == ("check", "f", 2)
    assert tests.setup == (HUMANEVAL["prompt"],)


def test_mbpp() -> None:
    row = {
        "test_list": ["assert f(1) == 2", "f(2) == 4"],
        "test_setup_code": "import math",
        "test_imports": ["import re"],
    }
    tests = program(row)
    assert (tests.style, tests.entry_point, tests.count) == ("asserts", None, 2)
    assert tests.setup == ("import re", "import math")
    assert tests.code == "assert f(1) == 2\nassert f(2) == 4"


@pytest.mark.proves("F85")
def test_apps() -> None:
    written = {"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", ["4"]]}
    tests = cases({"input_output": json.dumps(written)})
    assert tests.function is None
    assert [(case.stdin, case.expected) for case in tests.cases] == [("1\n", "2\n"), ("2\n3", "4")]
    called = cases({"input_output": {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [3]}})
    assert called.function == "f"
    assert called.cases[0].args == (1, ["l", 2])
    wrapped = cases({"input_output": {"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [[{"3": [4]}]]}})
    text, number = ["d", "3", ["l", 4]], ["d", 3, ["l", 4]]
    assert wrapped.cases == (ProgramCase((["d", 1, 2],), {}, "", ["l", text], (text, ["l", number], number)),)
    signed = cases({"input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [{"-3": 4, "01": 1}]}})
    assert signed.cases == (ProgramCase((1,), {}, "", ["d", "-3", 4, "01", 1], ()),), "01 is no number of JSON's"


def test_columns_of_inputs_and_outputs() -> None:
    tests = cases({"inputs": '["1", "2"]', "outputs": ["2", "4"]})
    assert [case.stdin for case in tests.cases] == ["1", "2"]


def test_lists_of_cases() -> None:
    row = {"tests": [{"input": {"x": 1}, "output": (1, 2)}, {"input": "ab", "output": None}], "fn_name": "f"}
    tests = cases(row)
    assert tests.cases[0].kwargs == {"x": 1}
    assert tests.cases[1].args == ("ab",)
    assert cases({"tests": [[[1, 2], 3]], "entry_point": "f"}).cases[0].args == (1, 2)


def test_unittest() -> None:
    code = "import unittest as u\nclass T(u.TestCase):\n    def test_a(self): self.assertTrue(f())\n"
    code += "    def test_b(self): pass"
    tests = program({"unittest": code})
    assert (tests.style, tests.count) == ("unittest", 2)


@pytest.mark.proves("F85")
def test_a_named_column_is_the_only_one_looked_at() -> None:
    row = {"test_list": ["assert f() == 1"], "hidden": ["assert f() == 2", "assert f() == 3"]}
    assert read_tests(row, column="hidden").count == 2
    with pytest.raises(UnusableTests, match="looked for absent"):
        read_tests(row, column="absent")


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"tests": []},
        {"test_list": ""},
        {"test_list": ["assert f( == 1"]},
        {"test": "def check(candidate):\n    assert candidate(1)\n"},
        {"test": "x = 1", "entry_point": "f"},
        {"input_output": '{"inputs": [1]}'},
        {"input_output": {"inputs": ["1"], "outputs": ["1", "2"]}},
        {"inputs": ["1"]},
        {"inputs": "not json", "outputs": "[]"},
        {"tests": [{"input": [1]}], "entry_point": "f"},
        {"tests": [{"input": [1], "output": object()}], "entry_point": "f"},
        {"tests": [1, 2], "entry_point": "f"},
        {"tests": [[1, 2, 3]], "entry_point": "f"},
        {"test": "assert f()\0", "entry_point": "f"},
    ],
)
def test_rows_without_usable_tests_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(UnusableTests):
        read_tests(row)


def test_a_prompt_that_is_code_lends_its_imports_and_helpers() -> None:
    assert starts_of(HUMANEVAL["prompt"], "f") == "import math\n\ndef helper(x):\n    return x\n"
    assert sources_of("def f(x):\n    return 2", HUMANEVAL)[0].startswith("import math")
    assert sources_of("def f(x):\n    return 2", HUMANEVAL)[1] == "def f(x):\n    return 2"
    assert sources_of("    return 2 * x", HUMANEVAL) == [HUMANEVAL["prompt"] + "    return 2 * x"]
    assert sources_of("return 2 * x", HUMANEVAL) == [HUMANEVAL["prompt"] + "    return 2 * x"]
    assert sources_of("f = lambda x: 2", HUMANEVAL)[1] == "f = lambda x: 2"
    assert sources_of("x = 1", {"prompt": "Write f.", "entry_point": "f"}) == ["x = 1"]
    assert sources_of("def f_2(x): pass", HUMANEVAL) == [HUMANEVAL["prompt"] + "    def f_2(x): pass"]


def _packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_packed_private_tests_are_read_beside_the_public_ones() -> None:
    public = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
    private = [{"input": "2\n", "output": "3\n", "testtype": "stdin"}]
    row = {"public_test_cases": json.dumps(public), "private_test_cases": _packed(json.dumps(private))}
    tests = read_tests(row)
    assert isinstance(tests, ProgramCases)
    assert [case.stdin for case in tests.cases] == ["1\n", "2\n"]


def test_a_packed_object_is_refused_and_never_built(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "made"),)

    public = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
    with pytest.raises(UnusableTests):
        read_tests({"public_test_cases": json.dumps(public), "private_test_cases": _packed(Hostile())})
    assert not (tmp_path / "made").exists()


def test_a_class_solution_finds_the_imports_of_its_judges() -> None:
    program = "class Solution:\n    def f(self, a: List[int]) -> int:\n        return sum(a)"
    sources = sources_of(program, {"fn_name": "f"})
    assert sources[1] == program
    assert "from typing import *" in sources[0]
    assert sources_of("def f(a): ...", {"fn_name": "f"}) == ["def f(a): ..."]
