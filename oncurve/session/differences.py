"""What is otherwise in a resumed run than in the one that was saved: recipe, data, rewards, machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oncurve.config.load import resolved
from oncurve.config.schema import Config
from oncurve.session.parts import recorded
from oncurve.settings import harmless_keys


def config_differences(was: Mapping[str, Any], config: Config) -> list[str]:
    """What the recipe says otherwise than that of the checkpoint, as lines ``key: old -> new``."""
    try:
        was = recorded(
            resolved(Config.model_validate(was))
        )  # with the defaults of keys that are newer than the checkpoint
    except ValueError:
        was = dict(was)  # of an older version: shown as it is
    old, new, harmless = dict(_flat(was)), dict(_flat(recorded(config))), harmless_keys(Config)
    return [
        f"{key}: {old.get(key, 'not there')} -> {new.get(key, 'not there')}"
        for key in sorted(old.keys() | new.keys())
        if key not in harmless and old.get(key, "not there") != new.get(key, "not there")
    ]


def fact_differences(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """What is otherwise in the data, the base model and the number of processes."""
    names = {
        "data": "the training prompts",
        "base": "the weights of the base model",
        "world_size": "the number of processes",
    }
    differences = [
        f"{text}: {manifest.get(key)} -> {facts[key]}" for key, text in names.items() if manifest.get(key) != facts[key]
    ]
    was, now = manifest.get("given") or {}, facts.get("given") or {}
    changed = [name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]
    return [
        *differences,
        *(
            f"{name}: not as when the run began (a function counts with its source, an object with its attributes)"
            for name in changed
        ),
    ]


def warn_of_machine(manifest: Mapping[str, Any], facts: Mapping[str, Any], *, warn: Callable[[str], None]) -> None:
    """Say what makes the bits differ without making the run another one."""
    for key in ("device", "threads", "versions"):
        if manifest.get(key) != facts[key]:
            old, new = manifest.get(key), facts[key]
            if isinstance(old, Mapping):
                old, new = ({k: v for k, v in one.items() if old.get(k) != new.get(k)} for one in (old, new))
            warn(f"{key}: {old} when it was saved, {new} now. The run goes on, but its last bits may differ")


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        return [pair for key, value in tree.items() for pair in _flat(value, f"{prefix}{key}.")]
    if isinstance(tree, list) and any(isinstance(item, (Mapping, list)) for item in tree):
        return [pair for place, value in enumerate(tree) for pair in _flat(value, f"{prefix}{place}.")]
    return [(prefix.rstrip("."), tree)]
