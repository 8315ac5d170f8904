"""The training and evaluation prompts of a recipe."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from transformers import PreTrainedTokenizerBase

from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import Prompt
from oncurve.data.chat_template import Chat, TemplateRefusal, prepare_tokenizer, write_conversations
from oncurve.data.datasets import count_rows, draw_rows, hold_out, shared_rows
from oncurve.data.from_settings import FIRST_ROWS, Rows, make_rows
from oncurve.data.prompts import Excluded, ToolsOf, render_prompts
from oncurve.data.python_objects import NOTHING, PythonObjects
from oncurve.data.settings import DataSection, DemonstrationsData, SftSection
from oncurve.data.sources import StoredRows
from oncurve.recipe.schema import Config
from oncurve.rewards.terms import have_right_answer
from oncurve.rewards.thinking import refuse_unknown_marks
from oncurve.wording import counted, shortened

if TYPE_CHECKING:
    from oncurve.data.demonstrations import Demonstration
    from oncurve.data.prompts_on_demand import DemonstrationsOnDemand, PromptsOnDemand

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendered:
    """Prompts for training, for measuring during the run, and for measuring before and after it."""

    train: list[Prompt] | PromptsOnDemand
    during: list[Prompt]
    test: list[Prompt]
    excluded: list[Excluded]
    """Rows left out because their prompt, or prompt and demonstration, is too long."""
    demonstrations: list[Demonstration] | DemonstrationsOnDemand = field(default_factory=list)
    """Demonstrations of a supervised stage, one for each prompt in ``train``; ``train`` itself where rows wait."""
    demonstrations_during: list[Demonstration] = field(default_factory=list)
    """Validation demonstrations, whose loss is measured during a supervised stage."""
    demonstrations_held_out: list[Demonstration] = field(default_factory=list)
    """Demonstrations of test and validation, of which the last turn is to be said."""
    hinted: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """The prompt of the reference for each training prompt, with the hint of ``algorithm.teacher_hint``; where prompts
    are written on demand, of those that have been."""

    @property
    def written(self) -> list[Prompt]:
        """Training prompts that are written already; none where they are written on demand."""
        return self.train if isinstance(self.train, list) else []

    @property
    def written_demonstrations(self) -> list[Demonstration]:
        """Demonstrations that are written already; none where they are written on demand."""
        return self.demonstrations if isinstance(self.demonstrations, list) else []


def benchmark_rows(config: Config) -> tuple[Rows, Rows, Rows, Rows]:
    """The rows of ``data`` as test problems, as ``split_rows`` gives those of a run; nothing to train on.

    Raises ConfigError for few-shot examples, which would have to come from training rows.
    """
    if config.data.few_shot:
        raise ConfigError("data.few_shot: a benchmark has no training rows. Write the examples into a template file")
    rows = make_rows(config.data, seed=0, needs_answer=have_right_answer(config.rewards))
    return [], [], [], list(rows[: config.evaluation.num_prompts])


def split_rows(config: Config, objects: PythonObjects = NOTHING) -> tuple[Rows, Rows, Rows, Rows]:
    """Rows for training, few-shot examples, validation during the run, and the test before and after it.

    Which they are depends on the rows and on ``evaluation``, and not on whether anything is measured during the run.
    A row is in one of them only; but where rows are too few, the validation is made of test problems.
    """
    seed, needed = config.evaluation.split_seed, config.run.prompts_per_step
    kind = {
        "needs_answer": have_right_answer(config.rewards, objects.rewards),
        "demonstrated": config.sft is not None,
    }
    own_seed = config.run.seed if isinstance(config.data, DemonstrationsData) else 0
    rows = make_rows(config.data, seed=own_seed, objects=objects.rows, **kind)
    few_shot: Rows = []
    chosen = {"seed": seed, "by_row": config.rollouts.plays_rows}
    if config.data.few_shot:
        rows, few_shot = hold_out(rows, count=config.data.few_shot, seed=seed)
    most, most_during = config.evaluation.num_prompts, config.evaluation.num_prompts_during
    if config.evaluation.data is not None:
        own_rows = make_rows(config.evaluation.data, seed=0, objects=objects.evaluation_rows, **kind)
        test, others = list(own_rows[:most]), own_rows[most:]
        return rows, few_shot, draw_rows(others if len(others) >= most_during else test, most_during, **chosen), test
    rows, test = hold_out(rows, count=_held_out(rows, most, "num_prompts", needed), **chosen)
    if count := _held_out(rows, most_during, "num_prompts_during", needed):
        rows, during = hold_out(rows, count=count, **chosen)
        return rows, few_shot, during, test
    return rows, few_shot, draw_rows(test, most_during, **chosen), test


def _held_out(rows: Rows, requested: int, key: str, needed: int) -> int:
    """Rows to hold out: as many as ``evaluation.<key>`` asks for, or a fifth if fewer than ``needed`` are left.

    Raises DataError if a fifth is none, and there would be no test problem.
    """
    if len(rows) - requested >= needed:
        return requested
    fewer = len(rows) // 5
    if not fewer and key == "num_prompts":
        few = f"{counted(len(rows), 'row')} {'is' if len(rows) == 1 else 'are'} too few"
        raise DataError(
            f"{few} to hold some of them out for evaluation.{key}. Use more data, or name "
            f"problems to evaluate on with evaluation.data.type=jsonl evaluation.data.path=FILE"
        )
    if fewer:
        log.warning(
            "evaluation.%s is %d, and %d rows are too few: %d of them, a fifth, are held out",
            key,
            requested,
            len(rows),
            fewer,
        )
    return fewer


def _is_demonstrated(row: dict[str, Any]) -> bool:
    """A row shows more than an answer: it has a completion of its own, or a worked solution."""
    return any(row.get(column) for column in ("messages", "parts", "completion", "text", "solution"))


def refuse_shared(rows: tuple[Rows, Rows, Rows, Rows], config: Config, objects: PythonObjects = NOTHING) -> None:
    """Raises DataError for rows of ``evaluation.data`` that are trained on; warns of those that a program passed.

    Training rows that stay on the disk are not read.
    """
    train, _, during, test = rows
    if config.evaluation.data is None or isinstance(train, StoredRows):
        return
    shared = shared_rows(train, (*during, *test), by_row=config.rollouts.plays_rows)
    if not shared:
        return
    example = shortened(str(train[shared[0][0]]["question"]))
    text = (
        f"{len(shared):,} of {counted(len(train), 'training row')} {'is' if len(shared) == 1 else 'are'} in the "
        f"evaluation data too, such as {example!r}. Problems that are trained on measure nothing"
    )
    if objects.evaluation_rows is None and not config.evaluation.allow_training_rows:
        raise DataError(
            f"evaluation.data: {text}. Name other problems, take these rows out of one of the two files, or leave "
            f"evaluation.data out, and some rows are held out. If it is meant so: evaluation.allow_training_rows=true"
        )
    log.warning("%s", text)


def check_thinking(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError where a reward reads what the model says, and its marks of thinking are unknown."""
    if any(reward.says_correct() or reward.is_form for reward in config.rewards):
        added = tokenizer.get_added_vocab()  # pyright: ignore[reportCallIssue, reportOptionalCall]
        arguments = config.data.chat if isinstance(config.data.chat, Mapping) else None

        def written(messages: Sequence[Mapping[str, Any]], opens_answer: bool) -> str | None:
            try:
                return write_conversations([messages], tokenizer, arguments=arguments, opens_answer=opens_answer)[0]
            except TemplateRefusal:
                return None

        template = tokenizer.chat_template
        refuse_unknown_marks(config.model, template, map(str, added), written if template else lambda *_: None)


