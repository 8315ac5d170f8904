"""Tests of a program, read from a row of a data set."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oncurve.sandbox.inside.assertions import one_result_each
from oncurve.sandbox.inside.codec import Payload, encode

Style = Literal["asserts", "check", "unittest"]
"""Plain assertions, a function ``check(candidate)`` that asserts, or classes of unittest."""

COLUMNS = ("test_list", "tests", "test_cases", "input_output", "inputs", "test", "unittest", "test_code")
"""Where tests are looked for, in this order, when no column is named."""
_ENTRY_POINTS = ("entry_point", "fn_name", "function")
_SETUPS = ("test_imports", "test_setup_code", "setup")


class UnusableTests(ValueError):
    """The row holds no tests, or tests that nobody could run."""


@dataclass(frozen=True, slots=True)
class ProgramCase:
    """One input and what must come of it."""

    args: tuple[Payload, ...]
    """Positional arguments; empty for a script."""
    kwargs: Mapping[str, Payload]
    """Named arguments."""
    stdin: str
    """Standard input of a script; empty for a call."""
    expected: Payload
    """The value that the call returns, or the output of the script. It never enters a sandbox."""


@dataclass(frozen=True, slots=True)
class ProgramCases:
    """Inputs with expected results; they are compared outside of every sandbox."""

    function: str | None
    """The function to call; None runs the program as a script."""
    cases: tuple[ProgramCase, ...]
    """At least one."""

    @property
    def count(self) -> int:
        """Number of tests."""
        return len(self.cases)


@dataclass(frozen=True, slots=True)
class TestProgram:
    """Code that tests a program by calling it; it runs in a sandbox of its own."""

    __test__ = False

    code: str
    style: Style
    entry_point: str | None
    """Name of the tested function; None if the code calls the program by its names."""
    setup: tuple[str, ...]
    """Code that runs before, such as imports; what it defines is not taken from the program."""
    count: int
    """Number of tests as written; a test in a loop counts as often as it runs."""


Tests = ProgramCases | TestProgram


def read_tests(row: Mapping[str, Any], *, column: str | None = None) -> Tests:
    """The tests of a row, whatever common form they are in.

    Understood are lists of assertions (MBPP), ``check(candidate)`` with ``entry_point`` (HumanEval), inputs with
    outputs (APPS: ``{"inputs", "outputs", "fn_name"}``, or a list of ``{"input", "output"}``), unittest classes and any
    code with assertions; JSON text is read first.

    Raises UnusableTests.
    """
    name = column or next((name for name in COLUMNS if row.get(name)), None)
    if name is None or not row.get(name):
        raise UnusableTests(f"no tests in the row: looked for {column or ', '.join(COLUMNS)}")
    value = {"inputs": row[name], "outputs": row.get("outputs")} if name == "inputs" else _from_json(row[name])
    entry_point = next((str(row[key]) for key in _ENTRY_POINTS if row.get(key)), None)
    try:
        return _read(value, entry_point, row)
    except UnusableTests:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise UnusableTests(f"column {name!r}: {type(error).__name__}: {error}") from error


def _from_json(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _read(value: Any, entry_point: str | None, row: Mapping[str, Any]) -> Tests:
    if isinstance(value, Mapping):
        function = value.get("fn_name") or entry_point
        pairs = list(zip(_listed(value["inputs"]), _listed(value["outputs"]), strict=True))
        return _cases(pairs, function)
    if isinstance(value, str):
        return _code(value, entry_point, row)
    items = list(value)
    if all(isinstance(item, str) for item in items):
        return _code("\n".join(_as_assertion(item) for item in items), entry_point, row)
    pairs = [(item["input"], item["output"]) if isinstance(item, Mapping) else tuple(item) for item in items]
    return _cases(pairs, entry_point)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str):
        value = json.loads(value)
    return list(value)


def _cases(pairs: Sequence[tuple[Any, Any]], function: str | None) -> ProgramCases:
    if not pairs:
        raise UnusableTests("the list of tests is empty")
    if function is None:
        return ProgramCases(
            None, tuple(ProgramCase((), {}, _joined(given), _joined(wanted)) for given, wanted in pairs)
        )
    cases = []
    for given, wanted in pairs:
        named = {str(key): encode(item) for key, item in given.items()} if isinstance(given, Mapping) else {}
        args = () if named else tuple(given) if isinstance(given, list | tuple) else (given,)
        cases.append(ProgramCase(tuple(encode(item) for item in args), named, "", encode(wanted)))
    return ProgramCases(function, tuple(cases))


def _joined(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _as_assertion(line: str) -> str:
    """A test as a statement; a bare expression is what should be true."""
    try:
        ast.parse(line.strip(), mode="eval")
    except SyntaxError:
        return line
    return f"assert {line.strip()}"


def _code(code: str, entry_point: str | None, row: Mapping[str, Any]) -> TestProgram:
    try:
        tree = ast.parse(code)
        count = one_result_each(code)[1]
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UnusableTests(f"the test code cannot be parsed: {error}") from error
    style: Style = "asserts"
    if any(isinstance(node, ast.ClassDef) and _is_test_case(node) for node in tree.body):
        style = "unittest"
        count = sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test") for node in ast.walk(tree))
    elif any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        style = "check"
        if entry_point is None:
            raise UnusableTests("check(candidate) needs a column entry_point with the function's name")
    if count == 0:
        raise UnusableTests("the test code holds no assertion")
    return TestProgram(code, style, entry_point, (*_setup(row), *_context(row, entry_point)), count)


def _is_test_case(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split(".")[-1].endswith("TestCase") for base in node.bases)


def _setup(row: Mapping[str, Any]) -> list[str]:
    found = (row.get(name) for name in _SETUPS)
    return [text for value in found if value for text in ([value] if isinstance(value, str) else list(value))]


def _context(row: Mapping[str, Any], entry_point: str | None) -> list[str]:
    """The task's own code, if the prompt is code that begins the tested function, as in HumanEval.

    Test code may call the helpers that are defined there; they must be the task's, not what the program calls so.
    """
    prompt = row.get("prompt")
    is_code = isinstance(prompt, str) and entry_point is not None and starts_of(prompt, entry_point) is not None
    return [str(prompt)] if is_code else []


def starts_of(prompt: str, entry_point: str) -> str | None:
    """What a prompt that is code has before the tested function: imports and helpers; None if it is no such prompt."""
    try:
        tree = ast.parse(prompt)
    except (SyntaxError, ValueError, RecursionError):
        return None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            return "\n".join(prompt.splitlines()[: first - 1])
    return None


def sources_of(program: str, row: Mapping[str, Any]) -> list[str]:
    """What is run for a program: before it the imports and helpers of its task, if the prompt is code.

    A program that does not define the tested function is taken as the continuation of the prompt.
    """
    prompt, entry_point = row.get("prompt"), row.get("entry_point")
    if not isinstance(prompt, str) or not isinstance(entry_point, str):
        return [textwrap.dedent(program)]
    start = starts_of(prompt, entry_point)
    if start is None:
        return [textwrap.dedent(program)]
    name = re.escape(entry_point)
    definition = rf"^[ \t]*(?:(?:async[ \t]+)?def[ \t]+{name}\b|{name}[ \t]*=)"
    if re.search(definition, program, re.M):
        return [start, textwrap.dedent(program)]
    return [prompt + (program if program[:1].isspace() else textwrap.indent(program, "    "))]
