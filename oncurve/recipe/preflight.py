"""Checks of a recipe before anything is loaded: what its algorithm makes of it, its files, and its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from oncurve.algorithm.pairings import Choices, Rule, check_pairing
from oncurve.core.errors import ConfigError, DataError
from oncurve.data.settings import CsvData, DataSection, JsonlData
from oncurve.episodes.settings import SANDBOX
from oncurve.observe.record import refuse_existing
from oncurve.observe.run_model import locate_model
from oncurve.recipe.schema import Config
from oncurve.rewards.terms import part_weights
from oncurve.section import Section, typed, unread_keys


def check_algorithm(config: Config) -> list[Rule]:
    """Choices that do not go together, for the user to read. Loads nothing heavy.

    Raises ConfigError for those that a run must not have.
    """
    if config.sft is not None:
        return []  # nothing of it is the user's choice
    try:
        row = config.algorithm.row()
    except ValueError as error:
        raise ConfigError(f"algorithm: {error}") from None
    config.algorithm.check_baseline(row)
    config.algorithm.check_teacher(row)
    if config.algorithm.has_served_teacher and config.rollouts.temperature != 1:
        raise ConfigError(
            f"algorithm.teacher is {config.algorithm.teacher}, and servers score tokens at temperature 1, but "
            f"rollouts.temperature is {config.rollouts.temperature:g}. Set it to 1, or load the teacher in this process"
        )
    config.algorithm.check_hint(row)
    scheduled = [reward.key for reward in config.rewards if reward.weight_by_step and not reward.held_out]
    if scheduled and row.advantage == "multi_objective":
        raise ConfigError(
            f"rewards: {scheduled[0]} has weight_by_step, and advantage multi_objective weighs the parts of the reward "
            f"by themselves, the same in every step. Leave it out, or choose another advantage"
        )
    choices = Choices(
        row=row,
        masks_truncated=config.algorithm.mask_truncated,
        sampling=config.sampling(),
        updates_per_step=config.updates_per_step,
        max_staleness=config.rollouts.staleness,
        sampler_is_trainer=config.rollouts.vllm_servers == 0,
        punishes_length=any(reward.punishes_length and not reward.held_out for reward in config.rewards),
        lora=config.policy.lora is not None,
        num_reward_parts=len(part_weights(config.rewards)),
        negative_rewards=any(reward.can_be_negative() for reward in config.rewards if not reward.held_out),
    )
    findings = check_pairing(choices)
    refused = [finding for finding in findings if finding.severity == "refuse"]
    if refused:
        raise ConfigError("\n".join(f"algorithm: {f.what}. {f.why} {f.do}" for f in refused))
    return findings


def unread_settings(config: Config) -> list[str]:
    """The settings of a recipe that nothing reads, a line each with the setting on which that depends."""
    sections: list[tuple[str, Section, Mapping[str, object], Mapping[str, object]]] = []
    if config.sft is None:
        row, usual = config.algorithm.row(), config.algorithm.with_row(config.algorithm.row_name).row()
        sections.append(("algorithm", config.algorithm, asdict(row), asdict(usual)))
    for name, section in (
        ("data", config.data),
        *((f"rewards.{index}", reward) for index, reward in enumerate(config.rewards)),
        ("rollouts", config.rollouts),
        ("policy", config.policy),
        ("evaluation", config.evaluation),
    ):
        defaults = {key: field.get_default() for key, field in type(section).model_fields.items()}
        sections.append((name, section, vars(section), defaults))
    return [
        f"{name}.{key}={typed(values[key])} does not count, since {name}.{mark.key} is {typed(values[mark.key])}. "
        f"Leave it out, or set {name}.{mark.key}{mark.described()}"
        for name, section, values, defaults in sections
        for key, mark in unread_keys(section, values, defaults)
    ]


def check_cheaply(config: Config, *, new_folder: Path | None = None) -> None:
    """Everything that takes milliseconds to check, so that no mistake waits behind what takes seconds.

    ``new_folder`` is where a new run is to be written. Raises ConfigError or DataError with what to do.
    """
    from oncurve.data.prompts import find_template  # lazy

    if new_folder is not None:
        refuse_existing(new_folder)
        _check_writable(new_folder)
    problems: list[str] = []
    for name, section in (("data", config.data), ("evaluation.data", config.evaluation.data)):
        if section is not None:
            find_template(section.template)
            problems += _missing_data(name, section)
    for key, named in _functions(config):
        module = named.rpartition(":")[0]
        if module.endswith(".py") and not os.path.exists(module):
            problems.append(f"{key}: there is no file {module} (in {Path.cwd()})")
    if problems:
        raise DataError("\n".join(problems))
    _check_model(config.model)


def _functions(config: Config) -> Iterator[tuple[str, str]]:
    """The objects that the recipe names as module:name or file.py:name, each with its key."""
    for reward in config.rewards:
        if (named := reward.code_file()) is not None:
            yield "rewards", named
    for tool in config.rollouts.tools:
        yield "rollouts.tools", tool.removeprefix(SANDBOX)
    for environment in config.rollouts.environments.values():
        yield "rollouts.environments", environment
    for key in ("function", "advantage_function"):
        if (named := vars(config.algorithm).get(key)) is not None:
            yield f"algorithm.{key}", named


def _check_writable(folder: Path) -> None:
    """The folder can be made: the nearest one above it that is there lets this user write."""
    above = next(part for part in folder.absolute().parents if part.is_dir())
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: the run cannot be written there, since {above} is read-only. Choose run.folder.")


def _missing_data(name: str, section: DataSection) -> list[str]:
    if not isinstance(section, (JsonlData, CsvData)):
        return []
    if section.path is None:
        raise ConfigError(f"{name}.path is missing. Name the file, such as {name}.path=problems.jsonl")
    if os.path.exists(Path(section.path).expanduser()):
        return []
    return [f"{name}.path: there is no file {section.path} (in {Path.cwd()})"]


def _check_model(name: str) -> None:
    """A model that can only be a folder must be one, with one set of whole files; what may be a name on the Hugging
    Face Hub is looked up later."""
    path, _ = locate_model(name)
    if name != "embedded" and os.path.isdir(path):
        from oncurve.observe.model_files import read_model_files  # lazy

        read_model_files(path)
