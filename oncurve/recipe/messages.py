"""Messages for mistakes in a recipe: the key, what was found, and what to do about it."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from oncurve.core.errors import ConfigError
from oncurve.data.settings import FILE_TYPES
from oncurve.recipe.schema import Config
from oncurve.wording import counted, listed


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every key that a recipe can set, with dots; those of all types of a choice."""
    for key, _ in _typed_keys(model, prefix, None):
        yield key


def _typed_keys(model: type[BaseModel], prefix: str, choice: str | None) -> Iterator[tuple[str, str | None]]:
    """Every key, and the type of the choice that it belongs to; None outside a choice."""
    for name, field in model.model_fields.items():
        sections = list(_sections(field.annotation))
        if not sections:
            yield f"{prefix}{name}", choice
        for section in sections:
            own = section.model_fields["type"].default if len(sections) > 1 and "type" in section.model_fields else None
            yield from _typed_keys(section, f"{prefix}{name}.", own)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections inside a type such as a union or a tuple of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, tuple):
        for part in typing.get_args(annotation):
            yield from _sections(part)


OTHER_SYSTEMS = (
    "Files of other systems are not read; docs/coming_from_trl.md has the keys of verl beside those of a recipe"
)
"""Advice for who brings a file of another system."""


def explain_yaml(error: Exception, text: str = "") -> str:
    """The fault in a text that is not YAML, and its line."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return f"not valid YAML: {' '.join(str(error).split())}"
    if "'\\t'" in str(error):
        return f"not valid YAML: line {mark.line + 1} is indented with a tab. Indent with spaces"
    problem = str(error.problem)
    explanation = next((text for known, text in _YAML_PROBLEMS.items() if known in problem), problem)
    where = f"line {mark.line + 1}, column {mark.column + 1}: {explanation}"
    return f"not valid YAML: {without_colon(text) or _misplaced(text, mark.line) or where}"


_KEY_ALONE = re.compile(r"(?P<key>-?[A-Za-z_][\w.]*)(?P<mark>\s*[:=]\s*|\s+|(?=$))(?P<value>[^:=]*)")


def _colon(text: str) -> str | None:
    """A key and its value as YAML has them, out of "key value", "key=value" or "key:value"; None for another text."""
    match = _KEY_ALONE.fullmatch(text.strip())
    if match is None or ": " in text:
        return None
    section, dot, key = match["key"].rpartition(".")
    return f"{section}: {{{key}: {match['value']}}}" if dot else f"{key}: {match['value']}".strip()


def without_colon(text: str) -> str | None:
    """The first line of a text with a key that no colon follows; None where there is none."""
    block = brackets = 0
    for number, line in enumerate(text.splitlines(), 1):
        plain = line.partition(" #")[0].strip()
        depth = len(line) - len(line.lstrip())
        block = 0 if depth < block else block
        if not block and not brackets and plain and not plain.endswith(":") and (written := _colon(plain)) is not None:
            return f"line {number} ({plain!r:.60}) has no colon with a space behind its key. Write {written}"
        brackets += sum(map(plain.count, "[{")) - sum(map(plain.count, "]}"))
        block = depth + 1 if plain.endswith(("|", ">")) else block
    return None


def _misplaced(text: str, index: int) -> str | None:
    """The indentation of a line that fits none above it; None where it fits."""
    lines = text.splitlines()[: index + 1]
    above = [line for line in lines[:-1] if line.strip()]
    is_inside = sum(
        line.count(mark) * sign for line in above for mark, sign in zip("[{]}", (1, 1, -1, -1), strict=True)
    )
    if not above or not lines[-1].strip() or is_inside:
        return None
    depth, *depths = (len(line) - len(line.lstrip(" ")) for line in (lines[-1], *above))
    line, last = f"line {index + 1} ({lines[-1].strip()!r:.60})", above[-1].strip()
    if depth > depths[-1] and not last.endswith(":"):
        return f"{line} is indented deeper than {last!r:.60} above it, which has its value. Begin both in one column"
    if depth < depths[-1] and depth not in depths:
        spaces = counted(depth, "space")
        return f"{line} is indented by {spaces}, as no line above it is. Put it below a key of its section"
    return None


def refuse_glued(tree: Any, key: str = "", *, source: str = "") -> None:
    """Raise ConfigError for ``{rank:8}`` and ``{rank 8}``, which YAML reads as keys without a value."""
    if isinstance(tree, list):
        tree = dict(enumerate(cast("list[Any]", tree)))
    for name, value in cast("dict[Any, Any]", tree).items() if isinstance(tree, dict) else ():
        where = "".join(f"{part}: " for part in (source, key.lstrip(".")) if part)
        before, brace, after = str(name).partition(" {")
        if value is None and (written := _colon(str(name))) is not None and written != f"{name}:":
            raise ConfigError(f"{where}{name!r} has no colon with a space behind its key. Write {{{written}}}")
        if brace:
            raise ConfigError(f"{where}{before!r} has no colon behind it. Write {before}: {{{after}: ...}}")
        refuse_glued(value, f"{key}.{name}", source=source)


_YAML_PROBLEMS = {
    "unexpected end of stream": "a quotation mark before this is not closed",
    "but got '<stream end>'": "a bracket or brace before this is not closed",
    "undefined alias": "a value that begins with * needs quotation marks",
    "determine a constructor": "tags such as !!python are not allowed; write a plain value",
    "mapping values are not allowed": "a colon is out of place: check the indentation, or quote the value",
    "did not find expected key": "the indentation or a comma is wrong here",
    "did not find expected ',' or": "a comma, bracket or brace is missing",
    "<block end>, but found '}'": "a brace too many",
    "<block end>, but found ']'": "a bracket too many",
    "expected alphabetic or numeric": "this character needs quotation marks around the value",
    "expected ',' or": "a comma, bracket or brace is missing",
    "expected the node content": "a value is missing here",
    "expected <document start>": "something follows the value; a list is written [a, b]",
    "expected '<document start>'": "something follows the value; a list is written [a, b]",
    "found another document": "--- begins a second recipe here; a file holds one",
    "block end": "the indentation is wrong here",
    "cannot start any token": "this character needs quotation marks around the value",
}
"""Explanations of the parser's findings, by words that they contain."""


