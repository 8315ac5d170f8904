"""Verifiable constraints on the form of an answer, such as "at least 100 words" or "no comma", by the names of IFEval.

A row lists its constraints and their arguments, as IFEval's data set does (arXiv:2311.07911): columns
``instruction_id_list`` and ``kwargs``. Each check fails closed: what is not clearly met is not met, and an empty
completion meets nothing. Where a text can be counted in two ways, such as sentences around "e.g.", both must do.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.languages import KNOWN, language_of
from oncurve.rewards.strict_json import json_of, parse_json
from oncurve.rewards.thinking import spoken_text

if TYPE_CHECKING:
    from oncurve.rewards.late_graders import InstructionsReward

Relation = Literal["at least", "less than", "at most", "more than", "exactly"]
Check = Callable[[str], bool]

ABBREVIATIONS = re.compile(r"\b(?:[Ee]\.g|[Ii]\.e|[Ee]tc|[Vv]s|Mr|Mrs|Ms|Dr|Prof|St|No|Fig|[Aa]pprox|[A-Z])\.")
SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"'\u201d\u2019)\]*_]*+(?=\s|$)|[\u3002\uff01\uff1f]++")
BULLET = re.compile(r"^[ \t]*[*+\-\u2022][ \t]+\S", re.MULTILINE)
NUMBERED = re.compile(r"^[ \t]*(\d+)[.)][ \t]+\S", re.MULTILINE)
HIGHLIGHT = re.compile(r"(?<!\*)\*\*?(?=\S)([^*\n]*\S)\*\*?(?!\*)")
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def compare(relation: Relation, number: int, least: int, most: int | None = None) -> bool:
    """Whether a count, known to lie from ``least`` to ``most``, surely has the relation to a number."""
    most = least if most is None else most
    match relation:
        case "at least":
            return least >= number
        case "more than":
            return least > number
        case "at most":
            return most <= number
        case "less than":
            return most < number
        case "exactly":
            return least == most == number


def words_of(text: str) -> list[str]:
    """The words of a text; apostrophes and hyphens inside a word belong to it."""
    return re.findall(r"\w+(?:['\u2019\-]\w+)*", text)


def sentences(text: str) -> tuple[int, int]:
    """Fewest and most sentences that a text can be said to have.

    >>> sentences("Take fruit, e.g. plums. Then wait")
    (1, 3)
    """
    parts = SENTENCE_END.split(text)
    ends = sum(bool(words_of(part)) for part in parts[:-1])
    strict = sum(bool(words_of(part)) for part in SENTENCE_END.split(ABBREVIATIONS.sub("x", text))[:-1])
    return strict, ends + bool(words_of(parts[-1]))


def paragraphs(text: str, divider: str) -> list[str]:
    """Parts between dividers, a regular expression, without empty parts at both ends."""
    parts = [part.strip() for part in re.split(divider, text)]
    while parts and not parts[0]:
        parts.pop(0)
    while parts and not parts[-1]:
        parts.pop()
    return parts


def contains(text: str, phrase: str) -> bool:
    """Whether a phrase stands in a text as whole words, in any case."""
    return count_of(text, phrase) > 0


def count_of(text: str, phrase: str) -> int:
    """How often a phrase stands in a text as whole words, in any case."""
    inner = r"\s+".join(map(re.escape, phrase.split()))
    left = r"(?<!\w)" if phrase[:1].isalnum() else ""
    right = r"(?!\w)" if phrase[-1:].isalnum() else ""
    return len(re.findall(f"{left}{inner}{right}", text, re.IGNORECASE))


def keyword_existence(text: str, *, keywords: list[str]) -> bool:
    """Every keyword occurs."""
    return all(contains(text, keyword) for keyword in keywords)


def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: Relation = "at least") -> bool:
    """A keyword occurs so often."""
    return compare(relation, frequency, count_of(text, keyword))


def forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    """None of the words occurs."""
    return not any(contains(text, word) for word in forbidden_words)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: Relation = "at least") -> bool:
    """A letter occurs so often, in any case."""
    return compare(let_relation, let_frequency, text.lower().count(letter.lower()))


def keywords_in_order(text: str, *, keywords: list[str]) -> bool:
    """The keywords occur, each behind the one before it."""
    start = 0
    for keyword in keywords:
        match = re.compile(rf"(?<!\w){re.escape(keyword)}(?!\w)", re.IGNORECASE).search(text, start)
        if match is None:
            return False
        start = match.end()
    return True


def response_language(text: str, *, language: str) -> bool:
    """The text is in a language, given by its two letters (ISO 639-1)."""
    if language not in KNOWN:
        raise ValueError(f"the language {language!r} is not known; known are {', '.join(sorted(KNOWN))}")
    return language_of(text) == language


def number_sentences(text: str, *, num_sentences: int, relation: Relation = "at least") -> bool:
    """So many sentences."""
    return compare(relation, num_sentences, *sentences(text))


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs, divided by ``***``, none of them empty."""
    parts = paragraphs(text, r"\s?\*\*\*\s?")
    return len(parts) == num_paragraphs and all(parts)


