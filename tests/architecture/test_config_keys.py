"""Is a new key of the recipe a decision that somebody saw?

``python tests/architecture/test_config_keys.py`` writes the list anew; the change to it belongs into the same commit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from oncurve.recipe.messages import known_keys

LIST = Path(__file__).with_name("config_keys.txt")


def current() -> str:
    return "".join(f"{key}\n" for key in sorted(set(known_keys())))


@pytest.mark.proves("F153", "D49")
def test_the_keys_of_a_recipe_are_those_that_were_agreed_on() -> None:
    assert current().splitlines() == LIST.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    LIST.write_text(current(), encoding="utf-8")
