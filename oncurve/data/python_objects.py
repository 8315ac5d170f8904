"""Rows and rewards that a Python program passes to a run, and the recipe that stands for them."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction
from oncurve.data import sources
from oncurve.data.settings import FILE_TYPES
from oncurve.data.sources import StoredTable
from oncurve.observe.record import to_yaml

Row = dict[str, Any]
MOST_ROWS = 1_000_000
"""Rows that a stream is read for where nothing says how many steps there are."""
NAMELESS = "given"
"""The name of a loaded model that has none."""


@dataclass(frozen=True)
class PythonObjects:
    """Objects that a run gets from Python instead of from files. None of them is written into the run's folder."""

    rows: list[Row] | StoredTable | None = None
    """Training rows; None where the recipe's data section names them."""
    evaluation_rows: list[Row] | StoredTable | None = None
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Reward functions by the names of their sections."""
    model: Any = None
    """A loaded transformers or peft model, whose own weights are trained; None where the recipe names it."""
    tokenizer: Any = None
    """Its tokenizer; None where it is the one of the recipe's model."""
    reference_is_named: bool = False
    """The reference of a KL is the model that the recipe names, as TRL has it, and not a copy of ``model``."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """Functions that the policy may call, by name."""
    environments: Mapping[str, Any] = field(default_factory=dict)
    """Classes or functions that make environments, by name."""
    agents: Mapping[str, Any] = field(default_factory=dict)
    """The function that plays the episodes, by its name."""
    base_sha256: str | None = None
    """SHA-256 of the model's weights when its run began, which has moved them since; None before that."""

    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of rows and rewards when they were given: an object may change its own state while it grades."""
    unseen: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Parts of them that could not be read, so that a change there would not be noticed."""

    def check_model(self, name: str, *, needs_files: bool) -> None:
        """Refuse a loaded model that cannot be sent to where it is needed, or has no tokenizer. Raises ConfigError."""
        if self.model is None or name != NAMELESS:
            return
        if needs_files:
            raise ConfigError(
                "model: the one that was passed does not say from which folder it was loaded, so a server cannot "
                "load it. Write it with save_pretrained(FOLDER) and load it from there, or sample in this process "
                "(rollouts={'type': 'engine'})"
            )
        if self.tokenizer is None:
            raise ConfigError(
                "model: the one that was passed does not say whose tokenizer is its own. Pass tokenizer=..."
            )

    def with_fingerprints(self) -> PythonObjects:
        """The same with the fingerprints of everything in it, taken now."""
        from oncurve.data.fingerprint import Fingerprint, fingerprint, rows_fingerprint  # lazy

        fingerprints = {
            f"{kind} {name}": fingerprint(item)
            for kind, ones in (
                ("reward", self.rewards),
                ("tool", self.tools),
                ("environment", self.environments),
                ("agent", self.agents),
            )
            for name, item in ones.items()
        }
        for name, rows in (("the rows", self.rows), ("the evaluation rows", self.evaluation_rows)):
            if isinstance(rows, StoredTable):
                fingerprints[name] = Fingerprint()
                fingerprints[name].add(rows.fingerprint)
            elif rows is not None:
                fingerprints[name] = rows_fingerprint(rows)
        return replace(
            self,
            fingerprints={name: item.text for name, item in fingerprints.items()},
            unseen={name: tuple(item.unseen) for name, item in fingerprints.items() if item.unseen},
        )


NOTHING = PythonObjects()
"""A run that gets everything from its recipe."""


def recipe_of(
    model: str | os.PathLike[str],
    data: Any,
    rewards: Any,
    evaluation_data: Any = None,
    *,
    sections: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Any], PythonObjects]:
    """The recipe as a tree of keys, and what of it cannot be written down.

    ``data`` is a list or any iterable of dictionaries, a ``datasets.Dataset``, a data frame of pandas, a path, the
    name of a data type, or a section of a recipe, which may hold "rows". ``rewards`` is one or a list of functions,
    objects, names of reward types, ``file.py:name``, sections, or pairs (reward, weight). Raises ConfigError for
    anything else.
    """
    tree: dict[str, Any] = {name: dict(section) for name, section in sections.items()}
    tree["model"] = os.fspath(model)
    tree["data"], rows = data_section(data, tree.pop("data", {}), limit=_needed(tree))
    evaluation_rows = None
    if evaluation_data is not None:
        own = dict(tree.get("evaluation", {}))
        own["data"], evaluation_rows = data_section(evaluation_data, own.get("data") or like(tree["data"]))
        tree["evaluation"] = own
    rewards_by_name: dict[str, Any] = {}
    if rewards is not None:
        tree["rewards"] = [reward_section(reward, rewards_by_name) for reward in as_list(rewards)]
    return tree, PythonObjects(rows, evaluation_rows, rewards_by_name).with_fingerprints()


