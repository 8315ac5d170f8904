"""A program's request to a trainer: the recipe, its text and the objects that no recipe holds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from oncurve.core.errors import ConfigError
from oncurve.data.python_objects import NAMELESS, NOTHING, PythonObjects, agent_of, episodes_of, recipe_of, recipe_text
from oncurve.episodes.settings import NO_QUESTION
from oncurve.evaluate.settings import EvaluationSection
from oncurve.policy.lora import lora_section
from oncurve.policy.own_code import refuse_own_code
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import prefer_length, read_text, read_tree, refuse_two_lengths, validate_tree
from oncurve.recipe.schema import Config
from oncurve.run.settings import RunSection

Sections = Mapping[str, Mapping[str, Any]]
KEYS_BESIDE_ROWS = (
    "columns", "template", "chat", "chat_template", "now", "few_shot", "limit", "max_prompt_tokens", "retire_above",
)  # fmt: skip
"""Keys of a recipe's data section that still hold when its rows are replaced."""


@dataclass(frozen=True)
class TrainingRequest:
    """A training that a program asks for."""

    config: Config
    recipe: str
    """The recipe as text, for the run's folder."""
    objects: PythonObjects = NOTHING
    """ProgramObjects of a program."""


@dataclass(frozen=True, kw_only=True)
class ProgramObjects:
    """ProgramObjects that a program passes beside rows and rewards."""

    model: nn.Module | None = None
    reference_is_named: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None
    tools: Any = None
    environments: Any = None
    agent: Any = None


def request_of(
    model: str | os.PathLike[str] | nn.Module,
    data: Any,
    rewards: Any,
    evaluation_data: Any,
    objects: ProgramObjects,
    sections: Sections,
) -> TrainingRequest:
    """The request of the arguments of ``Trainer``. Raises ConfigError for what a recipe does not allow."""
    if not isinstance(model, (str, os.PathLike, nn.Module)):
        raise ConfigError(
            f"the first argument is the model: a folder, a name or a model object, not {type(model).__name__}. Call "
            f"oncurve.train(model, rows, reward)"
        )
    name_or_path = str(model.name_or_path or NAMELESS) if isinstance(model, nn.Module) else os.fspath(model)
    if isinstance(model, nn.Module):
        objects = replace(objects, model=model)
        if (section := lora_section(model)) is not None:
            sections = {**sections, "policy": {**sections.get("policy", {}), "lora": section}}
    if name_or_path.endswith((".yaml", ".yml")):
        return request_of_tree(
            read_tree(name_or_path), data, rewards, evaluation_data, objects, sections, source=name_or_path
        )
    if data is None and "data" not in sections and objects.environments is not None:
        data = _rows_of_environments(sections)
    if data is None and "data" not in sections:
        raise ConfigError("data: there is none. Pass rows, a path, or the name of a data type such as 'gsm8k'")
    tree, python_objects = recipe_of(name_or_path, data, rewards, evaluation_data, sections=sections)
    return _request(tree, python_objects, rewards, objects, source="Trainer")


def request_of_recipe(
    recipe: str, overrides: Sequence[str] = (), data: Any = None, rewards: Any = None, evaluation_data: Any = None
) -> TrainingRequest:
    """The request of a recipe file, its folder or its name in the package, with what replaces its data and rewards."""
    path = find_recipe(recipe)
    tree = read_tree(path, overrides)
    if data is None and rewards is None and evaluation_data is None:
        return TrainingRequest(validate_tree(tree, source=str(path)), read_text(path))
    return request_of_tree(tree, data, rewards, evaluation_data, ProgramObjects(), {}, source=str(path))


def request_of_tree(
    tree: Mapping[str, Any],
    data: Any,
    rewards: Any,
    evaluation_data: Any,
    objects: ProgramObjects,
    sections: Sections,
    *,
    source: str = "Trainer",
) -> TrainingRequest:
    """The request of a recipe as nested dictionaries, in which ``sections`` and what a program passes replace parts."""
    tree = {key: dict(part) if isinstance(part, Mapping) else part for key, part in tree.items()}
    if objects.model is not None and (section := lora_section(objects.model)) is not None:
        tree["policy"] = {**tree.get("policy", {}), "lora": section}
    for name, section in sections.items():
        own = tree.get(name)
        tree[name] = {**own, **section} if isinstance(own, dict) else dict(section)
    prefer_length(tree, sections)
    written = dict(tree.pop("data", {}))
    data_keys = {key: value for key, value in written.items() if key in KEYS_BESIDE_ROWS}
    named = tree.pop("rewards", None)
    whole, python_objects = recipe_of(
        str(tree.pop("model", "")),
        written if data is None else data,
        rewards if rewards is not None else named,
        evaluation_data,
        sections={**tree, **({"data": data_keys} if data is not None else {})},
    )
    return _request(whole, python_objects, rewards, objects, source=source)


def _request(
    tree: dict[str, Any], python_objects: PythonObjects, rewards: Any, objects: ProgramObjects, *, source: str
) -> TrainingRequest:
    """With tools, environments and agent in the recipe. What they say that an episode is worth is a reward too."""
    refuse_two_lengths(tree, source)
    if objects.model is not None:
        refuse_own_code(objects.model)
    python_objects = replace(
        python_objects,
        model=objects.model,
        tokenizer=objects.tokenizer,
        reference_is_named=objects.reference_is_named,
    )
    python_objects = agent_of(
        tree, episodes_of(tree, python_objects, objects.tools, objects.environments), objects.agent
    )
    own: list[dict[str, Any]] = []
    if objects.environments is not None:
        from oncurve.episodes.from_settings import environment_rewards  # lazy

        own = environment_rewards(objects.environments)
    if objects.agent is not None or own:
        listed = [dict(section) for section in tree.get("rewards", ())] if rewards is not None else []
        if "environment" not in [section.get("type") for section in listed]:
            tree["rewards"] = [*listed, *(own or [{"type": "environment"}])]
    return TrainingRequest(validate_tree(tree, source=source), recipe_text(tree), python_objects)


def _rows_of_environments(sections: Sections) -> list[dict[str, Any]]:
    """A row for every prompt of the run and those to measure on, where the environment alone says what is asked."""
    run, evaluation = RunSection(**sections.get("run", {})), EvaluationSection(**sections.get("evaluation", {}))
    count = run.steps * run.prompts_per_step + evaluation.num_prompts + evaluation.num_prompts_during
    return [{"question": f"{NO_QUESTION} {number}"} for number in range(count)]
