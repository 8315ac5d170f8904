"""Format rewards. Order, uniqueness and nesting count; repetition pays nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import PositiveInt

from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.answer_locations import after_hash, last_boxed
from oncurve.rewards.section import RewardSection, Surroundings
from oncurve.rewards.thinking import spoken_text

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_STEP = re.compile(
    r"^[^\S\n]*(?:#{1,6}[^\S\n]*)?(?:\*\*)?(?:step\s+)?(\d{1,2})\s*(?:\.(?!\d)|[:)])(?:\*\*)?[^\S\n]*(\S.*)$",
    re.IGNORECASE | re.MULTILINE,
)


def is_tagged(text: str, tags: Sequence[str], *, may_start_open: bool = False) -> bool:
    """Whether a text is one block per tag, in order, with only space around them, and the last one not empty.

    Each tag stands exactly once; other text before or between the blocks, and a further tag after them, spoil the form.
    With ``may_start_open`` the first opening tag may be missing, because the prompt ends with it. Text after the last
    block is tolerated: a sampler without stop string goes on writing.
    """
    matches = _find_tags(text, tags)
    expected = _expected(tags)
    names = [name for name, _, _ in matches]
    if may_start_open and names == expected[1:]:
        matches = [(expected[0], 0, 0), *matches]
    elif names != expected:
        return False
    gaps = [(0, matches[0][1])] + [(matches[k][2], matches[k + 1][1]) for k in range(1, len(matches) - 1, 2)]
    return not any(text[start:end].strip() for start, end in gaps) and bool(
        text[matches[-2][2] : matches[-1][1]].strip()
    )


def _expected(tags: Sequence[str]) -> list[str]:
    return [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]


def _find_tags(text: str, tags: Sequence[str]) -> list[tuple[str, int, int]]:
    pattern = re.compile("|".join(map(re.escape, _expected(tags))))
    return [(match.group(), match.start(), match.end()) for match in pattern.finditer(text)]


def paid_tags(text: str, tags: Sequence[str]) -> int:
    """The number of opening and closing tags that stand exactly once and after those that belong before them."""
    positions: dict[str, list[int]] = {}
    for name, start, _ in _find_tags(text, tags):
        positions.setdefault(name, []).append(start)
    paid, last = 0, -1
    for name in _expected(tags):
        starts = positions.get(name, [])
        if len(starts) == 1 and starts[0] > last:
            paid, last = paid + 1, starts[0]
    return paid


class _Form:
    """A reward for form alone: 1 or 0, as value and as the part "format"."""

    reads_answer_only = False
    """It is given what stands after the thinking."""

    def __init__(self, *, name: str = "format") -> None:
        self.name = name

    def close(self) -> None:
        """Nothing to end."""

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        texts = (
            spoken_text(*pair) if self.reads_answer_only else pair[1].text
            for pair in zip(prompts, completions, strict=True)
        )
        return [self.reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    def reward(self, prompt: Prompt, text: str) -> Reward:
        """The reward of one text."""
        value = float(self.has_form(prompt, text))
        return Reward(value=value, parts={"format": value})

    def has_form(self, prompt: Prompt, text: str) -> bool:
        """Whether the text has the form."""
        raise NotImplementedError


class TagFormat(_Form):
    """One block per tag, such as think then answer, or reasoning then answer.

    The first tag may be missing from a completion whose prompt ends with it. With ``per_tag`` the value is the share of
    tags that stand once and in order, while the part "format" stays all or nothing. ``is_signed`` stretches the value
    from 0 and 1 to -1 and 1.
    """

    def __init__(
        self,
        tags: Sequence[str] = ("think", "answer"),
        *,
        per_tag: bool = False,
        is_signed: bool = False,
        name: str = "format",
    ) -> None:
        super().__init__(name=name)
        if not tags or len(set(tags)) != len(tags):
            raise ConfigError(f"rewards: tags are {list(tags)}; name at least one tag, each once.")
        self.tags = tuple(tags)
        self.per_tag, self.is_signed = per_tag, is_signed

    def reward(self, prompt: Prompt, text: str) -> Reward:
        """All or nothing, or the share of tags."""
        whole = float(self.has_form(prompt, text))
        value = self._share_of_tags(prompt, text) if self.per_tag else whole
        return Reward(value=2 * value - 1 if self.is_signed else value, parts={"format": whole})

    def _share_of_tags(self, prompt: Prompt, text: str) -> float:
        is_open = self._is_open(prompt)
        opening = f"<{self.tags[0]}>"
        continued = opening + text if is_open and not text.lstrip().startswith(opening) else text
        value = (paid_tags(continued, self.tags) - is_open) / (2 * len(self.tags) - is_open)
        return max(value, 0.0)

    def has_form(self, prompt: Prompt, text: str) -> bool:
        """Whether the blocks are all there."""
        return is_tagged(text, self.tags, may_start_open=self._is_open(prompt))

    def _is_open(self, prompt: Prompt) -> bool:
        return prompt.text.rstrip().endswith(f"<{self.tags[0]}>")


class BoxedFormat(_Form):
    r"""Exactly one ``\boxed{...}`` after the thinking, and something in it."""

    reads_answer_only = True

    def has_form(self, prompt: Prompt, text: str) -> bool:
        """Whether there is one box."""
        return len(_BOX.findall(text)) == 1 and bool(last_boxed(text))


class HashFormat(_Form):
    """Exactly one ``####``, at the start of the last line after the thinking, with an answer after it."""

    reads_answer_only = True

    def has_form(self, prompt: Prompt, text: str) -> bool:
        """Whether the last line is the marked answer."""
        lines = text.strip().splitlines()
        return text.count("####") == 1 and lines[-1].lstrip().startswith("####") and bool(after_hash(text))


class StepFormat(_Form):
    """A chain of thought in numbered steps, "Step 1: ..." or "2. ...", from 1 without a gap, none said twice."""

    def __init__(self, *, min_steps: int = 2, name: str = "format") -> None:
        super().__init__(name=name)
        self.min_steps = min_steps

    def has_form(self, prompt: Prompt, text: str) -> bool:
        """Whether the steps are there and in order."""
        steps = _STEP.findall(text)
        contents = {content.strip().casefold() for _, content in steps}
        is_counted = [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
        return len(steps) >= self.min_steps and is_counted and len(contents) == len(steps)


class FormatReward(RewardSection):
    """The tags are there, once each, in order."""

    type: Literal["format"] = "format"
    tags: tuple[str, str] = ("think", "answer")
    """The two tags."""
    per_tag: bool = False
    """Credit for each correct tag."""
    scale: Literal["binary", "signed"] = "binary"
    """0 and 1; or -1 and 1."""

    is_form: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return TagFormat(tags=self.tags, per_tag=self.per_tag, is_signed=self.scale == "signed")


class BoxedFormatReward(RewardSection):
    r"""Exactly one boxed expression after the thinking, not empty."""

    type: Literal["boxed_format"] = "boxed_format"

    is_form: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return BoxedFormat(name=self.type)


class HashFormatReward(RewardSection):
    """Exactly one ####, at the start of the last line, followed by an answer."""

    type: Literal["hash_format"] = "hash_format"

    is_form: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return HashFormat(name=self.type)


class StepFormatReward(RewardSection):
    """Numbered steps from 1, without gaps or repetition."""

    type: Literal["step_format"] = "step_format"
    min_steps: PositiveInt = 2
    """Fewest steps."""

    is_form: ClassVar[bool] = True

    def make(self, around: Surroundings) -> RewardFunction:
        """The function that grades."""
        return StepFormat(min_steps=self.min_steps, name=self.type)