def explain(error: ValidationError) -> Iterator[str]:
    """One line per problem: the key, what was found, what to do."""
    problems = error.errors()
    if (foreign := _of_other_system(problems)) is not None:
        yield foreign
        return
    for problem in _joined(problems):
        if problem["type"] == "too_short" and len(problems) > 1:
            continue  # a list whose only item is wrong also counts as empty
        # Places inside a choice carry the name of its type; the key as written in the recipe does not.
        parts = [str(part) for part in problem["loc"] if not str(part).startswith("literal[")]
        key = ".".join(part for index, part in enumerate(parts) if not _is_tag(parts, index))
        sentence = _SENTENCES.get(problem["type"])
        if problem["type"] == "truth_value":
            key = ".".join(filter(None, (key, str(problem.get("ctx", {}).get("key", "")))))
        if problem["type"] == "extra_forbidden" and "." in parts[0]:
            section, _, last = key.partition(".")
            yield f"{key}: keys with a dot are for the command line. In a file write {section}: {{{last}: ...}}"
        elif problem["type"] == "extra_forbidden":
            chosen = next((part for index, part in enumerate(parts) if _is_tag(parts, index)), None)
            yield _unknown(key, chosen, problem.get("input"))
        elif problem["type"] == "value_error":
            yield str(problem["msg"]).removeprefix("Value error, ")
        elif sentence is not None:
            yield f"{key}: {sentence(key, problem.get('input'), problem.get('ctx', {}))}"
        else:
            yield f"{key}: {_lower_first(str(problem['msg']))}; found {problem.get('input')!r:.80}"


def _joined(problems: Sequence[Any]) -> Iterator[Any]:
    """The problems of a recipe, those of a value that is in none of several lists of words as one."""
    words: dict[tuple[Any, ...], list[str]] = {}
    for problem in problems:
        if problem["type"] == "literal_error" and str(problem["loc"][-1]).startswith("literal["):
            words.setdefault(problem["loc"][:-1], []).append(str(problem["ctx"]["expected"]))
    for problem in problems:
        if (lists := words.get(problem["loc"][:-1], [])) and problem["type"] == "literal_error":
            if problem["ctx"]["expected"] == lists[0]:
                yield {**problem, "ctx": {"expected": ", ".join(lists).replace(" or ", ", ")}}
        else:
            yield problem


