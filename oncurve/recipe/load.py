"""Loading a recipe: strict YAML with overrides, checked against its sections."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from oncurve import __version__
from oncurve.algorithm.table import CHOICES, resolve
from oncurve.core.errors import ConfigError, DataError
from oncurve.observe.record import read_manifest, to_yaml
from oncurve.recipe.files import find_beside
from oncurve.recipe.messages import OTHER_SYSTEMS, explain, explain_yaml, refuse_glued, without_colon
from oncurve.recipe.schema import Config


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses the same key twice, where plain YAML silently keeps the last."""


_BASE: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _QuickLoader(_BASE):
    """The same by the C parser, whose own mistakes are worded otherwise."""


def _mapping(loader: _StrictLoader | _QuickLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys: set[str] = set()
    for key_node, _ in node.value:
        key: Any = loader.construct_object(key_node)  # type: ignore[no-untyped-call]
        if not isinstance(key, str):
            raise ConfigError(f"line {key_node.start_mark.line + 1}: the key {key!r} is not a word. Quote it")
        if key in keys:
            raise ConfigError(f"line {key_node.start_mark.line + 1}: duplicate key {key!r}; remove one of them")
        keys.add(key)
    return loader.construct_mapping(node, deep=True)


def _number(loader: _StrictLoader | _QuickLoader, node: yaml.ScalarNode) -> Any:
    """A number in base ten: YAML 1.1 reads 010 as 8, and 1:30 as 90."""
    digits = node.value.lstrip("+-")
    if ":" in digits or (digits[:1] == "0" and digits.isdecimal() and len(digits) > 1):
        line = node.start_mark.line + 1
        raise ConfigError(
            f"line {line}: YAML does not read {node.value} in base ten. Write another number, or quote it"
        )
    kind = node.tag.rpartition(":")[2]
    return getattr(loader, f"construct_yaml_{kind}")(node)


for _loader in (_StrictLoader, _QuickLoader):
    _loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
    _loader.add_constructor("tag:yaml.org,2002:int", _number)
    _loader.add_constructor("tag:yaml.org,2002:float", _number)


def _parse(text: str) -> Any:
    """The content of a YAML text, or what the Python parser says against it."""
    with suppress(yaml.YAMLError):
        return yaml.load(text, Loader=_QuickLoader)
    return yaml.load(text, Loader=_StrictLoader)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and apply ``key=value`` overrides.

    Files that the recipe names are looked for beside it, then in the current folder; those of overrides, which
    somebody typed, in the current folder alone.

    Raises ConfigError naming the file, the key and, for a misspelt key, the nearest right one.
    """
    return validate_tree(read_tree(path, overrides), source=str(path), overrides=overrides)


_DATA_ENDINGS = (".jsonl", ".csv", ".tsv", ".parquet")


def read_text(path: str | Path) -> str:
    """The text of a recipe. Raises ConfigError where there is none."""
    path = Path(path)
    if path.is_dir():
        path = path / "recipe.yaml"
    if path.suffix in _DATA_ENDINGS and path.is_file():
        raise ConfigError(f"{path}: is data, not a recipe. A recipe is a YAML file in which data.path names the data")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe. `oncurve recipe list` shows those in the package") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8. Name a recipe, such as recipe.yaml") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}). Name a recipe file") from None


def parse_config(
    text: str, overrides: Sequence[str] = (), *, source: str = "recipe", folder: Path | None = None
) -> Config:
    """A recipe from its text; ``folder`` is where it lies, if it lies somewhere."""
    tree = parse_tree(text, overrides, source=source, folder=folder)
    return validate_tree(tree, source=source, overrides=overrides)


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys of a recipe file with overrides, not yet checked; see ``load_config``."""
    recipe = Path(path)
    folder = recipe if recipe.is_dir() else recipe.parent
    return parse_tree(read_text(path), overrides, source=str(path), folder=folder)


def _other_file(source: str) -> str:
    """The message for a file that holds no recipe and is not called like one; empty for one that is."""
    suffix = Path(source).suffix
    if suffix in ("", ".yaml", ".yml", ".json"):
        return ""
    script = f"Scripts for TRL are run by `oncurve trl {source}`" if suffix == ".py" else OTHER_SYSTEMS
    return f"is no recipe, which is a YAML file. {script}"


def parse_tree(
    text: str,
    overrides: Sequence[str] = (),
    *,
    source: str = "recipe",
    folder: Path | None = None,
    is_of_run: bool = False,
) -> dict[str, Any]:
    """The keys of a recipe's text with overrides, not yet checked.

    In the recipe of a run, which earlier versions wrote with both lengths, its steps count.
    """
    try:
        raw: Any = _parse(text)
    except ConfigError as error:
        raise ConfigError(f"{source}, {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: {_other_file(source) or explain_yaml(error, text)}") from None
    if raw is None:
        raise ConfigError(
            f"{source}: the file is empty. Begin with `model: embedded` and `data: {{type: word_problems}}`"
        )
    if not isinstance(raw, dict) or ("model" not in raw and _other_file(source)):
        what = f"a recipe is a mapping of sections such as `model:` and `data:`; found {raw!r:.80}"
        what = (without_colon(text) if isinstance(raw, str) else None) or what
        raise ConfigError(f"{source}: {_other_file(source) or what}")
    tree = cast("dict[str, Any]", raw)
    if folder is not None:
        find_beside(tree, folder)
    if is_of_run:
        prefer_length(tree, {"run": tree.get("run")})
    refuse_glued(tree, source=source)
    apply_overrides(tree, overrides)
    refuse_two_lengths(tree, source)
    return tree


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A recipe's keys with ``key=value`` pairs put into them. Raises ConfigError for what is none."""
    changes: dict[str, Any] = {}
    for index, override in enumerate(overrides):
        changes |= _apply(tree, override)
        section = override.partition("=")[0].removesuffix("type")
        for earlier in overrides[:index] if section.endswith(".") else ():  # those typed before belong to the new type
            if earlier.startswith(section) and not earlier.startswith(f"{section}type="):
                _apply(tree, earlier)
    refuse_glued(tree)
    return prefer_length(tree, changes)


LENGTHS = (("run", "steps"), ("sft", "epochs"))
"""Keys that set the length of a supervised stage, each in place of the other."""


def _lengths(tree: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    sections = {key: tree.get(key[0]) for key in LENGTHS}
    values = {key: section.get(key[1]) for key, section in sections.items() if isinstance(section, dict)}
    return {key: value for key, value in values.items() if value is not None}


def prefer_length(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe in which the length among the ``changes`` of a supervised stage takes the place of the one that it had.

    ``changes`` are sections, or keys with dots, that were put into the tree.
    """
    chosen = {key for key, value in flat(changes) if value is not None}
    is_changed = {key: ".".join(key) in chosen for key in LENGTHS}
    for key in _lengths(tree) if any(is_changed.values()) else ():
        if not is_changed[key]:
            del tree[key[0]][key[1]]
    return tree


def refuse_two_lengths(tree: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError where a recipe sets the length of a supervised stage twice."""
    if len(both := _lengths(tree)) > 1:
        lengths = " and ".join(f"{section}.{key}={value}" for (section, key), value in both.items())
        raise ConfigError(f"{source}: {lengths} both set the length of the supervised stage. Keep one of the two")


def validate_tree(tree: Mapping[str, Any], *, source: str, overrides: Sequence[str] = ()) -> Config:
    """A recipe from its keys. Raises ConfigError with a line for each mistake, which says if an override made it."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        typed = tuple(f"{override.partition('=')[0].strip()}." for override in overrides)
        lines = [(f"{line.partition(':')[0]}.", line) for line in explain(error)]
        messages = [f"{'command line' if key.startswith(typed) else source}: {line}" for key, line in lines]
        raise ConfigError("\n".join(messages)) from None
    if not config.rollouts.plays_rows and any(reward.type == "environment" for reward in config.rewards):
        raise ConfigError(
            f"{source}: a reward of type environment is what an environment or an agent gives, and the recipe has "
            f"neither. Set rollouts.environments or rollouts.agent, or choose another reward"
        )
    return resolved(config)


def resolved(config: Config) -> Config:
    """The recipe with every choice of its algorithm as a value, where it says nothing those of the algorithm's row."""
    own = config.algorithm
    choices = {key: value for key, value in own.model_dump().items() if key in (*CHOICES, "scale_by_std")}
    try:
        row = resolve("grpo" if own.type == "custom" else own.type, **choices)
    except ValueError:
        return config  # refused with a reason when the algorithm is made
    chosen = {key: getattr(row, key) for key in CHOICES}
    if own.function is not None:
        del chosen["loss"]
    if own.advantage_function is not None:
        del chosen["advantage"]
    return config.model_copy(update={"algorithm": own.model_copy(update=chosen)})


def config_yaml(config: Config) -> str:
    """The resolved recipe with every default, as YAML."""
    has_epochs = config.sft is not None and config.sft.epochs is not None
    return to_yaml(config.model_dump(mode="json", exclude={"run": {"steps"}} if has_epochs else None))


_SAME_KEYS = ("rollouts.type", "optimizer.type")
"""Types that take the keys of each other: lengths and temperatures stay what they are wherever samples come from."""


def _apply(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """Set one ``section.key=value``; a new ``type`` empties its section, whose other keys belonged to the old one.

    Returns the key and the value.
    """
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise ConfigError(f"override {override!r} is not of the form key=value, such as run.steps=50")
    try:
        value: Any = _parse(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"override {override!r}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"override {override!r}: the value is {explain_yaml(error)}") from None
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
        node[_index(cast("list[Any]", node), last, override)] = value
    elif isinstance(node, dict):
        section = cast("dict[str, Any]", node)
        if last == "type" and section.get("type") not in (None, value) and path not in _SAME_KEYS:
            section.clear()
        section[last] = value
    else:
        raise ConfigError(f"override {override!r}: {'.'.join(parents)} is a value, not a section")
    return {path: value}


def _child(node: Any, key: str, *, where: str, override: str) -> Any:
    if isinstance(node, list):
        items = cast("list[Any]", node)
        return items[_index(items, key, override)]
    if isinstance(node, dict):
        section = cast("dict[str, Any]", node)
        if section.get(key) is None:
            section[key] = {}
        return section[key]
    raise ConfigError(f"override {override!r}: {where} is below a value, not a section")


def _index(items: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(items):
        raise ConfigError(f"override {override!r}: {key!r} is not a place in a list of {len(items)}, counted from 0")
    return int(key)


def run_folder_path(config: Config) -> Path:
    """The folder of the run: its name, or one made of the model, the data and the time."""
    name = config.run.name
    if name is None:
        model = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(config.model).name)
        first = name = f"{model}-{config.data.type}-{config.algorithm.type}-{time.strftime('%Y%m%d-%H%M%S')}"
        others = itertools.count(2)
        while (Path(config.run.folder) / name).exists():  # begun in the same second
            name = f"{first}-{next(others)}"
    if Path(name).name != name or name in (".", ".."):
        raise ConfigError(f"run.name is {name!r}, which is not the name of one folder; put parents into run.folder")
    return Path(config.run.folder) / name


def read_run_config(text: str, overrides: Sequence[str] = (), *, source: str) -> Config:
    """The recipe that a run's ``config.yaml`` holds; ``source`` is the path of that file.

    Raises ConfigError: for overrides as for those of a recipe, and for a recipe that this version does not read with
    the version that wrote it.
    """
    try:
        tree = parse_tree(text, overrides, source=source, is_of_run=True)
        return validate_tree(tree, source=source, overrides=overrides)
    except ConfigError:
        try:
            validate_tree(parse_tree(text, source=source, is_of_run=True), source=source)
        except ConfigError as error:
            raise ConfigError(
                f"{error}\nThe run was made by {_writer(Path(source).parent)}, and this is oncurve {__version__}. Read "
                f"the run with the version that made it, or train again"
            ) from None
        raise


def _writer(run: Path) -> str:
    """The version of oncurve that made a run, and its commit, as far as the run's manifest says."""
    try:
        manifest = read_manifest(run)
    except DataError:
        return "an unknown version of oncurve"
    code = manifest.get("code")
    commit = code.get("commit") if isinstance(code, Mapping) else None
    return f"oncurve {manifest.get('oncurve')}" + (f", commit {str(commit)[:12]}" if commit else "")


def flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """The leaves of a recipe with dots in their keys; sections in a list by their index.

    >>> flat({"run": {"steps": 3}, "rewards": [{"type": "format"}]})
    [('run.steps', 3), ('rewards.0.type', 'format')]
    """
    if isinstance(tree, list) and any(isinstance(item, (Mapping, list)) for item in cast("list[Any]", tree)):
        tree = dict(enumerate(cast("list[Any]", tree)))
    if isinstance(tree, Mapping) and tree:
        sections = cast("Mapping[Any, Any]", tree)
        return [pair for key, value in sections.items() for pair in flat(value, f"{prefix}{key}.")]
    return [(prefix.rstrip("."), tree)]
