"""Commands besides training: evaluate, sample, serve, check and probe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from oncurve.core.errors import ConfigError
from oncurve.core.grading import grade
from oncurve.core.records import SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.data.chat_template import Chat, prepare_tokenizer
from oncurve.data.check import Grade, GradeMeaning, check_data, form_of
from oncurve.data.datasets import count_rows, statistics
from oncurve.data.from_settings import Rows
from oncurve.data.prompt_check import demonstration_report, prompt_report
from oncurve.data.prompts import (
    Template,
    chosen_chat,
    describe_chat,
    describe_turn_end,
    find_template,
    render_prompts,
    unnamed_turn_end,
    write_gold,
)
from oncurve.data.python_objects import NOTHING
from oncurve.data.settings import DataSection
from oncurve.data.sources import StoredRows
from oncurve.episodes.from_settings import make_tools_of
from oncurve.model.context import context_of
from oncurve.observe.record import read_rows
from oncurve.observe.run_model import is_run
from oncurve.policy.model_folder import declared_end_ids, inspect_folder, load_tokenizer
from oncurve.recipe.load import read_run_config
from oncurve.recipe.preflight import check_algorithm, unread_settings
from oncurve.recipe.schema import Config
from oncurve.rewards.probes import PROBED_ROWS, PROBES, describe_probes, judge_probes, run_probes
from oncurve.rewards.references import describe_references
from oncurve.rewards.section import RewardSection
from oncurve.rewards.terms import deciding_reward, describe_rewards, have_right_answer
from oncurve.run.builder import make_policy, make_rewards
from oncurve.run.model_paths import describe_sampling, foresee_paths
from oncurve.run.rendered import check_thinking, describe_validation, make_prompts, split_rows
from oncurve.run.reward_cost import MeteredGrade
from oncurve.sample.engine import InProcessEngine
from oncurve.sandbox.tiers import describe_isolation
from oncurve.wording import counted

CHECKED_ROWS = 10_000
"""Rows that are checked where rows are read on demand."""


def ask(
    model: str,
    questions: Sequence[str],
    *,
    template: str | None,
    chat: bool | None,
    count: int,
    temperature: float,
    max_tokens: int,
    console: Console,
) -> None:
    """Print completions of questions; without questions, ask for them until the input ends."""
    if count > 1 and temperature == 0:
        raise ConfigError(f"--count {count} at temperature 0 would print the same completion; add --temperature 1")
    if not all(question.strip() for question in questions):
        raise ConfigError("a question is empty. Write it in quotation marks, or leave it out to be asked for it")
    config = Config.model_validate({"model": model, "data": {"type": "word_problems"}})
    policy = make_policy(config, is_trained=False)
    data = config.data
    own, laid_out = _prompts_of_run(Path(model), policy.tokenizer) if is_run(model) else (data.chat, data.template)
    chat_setting, template = own if chat is None else chat, template or laid_out
    if description := describe_chat(chat_setting, policy.tokenizer, template, model=model):
        console.print(description, style="dim", markup=False, highlight=False, soft_wrap=True)
    console.print(describe_sampling(policy), style="dim", markup=False, highlight=False, soft_wrap=True)
    params = SamplingParams(temperature=temperature).limited_to(max_tokens)
    engine = InProcessEngine(params)
    engine.load_weights(policy, version=0)
    for index, question in enumerate(questions or _typed(console)):
        rows = [{"question": question, "answer": ""}]
        prompts, _ = render_prompts(rows, cast("Any", policy.tokenizer), template=template, chat=chat_setting)
        for group in engine.sample(SamplingRequest(prompts, count, index)):
            for completion in group.completions:
                console.print(group.prompt.text, style="dim", end="", markup=False, highlight=False)
                console.print(completion.text, markup=False, highlight=False)
                console.print(f"[{len(completion.token_ids)} tokens, {completion.finish_reason}]", markup=False)


def _prompts_of_run(run: Path, tokenizer: Any) -> tuple[Chat, str]:
    """The form of a run's prompts: its chat and its template, or none where the rows held whole prompts."""
    text = (run / "config.yaml").read_text(encoding="utf-8")
    data = read_run_config(text, (), source=str(run / "config.yaml")).data
    files = sorted((run / "rollouts").glob("*.jsonl"))
    rows = read_rows(files[0]) if files else []
    begins = find_template(data.template).turn.partition("{user}")[0]
    if rows and begins not in str(rows[0].get("prompt")) and chosen_chat(data.chat, tokenizer, data.template) is False:
        return False, "as_is"
    return data.chat, data.template


def _typed(console: Console) -> Sequence[str]:
    """Questions from the terminal, one per line, until an empty line or the end."""

    def ask() -> str:
        try:
            return console.input("question (empty to stop): ").strip()
        except EOFError:
            return ""

    return iter(ask, "")  # type: ignore[return-value]


