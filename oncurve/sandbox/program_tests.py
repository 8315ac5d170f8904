"""Tests of a program, read from a row of a data set."""

from __future__ import annotations

import ast
import base64
import json
import pickletools
import re
import textwrap
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from oncurve.sandbox.inside.assertions import free_names, imported_from_solution, result_per_assertion, uncalled_tests
from oncurve.sandbox.inside.codec import Payload, encode

Style = Literal["asserts", "check", "unittest", "pytest"]
"""Plain assertions, a function ``check(candidate)`` that asserts, classes of unittest, or functions ``test_...``."""

COLUMNS = (
    "test_list", "tests", "test_cases", "input_output", "public_test_cases", "inputs", "test", "unittest", "test_code",
)  # fmt: skip
"""Columns in which tests are looked for, in this order, when none is named."""
_ENTRY_POINTS = ("entry_point", "fn_name", "func_name", "function")
_ANY_TYPE = ("testtype", "type")
MISSING: Payload = ["missing"]
"""In the place of an output that a row does not give."""
MAX_UNPACKED_BYTES = 256 * 2**20
"""Largest size of the tests of one row after decompression."""
_SOLUTION_IMPORTS = """from typing import *
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, nlargest, nsmallest
from itertools import accumulate, chain, combinations, groupby, pairwise, permutations, product
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log2, sqrt
"""
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
    """The value that the call returns, or the output of the script. It never enters the program's sandbox."""
    also: tuple[Payload, ...] = ()
    """Values that count as the expected one, where a data set writes it in a wrapper."""


@dataclass(frozen=True, slots=True)
class ProgramCases:
    """Inputs with expected results; they are compared outside of every sandbox."""

    function: str | None
    """The function to call; None runs the program as a script."""
    cases: tuple[ProgramCase, ...]
    """At least one."""
    checker: str | None = None
    """Code with a function ``check(input, output, expected)`` that decides instead of equality; None: equality."""

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


def read_tests(row: Mapping[str, Any], *, column: str | None = None, checker: str | None = None) -> Tests:
    """The tests of a row, whatever common form they are in.

    Understood are lists of assertions (MBPP), ``check(candidate)`` with ``entry_point`` (HumanEval), inputs with
    outputs (APPS and TACO: ``{"inputs", "outputs", "fn_name"}``; LiveCodeBench and others: a list of ``{"input",
    "output"}`` with a ``testtype`` or ``type``, its packed private tests too), unittest classes, functions of pytest
    without fixtures, and any code with assertions; JSON text is read first. With a ``checker`` outputs may be missing.

    Raises UnusableTests.
    """
    name = column or next((name for name in COLUMNS if row.get(name)), None)
    if name is None or not row.get(name):
        raise UnusableTests(f"no tests in the row: looked for {column or ', '.join(COLUMNS)}")
    try:
        value = {"inputs": row[name], "outputs": row.get("outputs")} if name == "inputs" else _from_json(row[name])
        if name == "public_test_cases" and row.get("private_test_cases"):
            value = [*value, *_from_json(row["private_test_cases"])]
        tests = _read(value, _entry_point(row), row)
        if checker is None:
            if isinstance(tests, ProgramCases) and any(case.expected is MISSING for case in tests.cases):
                raise UnusableTests(f"column {name!r}: a test has no output, and the row has no checker")
            return tests
        if not isinstance(tests, ProgramCases):
            raise UnusableTests("a checker judges inputs and outputs, and these tests are code")
        return replace(tests, checker=checker)
    except UnusableTests:
        raise
    except (ValueError, TypeError, KeyError, zlib.error) as error:
        raise UnusableTests(f"column {name!r}: {type(error).__name__}: {error}") from error