def make_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_tokens: int | None,
    objects: PythonObjects = NOTHING,
    rows: tuple[Rows, Rows, Rows, Rows] | None = None,
) -> Rendered:
    """Every prompt of the run as tokens; ``rows`` are those of ``split_rows``, where somebody has them already.

    Raises DataError or ConfigError if nothing fits, or fewer prompts are left than a step takes.
    """
    train_rows, few_shot, during, test = rows or split_rows(config, objects)
    limit = config.prompt_limit(context_tokens)
    writer = _Writer(config, tokenizer, few_shot, limit, context_tokens, objects)
    demonstrations: list[Demonstration] | DemonstrationsOnDemand = []
    demonstrations_during: list[Demonstration] = []
    demonstrations_held_out: list[Demonstration] = []
    if config.sft is None:
        train = (
            writer.on_demand(train_rows)
            if isinstance(train_rows, StoredRows)
            else writer.prompts(train_rows, config.data)
        )
        middle = writer.prompts(during, config.evaluation_data)
        test_prompts = writer.prompts(test, config.evaluation_data)
    else:
        if isinstance(train_rows, StoredRows):
            train = demonstrations = writer.demonstrations_on_demand(train_rows, config.sft)
        else:
            demonstrations = writer.demonstrations(train_rows, config.data, config.sft)
            train = [demonstration.prompt for demonstration in demonstrations]
        taught = [row for row in during if _is_demonstrated(row) or not _is_demonstrated(train_rows[0])]
        demonstrations_during = writer.demonstrations(taught, config.evaluation_data, config.sft)
        last = config.sft.model_copy(update={"train_on": "last"})
        held_out = (
            writer.demonstrations(test, config.evaluation_data, last),
            writer.demonstrations(during, config.evaluation_data, last),
        )
        demonstrations_held_out = [*held_out[0], *held_out[1]]
        test_prompts, middle = (
            [demonstration.prompt for demonstration in part if demonstration.leaves_room(limit)] for part in held_out
        )
    excluded = writer.excluded
    if train_rows and len(train) < config.run.prompts_per_step:
        raise DataError(
            f"run.prompts_per_step is {config.run.prompts_per_step}, but only {len(train)} training prompts are left: "
            f"{len(during) + len(test)} are held out and {len(excluded)} too long. Use more data, or smaller steps"
        )
    hinted: dict[tuple[int, ...], tuple[int, ...]] = {}
    if config.algorithm.teacher_hint is not None:
        if not isinstance(train, list):
            train.see = lambda prompts: hinted.update(writer.hinted(prompts))
        else:
            hinted = writer.hinted(train)
    demonstrated = (demonstrations, demonstrations_during, demonstrations_held_out)
    return Rendered(train, middle, test_prompts, excluded, *demonstrated, hinted)