def check_recipe(config: Config, *, console: Console) -> bool:
    """Load everything but the weights of the model: True if nothing fatal was found."""
    for finding in check_algorithm(config):
        console.print(f"warning: {finding.what}. {finding.why} {finding.do}", markup=False, highlight=False)
    for line in unread_settings(config):
        console.print(f"warning: {line}", markup=False, highlight=False)
    for line in describe_rewards(config.rewards, is_default=config.has_default_reward):
        console.print(line, markup=False, highlight=False)
    if any(reward.is_sandboxed for reward in config.rewards):
        console.print(describe_isolation().text, markup=False, highlight=False)
    find_template(config.data.template)
    parts = split_rows(config)
    if isinstance(parts[0], StoredRows):
        console.print(f"many rows: the first {CHECKED_ROWS:,} of {len(parts[0]):,} are checked", highlight=False)
        parts = (list(parts[0][:CHECKED_ROWS]), *parts[1:])
    with closing(make_rewards(config, rows=parts)) as reward_function:
        return _check_rows(config, parts, partial(grade, reward_function), console)


def check_model(name: str, *, console: Console) -> None:
    """Print the passport of a model; every number of its files is read, and no model is made of them.

    Raises CheckpointError for a folder that is not what a run would train.
    """
    for line in inspect_folder(name).lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print("OK: the model is what its files hold.", highlight=False)


def _check_rows(config: Config, parts: tuple[Rows, Rows, Rows, Rows], pays: Grade, console: Console) -> bool:
    """Show what the rewards give to the right answers of the rows and to wrong ones."""
    rows, few_shot, during, test = parts
    console.print(f"training data: {statistics(rows).describe()}", markup=False, highlight=False)
    model_config, tokenizer = load_tokenizer(
        config.model, revision=config.policy.revision, trust_remote_code=config.policy.trust_remote_code
    )
    prepare_tokenizer(tokenizer, template=config.data.chat_template, moment=config.data.now)
    check_thinking(config, tokenizer)
    if any(reward.reads_reference for reward in config.rewards):
        console.print(describe_references(rows), markup=False, highlight=False, soft_wrap=True)
    console.print(foresee_paths(config, model_config), markup=False, highlight=False, soft_wrap=True)
    has_right_answer = have_right_answer(config.rewards)
    if not has_right_answer:
        console.print("no reward looks at an answer, so that none is right: the table shows what completions earn")
    counts = f"{count_rows(rows, 'training rows')}, {count_rows(test, 'test')}, "
    counts += describe_validation(config, during, test)
    graded, held_out, section = _rows_to_grade(config, parts, tokenizer, model_config, console)
    if not graded:
        console.print(f"OK: {counts}. No row has an answer, so that no reward is checked.", highlight=False)
        return True
    is_paid_for = any(reward.is_paid_for for reward in config.rewards)
    num_probed = 0 if is_paid_for else len(PROBES) * min(PROBED_ROWS, len(graded))
    pays = MeteredGrade(pays, config, num_completions=len(graded) + num_probed, console=console)
    end_ids = _end_ids(config, section, tokenizer, console)
    form = _show_prompt(config, section, (graded, few_shot), tokenizer, end_ids, pays, console)
    findings = check_data(
        graded,
        cast("Any", tokenizer),
        grade=pays,
        section=section.model_copy(update={"max_prompt_tokens": config.prompt_limit(context_of(model_config))}),
        gold=partial(write_gold, template=form),
        few_shot=few_shot,
        evaluation_rows=() if config.evaluation.allow_training_rows else held_out,
        meaning=GradeMeaning(
            has_right_answer=has_right_answer,
            decided_by_value=deciding_reward(config.rewards) is not None,
            needs_grades=not any(reward.type == "environment" for reward in config.rewards),
            by_row=config.rollouts.plays_rows,
        ),
        vocabulary=model_config.get_text_config().vocab_size,
        end_ids=end_ids,
    )
    reports = [(finding.severity, finding.describe()) for finding in findings]
    table, verdicts = probe(config.rewards, section, graded, few_shot, tokenizer, pays, form, seed=config.run.seed)
    console.print(table, markup=False, highlight=False, soft_wrap=True)
    is_of_form = not any(finding.takes_other_form for finding in findings)  # else no probe is either
    reports += [(severity, f"{severity}: {text}") for severity, text in verdicts if is_of_form or severity != "error"]
    for _, text in reports:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if errors := sum(severity == "error" for severity, _ in reports):
        fix = "the error" if errors == 1 else f"the {errors} errors"
        console.print(f"Check failed: fix {fix} above before training ({counts}).", highlight=False)
        return False
    doubts = f", with {counted(len(reports), 'warning')} to read above" if reports else ""
    console.print(f"OK{doubts}: {counts}.", highlight=False)
    return True


