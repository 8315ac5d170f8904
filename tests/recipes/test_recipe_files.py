"""Is every recipe found, complete, documented, planned and checked, with its files beside it?"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lanes import gate
from offenders import assert_none, at
from rich.console import Console
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.cli.plan import plan_recipe
from oncurve.core.errors import ConfigError, DataError
from oncurve.recipe.files import SHIPPED, copy_recipe, described_recipes, find_recipe, shipped_recipes
from oncurve.recipe.load import load_config
from oncurve.rewards.instructions import constraints_of
from oncurve.run.examine import check_recipe
from oncurve.sandbox.tiers import describe_isolation

NAMES = list(shipped_recipes())
FOUR = ("math_r1_zero", "gsm8k_lora_8gb", "spot_32b", "gsm8k_instruct")
OWN_BASES = ("programs", "calculator", "word_problems/base")
ON_CPU = ["model=embedded", "rollouts.max_completion_tokens=96", "policy.quantization=null"]


def layout_of(name: str) -> Path:
    """A folder with rows as the data set of a recipe has them."""
    return (
        SHIPPED / {"math": "math_r1_zero", "gsm8k": "gsm8k_instruct"}[load_config(find_recipe(name)).data.type] / "tiny"
    )


def on_own_rows(name: str) -> list[str]:
    """What makes a recipe whose model and data are on the hub one that needs no network."""
    config = load_config(find_recipe(name))
    made = ("demonstrations", "calculator_problems", "calculator_chains", "word_problems")  # by the thousands
    few = ["data.limit=400"] if config.data.type in made else []
    if name.startswith("programs"):  # every program runs in a sandbox
        few = few or ["data.limit=40"]
        return ["model=embedded", *few, "evaluation.data.limit=10", "evaluation.num_prompts_during=10"]
    if config.model == "embedded":
        return few
    changes = [*few, *ON_CPU, "data.chat=false", "evaluation.data.chat=false"]
    if config.data.type in ("math", "gsm8k"):
        folder = layout_of(name)
        changes += [f"data.path={folder}", f"evaluation.data.path={folder}", "evaluation.num_prompts_during=20"]
    return [change for change in changes if config.evaluation.data is not None or "evaluation.data" not in change]


def check(name: str, overrides: Sequence[str] = ()) -> tuple[bool, str]:
    said = io.StringIO()
    good = check_recipe(load_config(find_recipe(name), overrides), console=Console(file=said, width=200))
    return good, said.getvalue()


def test_each_of_the_four_experiments_has_a_small_version() -> None:
    assert {f"{name}/tiny" for name in FOUR} <= set(NAMES)
    assert {"math_r1_zero/one_gpu", "math_r1_zero/mps", "spot_32b/full"} <= set(NAMES)


def test_a_recipe_says_what_it_is_and_its_readme_tells_of_it() -> None:
    wrong: list[str] = []
    for name, said in described_recipes():
        path = find_recipe(name)
        if not said.endswith((".", "README.", "servers", "programs-base")):
            wrong.append(f"{at(path)} does not say what it is in a sentence: {said}")
        readme = (path.parent / "README.md").read_text(encoding="utf-8")
        if f"oncurve train {name}" not in readme and f"`{name}`" not in readme:
            wrong.append(f"{at(path.parent / 'README.md')} does not tell of {name}")
    assert set(dict(described_recipes())) == set(NAMES)
    assert_none(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_planned_without_a_network(name: str) -> None:
    overrides = ["model=embedded"] if name.startswith(OWN_BASES) else []  # whose base a cold start makes
    overrides += ["algorithm.teacher=embedded"] if name == "distil_word_problems" else []  # a run comes first
    planned = json.loads(plan_recipe(find_recipe(name), overrides, as_json=True))
    assert planned["seconds"]["step"] > 0


VARIANTS = [
    "gsm8k_qwen/full", "gsm8k_qwen/lora", "gsm8k_qwen/sft", "gsm8k_small/full", "gsm8k_small/tiny_sft",
    "math_r1_zero/four_gpus", "math_r1_zero/mps", "math_r1_zero/one_gpu", "math_r1_zero/tiny_serve", "spot_32b/full",
    "spot_32b/tiny_full", "spot_32b/tiny_serve", "spot_32b/tiny_sft",
]  # fmt: skip
"""Recipes that have the data and the rewards of another, which is checked in the gate; these are nightly."""


@pytest.mark.parametrize("name", gate(NAMES, *(name for name in NAMES if name not in VARIANTS)))
def test_every_gold_answer_pays_and_no_prompt_gives_it_away(name: str) -> None:
    if name.startswith(("programs", "python_tool")) and describe_isolation().strongest != "bubblewrap":
        pytest.skip("programs run in a sandbox, and bubblewrap does not work here: apt-get install bubblewrap")
    good, said = check(name, on_own_rows(name))
    assert good, said


@pytest.mark.parametrize("name", ["gsm8k", "math_r1_zero", "gsm8k_lora_8gb", "spot_32b", "gsm8k_instruct"])
def test_without_a_network_check_says_how_to_do_without(name: str) -> None:
    with pytest.raises(DataError, match=r"(?s)cannot be loaded.*data\.path=FOLDER.*evaluation\.data\.path=FOLDER"):
        check(name)


def test_a_recipe_that_is_not_checked_in_the_gate_has_data_and_rewards_of_one_that_is() -> None:
    settings = {name: load_config(find_recipe(name)) for name in NAMES}
    checked = [settings[name] for name in NAMES if name not in VARIANTS]
    for name in VARIANTS:
        own = settings[name]
        same = [other for other in checked if (other.data, other.rewards) == (own.data, own.rewards)]
        assert any(other.evaluation.data == own.evaluation.data for other in same), name


def test_the_variants_of_an_experiment_differ_in_what_they_are_for_alone() -> None:
    def flat(name: str) -> dict[str, Any]:
        tree = load_config(find_recipe(name)).model_dump(mode="json")
        return {f"{section}.{key}": value for section, keys in tree.items() if isinstance(keys, dict)
                for key, value in keys.items()} | {"model": tree["model"], "rewards": tree["rewards"]}  # fmt: skip

    settings = {name: flat(name) for name in NAMES}

    def changed(one: str, other: str) -> set[str]:
        return {key for key, value in settings[one].items() if settings[other][key] != value}

    servers = {"rollouts.type", "rollouts.vllm_servers", "rollouts.vllm_options"}
    assert changed("math_r1_zero", "math_r1_zero/one_gpu") == servers | {"algorithm.correction"}
    assert changed("math_r1_zero/tiny", "math_r1_zero/tiny_serve") == servers - {"rollouts.type"} | {
        "rollouts.registry"
    }
    assert changed("gsm8k_lora_8gb", "gsm8k_lora_8gb/shaped") == {"rewards"}
    assert changed("spot_32b", "spot_32b/full") == {
        "policy.lora",
        "rollouts.deltas",
        "policy.parallel",
        "policy.tokens_per_microbatch",
        "optimizer.learning_rate",
    }
    for name in FOUR:
        free = {"model", "rewards", "data", "rollouts", "evaluation", "run", "optimizer"}
        other = {key.split(".")[0] for key in changed(name, f"{name}/tiny")} - free
        assert other <= {"algorithm", "policy"}
        kept = {
            "algorithm.type",
            "algorithm.loss",
            "algorithm.group_size",
            "policy.parallel",
            "policy.gradient_checkpointing",
        }
        assert not kept & changed(name, f"{name}/tiny"), "the small version takes another path"


def test_a_copy_is_found_before_the_package_and_may_be_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = copy_recipe("custom_reward")
    assert sorted(path.name for path in made.iterdir()) == [
        "README.md",
        "recipe.yaml",
        "reward.py",
        "test.jsonl",
        "train.jsonl",
    ]
    (made / "reward.py").write_text(
        "def right(completion, answer):\n    return float(answer in completion)\n\n"
        "def brief(completion, answer):\n    return 0.0\n"
    )
    config = load_config(find_recipe("custom_reward"))
    assert [reward.function for reward in config.rewards] == [  # type: ignore[union-attr]
        f"{tmp_path / 'custom_reward' / 'reward.py'}:{name}" for name in ("right", "brief")
    ]
    assert check("custom_reward")[0]
    assert find_recipe(str(copy_recipe("spot_32b/tiny", Path("mine")) / "tiny")) == Path("mine/tiny.yaml")
    with pytest.raises(ConfigError, match="exists already"):
        copy_recipe("spot_32b", Path("mine"))
    with pytest.raises(ConfigError, match="Did you mean 'custom_reward'"):
        copy_recipe("custom_rewards")


def test_files_are_looked_for_beside_the_recipe_then_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    here = tmp_path / "here"
    here.mkdir()
    (here / "rows.jsonl").touch()
    (here / "mine.py").touch()
    (here / "recipe.yaml").write_text(
        "{model: embedded, data: {type: jsonl, path: rows.jsonl, template: r1_zero},"
        " evaluation: {data: {type: jsonl, path: other.jsonl}},"
        " rewards: [{type: custom, function: 'mine.py:f'}, {type: custom, function: 'a.module:f'}]}"
    )
    config = load_config(here)
    assert config.data.path == str(here / "rows.jsonl")
    assert config.data.template == "r1_zero"
    assert config.evaluation.data is not None
    assert config.evaluation.data.path == "other.jsonl", "not there: seen from the current folder, as ever"
    assert [reward.function for reward in config.rewards] == [f"{here / 'mine.py'}:f", "a.module:f"]  # type: ignore[union-attr]
    assert load_config(here, ["data.path=rows.jsonl"]).data.path == "rows.jsonl", "typed here, so meant from here"
    monkeypatch.chdir(here)
    assert load_config("recipe.yaml").data.path == "rows.jsonl"


def beside(recipe: str, name: str) -> ModuleType:
    """The program in a recipe's folder that writes its rows."""
    spec = importlib.util.spec_from_file_location(name, SHIPPED / recipe / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_orders_are_what_their_script_writes() -> None:
    script = beside("structured_output", "orders")
    written = {
        split: [
            json.loads(line) for line in (SHIPPED / "structured_output" / f"{split}.jsonl").read_text().splitlines()
        ]
        for split in ("train", "test")
    }
    assert written == {"train": script.orders("train", 240), "test": script.orders("test", 80)}


def test_the_requests_are_what_their_script_writes_and_every_constraint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = beside("instructions", "requests")
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    script.main()
    for path in sorted(tmp_path.rglob("*.jsonl")):
        shipped = SHIPPED / "instructions" / path.relative_to(tmp_path)
        assert path.read_text(encoding="utf-8") == shipped.read_text(encoding="utf-8")
        for line in path.read_text(encoding="utf-8").splitlines():
            assert constraints_of(json.loads(line), "instruction_id_list", "kwargs")


PLANNED = re.compile(
    r"^\| `oncurve (plan [^`]+)` \| ([\d.]+) GiB \| ([\d.]+) s \| ([\d.]+) h \| (?:\$([\d.]+)|-) \|$", re.M
)


@pytest.mark.parametrize("name", [*FOUR, "structured_output"])
def test_the_figures_of_a_readme_are_those_of_the_planner(name: str) -> None:
    found = PLANNED.findall((SHIPPED / name / "README.md").read_text(encoding="utf-8"))
    assert found
    for command, *figures in found:
        done = CliRunner().invoke(app, [*shlex.split(command), "--json"])
        assert done.exit_code == 0, done.output
        plan = json.loads(done.output)
        peak = next(one["peak_bytes"] for one in plan["memory"] if one["role"] == "trainer") / 2**30
        planned = (peak, plan["seconds"]["step"], plan["hours"], plan["usd"]["on_demand"])
        for shown, now in zip(figures, planned, strict=True):
            assert shown == "" if now is None else float(shown) == pytest.approx(now, rel=0.15), command
