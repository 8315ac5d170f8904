"""The R1-Zero reward: thinking, then an answer in tags that is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from oncurve.core.grading import RewardFunction
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.answer_locations import find_answer
from oncurve.rewards.formats import is_tagged
from oncurve.rewards.mathematics import AnswerChecker, reward_of
from oncurve.rewards.references import reference_text
from oncurve.rewards.section import RewardSection, Surroundings

TAGS = ("think", "answer")


def is_r1_zero(text: str) -> bool:
    """Whether a text has the form ``... </think> <answer> ... </answer>``, each tag once and in this order.

    ``<think>`` may stand at the very start, for prompts that do not end with it. Any space, line breaks or nothing may
    stand between the blocks; text after ``</answer>`` is ignored as long as it holds no further tag.
    """
    return is_tagged(text, TAGS, may_start_open=True)


class R1Zero:
    """1 for the right answer in the right form, 0 for anything else: form alone pays nothing.

    Parts: ``format``, 1.0 if the completion has the form of ``is_r1_zero``; ``correct``, 1.0 if moreover the content of
    the answer tag, or of a box inside it, equals the row's reference; ``over_limit`` as in ``Mathematics``.
    """

    def __init__(
        self,
        *,
        answer_column: str = "answer",
        timeout_seconds: float = 3.0,
        workers: int | None = None,
        name: str = "r1_zero",
        checker: AnswerChecker | None = None,
    ) -> None:
        self.name = name
        self.answer_column = answer_column
        self.checker = checker or AnswerChecker(timeout_seconds=timeout_seconds, workers=workers)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        golds = [reference_text(prompt.row, self.answer_column) for prompt in prompts]
        formed = [is_r1_zero(completion.text) for completion in completions]
        answers = [
            find_answer(completion.text, "answer_tag") if is_formed else None
            for completion, is_formed in zip(completions, formed, strict=True)
        ]
        verdicts = self.checker.check(list(zip(answers, golds, strict=True)))
        return [
            reward_of(verdict, answer, gold, is_well_formed=is_formed)
            for verdict, answer, gold, is_formed in zip(verdicts, answers, golds, formed, strict=True)
        ]

    def close(self) -> None:
        """Ends the checker's processes."""
        self.checker.close()


class R1ZeroReward(RewardSection):
    """1 for the right answer in the right format, else 0; format and answer are also logged apart."""

    type: Literal["r1_zero"] = "r1_zero"
    timeout_seconds: PositiveFloat = 3.0
    """Time limit of a comparison."""
    workers: PositiveInt | None = None
    """Processes that compare; None: one per processor, at most 16."""

    gives_correct: ClassVar[bool] = True
    reads_reference: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return R1Zero(**self.options())
