"""Checks of the data before a run: the reward accepts the gold answers, prompts fit and leak nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from oncurve.core.records import NOT_APPLICABLE, Completion, Prompt, Reward
from oncurve.data.data_finding import DataFinding
from oncurve.data.datasets import problem_key, shared_rows
from oncurve.data.leaks import copied_answers, leaked_excerpt
from oncurve.data.prompt_check import find_prompt_faults
from oncurve.data.prompts import TEMPLATES, Excluded, Template, Tokenizer, find_template, render_prompts, write_gold
from oncurve.data.settings import DataSection
from oncurve.rewards.probes import TRIED
from oncurve.rewards.weighted_sum import categorize
from oncurve.wording import shortened

Grade = Callable[[Sequence[Prompt], Sequence[Completion]], Sequence[Reward]]
Verdict = Literal["accepted", "wrong", "unpaid", "bad_format", "failed"]
AS_IS = "as_is"
"""The template that leaves the form of a completion to the prompts."""
FREE_FORM = (
    "With data.template=as_is your prompts say what form an answer has, and the reward accepts none of the forms that "
    "are tried here. See what it pays to the model's own completions: `oncurve check RECIPE --sample 16`."
)


@dataclass(frozen=True, slots=True)
class GradeMeaning:
    """The meaning of the grades that a run's rewards give to an answer."""

    has_right_answer: bool = True
    """Some reward looks at an answer. Otherwise none is right, and graders must only not fail."""
    decided_by_value: bool = False
    """No reward has a part "correct" of its own, so a value of 1 counts as correct."""
    needs_grades: bool = True
    """False: the reward comes from an environment, which has not played."""
    by_row: bool = False
    """An environment or agent gets all columns, so that rows of one question are different problems."""


PLAIN = GradeMeaning()


def check_data(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    grade: Grade,
    section: DataSection,
    few_shot: Sequence[Mapping[str, Any]] = (),
    evaluation_rows: Sequence[Mapping[str, Any]] = (),
    gold: Callable[[Mapping[str, Any]], str] | None = None,
    max_refused_fraction: float = 0.05,
    meaning: GradeMeaning = PLAIN,
    vocabulary: int | None = None,
    end_ids: Sequence[int] | None = None,
) -> list[DataFinding]:
    """Everything found wrong with the rows of a run; an empty list if all is well.

    ``section`` says how prompts are written, and how long they may be.

    ``gold`` writes a perfect completion for a row; without it, the template's own form is used. A few refused gold
    answers are a warning, more than ``max_refused_fraction`` of the rows an error. ``vocabulary`` is the
    number of embeddings, and ``end_ids`` are the tokens that end a completion.

    Raises ConfigError or DataError if the prompts cannot be made at all.
    """
    template, chat, limit = find_template(section.template), section.chat, section.max_prompt_tokens
    prompts, excluded = render_prompts(
        rows, tokenizer, template=template, chat=chat, few_shot=few_shot, max_prompt_tokens=limit
    )
    gold = gold or partial(write_gold, template=template)
    return [
        *find_too_long(excluded),
        *find_prompt_faults(prompts, tokenizer, template, gold, vocabulary=vocabulary, end_ids=end_ids, chat=chat),
        *find_leaks(prompts, few_shot=few_shot),
        *(find_copied(rows) if meaning.has_right_answer else ()),
        *find_refused_gold(
            prompts,
            grade,
            gold,
            max_fraction=max_refused_fraction,
            meaning=meaning,
            knows_form=template.name != AS_IS,
        ),
        *find_repeats(rows, by_row=meaning.by_row),
        *find_shared(rows, evaluation_rows, by_row=meaning.by_row),
    ]


def find_too_long(excluded: Sequence[Excluded]) -> list[DataFinding]:
    """Rows left out because their prompt is too long."""
    if not excluded:
        return []
    longest = max(excluded, key=lambda row: row.num_tokens)
    return [
        DataFinding(
            severity="warning",
            what=f"the prompt is longer than {longest.limit_tokens} tokens and is left out",
            rows=tuple(row.index for row in excluded),
            example=f"row {longest.index}: {longest.num_tokens} tokens",
            remedy="Raise max_prompt_tokens, or shorten the template or the few-shot examples.",
        )
    ]


