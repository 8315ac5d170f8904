"""The dialect of a model's own chat template: how it writes calls, and what stands between two turns."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oncurve.core.errors import ConfigError
from oncurve.core.sampler import exact_text
from oncurve.data.chat_template import TemplateRefusal, let_add, write_conversations
from oncurve.episodes.call_formats import FORMATS, MARKS, Read, learned_format
from oncurve.episodes.dialects import EncodedText, ForeignText
from oncurve.episodes.tools import CallRequest, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_ANSWER, _MARK = "oncurve-said-this", "oncurve-was-told-this"
_QUOTED = 'oncurve "quoted" this'
_THOUGHTS = "<think>\nfirst\n</think>\n\n"
_NAME, _ARGUMENTS = "oncurve_probe", {"text": "oncurve-argument"}
_QUESTION = {"role": "user", "content": "oncurve-asked"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "A text."}},
            "required": ["text"],
        },
    },
}


class ChatDialect:
    """Tools as the model's own chat template writes them."""

    stop: tuple[str, ...] = ()
    end_ids: Sequence[int] = ()

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        has_tools: bool,
        has_observations: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Finds out how the template, with its ``arguments``, frames answers, and that it can be gone on with.

        A template that writes earlier turns anew when a message is added is replaced, in the tokenizer, by one that
        only adds.

        Raises ConfigError, naming what the template does, if that is not possible, or if it writes calls in a form that
        is not read here.
        """
        self.tokenizer, self.foreign = tokenizer, ForeignText(tokenizer)
        self._arguments = dict(arguments or {})
        self.name = tokenizer.name_or_path or "the model"
        self._read: Read = lambda text, tools: []
        self._escapes, self._shows_calls = False, True
        if has_tools:
            self.learn_tools()
        if has_observations:
            self.check_prefix("user")

    @property
    def _ends(self) -> tuple[str, ...]:
        """The names of the tokens that end a turn."""
        ends = [self.tokenizer.eos_token, *(self.tokenizer.decode([token]) for token in self.end_ids)]
        return tuple(dict.fromkeys(str(end) for end in ends if end))

    def learn_tools(self) -> None:
        """Find out how the template writes calls and frames answers. Raises ConfigError as above."""
        self._read = self._find_format()
        self.check_prefix("tool")
        framed = self._after([{"role": "tool", "name": _NAME, "content": _QUOTED}])
        self._escapes = json.dumps(_QUOTED)[1:-1] in framed

    def read(self, text: str, tools: Mapping[str, Tool]) -> list[CallRequest]:
        """The calls in a turn."""
        return self._read(text, tools)

    def encode_answers(self, answers: Sequence[tuple[str, str]], *, ended: bool, limit: int) -> EncodedText:
        """The answers in the template's frame for them."""
        names = tuple(name for name, _ in answers)
        return self._framed("tool", names, [answer for _, answer in answers], ended=ended, limit=limit)

    def encode_observation(self, text: str, *, ended: bool, limit: int) -> EncodedText:
        """The words as the next message of the user."""
        return self._framed("user", ("",), [text], ended=ended, limit=limit)

    def _framed(self, role: str, names: tuple[str, ...], texts: list[str], *, ended: bool, limit: int) -> EncodedText:
        messages = [
            {"role": role, "content": f"{_MARK}-{index}-"} | ({"name": name} if name else {})
            for index, name in enumerate(names)
        ]
        rest = self.behind_end(self._after(messages), ended=ended)
        ids: list[int] = []
        for index, text in enumerate(texts):
            before, _, rest = rest.partition(f"{_MARK}-{index}-")
            content = json.dumps(text, ensure_ascii=False)[1:-1] if self._escapes and role == "tool" else text
            ids += [*self._marks(before), *self.foreign.cut(content, limit)]
        ids += self._marks(rest)
        return ids, exact_text(self.tokenizer, ids)

    def behind_end(self, text: str, *, ended: bool) -> str:
        """The tokens behind a turn, without the end token that the policy has written already."""
        written = next((end for end in self._ends if text.startswith(end)), "") if ended else ""
        return text.removeprefix(written)

    def _marks(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def _after(self, messages: list[dict[str, Any]]) -> str:
        """The template's text between the policy's last word or call and the next turn."""
        is_tool = messages[0]["role"] == "tool"
        if not (is_tool and self._shows_calls):
            turn = {"role": "assistant", "content": _ANSWER}
            role = str(messages[0]["role"])
            return self._attempt([_QUESTION, turn, *messages], role=role, goes_on=True).rpartition(_ANSWER)[2]
        names = [str(message["name"]) for message in messages]
        for called in (names, names[:1]):  # some take a single call, however many answers follow
            ids = [f"oncurve{number:02d}" for number in range(len(called))]
            answers = [{**message, "tool_call_id": ids[min(at, len(ids) - 1)]} for at, message in enumerate(messages)]
            turn = _calling(called)
            try:
                alone, whole = (
                    self._attempt([_QUESTION, turn]),
                    self._attempt([_QUESTION, turn, *answers], goes_on=True),
                )
            except ConfigError:
                if called is not names[:1] and len(names) > 1:
                    continue
                raise
            if whole.startswith(body := self.without_end(alone)):
                break
        return whole[len(body) :]

    def without_end(self, text: str) -> str:
        """A text that ends with a turn, up to the turn's last word."""
        text = text.rstrip()
        while end := next((end for end in self._ends if text.endswith(end)), ""):
            text = text.removesuffix(end).rstrip()
        return text

    def check_prefix(self, role: str) -> None:
        """See that a turn reads as before when another message follows, and else let the template only add.

        Raises ConfigError if that is not possible.
        """
        fault = self._rewriting(role)
        own = self.tokenizer.chat_template
        if fault and let_add(self.tokenizer):
            try:
                is_cured = self._rewriting(role) is None
            except ConfigError:
                is_cured = False
            if is_cured:
                logger.warning(
                    "%s: its chat template %s when a message of the %s follows. Here it only adds: turns stay as they "
                    "were written, and the model is saved with the template that does so",
                    self.name, fault, role,
                )  # fmt: skip
                return
            self.tokenizer.chat_template = own
        if fault:
            raise ConfigError(
                f"{self.name}: its chat template {fault} when a message of the {role} follows, so that the policy "
                f"would be trained on other tokens than those that it is asked to go on from. Name a template that "
                f"only adds to a conversation with data.chat_template, or set data.chat=false"
            )

    def _rewriting(self, role: str) -> str | None:
        """The change that the template makes to a turn when a message follows; None if it leaves it."""
        is_call = role == "tool" and self._shows_calls
        answer = {"role": role, "content": _MARK} | ({"name": _NAME, "tool_call_id": "oncurve00"} if is_call else {})
        last = {"role": "assistant", "content": _ANSWER}
        for thoughts in ("", _THOUGHTS):
            turn = _calling([_NAME], thoughts) if is_call else {"role": "assistant", "content": thoughts + _ANSWER}
            first = self.without_end(self._attempt([_QUESTION, turn], role=role))
            both = self._attempt([_QUESTION, turn, answer, last], role=role)
            if not is_call and _ANSWER not in first:
                return "leaves out what the assistant says"
            if not is_call:
                first = first[: first.rfind(_ANSWER) + len(_ANSWER)]
            if not both.startswith(first):
                return "leaves thoughts out of earlier turns" if thoughts else "writes earlier turns anew"
        return None

    def _attempt(self, messages: list[dict[str, Any]], *, role: str = "tool", goes_on: bool = False) -> str:
        tools = None if role == "user" else [_TOOL]
        try:
            [text] = write_conversations(
                [messages], self.tokenizer, tools=tools, arguments=self._arguments, opens_answer=goes_on
            )
        except TemplateRefusal as refusal:
            raise ConfigError(
                f"{self.name}: its chat template refuses messages of the {role} ({refusal.reason}). Use a model whose "
                f"template knows tools, or data.chat=false, where calls are written as <tool>...</tool>"
            ) from None
        return text

    def _find_format(self) -> Read:
        """The form in which the template writes calls. Raises ConfigError for one that is not read here."""
        text = self.without_end(self._attempt([_QUESTION, _calling([_NAME])], role="assistant with calls"))
        tools = [_TOOL]
        opened = [
            write_conversations(
                [[_QUESTION]], self.tokenizer, tools=tools, arguments=self._arguments, opens_answer=goes_on
            )
            for goes_on in (True, False)
        ]
        if _NAME not in opened[0][0]:
            logger.warning(
                "%s: its chat template does not tell the model what it may call. Say it in the prompt (data.template)",
                self.name,
            )
        plain = next((prefix for [prefix] in opened if text.startswith(prefix)), "")
        turn = text[len(plain) :] if plain else text.rpartition("oncurve-asked")[2]
        for read in FORMATS.values():
            requests = read(turn, {})
            if len(requests) == 1 and (requests[0].name, requests[0].arguments) == (_NAME, _ARGUMENTS):
                return read
        if learned := learned_format(turn, _NAME, _ARGUMENTS):
            return learned
        if _NAME not in turn:
            return self._format_by_mark(_NAME in opened[0][0])
        raise ConfigError(
            f"{self.name}: its chat template writes a call of a tool as {turn.strip()[:200]!r}, a form not read "
            f"here. Known are {', '.join(FORMATS)} (docs/episodes.md). Use another model, or data.chat=false, where "
            f"calls are written as <tool>...</tool>"
        )

    def _format_by_mark(self, is_described: bool) -> Read:
        """The form of calls that the template takes for words of the assistant, by a mark that the model has for them.

        Raises ConfigError where there is none.
        """
        known = str(self.tokenizer.chat_template) + " ".join(self.tokenizer.get_added_vocab())  # pyright: ignore[reportCallIssue, reportOptionalCall]
        form = next((form for form, mark in MARKS.items() if mark in known), None)
        if form is None or not is_described:
            untold = "" if is_described else ", and does not tell the model what it may call"
            raise ConfigError(
                f"{self.name}: its chat template leaves out calls of tools{untold}. Use a model whose template knows "
                f"tools, name one with data.chat_template, or set data.chat=false, where calls are written as "
                f"<tool>...</tool>"
            )
        self._shows_calls = False
        return FORMATS[form]


def _calling(names: Sequence[str], content: str = "") -> dict[str, Any]:
    """A turn with a call of each tool; identifiers have nine letters, which Mistral's templates ask for."""
    calls = [
        {"id": f"oncurve{number:02d}", "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}}
        for number, name in enumerate(names)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}
