"""Is every option of TRL's GRPOConfig taken over, found idle or reported, and none dropped without a word?"""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from record import read_result
from tables.trl_options import filled

from oncurve.recipe.messages import known_keys
from oncurve.trl.conversion import convert
from oncurve.trl.draft import Draft, recipe_text
from oncurve.trl.options import OptionOutcome, older, table, trl_version

ROOT = Path(__file__).resolve().parents[2]
OF_OBJECTS = ("chat_template_kwargs", "reward_weights")
"""Options that count for rows and rewards, which are objects and stand in no draft."""
SERVERS = {"use_vllm": True, "vllm_mode": "server"}
TOGETHER: dict[str, dict[str, Any]] = {
    "vllm_mode": {"use_vllm": True},
    "vllm_server_base_url": SERVERS,
    "vllm_server_host": SERVERS,
    "vllm_server_port": SERVERS,
    "vllm_server_timeout": SERVERS,
    "vllm_importance_sampling_correction": SERVERS,
    "vllm_importance_sampling_mode": SERVERS,
    "vllm_importance_sampling_clip_max": SERVERS,
    "vllm_importance_sampling_clip_min": SERVERS,
    "vllm_importance_sampling_cap": SERVERS,
    "use_bias_correction_kl": {"beta": 0.04},
    "sync_ref_model": {"beta": 0.04},
    "ref_model_mixup_alpha": {"beta": 0.04, "sync_ref_model": True},
    "ref_model_sync_steps": {"beta": 0.04, "sync_ref_model": True},
    "entropy_target": {"use_adaptive_entropy": True},
    "entropy_coef_delta": {"use_adaptive_entropy": True},
    "entropy_coef_max": {"use_adaptive_entropy": True},
    "eval_steps": {"eval_strategy": "steps"},
    "num_generations_eval": {"eval_strategy": "steps"},
}
"""Options that count only beside others."""
OTHER: dict[str, Any] = {
    "num_generations": 4, "per_device_train_batch_size": 16,
    "steps_per_generation": 2, "generation_batch_size": 16, "max_steps": 30, "lr_scheduler_type": "cosine",
    "warmup_steps": 5, "optim": "adamw_bnb_8bit", "bf16": False, "report_to": "wandb", "save_strategy": "no",
    "save_total_limit": 3, "eval_strategy": "steps", "eval_steps": 20, "num_generations_eval": 2,
    "deepspeed": "zero.json", "fsdp": "full_shard", "model_init_kwargs": {"revision": "v1"}, "min_p": 0.1,
    "generation_kwargs": {"stop": ["</answer>"]}, "vllm_mode": "server", "vllm_server_base_url": "http://a:1",
    "vllm_server_host": "10.0.0.5", "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_cap": 2.0, "loss_type": "grpo",
    "importance_sampling_level": "sequence", "scale_rewards": "none",
    "multi_objective_aggregation": "normalize_then_sum", "epsilon_high": 0.28, "delta": 4.0,
    "top_entropy_quantile": 0.2, "top_p": 0.9, "off_policy_mask_threshold": 0.1,
    "max_tool_calling_iterations": 3,
}  # fmt: skip


def converted(options: dict[str, Any]) -> Draft:
    return convert(OptionOutcome("train.py", "embedded", dict(options), num_rewards=2), rows=4000)


def keys(draft: Draft) -> str:
    """The recipe without its comments."""
    return "\n".join(re.sub(r"  # .*", "", line) for line in recipe_text(draft, "").splitlines() if line[:1] != "#")


def another(name: str) -> Any:
    default = table()[name].default
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default * 2 + 1
    return "something"


def test_the_table_holds_every_field_of_the_installed_trl_with_its_default() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: it comes with the extra trl")
    assert trl.__version__ == trl_version()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fields = dataclasses.fields(trl.GRPOConfig)
    defaults = {f.name: f.default if f.default is not dataclasses.MISSING else f.default_factory() for f in fields}
    assert {option.name: option.default for option in table().values()} == defaults
    assert not set(older()) & set(defaults)


def test_what_is_taken_over_has_a_key_of_the_recipe() -> None:
    known = {*known_keys(), "rewards.weight"}
    targets = {option.to for option in table().values() if option.to} | {old.to for old in older().values() if old.to}
    assert targets <= known


@pytest.mark.parametrize(
    "name", [o.name for o in table().values() if o.fate in ("direct", "computed") and o.name not in OF_OBJECTS]
)
def test_an_option_that_is_taken_over_changes_the_recipe_or_is_reported(name: str) -> None:
    before = TOGETHER.get(name, {})
    changed = converted({**before, name: another(name)})
    is_reported = any(note.what.startswith(name) and note.is_loss for note in changed.notes)
    assert keys(changed) != keys(converted(before)) or is_reported


@pytest.mark.parametrize("name", [o.name for o in table().values() if o.fate == "unsupported"])
def test_an_option_without_equal_is_reported_only_if_it_differs(name: str) -> None:
    reported = [note for note in converted({name: another(name)}).notes if note.kind == "unsupported"]
    assert [note.option for note in reported] == [name]
    assert not any(note.is_loss for note in converted({name: table()[name].default}).notes)