def _end_ids(
    config: Config, section: DataSection, tokenizer: PreTrainedTokenizerBase, console: Console | None = None
) -> tuple[int, ...]:
    """The tokens that end a completion; one that only the chat template names is said to ``console``."""
    declared = declared_end_ids(config.model, tokenizer, revision=config.policy.revision)
    end = unnamed_turn_end(section.chat, tokenizer, section.template, declared)
    if end is None:
        return declared
    if console is not None:
        console.print(describe_turn_end(tokenizer, end), markup=False, highlight=False, soft_wrap=True)
    return (*declared, end)


def _show_prompt(
    config: Config,
    section: DataSection,
    parts: tuple[Rows, Rows],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    pays: Grade,
    console: Console,
) -> Template:
    """Print the first prompt with a right completion; the template whose form right completions have."""
    template, has_right_answer = find_template(section.template), have_right_answer(config.rewards)
    if description := describe_chat(section.chat, tokenizer, section.template, model=config.model):
        console.print(description, markup=False, highlight=False, soft_wrap=True)
    prompts, _ = render_prompts(
        parts[0][:1],
        cast("Any", tokenizer),
        template=section.template,
        chat=section.chat,
        few_shot=parts[1],
        tools_of=make_tools_of(config.rollouts, section, NOTHING),
    )
    decided_by_value = deciding_reward(config.rewards) is not None
    form = form_of(template, prompts, pays, decided_by_value=decided_by_value) if has_right_answer else template
    if form is not template:
        console.print(f"as_is leaves the form to your prompts; the reward accepts that of {form.name}", highlight=False)
    for prompt in prompts:
        gold = write_gold(prompt.row, form) if has_right_answer else None
        console.print(prompt_report(prompt, tokenizer, end_ids, gold), markup=False, highlight=False, soft_wrap=True)
    return form


def _rows_to_grade(
    config: Config,
    parts: tuple[Rows, Rows, Rows, Rows],
    tokenizer: PreTrainedTokenizerBase,
    model_config: Any,
    console: Console,
) -> tuple[Rows, Rows, DataSection]:
    """Rows whose answers are graded, those held out from them, and how they are written.

    In a supervised stage the demonstrations are tokenized and counted, and where those have no answers, the rows of
    the evaluation are graded; none where these have no answers either.
    """
    rows, _, during, test = parts
    held_out = [*during, *test]
    if config.sft is None:
        return rows, held_out, config.data
    made = make_prompts(config, tokenizer, context_tokens=context_of(model_config), rows=parts)
    tokens = sum(len(demonstration.token_ids) for demonstration in made.demonstrations)
    too_long = counted(len(made.excluded), "row")
    console.print(
        f"{len(made.demonstrations):,} demonstrations, {tokens:,} tokens; too long: {too_long}", highlight=False
    )
    first = made.demonstrations[0]
    end_ids = _end_ids(config, config.data, tokenizer)
    report = demonstration_report(first.prompt, first.token_ids, tokenizer, end_ids)
    console.print(report, markup=False, highlight=False, soft_wrap=True)
    if any(row["answer"] for row in rows):
        return rows, held_out, config.data
    return [row for row in test if row["answer"]], [], config.evaluation_data


def probe(
    rewards: Sequence[RewardSection],
    section: DataSection,
    rows: Rows,
    few_shot: Rows,
    tokenizer: PreTrainedTokenizerBase,
    pays: Grade,
    form: Template,
    *,
    seed: int,
) -> tuple[str, list[tuple[Literal["error", "warning"], str]]]:
    """The recipe's reward on completions that no honest policy writes, as a table, and what follows."""
    if any(reward.is_paid_for for reward in rewards):
        return "no probes: each of them would be a paid request to the judge", []
    if all(reward.type == "environment" for reward in rewards):
        return (
            "no probes: every reward is that of an environment or agent, which plays only with a model. See an episode "
            "and the rewards of some with `oncurve check RECIPE --sample 4`",
            [],
        )
    prompts, _ = render_prompts(
        rows[:200],
        cast("Any", tokenizer),
        template=section.template,
        chat=section.chat,
        few_shot=few_shot,
    )
    options: dict[str, Any] = {
        "gold": partial(write_gold, template=form),
        "seed": seed,
        "encode": lambda text: tokenizer.encode(text, add_special_tokens=False),
    }
    best, *results = run_probes(pays, prompts, **options)
    options = {"has_right_answer": have_right_answer(rewards)}
    return describe_probes(results, best, **options), judge_probes(results, best, **options)
