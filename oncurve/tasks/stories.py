"""Texts of the word problems: six families of stories, each in three registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["textbook", "answer_key", "forum"]
"""A register, and the source of demonstrations that usually sounds like it."""

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Lena", "Marco")


@dataclass(frozen=True, slots=True)
class Story:
    """The clauses of one family in one register: {n} is a number, {x} the things, {who} the name."""

    start: str
    gain: tuple[str, ...]
    loss: tuple[str, ...]
    ask: str
    boxes: str
    """The start of a story with a product: {k} times {n}."""


THINGS: dict[str, tuple[str, ...]] = {
    "collection": ("shells", "stamps", "marbles", "cards"),
    "bus": ("people", "children", "tourists"),
    "money": ("euros", "coins"),
    "bakery": ("rolls", "cakes", "muffins"),
    "library": ("books", "maps", "comics"),
    "farm": ("eggs", "pears", "melons"),
}

STORIES: dict[str, dict[Source, Story]] = {
    "collection": {
        "textbook": Story(
            "{who} has {n} {x}.",
            ("Then {who} finds {n} more {x}.", "A friend gives {who} {n} {x}."),
            ("Then {who} loses {n} {x}.", "{who} gives {n} {x} to a friend."),
            "How many {x} does {who} have now?",
            "{who} has {k} boxes with {n} {x} in each box.",
        ),
        "answer_key": Story(
            "{x} of {who}: {n};", ("found {n};",), ("lost {n};",), "{x} now:", "{x} of {who}: {k} boxes of {n};"
        ),
        "forum": Story(
            "hi, i had {n} {x},",
            ("then got {n},",),
            ("then lost {n},",),
            "so how many {x}?",
            "hi, i had {k} boxes of {n} {x},",
        ),
    },
    "bus": {
        "textbook": Story(
            "There are {n} {x} on a bus.",
            ("At the next stop {n} {x} get on.", "Then {n} more {x} get on the bus."),
            ("At the next stop {n} {x} get off.", "Then {n} {x} leave the bus."),
            "How many {x} are on the bus now?",
            "There are {k} buses with {n} {x} on each bus.",
        ),
        "answer_key": Story(
            "Bus, {x}: {n};", ("on {n};",), ("off {n};",), "{x} on the bus:", "{k} buses, {x} on each: {n};"
        ),
        "forum": Story(
            "ok so my bus had {n} {x},",
            ("{n} got on,",),
            ("{n} got off,",),
            "how many {x} are left?",
            "ok so we had {k} buses of {n} {x},",
        ),
    },
    "money": {
        "textbook": Story(
            "{who} has {n} {x} in a purse.",
            ("{who} earns {n} {x}.", "Then {who} gets {n} {x} from an uncle."),
            ("{who} spends {n} {x}.", "Then {who} pays {n} {x} for a game."),
            "How many {x} are left in the purse?",
            "{who} saves {n} {x} a week for {k} weeks.",
        ),
        "answer_key": Story(
            "Purse of {who}: {n} {x};",
            ("in {n};",),
            ("out {n};",),
            "{x} in the purse:",
            "{who} saves {n} {x}, {k} weeks;",
        ),
        "forum": Story(
            "hey, i have {n} {x},",
            ("i earn {n},",),
            ("i pay {n},",),
            "what do i have now?",
            "hey, i save {n} {x} for {k} weeks,",
        ),
    },
    "bakery": {
        "textbook": Story(
            "A baker has {n} {x} on the shelf.",
            ("The baker makes {n} more {x}.", "Then the baker adds {n} {x}."),
            ("The baker sells {n} {x}.", "Then {n} {x} are sold."),
            "How many {x} are on the shelf now?",
            "A baker fills {k} trays with {n} {x} each.",
        ),
        "answer_key": Story(
            "Shelf: {n} {x};", ("baked {n};",), ("sold {n};",), "{x} on the shelf:", "{k} trays of {n} {x};"
        ),
        "forum": Story(
            "my shop had {n} {x},",
            ("we baked {n},",),
            ("we sold {n},",),
            "how many {x} now?",
            "my shop had {k} trays of {n} {x},",
        ),
    },
    "library": {
        "textbook": Story(
            "A library has {n} {x} on a table.",
            ("Readers bring back {n} {x}.", "Then {n} new {x} arrive."),
            ("Readers borrow {n} {x}.", "Then {n} old {x} are removed."),
            "How many {x} are on the table now?",
            "A library has {k} tables with {n} {x} each.",
        ),
        "answer_key": Story(
            "Table: {n} {x};", ("back {n};",), ("lent {n};",), "{x} on the table:", "{k} tables of {n} {x};"
        ),
        "forum": Story(
            "we put {n} {x} out,",
            ("{n} came back,",),
            ("{n} went away,",),
            "how many {x} do we have?",
            "we put {n} {x} on {k} tables,",
        ),
    },
    "farm": {
        "textbook": Story(
            "Farmer {who} has {n} {x}.",
            ("{who} collects {n} more {x}.", "In the evening {who} picks up {n} {x}."),
            ("{who} sells {n} {x} at the market.", "In the evening {n} {x} break."),
            "How many {x} does the farmer have at the end?",
            "Farmer {who} fills {k} baskets with {n} {x} each.",
        ),
        "answer_key": Story(
            "Farm: {n} {x};", ("collected {n};",), ("market {n};",), "{x} at the end:", "{k} baskets of {n} {x};"
        ),
        "forum": Story(
            "on the farm i had {n} {x},",
            ("picked {n},",),
            ("ate {n},",),
            "how many {x} at the end?",
            "on the farm i had {k} baskets of {n} {x},",
        ),
    },
}
