"""Every key of a recipe with its type, default and meaning, from the schema."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from oncurve.data.settings import DataSection
from oncurve.recipe.load import parse_config
from oncurve.recipe.schema import Config
from oncurve.rewards.section import RewardSection

HEAD = """# Keys of a recipe

Made from the schema, which `oncurve recipe schema` prints as JSON Schema for editors. Write keys in
the YAML file, or as `section.key=value` on the command line. `oncurve recipe show RECIPE` prints the values that a
recipe resolves to. What to set them to: [hyperparameters](hyperparameters.md). The default is in brackets; for `algorithm` it
is that of the row `grpo`.
"""


def keys_markdown() -> str:
    """The page."""
    parts = [HEAD, "## model\n", f"{_meaning(Config.model_fields['model'])}\n"]
    parts += ["## data\n", "Every type of data has these keys:\n", _list("data", DataSection, {})]
    parts += _types("data", DataSection, Config.model_fields["data"].annotation)
    parts += ["## rewards\n", "A list; rewards are weighted and summed. Every type has these keys:\n"]
    parts += [_list("rewards.N", RewardSection, {})]
    parts += _types("rewards.N", RewardSection, Config.model_fields["rewards"].annotation)
    resolved = parse_config("model: embedded\ndata: {type: word_problems}").algorithm.model_dump()
    for name in ("algorithm", "rollouts", "policy", "optimizer", "evaluation", "run", "sft"):
        section = next(_sections(Config.model_fields[name].annotation))
        parts += [
            f"## {name}\n",
            f"{_flat(section.__doc__)}\n",
            _list(name, section, resolved if name == "algorithm" else {}),
        ]
    return "\n".join(parts).rstrip() + "\n"


def _types(name: str, base: type[BaseModel], annotation: Any) -> list[str]:
    """A line and the further keys of every type of a choice."""
    lines = [f"Values of `{name}.type`, each with its own keys:\n"]
    for section in _sections(annotation):
        kind = section.model_fields["type"].default
        lines.append(f"- **`{kind}`**: {_flat(section.__doc__)}")
        own = [key for key in section.model_fields if key not in base.model_fields and key != "type"]
        lines += [f"    - {_line(key, section.model_fields[key])}" for key in own]
    return ["\n".join(lines) + "\n"]


def _list(name: str, section: type[BaseModel], resolved: dict[str, Any]) -> str:
    lines: list[str] = []
    for key, field in section.model_fields.items():
        inner = list(_sections(field.annotation))
        lines.append(f"- {_line(f'{name}.{key}', field, resolved.get(key))}")
        if len(inner) == 1:
            lines += [f"    - {_line(f'{key}.{below}', each)}" for below, each in inner[0].model_fields.items()]
    return "\n".join(lines) + "\n"


def _line(key: str, field: FieldInfo, resolved: Any = None) -> str:
    """A key with its default and its meaning."""
    default = _default(field, resolved)
    return f"`{key}`{f' ({default})' if default else ''}: {_meaning(field)}"


def _default(field: FieldInfo, resolved: Any = None) -> str:
    if field.is_required():
        return "required"
    value = resolved if field.default is None and resolved is not None else field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or value is None or value in ((), {}):
        return ""
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _flat(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").split())


def _meaning(field: FieldInfo) -> str:
    text = _flat(field.description)
    options = _options(field.annotation)
    if options and len(options) <= 12:
        text = f"{text} One of {', '.join(f'`{one}`' for one in options)}.".strip()
    return text or "-"


def _options(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is typing.Literal:
        return [str(one).lower() if isinstance(one, bool) else str(one) for one in typing.get_args(annotation)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return [one for part in typing.get_args(annotation) for one in _options(part)]
    return []


def _sections(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, tuple):
        for part in typing.get_args(annotation):
            yield from _sections(part)