def number_words(text: str, *, num_words: int, relation: Relation = "at least") -> bool:
    """So many words, whether those with hyphens count as one or as several."""
    return compare(relation, num_words, len(words_of(text)), len(re.findall(r"\w+", text)))


def number_lines(text: str, *, num_lines: int, relation: Relation = "exactly") -> bool:
    """So many lines that are not blank."""
    return compare(relation, num_lines, sum(bool(line.strip()) for line in text.splitlines()))


def number_characters(text: str, *, num_characters: int, relation: Relation = "at most") -> bool:
    """So many characters, without white space at both ends."""
    return compare(relation, num_characters, len(text.strip()))


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """So many paragraphs, divided by blank lines, and one of them begins with a word."""
    parts = paragraphs(text, r"\n\s*\n")
    if not 1 <= nth_paragraph <= num_paragraphs == len(parts):
        return False
    first = words_of(parts[nth_paragraph - 1])[:1]
    return first == words_of(first_word)[:1] or [word.lower() for word in first] == [first_word.lower()]


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """At least so many placeholders in square brackets, such as [name]."""
    return sum(bool(words_of(inner)) for inner in set(re.findall(r"\[([^\[\]\n]+)\]", text))) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    """A postscript with text behind its marker, at the beginning of a line."""
    letters = [re.escape(letter) for letter in postscript_marker if letter.isalpha()]
    marker = r"\.?\s?".join(letters) + r"\.?"
    return re.search(rf"^[ \t]*{marker}:?\s+\S", text, re.IGNORECASE | re.MULTILINE) is not None


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    """Exactly so many items with a bullet."""
    return len(BULLET.findall(text)) == num_bullets


def numbered_list(text: str, *, num_items: int) -> bool:
    """Exactly so many numbered items, counted from 1."""
    return [int(number[:9]) for number in NUMBERED.findall(text)] == list(range(1, num_items + 1))


