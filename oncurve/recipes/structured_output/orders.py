"""Generator of this recipe's orders: python orders.py writes train.jsonl and test.jsonl beside this file."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

NAMES = ("Ada", "Bilal", "Chen", "Dana", "Elif", "Femi", "Greta", "Hugo", "Ines", "Jonas", "Kofi", "Lena")
ITEMS = ("screws", "hinges", "lamps", "brushes", "filters", "cables", "bolts", "tiles", "hooks", "valves")
COUNTS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve", "fifteen", "twenty")
NUMBERS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
FORMS = (
    "{name} needs {count} boxes of {item} by {day}.{hurry}",
    "Please send {count} boxes of {item} to {name} on {day}.{hurry}",
    "by {day}: {item}, {count} boxes, for {name}.{hurry}",
)
INSTRUCTION = "Write this order as one JSON object with the keys customer, item, boxes, day and urgent:\n"


def orders(split: str, count: int) -> list[dict[str, str]]:
    """Different orders of a split, as rows; no customer is in both."""
    draw, rows = Random(f"orders {split}"), {}
    names = NAMES[:8] if split == "train" else NAMES[8:]
    while len(rows) < count:
        number, urgent = draw.randrange(len(COUNTS)), draw.random() < 0.4
        fillers = {"name": draw.choice(names), "item": draw.choice(ITEMS), "day": draw.choice(DAYS)}
        text = draw.choice(FORMS).format(**fillers, count=COUNTS[number], hurry=" It is urgent." if urgent else "")
        order = {"customer": fillers["name"], "item": fillers["item"], "boxes": NUMBERS[number]}
        order |= {"day": fillers["day"], "urgent": urgent}
        rows[text] = {"question": INSTRUCTION + text, "answer": json.dumps(order)}
    return list(rows.values())


if __name__ == "__main__":
    for split, count in (("train", 240), ("test", 80)):
        lines = "".join(json.dumps(row) + "\n" for row in orders(split, count))
        Path(__file__).with_name(f"{split}.jsonl").write_text(lines, encoding="utf-8")
