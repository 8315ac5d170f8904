"""Tools and environments of a script for TRL."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import SOURCE_ROW
from oncurve.episodes.settings import NO_QUESTION
from oncurve.trl.chat import prompt_text
from oncurve.trl.draft import Draft
from oncurve.trl.options import Note
from oncurve.trl.rewards_of_scripts import PATIENCE_SECONDS
from oncurve.wording import listed

NO_LIMIT = sys.maxsize


def placeholder_rows(args: Any, environments: Any, generated: int) -> list[dict[str, Any]]:
    """Rows for a script without a data set, whose environment alone says what is asked: as many as a step takes.

    Raises ConfigError where TRL refuses it too.
    """
    if isinstance(environments, Mapping):
        raise ConfigError(
            "train_dataset is nothing, and environment_factory is a dictionary. Pass rows whose column environment "
            f"names one of {listed(environments)}"
        )
    if args.max_steps <= 0:
        raise ConfigError("train_dataset is nothing, so the length of the training is not known. Set max_steps")
    prompt = [{"role": "user", "content": ""}]
    return [{"prompt": prompt, "question": f"{NO_QUESTION} {number}"} for number in range(generated)]


def episode_row(
    row: Mapping[str, Any], tokenizer: Any, options: Mapping[str, Any], environments: Any, *, source: str
) -> dict[str, Any]:
    """A row whose messages are rendered when the tools of its environment are known.

    Raises DataError for a prompt that is no list of messages, and for the name of an environment that is not there.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        raise DataError(
            f"{source}: its prompt is text, and the chat template, which tells the model of tools, writes lists of "
            f'messages. Write [{{"role": "user", "content": {prompt[:40]!r}}}]'
        )
    if row.get("chat_template_kwargs"):
        raise DataError(
            f"{source}: it has chat_template_kwargs of its own, which tools and environments do not allow. Set "
            f"GRPOConfig(chat_template_kwargs=...) for all rows"
        )
    prompt_text(prompt, tokenizer, options, source=source)
    messages = [dict(message) for message in prompt]
    made = {"question": row.get("question") or messages[-1]["content"], SOURCE_ROW: {**row, "prompt": messages}}
    if isinstance(environments, Mapping):
        if row.get("environment") not in environments:
            raise DataError(
                f"{source}: its column environment is {row.get('environment')!r}; environment_factory has "
                f"{listed(environments)}. Correct the row, or add the environment"
            )
        made["environment"] = row["environment"]
    return made


def put_episodes(draft: Draft, args: Any) -> None:
    """Set how episodes are sampled, as the script's options say."""
    options = args.chat_template_kwargs
    draft.put("data.chat", dict(options) if options else True, comment="prompts are messages, and tools are told")
    if args.max_tool_calling_iterations is None:
        draft.put("rollouts.episodes.max_turns", NO_LIMIT, comment="max_tool_calling_iterations sets no limit")
    most = int(args.max_completion_length)
    draft.put("rollouts.episodes.max_answer_tokens", most, comment="an answer is cut where TRL ends the completion")
    draft.put("rollouts.episodes.tool_seconds", PATIENCE_SECONDS, comment="TRL waits without end")
    draft.put("rollouts.episodes.environment_seconds", PATIENCE_SECONDS, comment="the same")
    draft.notes += [
        Note(
            "differs", "tools", "max_completion_length limits what the model writes; in TRL answers of tools count too"
        ),
        Note(
            "differs", "tools", "a call that cannot be read is answered with what is wrong; in TRL it is the last turn"
        ),
    ]
