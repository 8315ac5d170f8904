"""Can a recipe name the examples of the page on rewards, and does the page know every reward of a recipe?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from oncurve.recipe import schema
from oncurve.rewards.custom import from_function
from oncurve.user_code import load_function

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.proves("F111")
def test_the_examples_can_be_named_by_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text("\n".join(PYTHON), encoding="utf-8")
    for name in ("exact", "short", "steps"):
        from_function(load_function(f"{file}:{name}"))


def test_every_reward_of_a_recipe_and_every_key_of_it_is_on_the_page() -> None:
    for section in get_args(get_args(schema.Reward)[0]):
        fields = dict(section.model_fields)
        assert f"`{fields.pop('type').default}`" in PAGE
        assert [key for key in fields if f"`{key}`" not in PAGE and f"`{key}:" not in PAGE] == []
