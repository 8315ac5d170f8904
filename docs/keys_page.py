"""Every key of a recipe with its type, default and meaning, from the schema."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from oncurve.config.load import parse_config
from oncurve.config.rewards import RewardSection
from oncurve.config.schema import Config, DataSection

HEAD = """# Keys of a recipe

Made from the schema, which `oncurve recipe schema` prints as JSON Schema for editors. Write keys in
the YAML file, or as `section.key=value` on the command line. `oncurve recipe show RECIPE` prints the values that a
recipe resolves to. What to set them to: [hyperparameters](hyperparameters.md).
"""


def keys_markdown() -> str:
    """The page."""
    parts = [HEAD, "## model\n", f"{_meaning(Config.model_fields['model'])}\n"]
    parts += ["## data\n", "Every type of data has these keys:\n", _table("data", DataSection, {})]
    parts += _types("data", DataSection, Config.model_fields["data"].annotation)
    parts += ["## rewards\n", "A list; rewards are weighted and summed. Every type has these keys:\n"]
    parts += [_table("rewards.N", RewardSection, {})]
    parts += _types("rewards.N", RewardSection, Config.model_fields["rewards"].annotation)
    resolved = parse_config("model: embedded\ndata: {type: word_problems}").algorithm.model_dump()
    for name in ("algorithm", "rollouts", "policy", "optimizer", "evaluation", "run"):
        section = next(_sections(Config.model_fields[name].annotation))
        text = " ".join((section.__doc__ or "").split())
        parts += [f"## {name}\n", f"{text}\n", _table(name, section, resolved if name == "algorithm" else {})]
    return "\n".join(parts).rstrip() + "\n"


def _types(name: str, base: type[BaseModel], annotation: Any) -> list[str]:
    """A line and the further keys of every type of a choice."""
    parts = [f"| `{name}.type` | what it is | its own keys |\n|---|---|---|"]
    for section in _sections(annotation):
        kind = section.model_fields["type"].default
        own = [key for key in section.model_fields if key not in base.model_fields and key != "type"]
        fields = [(key, section.model_fields[key]) for key in own]
        rows = [f"`{key}` ({_default(field)}): {_meaning(field)}" for key, field in fields]
        doc = " ".join((section.__doc__ or "").split())
        parts[0] += f"\n| `{kind}` | {_cell(doc)} | {_cell('<br>'.join(rows))} |"
    return [parts[0] + "\n"]


def _table(name: str, section: type[BaseModel], resolved: dict[str, Any]) -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, field in section.model_fields.items():
        inner = list(_sections(field.annotation))
        default = _default(field, resolved.get(key))
        lines.append(f"| `{name}.{key}` | {default} | {_cell(_meaning(field))} |")
        if len(inner) == 1:
            for below, each in inner[0].model_fields.items():
                lines.append(f"| `{name}.{key}.{below}` | {_default(each)} | {_cell(_meaning(each))} |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo, resolved: Any = None) -> str:
    if field.is_required():
        return "required"
    value = resolved if field.default is None and resolved is not None else field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    text = "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    mark = " (of grpo)" if field.default is None and resolved is not None else ""
    return f"`{text}`{mark}" if text != "-" else text


def _meaning(field: FieldInfo) -> str:
    text = " ".join((field.description or "").replace("``", "`").split())
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


def _cell(text: str) -> str:
    return text.replace("|", "\\|") or "-"
