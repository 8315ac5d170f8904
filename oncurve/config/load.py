"""How does a YAML file with overrides become a checked recipe?"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from oncurve.config.beside import find_beside
from oncurve.config.schema import Config
from oncurve.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses the same key twice, where plain YAML silently keeps the last."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[str] = set()
    for key_node, _ in node.value:
        key: Any = loader.construct_object(key_node)  # type: ignore[no-untyped-call]
        if not isinstance(key, str):
            raise ConfigError(f"line {key_node.start_mark.line + 1}: the key {key!r} is not a word")
        if key in keys:
            raise ConfigError(f"line {key_node.start_mark.line + 1}: the key {key!r} stands here twice; remove one")
        keys.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and apply ``key=value`` overrides.

    Files that the recipe names are looked for beside it, then in the current folder; those of overrides, which
    somebody typed, in the current folder alone.

    Raises ConfigError naming the file, the key and, for a misspelt key, the nearest right one.
    """
    place = Path(path)
    folder = place if place.is_dir() else place.parent
    return parse_config(read_text(path), overrides, source=str(path), folder=folder)


def read_text(path: str | Path) -> str:
    """The text of a recipe. Raises ConfigError where there is none."""
    path = Path(path)
    if path.is_dir():
        path = path / "recipe.yaml"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe. `oncurve recipe list` shows those in the package") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a recipe: {error}") from None


def parse_config(
    text: str, overrides: Sequence[str] = (), *, source: str = "recipe", folder: Path | None = None
) -> Config:
    """A recipe from its text; ``folder`` is where it lies, if it lies somewhere."""
    try:
        raw: Any = yaml.load(text, Loader=_StrictLoader)
    except ConfigError as error:
        raise ConfigError(f"{source}, {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{source}: a recipe is a mapping of sections such as `model:` and `data:`; found {raw!r:.80}"
        )
    tree = cast("dict[str, Any]", raw)
    if folder is not None:
        find_beside(tree, folder)
    for override in overrides:
        _apply(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in _explain(error))) from None


def config_yaml(config: Config) -> str:
    """The resolved recipe with every default, as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


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


_SAME_KEYS = ("rollouts.type", "optimizer.type")
"""Types that take the keys of each other: lengths and temperatures stay what they are wherever samples come from."""


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one ``section.key=value``; a new ``type`` empties its section, whose other keys belonged to the old one."""
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"override {override!r} is not of the form key=value, such as run.steps=50")
    try:
        value: Any = yaml.load(text, Loader=_StrictLoader) if text else None
    except (yaml.YAMLError, ConfigError, ValueError, RecursionError) as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from None
    *parents, last = path.split(".")
    node: Any = tree
    for depth, key in enumerate(parents):
        where = ".".join(parents[: depth + 1])
        following = [*parents, last][depth + 1]
        if following.isdigit() and isinstance(node, dict) and cast("dict[str, Any]", node).get(key) is None:
            raise ConfigError(
                f"override {override!r}: the recipe has no list {where}, whose place {following} this would change. "
                f"Write the list into the recipe, or the whole of it as {where}=[...]"
            )
        node = _child(node, key, where=where, override=override)
    if isinstance(node, list):
        node[_place(cast("list[Any]", node), last, override)] = value
    elif isinstance(node, dict):
        section = cast("dict[str, Any]", node)
        if last == "type" and section.get("type") not in (None, value) and path not in _SAME_KEYS:
            section.clear()
        section[last] = value
    else:
        raise ConfigError(f"override {override!r}: {'.'.join(parents)} is a value, not a section")


def _child(node: Any, key: str, *, where: str, override: str) -> Any:
    if isinstance(node, list):
        items = cast("list[Any]", node)
        return items[_place(items, key, override)]
    if isinstance(node, dict):
        section = cast("dict[str, Any]", node)
        if section.get(key) is None:
            section[key] = {}
        return section[key]
    raise ConfigError(f"override {override!r}: {where} is below a value, not a section")


def _place(items: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(items):
        raise ConfigError(f"override {override!r}: {key!r} is not a place in a list of {len(items)}, counted from 0")
    return int(key)


def _explain(error: ValidationError) -> Iterator[str]:
    """One line per problem: the key, what was found, what to do."""
    problems = error.errors()
    for problem in problems:
        if problem["type"] == "too_short" and len(problems) > 1:
            continue  # a list whose only item is wrong also counts as empty
        # Places inside a choice carry the name of its type; the key as written in the recipe does not.
        parts = [str(part) for part in problem["loc"]]
        key = ".".join(part for place, part in enumerate(parts) if not _is_tag(parts, place))
        if problem["type"] == "extra_forbidden":
            chosen = next((part for place, part in enumerate(parts) if _is_tag(parts, place)), None)
            yield f"{key}: there is no such key{_instead(key, chosen)}"
        elif problem["type"] == "union_tag_not_found":
            yield f"{key}: the key {key}.type is needed and missing"
        elif problem["type"] == "missing":
            yield f"{key}: this key is needed and missing"
        elif problem["type"] == "value_error":
            yield str(problem["msg"]).removeprefix("Value error, ")
        else:
            yield f"{key}: {_lower_first(str(problem['msg']))}; found {problem.get('input')!r:.80}"


def _is_tag(parts: list[str], place: int) -> bool:
    """The name of a type that pydantic puts behind the key of a choice."""
    if place == 0:
        return False
    before = parts[place - 1]
    inside_list = before.isdigit() and place > 1 and parts[place - 2] == "rewards"
    return (before == "data" or inside_list) and place < len(parts) - (0 if parts[place] in _TYPE_NAMES else 1)


def _type_names(model: type[BaseModel]) -> Iterator[str]:
    for field in model.model_fields.values():
        for section in _sections(field.annotation):
            if "type" in section.model_fields and isinstance(section.model_fields["type"].default, str):
                yield section.model_fields["type"].default
            yield from _type_names(section)


_TYPE_NAMES = frozenset(_type_names(Config))


def _instead(key: str, chosen: str | None) -> str:
    """What is to be done about an unknown key in a section whose type is ``chosen``: other types may have it."""
    generic = ".".join(part for part in key.split(".") if not part.isdigit())
    typed = list(_typed_keys(Config, "", None))
    owners = [str(owner) for name, owner in typed if name == generic and owner is not None]
    if chosen is not None and owners:
        place = key.rpartition(".")[0]
        return f" in a section of type {chosen}; it belongs to {', '.join(owners)}. Remove it or change {place}.type"
    section = generic.rpartition(".")[0]
    fitting = {name for name, owner in typed if chosen is None or owner == chosen or name.rpartition(".")[0] != section}
    return f".{_nearest(generic, fitting)}"


def _nearest(generic: str, names: set[str]) -> str:
    close = difflib.get_close_matches(generic, names, n=1, cutoff=0.6)
    if not close:
        last = generic.rsplit(".", 1)[-1]
        by_last = {name.rsplit(".", 1)[-1]: name for name in names}
        close = [by_last[found] for found in difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)]
    return f" Did you mean {close[0]!r}?" if close else " `oncurve recipe schema` lists all keys"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
