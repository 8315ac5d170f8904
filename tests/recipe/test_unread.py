"""Does a recipe say what is set in it and read by nothing?"""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import oncurve
from oncurve.core.errors import ConfigError
from oncurve.data.python_objects import NOTHING
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config
from oncurve.recipe.preflight import unread_settings
from oncurve.run.training import announce

RECIPES = sorted((Path(oncurve.__file__).parent / "recipes").rglob("*.yaml"))
UNREAD = {
    ("algorithm.kl_estimator=k2",): "algorithm.kl_estimator=k2 does not count, since algorithm.kl_coef is 0.0. ",
    ("algorithm.type=cispo", "algorithm.clip_high=0.3"): "algorithm.clip_high=0.3 does not count, since algorithm.loss",
    ("algorithm.kl_coef=0.1", "algorithm.reference_every_steps=5"): "set algorithm.reference to refreshed or average",
    (
        "algorithm.correction_high=3",
    ): "algorithm.correction_high=3.0 does not count, since algorithm.correction is none",
    ("algorithm.entropy_coef_max=0.1",): "since algorithm.entropy_target is null. Leave it out, or set",
    ("rollouts.type=engine", "rollouts.tensor_parallel=2"): "set rollouts.type to servers or auto",
    ("rollouts.type=engine", "rollouts.deltas={}"): "rollouts.deltas={} does not count",
    ("rollouts.type=transformers", "rollouts.kv_tokens=100"): "set rollouts.type to engine or auto",
    ("evaluation.top_p=0.9",): "evaluation.top_p=0.9 does not count, since evaluation.temperature is 0.0",
    ("policy.offload=true",): "policy.offload=true does not count, since policy.parallel is auto",
    ("data.chat=false", "data.now=2026-01-01T00:00:00"): "since data.chat is false",
    ("rewards=[{type: mathematics, partial: 0.5}]",): "rewards.0.partial=0.5 does not count",
}
READ = (
    (),
    ("algorithm.clip_high=0.28",),
    ("data.chat={}", "data.now=2026-01-01T00:00:00"),
    ("algorithm.kl_coef=0.1", "algorithm.kl_estimator=k2"),
    ("algorithm.kl_coef=0.1", "algorithm.reference=average", "algorithm.reference_share=0.1"),
    ("algorithm.correction=truncate", "algorithm.correction_high=3"),
    ("evaluation.temperature=0.6", "evaluation.top_p=0.9"),
    ("rollouts.type=servers", "rollouts.vllm_servers=1", "rollouts.tensor_parallel=2"),
    ("rewards=[{type: mathematics, scale: graded, partial: 0.5}]",),
)


@pytest.mark.parametrize("overrides", UNREAD)
def test_a_setting_that_nothing_reads_is_told_with_what_it_depends_on(overrides: tuple[str, ...]) -> None:
    [line] = unread_settings(load_config(find_recipe("word_problems"), overrides))
    assert UNREAD[overrides] in line


@pytest.mark.parametrize("overrides", READ)
def test_nothing_is_said_of_a_setting_that_is_read(overrides: tuple[str, ...]) -> None:
    assert unread_settings(load_config(find_recipe("word_problems"), overrides)) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: "/".join(path.parts[-2:]))
def test_the_recipes_of_the_package_set_nothing_in_vain(path: Path) -> None:
    assert unread_settings(load_config(path)) == []


@pytest.mark.parametrize("key", ["data.path=mine.csv", "evaluation.data.path=mine.csv", "data.subset=main"])
def test_a_place_of_rows_is_refused_where_they_are_made(key: str) -> None:
    kind = "jsonl" if "subset" in key else "csv"
    with pytest.raises(ConfigError, match=rf"would not count: the type word_problems makes its rows.*data.type={kind}"):
        load_config(find_recipe("word_problems"), [key])


def test_a_run_says_so_before_it_begins() -> None:
    console = Console(file=StringIO(), width=200)
    announce(load_config(find_recipe("word_problems"), ["algorithm.correction_high=3"]), None, NOTHING, console)
    assert "warning: algorithm.correction_high=3.0 does not count" in console.file.getvalue()  # type: ignore[attr-defined]