def constrained_response(text: str) -> bool:
    """One of the three answers that IFEval's prompts offer, and nothing else."""
    return text.strip() in CONSTRAINED


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """At least so many parts in *emphasis* or **strong emphasis**."""
    return len(HIGHLIGHT.findall(text)) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each with a heading such as "Section 1" on a line and text behind it."""
    heading = rf"^[ \t*#]*{re.escape(section_spliter)}\s+(\d+)\b"
    starts = [(match.start(), match.end(), match[1]) for match in re.finditer(heading, text, re.MULTILINE)]
    ends = [start for start, _, _ in starts[1:]] + [len(text)] * bool(starts)
    filled = {number for (_, end, number), stop in zip(starts, ends, strict=True) if words_of(text[end:stop])}
    return len(filled) >= num_sections


def json_format(text: str) -> bool:
    """JSON alone, or in one fence."""
    inner = re.fullmatch(r"\s*```(?:json|JSON|Json)?\s*\n(.*?)\n?\s*```\s*", text, re.DOTALL)
    try:
        parse_json(inner[1] if inner else text)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """A title in double angular brackets, such as <<poem of joy>>."""
    return any(map(words_of, re.findall(r"<<([^<>\n]+)>>", text)))


def two_responses(text: str) -> bool:
    """Two different answers with six asterisks between them."""
    parts = paragraphs(text, r"(?<!\*)\*{6}(?!\*)")
    return len(parts) == 2 and all(map(words_of, parts)) and parts[0] != parts[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """The request comes first, word for word, and something behind it."""
    start, words = prompt_to_repeat.strip().lower(), text.strip().lower()
    return words.startswith(start) and bool(words_of(words[len(start) :]))


def start_checker(text: str, *, start_phrase: str) -> bool:
    """The answer begins with a phrase, in any case."""
    return text.strip().lower().startswith(start_phrase.strip().lower())


def end_checker(text: str, *, end_phrase: str) -> bool:
    """The answer ends with a phrase, in any case; a quotation mark may follow."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().strip('"').lower())


def quotation(text: str) -> bool:
    """The whole answer in double quotation marks."""
    inner = text.strip()
    return len(inner) > 2 and inner[0] == inner[-1] == '"' and bool(words_of(inner))


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: Relation = "at least") -> bool:
    """So many words all in capitals, whether single letters count or not."""
    capitals = [word for word in words_of(text) if word.isupper()]
    return compare(capital_relation, capital_frequency, sum(len(word) > 1 for word in capitals), len(capitals))


def english_capital(text: str) -> bool:
    """English, all in capitals."""
    return text.isupper() and language_of(text) == "en"


def english_lowercase(text: str) -> bool:
    """English, all in lower case."""
    return text.islower() and language_of(text) == "en"


def no_comma(text: str) -> bool:
    """No comma of any script, and at least one word."""
    return bool(words_of(text)) and not re.search("[,\u060c\u3001\uff0c]", text)


def no_exclamation(text: str) -> bool:
    """No exclamation mark, and at least one word."""
    return bool(words_of(text)) and not re.search("[!\u00a1\uff01]", text)


def no_digits(text: str) -> bool:
    """No digit of any script, and at least one word."""
    return bool(words_of(text)) and not any(character.isdigit() for character in text)


CHECKS: Mapping[str, Callable[..., bool]] = types.MappingProxyType({
    "keywords:existence": keyword_existence,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "keywords:in_order": keywords_in_order,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:number_lines": number_lines,
    "length_constraints:number_characters": number_characters,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:numbered_list": numbered_list,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:start_checker": start_checker,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
    "punctuation:no_exclamation": no_exclamation,
    "punctuation:no_digits": no_digits,
})  # fmt: skip
"""Every constraint by its name in a row; the 25 of IFEval and 7 more."""


def bind(name: str, arguments: Mapping[str, Any]) -> Check:
    """The check of one constraint of a row, with its arguments.

    Arguments that are None are left out: data sets fill them in where a row has none. Raises ValueError, with what a
    row must say, for a name that is not known and for arguments that are missing, superfluous or of another type.
    """
    if name not in CHECKS:
        raise ValueError(
            f"no constraint is named {name!r}; the names are those of IFEval, such as {next(iter(CHECKS))}"
        )
    check = CHECKS[name]
    provided = {key: value for key, value in arguments.items() if value is not None}
    parameters = {key: value for key, value in inspect.signature(check).parameters.items() if key != "text"}
    missing = [key for key, value in parameters.items() if value.default is value.empty and key not in provided]
    unknown = sorted(set(provided) - set(parameters))
    if missing or unknown:
        expected = ", ".join(parameters) or "no arguments"
        raise ValueError(f"{name} takes {expected}; missing: {missing or 'none'}, not known: {unknown or 'none'}")
    types_of = get_type_hints(check)
    ready = {key: _typed(name, key, value, types_of[key]) for key, value in provided.items()}
    bound = partial(check, **ready)
    bound("a")  # arguments that no text can meet are told now
    return bound