def _needed(tree: Mapping[str, Any]) -> int | None:
    """Rows that all steps of a run take, and those that are held out; None where the steps are not said."""
    run, evaluation = tree.get("run", {}), tree.get("evaluation", {})
    steps = run.get("steps") if isinstance(run, Mapping) else None
    if not isinstance(steps, int):
        return None
    held_out = [evaluation.get(name, default) for name, default in (("num_prompts", 200), ("num_prompts_during", 50))]
    return steps * int(run.get("prompts_per_step", 16)) * 2 + sum(int(count) for count in held_out)


def episodes_of(tree: dict[str, Any], objects: PythonObjects, tools: Any, environments: Any) -> PythonObjects:
    """Put tools and environments of a Python program into the rollouts section, and the objects beside it.

    ``tools`` is one or a list of functions or names; ``environments`` is a class or function that makes one, a name, a
    taskset of verifiers, or a dictionary of those by name. Rewards of environments are added to the others. Raises
    ConfigError for others.
    """
    if tools is None and environments is None:
        return objects
    rollouts = dict(tree.get("rollouts", {}))
    passed, named = dict(objects.tools), [*rollouts.get("tools", ())]
    for tool in [] if tools is None else as_list(tools):
        if isinstance(tool, str):
            named.append(tool)
        elif callable(tool):
            name = _name_of_callable(tool)
            passed[name] = tool
            named.append(f"given:{name}")
        else:
            raise ConfigError(
                f"tools: {type(tool).__name__} cannot be called. Pass functions with types and a docstring"
            )
    made, references = dict(objects.environments), dict(rollouts.get("environments", {}))
    if environments is not None and not isinstance(environments, Mapping):
        environments = {"default": environments}
    for name, factory in (environments or {}).items():
        if not isinstance(factory, str):
            made[name] = factory
        references[name] = factory if isinstance(factory, str) else f"given:{name}"
    tree["rollouts"] = {**rollouts, "tools": named, "environments": references}
    return replace(objects, tools=passed, environments=made).with_fingerprints()


def agent_of(tree: dict[str, Any], objects: PythonObjects, agent: Any) -> PythonObjects:
    """Put the agent of a Python program into the rollouts section, and the function beside it.

    Raises ConfigError for what is none.
    """
    if agent is None:
        return objects
    rollouts = dict(tree.get("rollouts", {}))
    if isinstance(agent, (str, Mapping)):
        tree["rollouts"] = {**rollouts, "agent": agent}
        return objects
    if not callable(agent):
        raise ConfigError(
            f"agent: {type(agent).__name__} cannot be called. Pass a function `async def agent(row, client)`, "
            f"file.py:name, or {{'command': [...]}}"
        )
    name = _name_of_callable(agent)
    tree["rollouts"] = {**rollouts, "agent": f"given:{name}"}
    return replace(objects, agents={name: agent}).with_fingerprints()


def _name_of_callable(function: Any) -> str:
    return function.__name__ if inspect.isroutine(function) else type(function).__name__


def like(section: Mapping[str, Any]) -> dict[str, Any]:
    """The form of evaluation rows where nothing else is asked for: that of the training rows."""
    return {key: value for key, value in section.items() if key in ("columns", "template", "chat")}


def data_section(
    data: Any, more: Mapping[str, Any], *, limit: int | None = None
) -> tuple[dict[str, Any], list[Row] | StoredTable | None]:
    """The data section of a recipe, and the rows where they were passed; ``more`` holds further keys of the section.

    A stream without a length is read up to ``limit`` rows. A ``datasets.Dataset`` of many rows stays where it is.
    """
    if "pandas" in sys.modules and isinstance(data, sys.modules["pandas"].DataFrame):
        data = data.to_dict("records")
    if isinstance(data, Mapping):
        return _section_of(data, more)
    if isinstance(data, (str, os.PathLike)):
        return {**_stored(os.fspath(data)), **more}, None
    if isinstance(data, Iterable):
        if not isinstance(data, Sized):
            data = _read_at_most(data, limit)
        if type(data).__module__ == "datasets.arrow_dataset" and len(data) > sources.MANY_ROWS:
            return {"type": "given", **more}, StoredTable(data, "the rows that were passed")
        rows = [dict(row) if isinstance(row, Mapping) else _no_row(index, row) for index, row in enumerate(data)]
        if not rows:
            raise ConfigError("data: there are no rows. Pass at least as many as a step takes (run.prompts_per_step)")
        return {"type": "given", **more}, rows
    raise ConfigError(
        f"data: {type(data).__name__} is not a kind of data. Pass a list of dictionaries, a datasets.Dataset, a path, "
        f"or a section such as {{'type': 'gsm8k'}}"
    )