def _of_other_system(problems: Sequence[Any]) -> str | None:
    """The one line for a file without a model in which several keys are none of a recipe, nor misspelt ones."""
    strange = [str(p["loc"][0]) for p in problems if p["type"] == "extra_forbidden" and len(p["loc"]) == 1]
    strange = [key for key in strange if not difflib.get_close_matches(key, Config.model_fields, n=1, cutoff=0.7)]
    if len(strange) < 2 or not any(problem["loc"] == ("model",) for problem in problems):
        return None
    return (
        f"this is no recipe, but looks like a file of another system: {listed(strange[:4])} are no keys of a recipe, "
        f"and `model: NAME` is missing. {OTHER_SYSTEMS}; options of TRL's GRPOTrainer are run by `oncurve trl FILE`"
    )


def _unknown(key: str, chosen: str | None, value: Any) -> str:
    """A key or a section that there is not."""
    if "." not in key and isinstance(value, Mapping):
        sections = [name for name, field in Config.model_fields.items() if any(_sections(field.annotation))]
        keys, all_keys = list(cast("Mapping[str, Any]", value)), set(known_keys())
        close = difflib.get_close_matches(key, sections, n=1, cutoff=0.5)
        close = [name for name in close if all(f"{name}.{inner}" in all_keys for inner in keys)]
        inside = f".{keys[0]}" if len(keys) == 1 else ""
        hint = f"Did you mean '{close[0]}{inside}'?" if close else f"Known sections: {', '.join(sections)}"
        return f"{key}: there is no such section. {hint}"
    return f"{key}: there is no such key{_instead(key, chosen)}"


def _printed(value: Any) -> str:
    """A value as a recipe has it."""
    words = {True: "true", False: "false", None: "nothing"}
    if isinstance(value, date):
        return str(value)
    return words[value] if value is None or isinstance(value, bool) else f"{value!r:.80}"


def _expected(expected: str) -> Callable[[str, Any, Mapping[str, Any]], str]:
    return lambda key, value, _: f"this must be {expected}; found {_printed(value)}"


def _bounded(relation: str, name: str) -> Callable[[str, Any, Mapping[str, Any]], str]:
    return lambda key, value, context: f"this must be {relation} {context[name]:g}; found {value!r:.80}"


def _no_section(key: str, value: Any, _: Mapping[str, Any]) -> str:
    """A value where a section was expected; of a section with a type, the value may be that, or a file."""
    *above, index = key.split(".")
    for part in dict.fromkeys([value, *value.split()[:1]]) if isinstance(value, str) else ():
        if (written := _colon(part)) is not None and f".{written.partition(':')[0]}" in _ENDS:
            return f"{part!r:.60} has no colon with a space behind its key. Write {written}"
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in cast("list[Any]", value)):
        keys = dict(item for part in cast("list[Mapping[str, Any]]", value) for item in part.items())
        return f"this is a section and no list. Leave the dashes and brackets out: {key}: {_as_yaml(keys)}"
    generic = ".".join(above) if index.isdigit() else key
    if isinstance(value, str) and f"{generic}.type" in set(known_keys()):
        keys = {"path": value} if value.endswith(tuple(FILE_TYPES)) else {"type": value}
        written = ", ".join(f"{name}: {word}" for name, word in keys.items())
        example = f"{generic}: [{{{written}}}]" if index.isdigit() else f"{key}: {{{written}}}"
        return f"this is a section with keys of its own; found {value!r:.80}. Write {example}"
    return f"this is a section with keys of its own, such as {_a_key_of(key)}; found {_printed(value)}" + (
        ". Indent its keys below it, or remove it" if value is None else ""
    )


def _no_mapping(key: str, value: Any, _: Mapping[str, Any]) -> str:
    first = cast("list[Any]", value)[0] if isinstance(value, list) and value else value
    hint = f". Write {key.rpartition('.')[2]}: {{a_name: {first}}}" if isinstance(first, str) else ""
    return f"this must be a mapping of names to values; found {_printed(value)}{hint}"


def _as_yaml(value: Any) -> str:
    """A value on one line of a recipe."""
    if not isinstance(value, Mapping):
        return "a, b" if value is None else str(value)
    return f"{{{', '.join(f'{name}: {_as_yaml(inner)}' for name, inner in cast('Mapping[str, Any]', value).items())}}}"


