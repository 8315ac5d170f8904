"""Do the examples of the page on rewards run, and does the page know every reward of a recipe?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from oncurve.config import schema
from oncurve.config.load import parse_config
from oncurve.rewards.custom import from_function, load_function

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(code: str) -> dict[str, Any]:
    """The names that some code defines."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "rewards.md", "exec"), names)
    return names


def test_the_examples_run() -> None:
    assert len(PYTHON) >= 5
    names = run("\n".join(PYTHON))
    assert {"exact", "parts", "short", "slow", "quotes_are_there", "steps", "watched"} <= set(names)


def test_the_examples_can_be_named_by_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text("\n".join(PYTHON), encoding="utf-8")
    for name in ("exact", "short", "watched"):
        from_function(load_function(f"{file}:{name}"))


@pytest.mark.parametrize("recipe", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_the_recipes_load(recipe: str) -> None:
    parse_config(recipe)


def test_every_reward_of_a_recipe_and_every_key_of_it_is_on_the_page() -> None:
    for section in get_args(get_args(schema.Reward)[0]):
        fields = dict(section.model_fields)
        assert f"`{fields.pop('type').default}`" in PAGE
        assert [key for key in fields if f"`{key}`" not in PAGE and f"`{key}:" not in PAGE] == []