def _from_json(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("eJ") and len(value) > 16:
        value = _unpacked(value)
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _unpacked(text: str) -> str:
    """The JSON text in LiveCodeBench's private tests: base64 of zlib, around a pickle of one text, which is not run."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError(f"the packed tests have more than {MAX_UNPACKED_BYTES // 2**20} MiB")
    if not data.startswith(b"\x80"):
        return data.decode()
    texts = [argument for operation, argument, _ in pickletools.genops(data) if operation.name.endswith("BINUNICODE")]
    if len(texts) != 1:
        raise ValueError("the packed tests are not one text")
    return str(texts[0])


def _entry_point(row: Mapping[str, Any]) -> str | None:
    """The function that a row names; a method is meant by ``Solution().f`` as by ``f``."""
    named = next((str(row[key]) for key in _ENTRY_POINTS if row.get(key)), None)
    metadata = _from_json(row.get("metadata"))
    if named is None and isinstance(metadata, Mapping):
        named = next((str(metadata[key]) for key in _ENTRY_POINTS if metadata.get(key)), None)
    return None if named is None else re.sub(r"^Solution(?:\(\))?\.", "", named.strip())


def _read(value: Any, entry_point: str | None, row: Mapping[str, Any]) -> Tests:
    if isinstance(value, Mapping):
        function = _entry_point(value) or entry_point
        inputs = _listed(value["inputs"])
        outputs = _listed(value["outputs"]) if value.get("outputs") is not None else [MISSING] * len(inputs)
        return _cases(list(zip(inputs, outputs, strict=True)), function, is_wrapped=_all_wrapped(outputs))
    if isinstance(value, str):
        return _code(value, entry_point, row)
    items = list(value)
    if items and all(isinstance(item, str) for item in items):
        return _code("\n".join(_as_assertion(item) for item in items), entry_point, row)
    if not any(isinstance(item, Mapping) and any(key in item for key in _ANY_TYPE) for item in items):
        pairs = [
            (item["input"], item.get("output", MISSING)) if isinstance(item, Mapping) else tuple(item) for item in items
        ]
        return _cases(pairs, entry_point)
    return _typed_cases(items, entry_point)


def _typed_cases(items: Sequence[Mapping[str, Any]], entry_point: str | None) -> ProgramCases:
    """Cases that say themselves whether they are for a function or a script, such as those of LiveCodeBench."""
    kinds = {str(item.get("testtype") or item.get("type")).lower() for item in items}
    if kinds <= {"stdin", "stdin_stdout", "stdio"}:
        return _cases([(item["input"], item.get("output", MISSING)) for item in items], None)
    if not kinds <= {"functional", "function_call", "function"}:
        raise UnusableTests(f"tests of the types {', '.join(sorted(kinds))}; known are stdin and functional")
    names = {_entry_point(item) for item in items} - {None}
    if len(names) > 1:
        raise UnusableTests("the tests of one row call different functions")
    function = next(iter(names), None) or entry_point
    if function is None:
        raise UnusableTests("functional tests need the function's name: fn_name, entry_point or metadata.func_name")
    pairs = [(_arguments(item["input"]), _as_value(item.get("output", MISSING))) for item in items]
    return _cases(pairs, function, is_wrapped=_all_wrapped([expected for _, expected in pairs]))


def _arguments(value: Any) -> Any:
    """The arguments of a call, of which text holds one per line as JSON."""
    if not isinstance(value, str):
        return value
    return [_as_value(line) for line in value.split("\n") if line.strip()]


def _as_value(text: Any) -> Any:
    """The value of JSON text; any other text as it is."""
    if isinstance(text, str):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _all_wrapped(outputs: Sequence[Any]) -> bool:
    """Every output is a list of one: a wrapper of APPS, unless the function returns such lists."""
    return (
        bool(outputs)
        and MISSING not in outputs
        and all(isinstance(output, list | tuple) and len(output) == 1 for output in outputs)
    )


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str):
        value = json.loads(value)
    return list(value)


def _cases(pairs: Sequence[tuple[Any, Any]], function: str | None, *, is_wrapped: bool = False) -> ProgramCases:
    if not pairs:
        raise UnusableTests("the list of tests is empty")
    if function is None:
        return ProgramCases(
            None, tuple(ProgramCase((), {}, _joined(value), _joined(expected_value)) for value, expected_value in pairs)
        )
    cases = []
    for inputs, expected_value in pairs:
        named = {str(key): encode(item) for key, item in inputs.items()} if isinstance(inputs, Mapping) else {}
        args = () if named else tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
        accepted = [expected_value, *([expected_value[0]] if is_wrapped else [])]
        accepted += [_with_integer_keys(value) for value in accepted]
        expected, *also = [MISSING] if expected_value is MISSING else [encode(value) for value in accepted]
        arguments = tuple(encode(_with_integer_keys(item)) for item in args)
        cases.append(ProgramCase(arguments, named, "", expected, tuple(value for value in also if value != expected)))
    return ProgramCases(function, tuple(cases))


def _with_integer_keys(value: Any) -> Any:
    """A value with integers for keys that JSON could only write as text."""
    if isinstance(value, list | tuple):
        return type(value)(map(_with_integer_keys, value))
    if not isinstance(value, Mapping):
        return value
    is_integer = value and all(isinstance(key, str) and re.fullmatch(r"0|-?[1-9]\d{0,18}", key) for key in value)
    return {(int(key) if is_integer else key): _with_integer_keys(item) for key, item in value.items()}


def _joined(value: Any) -> Any:
    if value is MISSING:
        return value
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
        count = result_per_assertion(code)[1]
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
    elif functions := uncalled_tests(tree):
        style, count = "pytest", len(functions)
        for function in functions:
            _check_arguments(function)
    if count == 0:
        raise UnusableTests("the test code holds no assertion")
    return TestProgram(code, style, entry_point, (*_setup(row), *_context(row, entry_point)), count)


def _check_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Refuses a test of pytest that needs a fixture."""
    provided = {
        name.strip()
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize") and decorator.args
        for name in _names_of(decorator.args[0])
    }
    needed = [argument.arg for argument in function.args.args if argument.arg not in {*provided, "self"}]
    if needed:
        raise UnusableTests(f"{function.name} needs the fixture {needed[0]!r}, and fixtures are not run")


def _names_of(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant):
        return str(node.value).split(",")
    elements = node.elts if isinstance(node, ast.List | ast.Tuple) else []
    return [str(element.value) for element in elements if isinstance(element, ast.Constant)]


def _is_test_case(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split(".")[-1].endswith("TestCase") for base in node.bases)


def _setup(row: Mapping[str, Any]) -> list[str]:
    values = (row.get(name) for name in _SETUPS)
    return [text for value in values if value for text in ([value] if isinstance(value, str) else list(value))]


def _context(row: Mapping[str, Any], entry_point: str | None) -> list[str]:
    """The task's own code, if the prompt is code that begins the tested function, as in HumanEval.

    Test code may call the helpers that are defined there; they must be the task's, not what the program calls so.
    """
    prompt = row.get("prompt")
    is_code = isinstance(prompt, str) and entry_point is not None and starts_of(prompt, entry_point) is not None
    return [str(prompt)] if is_code else []


def starts_of(prompt: str, entry_point: str) -> str | None:
    """Imports and helpers before the tested function in a prompt that is code; None if it is no such prompt."""
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
    """The source that is run for a program: before it the imports and helpers of its task, if the prompt is code.

    A program that does not define the tested function is taken as the continuation of the prompt. A class ``Solution``
    finds the modules and types that its judges import for it.
    """
    prompt, entry_point = row.get("prompt"), row.get("entry_point")
    start = None
    if isinstance(prompt, str) and isinstance(entry_point, str):
        start = starts_of(prompt, entry_point)
    if start is None or not isinstance(prompt, str) or not isinstance(entry_point, str):
        is_solution = re.search(r"^\s*class\s+Solution\b", program, re.M) is not None
        return [*([_SOLUTION_IMPORTS] if is_solution else []), textwrap.dedent(program)]
    name = re.escape(entry_point)
    definition = rf"^[ \t]*(?:(?:async[ \t]+)?def[ \t]+{name}\b|{name}[ \t]*=)"
    if re.search(definition, program, re.M):
        return [start, textwrap.dedent(program)]
    return [prompt + (program if program[:1].isspace() else textwrap.indent(program, "    "))]


def names_of(tests: Tests) -> set[str]:
    """The names that tests expect a program to define, as far as they say so."""
    if isinstance(tests, ProgramCases):
        return {tests.function, "Solution"} if tests.function else set()
    if tests.entry_point is not None:
        return {tests.entry_point, "Solution"}
    return free_names(tests.code) | imported_from_solution(tests.code)