@pytest.mark.parametrize("name", [o.name for o in table().values() if o.fate == "nothing"])
def test_an_idle_option_is_said_to_be_idle_and_changes_nothing(name: str) -> None:
    draft = converted({name: another(name)})
    assert [note.option for note in draft.notes if note.kind == "nothing"] == [name]
    assert keys(draft) == keys(converted({}))


@pytest.mark.parametrize("name", list(older()))
def test_an_older_name_is_not_unknown(name: str) -> None:
    value = 0.1 if name == "warmup_ratio" else "no" if name.endswith("strategy") else 16
    draft = converted({name: value})
    assert keys(draft) != keys(converted({})) or draft.notes or older()[name].now in table()


def test_defaults_that_differ_are_written_out() -> None:
    text = keys(converted({}))
    for line in ("beta2: 0.999", "gradient_checkpointing: true", "max_completion_tokens: 512", "seed: 42",
                 "schedule: linear", "compute_type: bfloat16", "std_epsilon: 0.0001", "clip_high: 0.2", "track: []",
                 "type: dapo"):  # fmt: skip
        assert line in text


def test_the_page_shows_the_table_of_the_converter_and_the_results() -> None:
    page = (ROOT / "docs" / "coming_from_trl.md").read_text(encoding="utf-8")
    assert page == filled(page), "python docs/tables/trl_options.py docs/coming_from_trl.md writes it"


def test_a_constant_schedule_has_no_warm_up_unless_its_name_says_so() -> None:
    plain = converted({"lr_scheduler_type": "constant", "warmup_steps": 5})
    assert "warmup_updates" not in keys(plain)
    assert [note.kind for note in plain.notes if note.what.startswith("warmup_steps")] == ["nothing"]
    assert "warmup_updates: 5" in keys(converted({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "loss: sequence_truncated_importance"),
        ({"loss_type": "sapo"}, "loss: sequence_soft_gated"),
        ({"loss_type": "dapo", "delta": 1.1}, "ratio_max: 1.1"),
        ({"off_policy_mask_threshold": 0.1}, "off_policy_threshold: 0.1"),
    ],
)
def test_what_was_lost_is_taken_over(options: dict[str, Any], line: str) -> None:
    draft = converted({"importance_sampling_level": "sequence", **options})
    assert line in keys(draft)
    assert not [note for note in draft.notes if note.is_loss]


def test_a_bound_that_takes_the_gradient_of_unmoved_tokens_is_reported() -> None:
    draft = converted({"delta": 0.9})
    assert "ratio_max: 0" not in keys(draft)
    assert [note for note in draft.notes if note.is_loss]


def test_the_bound_of_cispo_is_the_largest_ratio_also_below_1() -> None:
    draft = converted({"loss_type": "cispo", "epsilon_high": 0.28})
    assert draft.values["algorithm.ratio_max"] == 0.28
    assert not [note for note in draft.notes if note.is_loss]


def test_settings_of_sampling_that_change_nothing_are_idle() -> None:
    kwargs = {"do_sample": True, "max_new_tokens": 512, "max_time": 60, "repetition_penalty": 1.0}
    assert not [note for note in converted({"generation_kwargs": kwargs}).notes if note.is_loss]
    assert [note for note in converted({"generation_kwargs": {"repetition_penalty": 1.1}}).notes if note.is_loss]


def test_a_length_in_generation_kwargs_is_the_length_of_completions() -> None:
    """TRL lays generation_kwargs over max_completion_length; only dr_grpo divides by the option itself."""
    options = {
        "max_completion_length": 256,
        "generation_kwargs": {"max_new_tokens": 200, "remove_invalid_values": True},
    }
    draft = converted(options)
    assert draft.values["rollouts.max_completion_tokens"] == 200
    assert not [note for note in draft.notes if note.is_loss]
    assert [note for note in converted({**options, "loss_type": "dr_grpo"}).notes if note.is_loss]


def test_no_script_of_others_lost_an_option_without_a_word() -> None:
    result = read_result(ROOT / "benchmarks" / "results" / "trl_scripts.json", rows="scripts")
    assert result["silent"] == []
    assert "traceback of ours" not in result["counts"]


def test_an_option_beside_another_that_is_off_is_said_to_mean_nothing() -> None:
    for name, value in (("vllm_mode", "server"), ("sync_ref_model", True), ("entropy_target", 0.3), ("eval_steps", 20)):
        assert ("nothing", name) in [(note.kind, note.option) for note in converted({name: value}).notes]
        together = converted({**TOGETHER[name], name: value})
        assert ("nothing", name) not in [(note.kind, note.option) for note in together.notes]


def test_an_epoch_is_a_number_of_steps_where_rows_are_known() -> None:
    text = keys(converted({"save_strategy": "epoch", "save_total_limit": 2, "eval_strategy": "epoch"}))
    prompts = converted({}).values["run.prompts_per_step"]
    assert f"save_every_steps: {4000 // prompts}" in text
    assert f"every_steps: {4000 // prompts}" in text.replace("save_every_steps", "")
    assert "keep_checkpoints: 2" in text