def _typed(name: str, key: str, value: Any, kind: Any) -> Any:
    """An argument of the declared type; whole floats count as integers, for tables of numbers hold floats."""
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if get_origin(kind) is Literal:
        is_right, expected = value in get_args(kind), " | ".join(get_args(kind))
    elif get_origin(kind) is list:
        is_right, expected = _are_texts(value), "texts"
    elif kind is int:
        is_right, expected = isinstance(value, int) and not isinstance(value, bool) and value >= 0, "a count"
    else:
        is_right, expected = isinstance(value, str) and bool(value.strip()), "a text"
    if not is_right:
        raise ValueError(f"{name}: {key} is {value!r}; give {expected}")
    return value


def _are_texts(value: Any) -> bool:
    """A list of texts, at least one and none blank."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_list and all(isinstance(item, str) and item.strip() for item in value)


class Instructions:
    """Whether a completion meets the constraints that its row lists.

    ``scale`` "binary": 1 if it meets all, else 0; "graded": the fraction of those that it meets. Parts: ``correct``,
    1.0 if it meets all; ``followed_fraction``. A row whose constraints cannot be read is an error
    (``unparsable_reference``), which names the constraint; it is not a wrong answer.
    """

    def __init__(self, section: InstructionsReward) -> None:
        self.name = section.key
        self.section = section

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        checks = {
            id(prompt): self._checks(prompt.row) for prompt in {id(prompt): prompt for prompt in prompts}.values()
        }
        return [
            self._reward(checks[id(prompt)], spoken_text(prompt, completion))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def close(self) -> None:
        """Nothing to end."""

    def _checks(self, row: Mapping[str, Any]) -> list[tuple[str, Check]] | Reward:
        """The constraints of a row, or the error of one whose constraints cannot be read."""
        try:
            return constraints_of(row, self.section.names_column, self.section.arguments_column)
        except ValueError as error:
            return Reward(value=None, error="unparsable_reference", detail=str(error)[:300])

    def _reward(self, checks: list[tuple[str, Check]] | Reward, text: str) -> Reward:
        if isinstance(checks, Reward):
            return checks
        is_blank = not text.strip()
        unmet = [name for name, check in checks if is_blank or not check(text)]
        followed = 1.0 - len(unmet) / len(checks)
        value = followed if self.section.scale == "graded" else float(not unmet)
        detail = f"not met: {', '.join(unmet)}" if unmet else ""
        return Reward(value=value, parts={"correct": float(not unmet), "followed_fraction": followed}, detail=detail)


def constraints_of(row: Mapping[str, Any], names_column: str, arguments_column: str) -> list[tuple[str, Check]]:
    """The constraints of a row with their checks.

    Raises ValueError, with the place in the row, for what is missing, of another type or not known.
    """
    names, arguments = _listed(row, names_column), _listed(row, arguments_column)
    if not names:
        raise ValueError(f"column {names_column} lists no constraint")
    if len(names) != len(arguments):
        raise ValueError(f"column {names_column} lists {len(names)} constraints, {arguments_column} {len(arguments)}")
    checks: list[tuple[str, Check]] = []
    for name, options in zip(names, arguments, strict=True):
        if not isinstance(options, Mapping):
            raise ValueError(f"column {arguments_column}: {options!r} stands for {name}; give its arguments, or {{}}")
        checks.append((name, bind(name, options)))
    return checks


def _listed(row: Mapping[str, Any], column: str) -> list[Any]:
    """A column with a list, or with a list as JSON text."""
    try:
        value = json_of(row.get(column))
    except ValueError as error:
        raise ValueError(f"column {column} holds no list: {error}") from None
    if not isinstance(value, list):
        raise ValueError(f"column {column} holds no list: {value!r:.60}")
    return value
