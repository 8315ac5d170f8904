"""Does a fingerprint change with what a reward does, and with nothing else, and is it said what it cannot see?"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from oncurve.data.fingerprint import fingerprint, rows_fingerprint

MODULE = """
import re
from functools import partial

LIMIT = {limit}
WORDS = ["so", {word!r}]
PATTERN = re.compile({pattern!r})
COUNT = 0


def helper(text):
    return len(text) {operator} LIMIT


def plain(completion, answer):
    return float(answer in completion)


def with_helper(completion, answer):
    global COUNT
    COUNT += 1
    return float(helper(completion) and PATTERN.search(completion) is None and WORDS[0] in completion)


def made(weight):
    def reward(completion, answer):
        return weight * float(answer in completion)

    return reward


class Holder:
    def __init__(self, bonus):
        self.bonus = bonus
        self.calls = []

    def __call__(self, completion, answer):
        self.calls.append(completion)
        return self.bonus {operator} 1

    def method(self, completion, answer):
        return self.bonus


class Slotted:
    __slots__ = ("bonus",)

    def __init__(self, bonus):
        self.bonus = bonus

    def __call__(self, completion, answer):
        return self.bonus


async def awaited(completion, answer):
    return {limit}
"""
SAME = {"limit": 10, "word": "thus", "pattern": "a+", "operator": ">"}


def module(folder: Path, **changes: Any) -> Any:
    path = folder / "made_rewards.py"
    path.write_text(MODULE.format(**(SAME | changes)))
    spec = importlib.util.spec_from_file_location("made_rewards", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    import linecache

    linecache.checkcache()
    spec.loader.exec_module(made)
    return made


REWARDS = {
    "plain": lambda m: m.plain,
    "with_helper": lambda m: m.with_helper,
    "closure": lambda m: m.made(1.0),
    "object": lambda m: m.Holder(0.5),
    "method": lambda m: m.Holder(0.5).method,
    "slots": lambda m: m.Slotted(0.5),
    "partial": lambda m: partial(m.plain, answer="4"),
    "async": lambda m: m.awaited,
    "class": lambda m: m.Holder,
}
CHANGES: list[tuple[str, dict[str, Any], bool]] = [
    ("plain", {"limit": 11}, False),  # nothing that it uses
    ("with_helper", {"limit": 11}, True),
    ("with_helper", {"word": "hence"}, True),
    ("with_helper", {"pattern": "b+"}, True),
    ("with_helper", {"operator": "<"}, True),
    ("object", {"operator": "<"}, True),
    ("method", {"operator": "<"}, True),
    ("class", {"operator": "<"}, True),
    ("async", {"limit": 11}, True),
]


@pytest.mark.parametrize("kind", REWARDS)
def test_the_same_source_read_again_has_the_same_fingerprint(kind: str, tmp_path: Path) -> None:
    first = fingerprint(REWARDS[kind](module(tmp_path)))
    assert first.text == fingerprint(REWARDS[kind](module(tmp_path))).text
    assert first.unseen == []


@pytest.mark.parametrize(("kind", "changes", "is_other"), CHANGES)
def test_a_change_of_what_a_reward_uses_changes_it(
    kind: str, changes: dict[str, Any], is_other: bool, tmp_path: Path
) -> None:
    first = fingerprint(REWARDS[kind](module(tmp_path))).text
    (tmp_path / "other").mkdir()
    assert (fingerprint(REWARDS[kind](module(tmp_path / "other", **changes))).text != first) is is_other


def test_values_that_a_reward_was_made_with_count(tmp_path: Path) -> None:
    code = module(tmp_path)
    for make in (code.made, code.Holder, code.Slotted, lambda value: partial(code.plain, answer=value)):
        assert fingerprint(make(1.0)).text == fingerprint(make(1.0)).text
        assert fingerprint(make(1.0)).text != fingerprint(make(2.0)).text


def test_a_counter_of_its_own_does_not_count(tmp_path: Path) -> None:
    code = module(tmp_path)
    first = fingerprint(code.with_helper).text
    code.with_helper("aa", "b")
    assert fingerprint(code.with_helper).text == first


def test_it_is_said_what_cannot_be_seen() -> None:
    class Opaque:
        def __init__(self) -> None:
            self.inner = (number for number in range(3))

        def __call__(self, completion: str) -> float:
            return 1.0

    assert fingerprint(Opaque()).unseen == ["a value of type builtins.generator"]
    made: dict[str, Any] = {}
    exec("def reward(completion):\n    return 1.0", made)
    other: dict[str, Any] = {}
    exec("def reward(completion):\n    return 2.0", other)
    assert fingerprint(made["reward"]).unseen == ["reward, whose source cannot be read"]
    assert fingerprint(made["reward"]).text != fingerprint(other["reward"]).text  # by its code, as far as that goes


def test_an_object_that_holds_itself_comes_to_an_end() -> None:
    knot: list[Any] = [1]
    knot.append(knot)
    assert fingerprint(partial(max, knot)).text == fingerprint(partial(max, knot)).text


def test_rows_count_with_all_their_columns_in_any_order_of_columns() -> None:
    rows = [{"question": "2+3?", "tests": ["a"]}]
    assert rows_fingerprint(rows).text == rows_fingerprint([{"tests": ["a"], "question": "2+3?"}]).text
    assert rows_fingerprint(rows).text != rows_fingerprint([{"question": "2+3?", "tests": ["b"]}]).text
    assert rows_fingerprint([*rows, *rows]).text != rows_fingerprint(rows).text
    opaque = rows_fingerprint([{"question": "2+3?", "pattern": re.compile("a"), "image": object()}])
    assert opaque.unseen == ["a value of type builtins.object"]


def test_a_fingerprint_is_the_same_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "made_rewards.py").write_text(MODULE.format(**SAME))
    program = (
        "import made_rewards as m; from oncurve.data.fingerprint import fingerprint\n"
        "print(fingerprint(m.Holder({'b', 'a', 'c'})).text, fingerprint(m.with_helper).text)"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    }
    assert len(outputs) == 1


def test_an_object_that_has_an_attribute_of_every_name_is_looked_at() -> None:
    """As mocks have, and proxies of other modules: its ``__wrapped__`` leads nowhere."""

    class Proxy:
        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return [1.0 for _ in completions]

    assert fingerprint(Proxy()).text == fingerprint(Proxy()).text != fingerprint(print).text
