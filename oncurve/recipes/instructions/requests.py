"""Writes train.jsonl, test.jsonl and tiny/: requests with constraints that a program can verify.

python requests.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TASKS = (
    "Describe a walk through a harbour town.", "Explain why leaves change their colour in autumn.",
    "Give advice to somebody who moves to a large city.", "Write a letter to a neighbour about a lost key.",
    "Explain how a bicycle stays upright.", "Suggest a plan for a rainy weekend.", "Introduce the game of chess.",
    "Write a short review of a train journey.", "Explain how bread is made.", "Describe your favourite tool.",
    "Recommend three habits for better sleep.", "Tell a story about a cat that cannot jump.",
    "Explain what a library is for.", "Write an invitation to a garden party.", "Describe the sea to a child.",
    "Compare tea with coffee.", "Explain how to repair a flat tyre.", "Write a speech for a retiring teacher.",
    "Describe a market in the morning.", "Explain why people keep diaries.", "Plan a picnic for six people.",
    "Write a note of thanks for a borrowed ladder.", "Explain what a map shows.", "Describe an empty theatre.",
)  # fmt: skip
KEYWORDS = ("window", "morning", "careful", "bridge", "letter", "green", "quiet", "river", "simple", "answer")
LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "pt": "Portuguese"}
Constraint = tuple[str, str, dict[str, Any]]
"""A name, the sentence that asks for it, and its arguments."""


def _words(draw: random.Random) -> Constraint:
    number, relation = draw.choice((20, 40, 60, 80)), draw.choice(("at least", "less than"))
    sentence = f"Answer with {relation} {number} words."
    return "length_constraints:number_words", sentence, {"num_words": number, "relation": relation}


def _sentences(draw: random.Random) -> Constraint:
    number = draw.randint(2, 6)
    return (
        "length_constraints:number_sentences", f"Write at least {number} sentences.",
        {"num_sentences": number, "relation": "at least"},
    )  # fmt: skip


def _keywords(draw: random.Random) -> Constraint:
    chosen = draw.sample(KEYWORDS, 2)
    return "keywords:existence", f"Use the words {' and '.join(chosen)}.", {"keywords": chosen}


def _forbidden(draw: random.Random) -> Constraint:
    chosen = draw.sample(("very", "good", "great", "really", "nice"), 2)
    return "keywords:forbidden_words", f"Do not use the words {' and '.join(chosen)}.", {"forbidden_words": chosen}


def _bullets(draw: random.Random) -> Constraint:
    number = draw.randint(2, 5)
    sentence = f'The answer has exactly {number} bullet points that begin with "* ".'
    return "detectable_format:number_bullet_lists", sentence, {"num_bullets": number}


def _title(draw: random.Random) -> Constraint:
    return "detectable_format:title", "Give the answer a title in double angular brackets, such as <<title>>.", {}


def _end(draw: random.Random) -> Constraint:
    phrase = draw.choice(("That is all.", "Any questions?", "Thank you for reading."))
    return "startend:end_checker", f'End with exactly "{phrase}"', {"end_phrase": phrase}


def _comma(draw: random.Random) -> Constraint:
    return "punctuation:no_comma", "Do not use any comma.", {}


def _lower(draw: random.Random) -> Constraint:
    return "change_case:english_lowercase", "Write in English and in lower case only.", {}


def _language(draw: random.Random) -> Constraint:
    code = draw.choice(tuple(LANGUAGES))
    return "language:response_language", f"Write in {LANGUAGES[code]} only.", {"language": code}


ANY: tuple[Callable[[random.Random], Constraint], ...] = (_words, _sentences, _bullets, _title, _end, _comma)
ENGLISH = (_keywords, _forbidden, _lower)
"""Constraints that speak of English words, which a request for another language would contradict."""


def row(draw: random.Random) -> dict[str, Any]:
    """A request with one to three constraints that do not contradict each other."""
    kinds = (*ANY, *ENGLISH) if draw.random() < 0.8 else (*ANY, _language)
    chosen = [kind(draw) for kind in draw.sample(kinds, draw.randint(1, 3))]
    names = [name for name, _, _ in chosen]
    if {"startend:end_checker", "change_case:english_lowercase"} <= set(names):  # phrases begin with a capital
        chosen = [constraint for constraint in chosen if constraint[0] != "startend:end_checker"]
    question = " ".join((draw.choice(TASKS), *(sentence for _, sentence, _ in chosen)))
    return {
        "question": question,
        "instruction_id_list": [name for name, _, _ in chosen],
        "kwargs": [arguments for _, _, arguments in chosen],
    }


def tiny_row(draw: random.Random) -> dict[str, Any]:
    """A word problem whose answer must be short, for the embedded model, which writes nothing else."""
    first, more = draw.randint(11, 60), draw.randint(11, 39)
    return {
        "question": f"Anna has {first} shells. Anna finds {more} more. How many shells does Anna have now?",
        "instruction_id_list": ["length_constraints:number_words", "startend:end_checker"],
        "kwargs": [{"num_words": draw.choice((6, 8, 10)), "relation": "less than"}, {"end_phrase": "</answer>"}],
    }


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object on a line."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the four files; no question of a test is one of training."""
    for folder, make, counts in ((FOLDER, row, (320, 80)), (FOLDER / "tiny", tiny_row, (160, 40))):
        draw, rows = random.Random(0), {}
        while len(rows) < sum(counts):
            made = make(draw)
            rows[made["question"]] = made
        ordered = list(rows.values())
        write(folder / "train.jsonl", ordered[: counts[0]])
        write(folder / "test.jsonl", ordered[counts[0] :])


if __name__ == "__main__":
    main()