def _a_key_of(section: str) -> str:
    generic = ".".join(part for part in section.split(".") if not part.isdigit())
    return next((name for name in known_keys() if name.startswith(f"{generic}.")), "key: value")


def _types_of(key: str) -> list[str]:
    """Names that ``type`` may have in a section such as ``data``, ``evaluation.data`` or ``rewards.0``."""
    name = "rewards" if key.startswith("rewards") else "data"
    sections = _sections(Config.model_fields[name].annotation)
    return [section.model_fields["type"].default for section in sections]


def _no_type(key: str, section: Any, _: Mapping[str, Any]) -> str:
    known, section = _types_of(key), cast("Mapping[str, Any]", section)
    if path := section.get("path"):
        ends = ", ".join(FILE_TYPES)
        return (
            f"the key {key}.type is needed and missing, since the ending of {path!r} says none. Name a file that ends "
            f"in {ends}, or set the type, such as {key}.type=huggingface for a folder"
        )
    if (only := next(iter(section), None)) in known and len(section) == 1:
        return f"{only!r} is a type, and stands where a key is. Write {{type: {only}}}"
    return f"the key {key}.type is needed and missing. Known: {', '.join(known)}."


def _wrong_type(key: str, value: Any, context: Mapping[str, Any]) -> str:
    chosen, known = str(context["tag"]), _types_of(key)
    close = difflib.get_close_matches(chosen, known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"there is no type {chosen!r}.{hint} Known: {', '.join(repr(name) for name in known)}"


def _no_choice(key: str, value: Any, context: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(str(value), str(context["expected"]).replace("'", "").split(", "), n=1)
    hint = f". Did you mean {close[0]!r}?" if close else ""
    return f"this must be {context['expected']}; found {value!r:.80}{hint}"


_EXAMPLES = {"model": "model: Qwen/Qwen2.5-0.5B", "data": "data: {type: gsm8k}"}


def _missing(key: str, value: Any, _: Mapping[str, Any]) -> str:
    example = f", such as `{_EXAMPLES[key]}`" if key in _EXAMPLES else ""
    return f"this key is needed and missing{example}"


def _no_list(key: str, value: Any, _: Mapping[str, Any]) -> str:
    inside = f"{{type: {value}}}" if key == "rewards" and isinstance(value, str) else _as_yaml(value)
    if isinstance(value, Mapping) and (dash := next((name for name in value if str(name).startswith("-")), None)):
        return f"a dash needs a space behind it; found {dash!r}. Write - {dash[1:]}: {_as_yaml(value[dash])}"
    if key == "rewards" and isinstance(value, Mapping) and len(value) == 1:  # a type where a key belongs
        [(name, keys)] = cast("Mapping[str, Any]", value).items()
        inside = _as_yaml({"type": name, **keys}) if isinstance(keys, Mapping) else inside
    example = f"{key.rpartition('.')[2]}: [{inside}]"
    return f"this must be a list, such as {example}; found {_printed(value)}"


def _too_short(key: str, value: Any, context: Mapping[str, Any]) -> str:
    if key == "rewards":
        return "name at least one reward, such as rewards=[{type: mathematics}]"
    return f"this needs at least {context['min_length']} of them; found {value!r:.80}"


def _no_truth_value(key: str, value: Any, context: Mapping[str, Any]) -> str:
    """YAML reads yes, no, on and off as truth values too."""
    return f"this takes no truth value (true, false, yes, no, on, off); found {_printed(context['value'])}"


_ENDS = frozenset(f".{name.rpartition('.')[2]}" for name in known_keys())
"""Last parts of all keys, each behind its dot."""
_SENTENCES: dict[str, Callable[[str, Any, Mapping[str, Any]], str]] = {
    "missing": _missing,
    "union_tag_not_found": _no_type,
    "union_tag_invalid": _wrong_type,
    "model_type": _no_section,
    "model_attributes_type": _no_section,
    "dict_type": _no_mapping,
    "tuple_type": _no_list,
    "list_type": _no_list,
    "literal_error": _no_choice,
    "too_short": _too_short,
    "int_type": _expected("a whole number"),
    "int_parsing": _expected("a whole number"),
    "int_from_float": _expected("a whole number"),
    "float_type": _expected("a number"),
    "float_parsing": _expected("a number"),
    "finite_number": _expected("a finite number"),
    "bool_type": _expected("true or false"),
    "bool_parsing": _expected("true or false"),
    "string_type": _expected("text"),
    "truth_value": _no_truth_value,
    **dict.fromkeys(
        ("datetime_type", "datetime_parsing", "datetime_from_date_parsing"),
        _expected("a date or a time, such as 2026-11-25T09:00:00"),
    ),
    "greater_than": _bounded("greater than", "gt"),
    "greater_than_equal": _bounded("at least", "ge"),
    "less_than": _bounded("less than", "lt"),
    "less_than_equal": _bounded("at most", "le"),
}
"""Message about each kind of mistake: (key, what was given, pydantic's context) to the text behind the key."""


def _is_tag(parts: list[str], index: int) -> bool:
    """The name of a type that pydantic puts behind the key of a choice."""
    if index == 0:
        return False
    before = parts[index - 1]
    inside_list = before.isdigit() and index > 1 and parts[index - 2] == "rewards"
    return (before == "data" or inside_list) and index < len(parts) - (0 if parts[index] in _TYPE_NAMES else 1)


def _type_names(model: type[BaseModel]) -> Iterator[str]:
    for field in model.model_fields.values():
        for section in _sections(field.annotation):
            if "type" in section.model_fields and isinstance(section.model_fields["type"].default, str):
                yield section.model_fields["type"].default
            yield from _type_names(section)


_TYPE_NAMES = frozenset(_type_names(Config))


def _instead(key: str, chosen: str | None) -> str:
    """Advice for an unknown key in a section whose type is ``chosen``: other types may have it."""
    generic = ".".join(part for part in key.split(".") if not part.isdigit())
    typed = list(_typed_keys(Config, "", None))
    owners = [str(owner) for name, owner in typed if name == generic and owner is not None]
    if chosen is not None and owners:
        parent = key.rpartition(".")[0]
        return f" in a section of type {chosen}; it belongs to {', '.join(owners)}. Remove it or change {parent}.type"
    section = generic.rpartition(".")[0]
    fitting = {name for name, owner in typed if chosen is None or owner == chosen or name.rpartition(".")[0] != section}
    hint = _nearest(generic, fitting)
    parent = key.rpartition(".")[0]  # of a list, with the index
    return f".{hint.replace(f'{section}.', f'{parent}.') if section else hint}"


SYNONYMS = {
    "lr": "optimizer.learning_rate",
    "learning_rate": "optimizer.learning_rate",
    "batch_size": "run.prompts_per_step",
    "per_device_train_batch_size": "run.prompts_per_step",
    "max_steps": "run.steps",
    "num_steps": "run.steps",
    "output_dir": "run.folder",
    "num_generations": "algorithm.group_size",
    "beta": "algorithm.kl_coef",
    "kl": "algorithm.kl_coef",
    "epsilon_high": "algorithm.clip_high",
    "max_completion_length": "rollouts.max_completion_tokens",
    "max_new_tokens": "rollouts.max_completion_tokens",
    "max_tokens": "rollouts.max_completion_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "bf16": "policy.compute_type",
    "dtype": "policy.compute_type",
    "wandb": "run.track",
    "report_to": "run.track",
}
"""Names of keys in other trainers."""


def _nearest(generic: str, names: set[str]) -> str:
    section, _, last = generic.rpartition(".")
    alike_words = difflib.get_close_matches(last, SYNONYMS, n=1, cutoff=0.88)
    if alike_words and (known := SYNONYMS[alike_words[0]]) != generic:
        return f" Did you mean {known!r}?"
    alike = {name.rpartition(".")[0]: name for name in names if name.rpartition(".")[2] == last and "." in name}
    close = [alike[close_name] for close_name in difflib.get_close_matches(section, alike, n=1, cutoff=0.6)]
    close = close or difflib.get_close_matches(generic, names, n=1, cutoff=0.6)
    if not close:
        last = generic.rsplit(".", 1)[-1]
        by_last = {name.rsplit(".", 1)[-1]: name for name in names}
        close = [by_last[close_name] for close_name in difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)]
    return f" Did you mean {close[0]!r}?" if close else " `oncurve recipe schema` lists all keys"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