def prompt_lengths(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, context_tokens: int | None = None
) -> list[int]:
    """Tokens of the training prompts, of the first thousand rows where there are more; those of too long ones left out.

    Raises DataError or ConfigError as ``make_prompts``.
    """
    prepare_tokenizer(cast("Any", tokenizer), template=config.data.chat_template, moment=config.data.now)
    data = config.data.model_copy(update={"limit": min(config.data.limit or FIRST_ROWS, FIRST_ROWS)})
    rows = make_rows(data, seed=0, needs_answer=False, demonstrated=config.sft is not None)
    rows, few_shot = (
        hold_out(rows, count=data.few_shot, seed=config.evaluation.split_seed) if data.few_shot else (rows, [])
    )
    writer = _Writer(config, tokenizer, few_shot, config.prompt_limit(context_tokens), context_tokens, NOTHING)
    if config.sft is not None:
        demonstrations = writer.demonstrations(rows, data, config.sft)
        return [len(demonstration.prompt.prompt_ids) for demonstration in demonstrations]
    return [len(prompt.prompt_ids) for prompt in writer.prompts(rows, data)]


@dataclass
class _Writer:
    """Rows as prompts or demonstrations, in the words of a recipe."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    few_shot: Rows
    limit: int | None
    """Most tokens of a prompt that is sampled from."""
    context_tokens: int | None
    objects: PythonObjects
    excluded: list[Excluded] = field(default_factory=list)
    """Rows that were too long."""

    def prompts(self, part: Rows, data: DataSection) -> list[Prompt]:
        if not part:
            return []
        prompts, too_long = self._rendered(part, data, self.limit)
        self.excluded += too_long
        return prompts

    def on_demand(self, part: StoredRows) -> PromptsOnDemand:
        from oncurve.data.prompts_on_demand import PromptsOnDemand  # lazy

        return PromptsOnDemand(part, lambda rows: self._rendered(rows, self.config.data, None)[0], limit=self.limit)

    def _rendered(self, part: Rows, data: DataSection, limit: int | None) -> tuple[list[Prompt], list[Excluded]]:
        return render_prompts(
            part,
            cast("Any", self.tokenizer),
            template=data.template,
            chat=data.chat,
            few_shot=self.few_shot,
            max_prompt_tokens=limit,
            tools_of=tools_in_prompts(self.config, self.objects),
        )

    def hinted(self, prompts: list[Prompt]) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The prompts with a hint behind the question, by the prompts without. Of equal prompts the first counts.

        Raises DataError for a column that a row lacks, and for a prompt that leaves no room for a completion.
        """
        from oncurve.data.hints import with_hint  # lazy

        data = self.config.data
        rows = [with_hint(plain.row, str(self.config.algorithm.teacher_hint), index=plain.index) for plain in prompts]
        tokenizer = cast("Any", self.tokenizer)
        made, _ = render_prompts(rows, tokenizer, template=data.template, chat=data.chat, few_shot=self.few_shot)
        by_prompt: dict[tuple[int, ...], tuple[int, ...]] = {}
        for prompt, longer in zip(prompts, made, strict=True):
            if self.limit is not None and len(longer.prompt_ids) > self.limit:
                raise DataError(
                    f"row {prompt.index}: with algorithm.teacher_hint its prompt has {len(longer.prompt_ids)} tokens, "
                    f"and at most {self.limit} leave room for a completion. Write a shorter hint, or set "
                    f"data.max_prompt_tokens lower"
                )
            by_prompt.setdefault(prompt.prompt_ids, longer.prompt_ids)
        return by_prompt

    def demonstrations(self, part: Rows, data: DataSection, sft: SftSection) -> list[Demonstration]:
        if not part:
            return []
        demonstrations, too_long = self._demonstrations(part, data, sft, data.chat, max_tokens=self._most_tokens(sft))
        self.excluded += too_long
        return demonstrations

    def demonstrations_on_demand(self, part: StoredRows, sft: SftSection) -> DemonstrationsOnDemand:
        from oncurve.data.demonstrations import demonstrated_chat  # lazy
        from oncurve.data.prompts_on_demand import DemonstrationsOnDemand  # lazy

        data = self.config.data
        chat = demonstrated_chat(part[:FIRST_ROWS], data.chat, cast("Any", self.tokenizer), data.template)

        def show(row: dict[str, Any], index: int) -> Demonstration:
            return self._demonstrations([row], data, sft, chat, first=index)[0][0]

        return DemonstrationsOnDemand(part, show, limit=self._most_tokens(sft))

    def _most_tokens(self, sft: SftSection) -> int | None:
        return min((limit for limit in (sft.max_tokens, self.context_tokens) if limit is not None), default=None)

    def _demonstrations(
        self,
        part: Rows,
        data: DataSection,
        sft: SftSection,
        chat: Chat,
        *,
        max_tokens: int | None = None,
        first: int = 0,
    ) -> tuple[list[Demonstration], list[Excluded]]:
        from oncurve.data.demonstrations import render_demonstrations  # lazy

        return render_demonstrations(
            part,
            cast("Any", self.tokenizer),
            template=data.template,
            chat=chat,
            few_shot=self.few_shot,
            train_on=sft.train_on,
            max_tokens=max_tokens,
            first=first,
        )


