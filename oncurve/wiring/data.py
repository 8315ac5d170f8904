"""The training and evaluation prompts of a recipe."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from oncurve.config.schema import Config, DataSection, GivenData, WordProblemsData
from oncurve.data.given import NOTHING, Given
from oncurve.errors import ConfigError, DataError
from oncurve.wiring.rewards import have_right_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oncurve.data.prompts import Excluded
    from oncurve.records import Prompt

Rows = list[dict[str, Any]]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendered:
    """Prompts for training, for measuring during the run, and for measuring before and after it."""

    train: list[Prompt]
    during: list[Prompt]
    test: list[Prompt]
    excluded: list[Excluded]
    """Rows left out because their prompt is too long."""


def make_rows(data: DataSection, *, seed: int, given: Rows | None = None, needs_answer: bool = True) -> Rows:
    """The rows of a data section; ``given`` are those that a Python program passed.

    Without ``needs_answer`` rows of files may have none.

    Raises ConfigError where such rows are needed and missing.
    """
    from oncurve.data.datasets import adapt_given_rows, load_rows  # lazy

    if isinstance(data, GivenData):
        if given is None:
            raise ConfigError(
                "data.type is given: the rows were passed from Python, and a recipe cannot hold them. Train or resume "
                "from the program, with oncurve.Trainer and the same rows; or write them to a file for data.type=jsonl"
            )
        return adapt_given_rows(given, columns=data.columns)[: data.limit]

    extra: dict[str, Any] = {"levels": data.levels} if isinstance(data, WordProblemsData) else {}
    return load_rows(
        data.type,  # type: ignore[attr-defined]  # every section of the union has one
        path=data.path,
        split=data.split,
        columns=data.columns or None,
        limit=data.limit,
        seed=seed,
        needs_answer=needs_answer,
        **extra,
    )


def split_rows(config: Config, given: Given = NOTHING) -> tuple[Rows, Rows, Rows, Rows]:
    """Rows for training, few-shot examples, measuring during the run, and the final test: no row is in two of them."""
    from oncurve.data.datasets import hold_out  # lazy

    seed = config.evaluation.split_seed
    needs_answer = have_right_answer(config.rewards, given.rewards)
    rows = make_rows(config.data, seed=0, given=given.rows, needs_answer=needs_answer)
    few_shot: Rows = []
    during: Rows = []
    if config.data.few_shot:
        rows, few_shot = hold_out(rows, count=config.data.few_shot, seed=seed)
    if config.evaluation.data is not None:
        test = make_rows(config.evaluation.data, seed=0, given=given.evaluation_rows, needs_answer=needs_answer)[
            : config.evaluation.num_prompts
        ]
    else:
        rows, test = hold_out(
            rows, count=_held_out(rows, config.evaluation.num_prompts, "num_prompts", config), seed=seed
        )
    if config.evaluation.every_steps:
        rows, during = hold_out(
            rows, count=_held_out(rows, config.evaluation.num_prompts_during, "num_prompts_during", config), seed=seed
        )
    return rows, few_shot, during, test


def shared_columns(rows: tuple[Rows, Rows, Rows, Rows]) -> list[str]:
    """Columns that a reward function may ask for: those of the training and of the evaluation rows."""
    from oncurve.rewards.parameters import columns_of  # lazy

    train, _, during, test = rows
    return columns_of(train, during, test)


def _held_out(rows: Rows, asked: int, key: str, config: Config) -> int:
    """Rows to hold out: as many as ``evaluation.<key>`` asks for, or a fifth if that leaves too few to train on.

    Raises DataError if a fifth is none.
    """
    if len(rows) - asked >= config.run.prompts_per_step:
        return asked
    fewer = len(rows) // 5
    if not fewer:
        raise DataError(
            f"{len(rows)} rows are too few to hold some of them out for evaluation.{key}. Use more data, or name "
            f"problems to evaluate on with evaluation.data.type=jsonl evaluation.data.path=FILE"
        )
    log.warning("holding out %d of %d rows instead of evaluation.%s=%d", fewer, len(rows), key, asked)
    return fewer


def make_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_tokens: int | None,
    given: Given = NOTHING,
    rows: tuple[Rows, Rows, Rows, Rows] | None = None,
) -> Rendered:
    """Every prompt of the run as tokens; ``rows`` are those of ``split_rows``, where somebody has them already.

    Raises DataError or ConfigError if nothing fits, or fewer prompts are left than a step takes.
    """
    from oncurve.data.prompts import render_prompts  # lazy
    from oncurve.wiring.episodes import make_tools_of  # lazy

    train_rows, few_shot, during, test = rows or split_rows(config, given)
    limit = prompt_limit(config, context_tokens=context_tokens)
    excluded: list[Excluded] = []
    tools_of = make_tools_of(config, given)

    def render(part: Rows, data: DataSection) -> list[Prompt]:
        if not part:
            return []
        prompts, too_long = render_prompts(
            part,
            cast("Any", tokenizer),
            template=data.template,
            chat=data.chat,
            few_shot=few_shot,
            max_prompt_tokens=limit,
            tools_of=tools_of,
        )
        excluded.extend(too_long)
        return prompts

    train = render(train_rows, config.data)
    if len(train) < config.run.prompts_per_step:
        raise DataError(
            f"run.prompts_per_step is {config.run.prompts_per_step}, but only {len(train)} training prompts are left: "
            f"{len(during) + len(test)} are held out and {len(excluded)} too long. Use more data, or smaller steps"
        )
    return Rendered(train, render(during, config.data), render(test, evaluation_section(config)), excluded)


def evaluation_section(config: Config) -> DataSection:
    """How test prompts are written: as the evaluation's data say, or as in training."""
    return config.evaluation.data or config.data


def prompt_limit(config: Config, *, context_tokens: int | None) -> int | None:
    """The longest prompt that leaves room for a completion in the model's context; None where nothing limits it."""
    asked = config.data.max_prompt_tokens
    if context_tokens is None:
        return asked
    room = context_tokens - config.rollouts.max_completion_tokens
    if room < 1:
        raise ConfigError(
            f"rollouts.max_completion_tokens is {config.rollouts.max_completion_tokens}, which leaves no room for a "
            f"prompt in the model's context of {context_tokens} tokens. Use at most {context_tokens // 2}"
        )
    return min(asked, room) if asked else room


def context_of(model_config: Any) -> int | None:
    """Positions that the model was made for; None if it does not say."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None)
