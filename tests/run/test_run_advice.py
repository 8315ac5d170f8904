"""Is a user told of settings that his processor or the size of his model makes doubtful?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lanes import gate
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.policy.settings import OptimizerSettings
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config
from oncurve.run import builder, model_paths

SHORT = ("run.steps=1", "run.prompts_per_step=2", "algorithm.group_size=2", "evaluation.num_prompts=2", "run.name=one")


@pytest.mark.parametrize(
    ("has_it", "weights", "kind", "is_said"),
    gate(
        [
            (True, 1000, "auto", True),
            (False, 1000, "auto", False),
            (True, 50_000_000, "auto", False),
            (True, 1000, "bfloat16", False),
        ],
        (True, 1000, "auto", True),
    ),
)
def test_a_large_model_in_float32_on_a_processor_with_bfloat16(
    has_it: bool, weights: int, kind: str, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_it})
    monkeypatch.setattr(model_paths, "WORTH_SAYING", weights)
    words = ["train", "word_problems", f"run.folder={tmp_path}", "policy.device=cpu", f"policy.compute_type={kind}"]
    done = CliRunner().invoke(app, [*words, *SHORT], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    told = "policy.compute_type=bfloat16 (weights and optimizer stay in float32)"
    assert (told in done.output) == is_said
    assert (told in (tmp_path / "one" / "log.txt").read_text()) == is_said


RATES: dict[str, tuple[list[str], str | None]] = {
    "low": (["optimizer.learning_rate=1e-6"], "begin with 0.0001"),
    "low for an adapter": (["policy.lora={rank: 8}", "optimizer.learning_rate=1e-6"], "begin with 1e-05"),
    "usual": (["optimizer.learning_rate=5e-5"], None),
    "usual for an adapter": (["policy.lora={rank: 8}", "optimizer.learning_rate=1e-5"], None),
    "none": (["optimizer.learning_rate=0"], "learning_rate is 0: no weight moves"),
    "none of Muon": (["optimizer.learning_rate=0", "optimizer.type=muon"], "learning_rate is 0: no weight moves"),
}


@pytest.mark.parametrize("name", RATES)
def test_a_rate_is_judged_beside_the_number_of_weights(name: str) -> None:
    settings, begin = RATES[name]
    weights = 100_000 if any(setting.startswith("policy.lora") for setting in settings) else 1_700_000
    optimizer = load_config(find_recipe("word_problems"), settings).optimizer
    said = optimizer.rate_warning(weights, is_adapter="adapter" in name, updates=70)
    assert (said is not None) == (begin is not None)
    assert begin is None or begin in str(said)


def test_a_warm_up_that_is_longer_than_the_run_is_told() -> None:
    optimizer = OptimizerSettings(learning_rate=1e-4, warmup_updates=80)
    said = [optimizer.rate_warning(1_700_000, is_adapter=False, updates=updates) for updates in (10, 70, 81)]
    assert "a rate of 8.64e-05, and optimizer.learning_rate=0.0001 is never reached" in str(said.pop(1))
    assert said == [None, None], "a trial, and a run that is long enough"


@pytest.mark.parametrize("name", gate(RATES, "low"))
def test_a_learning_rate_of_large_models_for_a_small_one(name: str, tmp_path: Path) -> None:
    settings, begin = RATES[name]
    words = ["word_problems", f"run.folder={tmp_path}", "policy.device=cpu", *settings]
    done = CliRunner().invoke(app, ["train", *words, *SHORT], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    checked = CliRunner().invoke(
        app, ["check", *words, *SHORT, "data.limit=200", "--sample", "2"], catch_exceptions=False
    )
    for said in (done.output, checked.output, (tmp_path / "one" / "log.txt").read_text()):
        assert ("warning: at optimizer.learning_rate=" in said) == (begin is not None and begin.startswith("begin"))
        assert begin is None or begin in said


@pytest.mark.parametrize(("weights", "is_said"), [(10**6, True), (10**9, False)])
def test_weights_of_which_each_process_has_a_part_count_as_a_whole(weights: int, is_said: bool) -> None:
    empty = torch.nn.Linear(1, 1, bias=False)
    empty.weight.data = torch.empty(0)  # as ZeRO leaves it between passes
    backend = SimpleNamespace(full_shape=lambda weight: torch.Size([weights]))
    policy: Any = SimpleNamespace(model=empty, backend=backend, total_updates=1)
    optimizer = OptimizerSettings(learning_rate=1e-6)
    config: Any = SimpleNamespace(optimizer=optimizer, policy=SimpleNamespace(lora=None))
    assert (model_paths.slow_rate(policy, config) is not None) == is_said


@pytest.mark.parametrize(
    ("changes", "is_single"),
    [
        ([], True), (["rollouts.top_p=0.9"], False), (["rollouts.top_k=3"], False), (["rollouts.min_p=0.1"], False),
        (["rollouts.temperature=0.5"], True), (["policy.lora={rank: 4}"], True),
        (["policy.lora={rank: 4, dropout: 0.1}"], False), (["rollouts.type=servers", "rollouts.staleness=1",
         "rollouts.vllm_servers=1"], False), (["sft={}"], False),
    ],
)  # fmt: skip
def test_sampler_and_trainer_are_one_policy_where_nothing_changes_its_probabilities(
    changes: list[str], is_single: bool
) -> None:
    assert model_paths.has_single_policy(load_config(find_recipe("word_problems"), changes)) is is_single


def test_a_row_may_have_what_the_keys_and_the_context_allow() -> None:
    def longest(context: int | None, *changes: str) -> int:
        changed = ("rollouts.max_completion_tokens=100", *changes)
        return builder._longest_tokens(load_config(find_recipe("word_problems"), changed), context)

    assert [longest(context) for context in (None, 4096, 1124, 1123)] == [1124, 1124, 1124, 1123]
    assert [longest(context, "data.max_prompt_tokens=50") for context in (None, 150, 149)] == [150, 150, 149]


@pytest.mark.parametrize(
    ("device", "kind", "has_it", "fast", "slow"),
    [
        ("cpu", "float32", "avx512_bf16", True, False), ("cpu", "float32", "amx_bf16", True, False),
        ("cpu", "float32", "", False, False), ("cuda", "float32", "amx_bf16", False, False),
        ("cpu", "bfloat16", "amx_bf16", False, False), ("cpu", "bfloat16", "", False, True),
        ("cpu", "float16", "amx_bf16", False, True), ("cuda", "float16", "", False, False),
    ],
)  # fmt: skip
def test_arithmetic_that_this_processor_does_better_is_named(
    device: str, kind: str, has_it: str, fast: bool, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {has_it: True})
    monkeypatch.setattr(model_paths, "multiplies_bfloat16", lambda: bool(has_it))
    policy: Any = SimpleNamespace(device=torch.device(device), compute_type=kind, model=torch.nn.Linear(3, 2))
    for least, is_large in ((8, True), (9, False)):
        monkeypatch.setattr(model_paths, "WORTH_SAYING", least)
        assert (model_paths.faster_arithmetic(policy) is not None) is (fast and is_large)
    said = model_paths.slow_arithmetic(policy)
    assert (said is not None) is slow
    assert said is None or f"policy.compute_type is {kind}" in said


def test_weights_that_are_not_trained_are_described_by_their_copies() -> None:
    model = torch.nn.Linear(2, 2)
    for kind, number, said in (
        ("float32", 0.1, "weights: as they are in the files, in float32"),
        ("bfloat16", 0.5, "weights: as they are in the files; bfloat16 loses none of their digits"),
        ("bfloat16", 0.1, "weights: copies in bfloat16, rounded to the nearest"),
    ):
        torch.nn.init.constant_(model.weight, number)
        torch.nn.init.constant_(model.bias, 0.1)
        policy: Any = SimpleNamespace(compute_type=kind, model=model)
        assert model_paths.describe_weights(policy) == said
