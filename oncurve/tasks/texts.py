"""Texts that a small model learns a task's form from: lessons first, then imperfect demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from oncurve.core.errors import DataError
from oncurve.tasks.calculator_problems import TAGS, Part, calculator_demonstrations, calculator_lessons
from oncurve.tasks.program_problems import program_demonstrations, program_lessons
from oncurve.tasks.word_problems import demonstrations, lessons
from oncurve.user_code import load_function
from oncurve.wording import listed

TextInParts = tuple[str, tuple[Part, ...]]
"""A prompt and the parts of its completion, without the end token."""
Texts = Callable[..., Iterable[tuple[str, str | tuple[Part, ...]]]]

TASKS: Mapping[str, tuple[Texts, Texts]] = {
    "word_problems": (lessons, demonstrations),
    "programs": (program_lessons, program_demonstrations),
    "calculator": (calculator_lessons, calculator_demonstrations),
    "calculator_chains": (partial(calculator_lessons, operations=2), partial(calculator_demonstrations, operations=2)),
}
"""Lessons and demonstrations of each task. Lessons teach to copy numbers and to take steps, and show no right answer in
its form: with demonstrations alone, the noise of the wrong ones drowns what little there is to learn from."""


def tags_of(task: str) -> tuple[str, ...]:
    """Tags that are tokens of a task's tokenizer, besides those of every small one."""
    return () if task in ("word_problems", "programs") else TAGS


def demonstrated_texts(task: str, *, lessons: int, demonstrations: int, seed: int = 0) -> Sequence[TextInParts]:
    """So many lessons of a task, then so many demonstrations.

    Raises DataError for a task that there is none of.
    """
    if task.endswith(".py"):
        makers = [load_function(f"{task}:{name}", where="data.task") for name in ("lessons", "demonstrations")]
    elif task in TASKS:
        makers = list(TASKS[task])
    else:
        raise DataError(
            f"data.task: there is no {task!r}. Use one of {listed(TASKS)}, or a file.py with functions lessons and "
            f"demonstrations"
        )
    texts: list[TextInParts] = []
    for make, count in zip(makers, (lessons, demonstrations), strict=True):
        for prompt, answer in make(count, seed=seed) if count else ():
            texts.append((prompt, ((answer, True),) if isinstance(answer, str) else answer))
    return texts