def tools_in_prompts(config: Config, objects: PythonObjects = NOTHING) -> ToolsOf | None:
    """The schemas that a chat template is given for a row; None where there are no tools to tell of."""
    if not config.rollouts.has_episodes:
        return None
    from oncurve.episodes.from_settings import make_tools_of  # lazy

    return make_tools_of(config.rollouts, config.data, objects)


def with_epochs(config: Config, objects: PythonObjects = NOTHING) -> Config:
    """The recipe with as many steps as ``sft.epochs`` asks for, in its place."""
    if config.sft is None or config.sft.epochs is None:
        return config
    run = config.run.model_copy(update={"steps": config.steps_over(len(split_rows(config, objects)[0]))})
    return config.model_copy(update={"run": run, "sft": config.sft.model_copy(update={"epochs": None})})


def describe_held_out(config: Config, prompts: Rendered) -> str:
    """The numbers of test and validation problems, and when the validation is made."""
    test, during = ([dict(prompt.row) for prompt in part] for part in (prompts.test, prompts.during))
    return f"{count_rows(test, 'test')}, {describe_validation(config, during, test)}"


def describe_validation(config: Config, during: Rows, test: Rows) -> str:
    """The number of validation problems, and which of them are test problems; "no validation" where there are none."""
    text = count_rows(during, "validation") if during else "no validation"
    if during and len(shared_rows(during, test, by_row=config.rollouts.plays_rows)) == len(during):
        text += " (test problems too: choose nothing by them)"
    return text if config.evaluation.every_steps else f"{text} (evaluation.every_steps is 0: not measured)"


def count_prompts(prompts: Rendered) -> dict[str, int]:
    """Numbers of prompts by their use, for the manifest."""
    return {
        "training": len(prompts.train),
        "test": len(prompts.test),
        "validation": len(prompts.during),
        "too_long": len(prompts.excluded),
    }


def arithmetic(config: Config, prompts: Rendered) -> str:
    """The arithmetic of the batch in a few lines; a run's page has all of it."""
    run, size, count = config.run, config.algorithm.group_size, config.completions_per_step
    updates = counted(config.updates_per_step, "update")
    lines = [
        f"each step: {run.prompts_per_step} prompts x {size} completions = {count} completions, {updates}",
        f"the run: {counted(run.steps, 'step')}, {len(prompts.train):,} training prompts "
        f"({run.steps * run.prompts_per_step / len(prompts.train):.2g} passes), {describe_held_out(config, prompts)}",
    ]
    if not isinstance(prompts.train, list):
        lines.append(
            "many rows: each is read when a step takes it. Evaluation rows were drawn by their places, so that equal "
            "questions may stand on both sides; in the place of a row that is too long comes the next one"
        )
    if prompts.excluded:
        what, limit = "prompt", "the model's context"
        if config.sft is not None:
            what, limit = "row", f"sft.max_tokens={config.sft.max_tokens}" if config.sft.max_tokens else limit
        lines.append(f"left out: {counted(len(prompts.excluded), what)} too long for {limit}")
    return "\n".join(lines)