def _section_of(
    data: Mapping[str, Any], more: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Row] | StoredTable | None]:
    if type(data).__module__ == "datasets.dataset_dict":
        raise ConfigError(
            f"data: {type(data).__name__} holds the splits {', '.join(data)}. Pass one of them, such as "
            f"data[{next(iter(data), 'train')!r}], and another as evaluation_data"
        )
    if "type" in data:
        return {**data, **more}, None
    if "rows" in data:
        keys = {key: value for key, value in data.items() if key != "rows"}
        section, rows = data_section(data["rows"], {})
        return {**section, **keys, **more}, rows
    raise ConfigError(
        f"data: a dictionary is a section of a recipe and needs a type, or rows; found the keys "
        f"{', '.join(data)}. Pass rows as a list of dictionaries, such as [{{'question': '2+3?', 'answer': "
        f"'5'}}], or as {{'rows': that list, 'chat': True}}"
    )


def _read_at_most(data: Iterable[Any], limit: int | None) -> list[Any]:
    """A stream's rows, as many as all steps can take. Raises ConfigError for one that goes on where nothing says so."""
    rows = list(islice(data, MOST_ROWS if limit is None else limit))
    if limit is None and len(rows) == MOST_ROWS:
        raise ConfigError(
            f"data: the iterable gave {MOST_ROWS:,} rows and goes on. Set run={{'steps': ...}}, so that it is read as "
            f"far as the steps need, or pass a list"
        )
    return rows


def _no_row(index: int, row: Any) -> Row:
    raise ConfigError(
        f"data: row {index} is {type(row).__name__}, not a dictionary: {row!r:.60}. Write "
        f"{{'question': ..., 'answer': ...}}"
    )


def _stored(source: str) -> dict[str, Any]:
    """A file, a folder, a data set of the Hugging Face Hub, or one of the package's types by its name."""
    from oncurve.data.datasets import DATASET_TYPES  # lazy

    if source in DATASET_TYPES and not Path(source).exists():
        return {"type": source}
    kind = FILE_TYPES.get(Path(source).suffix, "huggingface")
    return {"type": kind, "path": source}


def as_list(rewards: Any) -> list[Any]:
    """One reward or several of them, as a list; a pair (reward, weight) is one."""
    if isinstance(rewards, (list, Sequence)) and not isinstance(rewards, (str, tuple)):
        return list(rewards)
    return [rewards]


def reward_section(reward: Any, rewards: dict[str, Any]) -> dict[str, Any]:
    """The section that stands for a reward. A function or object is put into ``rewards`` under the section's name."""
    if isinstance(reward, tuple) and len(reward) == 2 and isinstance(reward[1], (int, float)):
        return {**reward_section(reward[0], rewards), "weight": float(reward[1])}
    if isinstance(reward, Mapping):
        return dict(reward)
    if isinstance(reward, str):
        return {"type": "custom", "function": reward} if ":" in reward else {"type": reward}
    if not callable(reward):
        raise ConfigError(
            f"rewards: {type(reward).__name__} cannot be called. Pass a function such as "
            f"`def reward(completion, answer): ...`, the name of a reward type, or a section of a recipe"
        )
    base = _reward_name(reward)
    name, number = base, 2
    while name in rewards:
        name, number = f"{base}_{number}", number + 1
    rewards[name] = reward
    return {"type": "given", "name": name}


def _reward_name(reward: Any) -> str:
    if isinstance(reward, RewardFunction) and not inspect.isroutine(reward):
        return reward.name
    name = reward.__name__ if inspect.isroutine(reward) else type(reward).__name__
    return "reward" if name == "<lambda>" else name


def recipe_text(tree: Mapping[str, Any]) -> str:
    """The recipe as YAML, for the run's folder."""
    header = "# Written by oncurve.Trainer. Entries of type `given` stand for Python objects that the program passed.\n"
    return header + to_yaml(json.loads(json.dumps(dict(tree))))
