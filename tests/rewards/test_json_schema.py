"""JSON pays when it is strictly JSON, valid, and what the row asks for."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cpu_time import assert_ends_within
from reward_records import completion_of, prompt_of

from oncurve.core.errors import ConfigError
from oncurve.core.records import Reward
from oncurve.recipe.load import parse_config
from oncurve.rewards.json_schema import JsonSchema
from oncurve.rewards.section import Surroundings
from oncurve.rewards.strict_json import fields_fraction, json_text, parse_json
from oncurve.rewards.validation import SchemaChecker

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANN = '{"name": "Ann", "age": 7}'


@pytest.fixture(scope="module")
def checker() -> Iterator[SchemaChecker]:
    sys.path.append(str(Path(__file__).parent))
    shared = SchemaChecker(timeout_seconds=2.0)
    yield shared
    shared.close()
    sys.path.remove(str(Path(__file__).parent))


def rewards_of(checker: SchemaChecker, *texts: str, row: dict[str, Any] | None = None, **options: Any) -> list[Reward]:
    if not options.keys() & {"model", "schema_column"}:
        options.setdefault("schema", PERSON)
    function = JsonSchema(checker=checker, **options)
    return function([prompt_of(row=row or {})] * len(texts), [completion_of(text) for text in texts])


def values_of(checker: SchemaChecker, *texts: str, **options: Any) -> list[float | None]:
    return [reward.value for reward in rewards_of(checker, *texts, **options)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NaN",
        "[Infinity]",
        "1e999",
        '{"a": 1, "a": 2}',
        "1" * 101,
        "0." + "1" * 101,
        "[" * 65 + "]" * 65,
        "[" * 20_000,
        '"' + '\\"' * 20_000,
        "{} {}",
        "{'a': 1}",
        "[1,]",
        "// no\n1",
        "\ud800",
        "\x00",
        '"\x01"',
    ],
)
def test_what_only_a_lenient_reader_takes_is_no_json(text: str) -> None:
    def refused() -> None:
        with pytest.raises(ValueError, match=r"\w"):
            parse_json(text)

    assert_ends_within(0.5, refused)


def test_brackets_within_strings_are_not_nesting() -> None:
    text = "[" * 1000 + '\\"'
    assert parse_json(f'["{text}"]') == ["[" * 1000 + '"']
    assert parse_json("[" * 64 + "]" * 64)


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("{}", ("{}", "{}", "{}")),
        (" <think> {1} </think>\n {} \n", ("{}", "{}", "{}")),
        ("```json\n{}\n```", (None, "{}", "{}")),
        ("~~~\r\n{}\r\n~~~\n", (None, "{}", "{}")),
        ("```python\n{}\n```", (None, None, None)),
        ("```json\n{}\n", (None, None, "{}")),
        ("```json\n{}\n```\nDone.", (None, None, "{}")),
        ("So:\n```json\n{}\n```", (None, None, "{}")),
        ("```json\n{}\n```\n```json\n[]\n```", (None, None, "[]")),
        ("So {}", (None, None, "{}")),
        ('Here [1]: {"a": [2]} Done', (None, None, '{"a": [2]}')),
        ('First {} then {"a": 1}', (None, None, '{"a": 1}')),
        ("Only [1, 2] here", (None, None, "[1, 2]")),
        ("<think>{} is it", (None, None, None)),
        ("```json\n{}\n```</answer>", (None, None, "{}")),
        ("{} and so on", (None, None, "{}")),
        ("x" * 60_000, (None, None, None)),
    ],
)
def test_text_around_json_is_refused_unless_asked_for(text: str, texts: tuple[str | None, ...]) -> None:
    for around, expected in zip(("nothing", "fence", "text"), texts, strict=True):
        part = json_text(text, around=around)  # type: ignore[arg-type]
        try:
            assert part is not None
            parse_json(part)
        except (AssertionError, ValueError):
            part = None
        assert part == expected, around


def test_json_can_stand_in_the_answer_tag(checker: SchemaChecker) -> None:
    texts = [f"<think> a </think> <answer> {ANN} </answer>", ANN]
    assert values_of(checker, *texts, answer_from="answer_tag") == [1.0, 0.0]


@pytest.mark.proves("F107")
def test_only_valid_json_pays(checker: SchemaChecker) -> None:
    texts = [ANN, '{"name": "Ann"}', '{"name": "ann", "age": 7}', '{"name": "Ann", "age": true}', "x", f"{ANN} ok"]
    assert values_of(checker, *texts) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    reward = rewards_of(checker, *texts[1:])
    assert all(graded.parts["format"] == 0.0 and graded.detail for graded in reward)


def test_graded_pays_for_json_then_keys_then_contents(checker: SchemaChecker) -> None:
    texts = ["x", "[]", '{"name": "Ann"}', '{"name": "Ann", "age": 1, "b": 2}', '{"name": "Ann", "age": -1}', ANN]
    assert values_of(checker, *texts, scale="graded") == [0.0, 0.2, 0.2, 0.2, 0.5, 1.0]


def test_a_reference_must_be_equalled(checker: SchemaChecker) -> None:
    row = {"answer": {"name": "Ann", "age": 7}}
    texts = ['{"age": 7.0, "name": "Ann"}', '{"name": "Ann", "age": 8}', '{"name": "Ann"}']
    assert values_of(checker, *texts, row=row) == [1.0, 0.0, 0.0]
    assert values_of(checker, *texts, row=row, scale="graded") == [1.0, 0.75, 0.2]
    assert [graded.parts["fields_fraction"] for graded in rewards_of(checker, *texts, row=row)] == [1.0, 0.5, 0.5]
    assert values_of(checker, texts[1], row=row, gold_column=None) == [1.0]
    assert values_of(checker, ANN, row={"answer": ANN}) == [1.0]


def test_every_field_too_many_costs_as_one_too_few() -> None:
    gold = {"a": 1, "b": {"c": [1, 2]}, "d": {}}
    assert fields_fraction(gold, gold) == 1.0
    assert fields_fraction({"a": 1}, gold) == 0.25
    assert fields_fraction({**gold, "e": 1}, gold) == 0.8
    assert fields_fraction({"a": True, "b": {"c": [2, 1]}, "d": []}, gold) == 0.0
    assert fields_fraction([], {}) == 0.0
    assert fields_fraction("1", 1) == 0.0


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"schema": "{"},
        {"schema": {"type": "objekt"}},
        {"schema": {"pattern": "("}},
        {"schema": {"$ref": "https://example.com/schema.json"}},
        {"schema": {"$ref": "file:///etc/passwd"}},
        {"schema": {"$ref": "#/$defs/missing"}},
        {"schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"schema": [1]},
        {"schema": True, "answer": "{"},
        {"schema": {"type": "integer"}, "answer": "x"},
        {"schema": {"type": "integer"}, "answer": '"x"'},
        {"schema": True, "answer": {1, 2}},
    ],
    ids=str,
)
def test_a_row_at_fault_is_an_error_whatever_the_completion(row: dict[str, Any], checker: SchemaChecker) -> None:
    assert [graded.error for graded in rewards_of(checker, "1", row=row, schema_column="schema")] == [
        "unparsable_reference"
    ]


def test_a_schema_may_refer_to_itself(checker: SchemaChecker) -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": False}
    deep = '{"left": ' * 60 + "{}" + "}" * 60
    assert values_of(checker, deep, '{"left": 1}', row={"s": json.dumps(tree)}, schema_column="s") == [1.0, 0.0]


def test_formats_are_asserted(checker: SchemaChecker) -> None:
    assert values_of(checker, '"2026-02-28"', '"2026-02-31"', schema={"type": "string", "format": "date"}) == [1.0, 0.0]


def test_a_value_that_hangs_the_schema_is_wrong_and_costs_its_time_only(checker: SchemaChecker) -> None:
    started = time.monotonic()
    schema = {"type": "string", "pattern": "^(a+)+$"}
    good, bad = rewards_of(checker, '"aaa"', json.dumps("a" * 40 + "b"), schema=schema)
    assert good.value == 1.0
    assert (bad.value, bad.error, bad.parts["over_limit"]) == (0.0, None, 1.0)
    assert time.monotonic() - started < 60.0  # it would not end in years


@pytest.mark.proves("F107")
def test_a_model_is_strict_and_refuses_more_keys(checker: SchemaChecker) -> None:
    texts = [
        ANN,
        '{"name": "Ann", "age": "7"}',
        '{"name": "Ann", "age": true}',
        '{"name": "Ann", "age": 7, "b": 1}',
        '{"name": "Ann", "age": 7, "address": {"city": "Ulm", "b": 1}}',
        '{"name": "\\ud800", "age": 7}',
        "[]",
    ]
    options: dict[str, Any] = {"model": "schema_models:Person", "scale": "graded"}
    assert values_of(checker, *texts, **options) == [1.0, 0.5, 0.5, 0.2, 0.5, 0.5, 0.2]


def test_a_model_may_allow_more_keys(checker: SchemaChecker) -> None:
    assert values_of(checker, '{"name": "Ann", "b": 1}', model="schema_models:Open") == [1.0]


def test_a_broken_validator_is_an_error(checker: SchemaChecker) -> None:
    rewards = rewards_of(checker, '{"name": "known"}', '{"name": "other"}', model="schema_models:Broken")
    assert [graded.error for graded in rewards] == [None, "crashed"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schema": {}, "schema_column": "s"},
        {"schema": {"type": "objekt"}},
        {"schema": "{"},
        {"schema": {"$ref": "other.json"}},
        {"model": "schema_models"},
        {"model": "schema_models:Missing"},
        {"model": "schema_models:NOT_A_MODEL"},
        {"model": "no_such_module:Model"},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_used_is_told_before_the_run(options: dict[str, Any], checker: SchemaChecker) -> None:
    with pytest.raises(ConfigError, match="rewards: json_schema"):
        JsonSchema(checker=checker, **options)


def test_a_schema_that_an_empty_object_satisfies_is_pointed_out(
    checker: SchemaChecker, caplog: pytest.LogCaptureFixture
) -> None:
    JsonSchema(schema=PERSON, checker=checker)
    assert caplog.text == ""
    JsonSchema(model="schema_models:Optional", checker=checker)
    assert "accepts {}" in caplog.text


@pytest.mark.parametrize("as_text", [False, True])
def test_keys_that_a_data_set_filled_with_null_are_not_there(as_text: bool, checker: SchemaChecker) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    filled: Any = {"name": "A", "age": 3, "city": None}
    row = {"answer": json.dumps(filled) if as_text else filled}
    texts = ('{"name": "A", "age": 3}', '{"name": "A", "age": 4}', '{"name": "A"}')
    assert values_of(checker, *texts, schema=schema, row=row) == [1.0, 0.0, 0.0]


def test_what_is_only_thought_is_no_json(checker: SchemaChecker) -> None:
    texts = ('<think>{"a": 1}', '<think>{"a": 1}</think>', '<think>hm</think>{"a": 1}', '{"a": 1}</think> no')
    assert values_of(checker, *texts, schema={"type": "object", "required": ["a"]}, around="text") == [0, 0, 1, 0]


def test_a_recipe_may_write_the_schema_as_a_mapping() -> None:
    rewards = parse_config(
        "{model: embedded, data: {type: word_problems}, rewards: [{type: json_schema, gold_column: null, "
        "json_schema: {type: object, required: [a], properties: {a: {type: integer}}}}]}"
    ).rewards
    function = rewards[0].make(Surroundings())
    values = [function([prompt_of()], [completion_of(text)])[0].value for text in ('{"a": 1}', "{}")]
    function.close()
    assert values == [1.0, 0.0]