def find_leaks(prompts: Sequence[Prompt], *, few_shot: Sequence[Mapping[str, Any]] = ()) -> list[DataFinding]:
    """Prompts that contain their own solution."""
    leaks = [(prompt.index, leaked_excerpt(prompt, prompt.row, few_shot=few_shot)) for prompt in prompts]
    excerpts = [(index, excerpt) for index, excerpt in leaks if excerpt is not None]
    if not excerpts:
        return []
    return [
        DataFinding(
            severity="error",
            what="the prompt contains its own solution",
            rows=tuple(index for index, _ in excerpts),
            example=f"row {excerpts[0][0]}: {shortened(excerpts[0][1])}",
            remedy="Correct data.columns, the template, or take few-shot examples from other rows.",
        )
    ]


def find_copied(rows: Sequence[Mapping[str, Any]]) -> list[DataFinding]:
    """Answers that stand in their own questions far more often than the answers of other rows do."""
    if (copied := copied_answers(rows)) is None:
        return []
    share, chance, words, first = copied
    behind = f", in most of them behind {words!r}" if words else ""
    return [
        DataFinding(
            severity="warning",
            what=f"the reference answer stands in the row's own question in {share:.0%} of the rows (answers of other "
            f"rows: {chance:.0%}){behind}, so that a model can copy it",
            rows=(first,),
            example=f"row {first}: answer {rows[first]['answer']!r}: {shortened(str(rows[first]['question']))}",
            remedy="Take it out of the question, unless the task is to find or choose it there.",
        )
    ]


def find_refused_gold(
    prompts: Sequence[Prompt],
    grade: Grade,
    gold: Callable[[Mapping[str, Any]], str],
    *,
    max_fraction: float = 0.05,
    meaning: GradeMeaning = PLAIN,
    knows_form: bool = True,
) -> list[DataFinding]:
    """Rows whose own reference answer does not earn full reward; wrong, badly formed and failed are different findings.

    A reward function that names the part "correct" must set it to 1; any other must pay more than 0 or, as a penalty
    does, more than for the answer of another row. A warning says where it pays less than what evaluations count as
    correct.
    """
    decided_by_value = meaning.decided_by_value
    completions = [_as_completion(prompt, gold(prompt.row)) for prompt in prompts]
    rewards = list(grade(prompts[:TRIED], completions[:TRIED]))
    if all(reward.is_failure for reward in rewards):  # each of the others may take its whole time or memory, too
        prompts, completions = prompts[:TRIED], completions[:TRIED]
    else:
        rewards += grade(prompts[TRIED:], completions[TRIED:])
    low = [
        (prompt, reward.value)
        for prompt, reward in zip(prompts, rewards, strict=True)
        if meaning.has_right_answer
        and reward.value is not None
        and reward.value <= 0
        and _by_value(reward, decided_by_value)
    ]
    unpaid = _unpaid(low, prompts, grade, gold)
    ungraded = [index for index, reward in enumerate(rewards) if reward.error == NOT_APPLICABLE]
    refused: dict[tuple[Verdict, str], list[tuple[Prompt, Completion, Reward]]] = {}
    for prompt, completion, reward in zip(prompts, completions, rewards, strict=True):
        verdict = _verdict(reward, decided_by_value=decided_by_value, is_unpaid=prompt.index in unpaid)
        if verdict != "accepted" and (verdict != "wrong" or meaning.has_right_answer):
            refused.setdefault((verdict, reward.error or ""), []).append((prompt, completion, reward))
    is_fatal = sum(len(cases) for cases in refused.values()) > max_fraction * len(prompts)
    findings = [
        _refusal(
            "error" if is_fatal and (knows_form or verdict == "failed") else "warning",
            verdict,
            error,
            cases,
            FREE_FORM if not knows_form and verdict != "failed" else _accepted_form(cases[0], grade, decided_by_value),
        )
        for (verdict, error), cases in refused.items()
    ]
    if ungraded and meaning.needs_grades:
        findings.append(_not_graded(prompts, rewards, ungraded))
    return [*findings, *(_find_below_full_reward(prompts, rewards) if decided_by_value else ())]


