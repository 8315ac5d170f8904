"""Does the page for people who come from verl name keys that exist?"""

from __future__ import annotations

import re
from pathlib import Path

from oncurve.recipe.load import parse_config
from oncurve.recipe.messages import known_keys
from oncurve.recipe.preflight import check_algorithm
from oncurve.recipe.schema import Config

DOCS = Path(__file__).resolve().parents[2] / "docs"


def between(page: str, name: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.split(f"<!-- {name}:begin -->\n")[1].split(f"<!-- {name}:end -->")[0]


def block(text: str, language: str) -> str:
    [found] = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return found


def test_every_key_named_for_people_from_verl_exists() -> None:
    rows = [line.split(" | ") for line in between("coming_from_trl.md", "verl").splitlines()[2:]]
    assert len(rows) > 60
    sections = {"rewards", "evaluation.data", "evaluation", *Config.model_fields}
    named = {key for row in rows for key in re.findall(r"`([^`]+)`", row[1]) if not key.startswith("oncurve ")}
    assert {
        key for key in named if key not in {*known_keys(), *sections} and "--" not in key and " " not in key
    } == set()
    also = {key for row in rows for key in re.findall(r"`((?:algorithm|policy|run|rollouts|data)\.\w+)`", row[2])}
    assert also - {"policy.lora"} <= set(known_keys())


def test_the_example_from_verl_loads_and_has_its_batch() -> None:
    config = parse_config(block(between("coming_from_trl.md", "verl example"), "yaml"))
    assert config.run.completions_per_update == 32 * config.algorithm.group_size
    assert config.updates_per_step == 4
    check_algorithm(config)