def _not_graded(prompts: Sequence[Prompt], rewards: Sequence[Reward], indices: Sequence[int]) -> DataFinding:
    """Rows for which every reward is None: an error where those are all rows, since then nothing is ever learned."""
    first = indices[0]
    return DataFinding(
        severity="error" if len(indices) == len(prompts) else "warning",
        what="no reward grades the row's own reference answer, so nothing is learned from the row",
        rows=tuple(prompts[index].index for index in indices),
        example=f"row {prompts[first].index}: {rewards[first].detail}",
        remedy="Let the reward function return a number; one without `return` gives None.",
    )


def _find_below_full_reward(prompts: Sequence[Prompt], rewards: Sequence[Reward]) -> list[DataFinding]:
    """Reference answers that earn something, and not what an evaluation counts as correct."""
    below = [
        (prompt, reward)
        for prompt, reward in zip(prompts, rewards, strict=True)
        if reward.value is not None and reward.value > 0 and reward.parts.get("correct", 1.0) < 1.0
    ]
    if not below:
        return []
    prompt, reward = below[0]
    return [
        DataFinding(
            severity="warning",
            what="the reference answer earns less than what counts as correct, so evaluations count it as wrong",
            rows=tuple(prompt.index for prompt, _ in below),
            example=f"row {prompt.index}: answer {prompt.row['answer']!r} earns {reward.value:.3g}",
            remedy="Set correct_at of the reward to what a correct answer earns, or return "
            '{"reward": ..., "correct": 1.0 or 0.0}.',
        )
    ]


def find_repeats(rows: Sequence[Mapping[str, Any]], *, by_row: bool = False) -> list[DataFinding]:
    """Rows whose question, or ``by_row`` all of whose columns came before: with another answer, or simply again."""
    first: dict[str, int] = {}
    again: list[int] = []
    contradicting: list[int] = []
    keys = [problem_key(row, by_row=by_row) for row in rows]
    for index, row in enumerate(rows):
        earlier = first.setdefault(keys[index], index)
        if earlier != index:
            (again if rows[earlier]["answer"] == row["answer"] else contradicting).append(index)
    findings: list[DataFinding] = []
    for what, indices, remedy in (
        ("the question occurs twice with different answers", contradicting, "Correct or drop one of the two rows."),
        ("the question came before", again, "Remove the later rows from the data, since they count twice."),
    ):
        if indices:
            example = _beside(rows, first[keys[indices[0]]], indices[0])
            findings.append(DataFinding("warning", what, tuple(indices), example, remedy))
    return findings


def find_shared(
    rows: Sequence[Mapping[str, Any]], evaluation_rows: Sequence[Mapping[str, Any]], *, by_row: bool = False
) -> list[DataFinding]:
    """Training rows whose question, or ``by_row`` all of whose columns are also evaluated."""
    shared = shared_rows(rows, evaluation_rows, by_row=by_row)
    if not shared:
        return []
    first, evaluated = shared[0]
    return [
        DataFinding(
            severity="error",
            what="the question is trained on and evaluated",
            rows=tuple(index for index, _ in shared),
            example=f"row {first} = evaluation row {evaluated}: {shortened(str(rows[first]['question']))}",
            remedy="Evaluate on another split, or hold rows out of the training data.",
        )
    ]


def _as_completion(prompt: Prompt, text: str) -> Completion:
    """Text as if it had been sampled; reward functions read text, so there are no tokens."""
    return Completion(prompt.prompt_ids, (), text, (), "stop", policy_version=0, index=0)


def _by_value(reward: Reward, decided_by_value: bool) -> bool:
    """Whether the value alone says if an answer is right: no part "correct" does, and the form is kept."""
    return decided_by_value or ("correct" not in reward.parts and reward.parts.get("format", 1.0) >= 1)


def _unpaid(
    low: Sequence[tuple[Prompt, float]],
    prompts: Sequence[Prompt],
    grade: Grade,
    gold: Callable[[Mapping[str, Any]], str],
) -> frozenset[int]:
    """Indices of rows whose reference answer earns no more than the answer of another row in its place.

    ``low`` are the rows whose reference answer earns 0 or less. A penalty, such as a distance with a minus, pays the
    best answer 0; only the reward of another answer tells it from a wrong one.
    """
    if not low:
        return frozenset()
    answers = list(dict.fromkeys(str(prompt.row.get("answer", "")) for prompt in prompts))
    others = [
        next((answer for answer in answers[:2] if answer != str(prompt.row.get("answer", ""))), f"{answers[0]}7")
        for prompt, _ in low
    ]
    written = [
        _as_completion(prompt, gold({**prompt.row, "answer": other}))
        for (prompt, _), other in zip(low, others, strict=True)
    ]
    compared = zip(low, grade([prompt for prompt, _ in low], written), strict=True)
    return frozenset(prompt.index for (prompt, value), other in compared if other.value is None or value <= other.value)


def _verdict(reward: Reward, *, decided_by_value: bool, is_unpaid: bool) -> Verdict:
    if reward.error == NOT_APPLICABLE:
        return "accepted"
    if reward.value is None:
        return "failed"
    if _by_value(reward, decided_by_value):
        return "unpaid" if is_unpaid else "accepted"
    category = categorize(reward)
    return "bad_format" if category == "bad_format" else "accepted" if category == "correct" else "wrong"


def _accepted_form(case: tuple[Prompt, Completion, Reward], grade: Grade, decided_by_value: bool) -> str:
    """A sentence that names the template in whose form the reward accepts the row's answer, or nothing."""
    prompt, _, low = case
    template = None if low.value is None else _accepting(prompt, grade, decided_by_value, above=low.value)
    if template is None:
        return ""
    return (
        f"It accepts {write_gold(prompt.row, template)[-80:]!r}, the form of data.template={template.name}: use that "
        f"template, or the reward of this one's form."
    )


def _accepting(prompt: Prompt, grade: Grade, decided_by_value: bool, *, above: float) -> Template | None:
    """The first template in whose form the reward accepts the row's answer, and pays more than ``above``."""
    forms = {write_gold(prompt.row, template): template for template in reversed(TEMPLATES.values())}
    for text, template in reversed(forms.items()):
        [reward] = grade([prompt], [_as_completion(prompt, text)])
        is_accepted = _verdict(reward, decided_by_value=decided_by_value, is_unpaid=False) == "accepted"
        if is_accepted and reward.value is not None and reward.value > above:
            return template
    return None


def form_of(template: Template, prompts: Sequence[Prompt], grade: Grade, *, decided_by_value: bool) -> Template:
    """The template whose form completions have: of prompts that are used as they are, the one that the reward accepts.

    ``as_is`` itself where it accepts none of the known forms.
    """
    if template.name != AS_IS or not prompts:
        return template
    return _accepting(prompts[0], grade, decided_by_value, above=0.0) or template


def _refusal(
    severity: Literal["error", "warning"],
    verdict: Verdict,
    error: str,
    cases: Sequence[tuple[Prompt, Completion, Reward]],
    accepted: str,
) -> DataFinding:
    what = {
        "wrong": "the reward calls the row's own reference answer wrong",
        "unpaid": "the reward pays the row's own reference answer 0 or less, and no more than another row's answer",
        "bad_format": "the reward does not accept the format of the reference completion",
    }.get(verdict, f"grading the row's own reference answer failed ({error})")
    remedy = accepted or {
        "wrong": "Check that the answers are in the format that the reward reads, or use another reward.",
        "unpaid": "Check that the answers are in the format that the reward reads, or use another reward.",
        "bad_format": "Choose a template and a reward with the same format: data.template and rewards.",
    }.get(verdict, "Correct the reward function, or drop rows whose answer it cannot read.")
    prompt, completion, reward = cases[0]
    example = f"row {prompt.index}: answer {prompt.row['answer']!r}, completion ...{completion.text[-80:]!r}"
    if reward.detail:
        example += f": {reward.detail}"
    rows = tuple(case[0].index for case in cases)
    return DataFinding(severity, what, rows, example, remedy, takes_other_form=bool(accepted))


def _beside(rows: Sequence[Mapping[str, Any]], earlier: int, later: int) -> str:
    answers = f"{rows[earlier]['answer']!r} and {rows[later]['answer']!r}"
    return f"rows {earlier} and {later}: {shortened(str(rows[later]['question']))}; answers {answers}"
