"""Are the numbers that a script for TRL reads and asks for its own: logs, checkpoints, ready rewards, each option?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from oncurve.core.errors import ConfigError
from oncurve.core.records import Completion, Group, Prompt, Reward, Segment, ToolCall
from oncurve.trl import GRPOConfig
from oncurve.trl.checkpoints import NoCheckpoint, find_run, load_state, name_checkpoint, note_best
from oncurve.trl.conversion import convert
from oncurve.trl.draft import Draft
from oncurve.trl.logs import LogWindow, clip_logs, num_tokens, rollout_logs, speeds, training_flops
from oncurve.trl.options import OptionOutcome
from oncurve.trl.ready_rewards import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    soft_overlong_punishment,
    think_format_reward,
)
from oncurve.trl.rewards_of_scripts import reward_name
from oncurve.trl.script_arguments import (
    ModelConfig,
    _take_old_options,
    get_peft_config,
    get_quantization_config,
    read_mapping,
)
from oncurve.trl.translation import _gold
from oncurve.trl.unsloth import ATTENTION, MLP, _refuse_rest, _targets

FOUR = {"steps_per_generation": 4}
SERVERS = {"use_vllm": True, "vllm_mode": "server"}
SERVED = {
    "rollouts.type": "servers", "rollouts.servers": ["http://127.0.0.1:8000"],
    "rollouts.deadlines.gone_seconds": 240.0,
}  # fmt: skip
MASKED = SERVED | {
    "algorithm.correction": "mask", "algorithm.correction_level": "sequence", "algorithm.correction_high": 3.0,
}  # fmt: skip
IN_FOURS = {"run.prompts_per_step": 4, "run.completions_per_update": 8}
GONE = None
"""The recipe has no such key, where it has one of a script without options."""


def draft_of(options: dict[str, Any], **more: Any) -> Draft:
    return convert(OptionOutcome("train.py", "embedded", dict(options), **({"num_rewards": 2} | more)), rows=4000)


USUAL = draft_of({}).values


@pytest.mark.parametrize(
    ("options", "keys", "losses"),
    [
        ({"warmup_steps": 0.1, "max_steps": 31}, {"run.steps": 31, "optimizer.warmup_updates": 4}, []),
        ({"warmup_steps": 1}, {"optimizer.warmup_updates": 1}, []),
        ({"warmup_steps": 0.1, "max_steps": 31, "num_iterations": 2, **FOUR},
         {**IN_FOURS, "run.passes_per_step": 2, "run.steps": 4, "optimizer.warmup_updates": 4,
          "run.save_every_steps": 62}, []),
        ({"max_steps": 31, **FOUR}, {**IN_FOURS, "run.steps": 8, "run.save_every_steps": 125}, []),
        ({"num_train_epochs": 1}, {"run.steps": 4000}, []),
        ({"save_steps": 0.1, "max_steps": 31}, {"run.steps": 31, "run.save_every_steps": 4}, []),
        ({"save_steps": 9, **FOUR}, {**IN_FOURS, "run.steps": 3000, "run.save_every_steps": 2}, []),
        ({"save_steps": 1, **FOUR}, {**IN_FOURS, "run.steps": 3000, "run.save_every_steps": 1}, []),
        ({"save_strategy": "no"}, {"run.save_every_steps": 0, "run.keep_checkpoints": GONE}, []),
        ({"save_strategy": "no", "save_total_limit": 2}, {"run.save_every_steps": 0, "run.keep_checkpoints": 2}, []),
        ({"save_strategy": "best"}, {"run.save_every_steps": 0}, []),
        ({"save_strategy": "x"}, {"run.save_every_steps": GONE, "run.keep_checkpoints": GONE},
         [("save_strategy", False)]),
        ({"eval_strategy": "steps", "logging_steps": 7},
         {"evaluation.every_steps": 7, "evaluation.samples": 8, "evaluation.temperature": 1.0}, []),
        ({"eval_strategy": "steps", "eval_steps": 3, "num_generations_eval": 2, "temperature": 0.5},
         {"rollouts.temperature": 0.5, "evaluation.every_steps": 3, "evaluation.samples": 2,
          "evaluation.temperature": 0.5}, []),
        ({"eval_strategy": "x"}, {}, [("eval_strategy", False)]),
        ({"report_to": "all"}, {"run.track": GONE}, []), ({"report_to": ["all"]}, {"run.track": GONE}, []),
        ({"report_to": ["wandb", "mlflow", "none"]}, {"run.track": ["wandb"]}, [("report_to", False)]),
        ({"report_to": "trackio"}, {"run.track": ["trackio"]}, []), ({"report_to": []}, {}, []),
        ({"run_name": "a/b"}, {}, [("run_name", False)]), ({"run_name": "ab"}, {"run.name": "ab"}, []),
        ({"output_dir": "o"}, {"run.folder": "o"}, []), ({"top_k": -1}, {"rollouts.top_k": 0}, []),
        ({"top_p": None}, {"rollouts.top_p": 1.0}, []), ({"top_k": 5}, {"rollouts.top_k": 5}, []),
        ({"bf16": False}, {"policy.compute_type": "float32"}, []),
        ({"fp16": True}, {"policy.compute_type": "float16"}, []),
        ({"fp16": True, "bf16": False}, {"policy.compute_type": "float16"}, []),
        ({"deepspeed": {"a": 1}}, {}, [("deepspeed", False)]),
        ({"deepspeed": "x.json"}, {"policy.parallel": "deepspeed", "policy.deepspeed": "x.json"}, []),
        ({"use_vllm": True}, {"rollouts.type": "engine"}, []), (SERVERS, MASKED, []),
        ({**SERVERS, "vllm_server_host": "h", "vllm_server_port": 1, "vllm_server_timeout": 5},
         MASKED | {"rollouts.servers": ["http://h:1"], "rollouts.deadlines.gone_seconds": 5.0}, []),
        ({**SERVERS, "top_p": 0.9}, SERVED | {"rollouts.top_p": 0.9},
         [("vllm_importance_sampling_correction", True)]),
        ({**SERVERS, "top_k": 1}, SERVED | {"rollouts.top_k": 1}, [("vllm_importance_sampling_correction", True)]),
        ({**SERVERS, "min_p": 0.1}, SERVED | {"rollouts.min_p": 0.1}, [("vllm_importance_sampling_correction", True)]),
        ({**SERVERS, "top_k": 0, "min_p": 0.0}, MASKED | {"rollouts.top_k": 0}, []),
        ({**SERVERS, "vllm_importance_sampling_cap": 4.0, "vllm_importance_sampling_clip_max": 5.0,
          "vllm_importance_sampling_clip_min": 0.5},
         MASKED | {"algorithm.correction_low": 0.5, "algorithm.correction_high": 4.0}, []),
        ({**SERVERS, "vllm_importance_sampling_clip_max": 5.0, "vllm_importance_sampling_mode": "token_truncate"},
         MASKED | {"algorithm.correction": "truncate", "algorithm.correction_level": "-",
          "algorithm.correction_high": 5.0},
         []),
        ({**SERVERS, "importance_sampling_level": "sequence", "vllm_importance_sampling_mode": "token_mask"},
         SERVED | {"algorithm.type": "gspo", "algorithm.normalize": "token_mean", "algorithm.clip_low": 0.2},
         [("vllm_importance_sampling_mode", True)]),
        ({**SERVERS, "loss_type": "vespo"},
         SERVED | {"algorithm.type": "vespo", "algorithm.old_logprobs": "sampler", "algorithm.clip_high": GONE}, []),
        ({"max_tool_calling_iterations": 3}, {"rollouts.episodes.max_turns": 4}, []),
        ({"loss_type": "cispo", "epsilon": 0.3},
         {"algorithm.type": "cispo", "algorithm.ratio_max": 0.3, "algorithm.clip_high": GONE}, []),
        ({"delta": 1.0}, {}, [("delta", True)]), ({"delta": 1.1}, {"algorithm.ratio_max": 1.1}, []),
        ({"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 64, **FOUR},
         {**IN_FOURS, "run.steps": 3000, "run.save_every_steps": 125, "algorithm.kl_coef": 0.1,
          "algorithm.reference": "average", "algorithm.reference_every_steps": 16, "algorithm.reference_share": 0.6},
         []),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {"algorithm.advantage": "multi_objective"}, []),
        ({"scale_rewards": False}, {"algorithm.advantage": "group_mean", "algorithm.std_epsilon": GONE}, []),
        ({"scale_rewards": "batch"}, {"algorithm.advantage": "batch_std"}, []), ({"scale_rewards": True}, {}, []),
        ({"top_entropy_quantile": 0.0}, {}, [("top_entropy_quantile", True)]),
        ({"top_entropy_quantile": 0.2}, {"algorithm.high_entropy_share": 0.2}, []),
        ({"generation_kwargs": {"stop": "x", "min_tokens": 3, "temperature": 0.7, "top_p": -1, "top_k": 0, "n": 1}},
         {"rollouts.stop": ["x"], "rollouts.min_completion_tokens": 3, "rollouts.temperature": 0.7,
          "rollouts.top_p": 1.0, "rollouts.top_k": 0}, []),
        ({"generation_kwargs": {"stop_strings": ["a"], "max_tokens": 9}},
         {"rollouts.max_completion_tokens": 9, "rollouts.stop": ["a"]}, []),
        ({"generation_kwargs": {"n": 2}}, {}, [("generation_kwargs", True)]),
        ({"generation_kwargs": 3}, {}, [("generation_kwargs", True)]),
        ({"optim": "x", "lr_scheduler_type": "y"}, {"optimizer.schedule": "cosine", "optimizer.type": "adamw"},
         [("lr_scheduler_type", True), ("optim", True)]),
        ({"model_init_kwargs": {"revision": "a", "dtype": "b", "device_map": 1, "x": 2}}, {"policy.revision": "a"},
         [("model_init_kwargs", True)]),
        ({"warmup_ratio": 0.1}, {"optimizer.warmup_updates": 1200}, []),
        ({"max_prompt_length": 5}, {"data.max_prompt_tokens": 5}, []),
    ],
)  # fmt: skip
def test_each_option_is_these_keys_and_no_others(
    options: dict[str, Any], keys: dict[str, Any], losses: list[tuple[str, bool]]
) -> None:
    draft = draft_of(options)
    names = draft.values.keys() | USUAL.keys()
    changed = {name: draft.values.get(name) for name in names if draft.values.get(name) != USUAL.get(name)}
    assert changed == {name: value for name, value in keys.items() if value != "-"}
    assert [(note.option, note.changes_learning) for note in draft.notes if note.is_loss] == losses


@pytest.mark.parametrize(
    ("lora", "keys", "losses"),
    [
        ({}, {"rank": 8, "alpha": 8, "dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "v_proj"]}, []),
        ({"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": {"b", "a"}},
         {"rank": 16, "alpha": 32.0, "dropout": 0.0, "bias": "none", "target_modules": ["a", "b"]}, []),
        ({"bias": "all", "use_dora": True, "task_type": "X", "target_modules": "all-linear"},
         {"rank": 8, "alpha": 8, "dropout": 0.0, "bias": "all", "target_modules": "all-linear"},
         ["LoraConfig use_dora", "LoraConfig task_type"]),
        ({"task_type": "CAUSAL_LM", "lora_dropout": 0.5, "use_dora": False},
         {"rank": 8, "alpha": 8, "dropout": 0.5, "bias": "none", "target_modules": ["q_proj", "v_proj"]}, []),
    ],
)  # fmt: skip
def test_an_adapter_is_these_keys_and_its_base_the_reference_where_it_stays(
    lora: dict[str, Any], keys: dict[str, Any], losses: list[str]
) -> None:
    draft = draft_of({"beta": 0.1}, lora=lora)
    assert {name.rpartition(".")[2]: draft.values[name] for name in draft.values if ".lora." in name} == keys
    assert draft.values.get("algorithm.reference") == ("base" if keys["bias"] == "none" else None)
    assert [note.option for note in draft.notes if note.is_loss] == losses


def test_what_is_said_of_averages_and_of_two_rewards_that_are_one() -> None:
    def differing(**options: Any) -> list[str]:
        return [note.option for note in draft_of(options).notes if note.kind == "differs"]

    assert differing(loss_type="bnpo") == ["loss_type"]
    assert differing(loss_type="dapo") == differing(loss_type="cispo", epsilon_high=1.0) == []
    assert differing(loss_type="dapo", steps_per_generation=2) == ["loss_type", "steps_per_generation"]
    assert differing(loss_type="grpo", steps_per_generation=2) == ["steps_per_generation"]
    assert differing(max_steps=32, loss_type="grpo", **FOUR) == ["steps_per_generation"]
    assert differing(max_steps=31, loss_type="grpo", **FOUR) == ["steps_per_generation", "max_steps"]
    assert differing(top_entropy_quantile=0.9) == ["top_entropy_quantile"]
    lonely = draft_of({"multi_objective_aggregation": "normalize_then_sum"}, num_rewards=1)
    assert lonely.values["algorithm.std_epsilon"] == 1e-4
    assert [note.option for note in lonely.notes if note.is_loss] == ["multi_objective_aggregation"]
    for options in (
        {"scale_rewards": "x"}, {"loss_type": "x"}, {"importance_sampling_level": "x"},
        {"multi_objective_aggregation": "x"}, {**SERVERS, "vllm_importance_sampling_mode": "token_x"},
        {**SERVERS, "vllm_importance_sampling_mode": "x_mask"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="none of TRL's"):
            draft_of(options)


def test_clipping_is_logged_by_side_and_of_single_completions_where_it_is_none() -> None:
    metrics = {"policy/clip_fraction": 0.75, "policy/clip_high_fraction": 0.25}
    sides = {"clip_ratio/region_mean": 0.75, "clip_ratio/low_mean": 0.5, "clip_ratio/high_mean": 0.25}
    assert clip_logs(metrics, "grpo") == sides
    none = {"clip_ratio/low_min": 0.0, "clip_ratio/high_max": 0.0}
    assert clip_logs({}, "grpo") == dict.fromkeys(sides, 0.0) | none
    assert clip_logs(metrics, "cispo") == {"cispo_clip_ratio": 0.25}


@pytest.mark.parametrize(
    ("strategy", "steps", "has_first", "updates", "due"),
    [
        ("steps", 2, False, [1, 2, 3, 4], [2, 4]), ("steps", 2, True, [1, 2, 3, 4], [1, 2, 4]),
        ("steps", 0.5, False, [1, 2, 3, 4, 5], [3]), ("steps", 1, False, [1, 2], [1, 2]),
        ("steps", 4, False, [3, 6, 9], [6, 9]), ("no", 1, True, [1, 2], []), ("epoch", 1, True, [1, 2, 3], [2]),
    ],
)  # fmt: skip
def test_a_row_is_due_when_so_many_updates_are_made(
    strategy: str, steps: float, has_first: bool, updates: list[int], due: list[int]
) -> None:
    args = SimpleNamespace(logging_strategy=strategy, logging_steps=steps, logging_first_step=has_first)
    window = LogWindow(args, 5)
    found = [window.add({}, updates=at, ends_epoch=at == 2, is_requested=False) is not None for at in updates]
    assert [at for at, is_due in zip(updates, found, strict=True) if is_due] == due


def test_a_row_has_means_and_of_what_only_grows_the_last() -> None:
    args = SimpleNamespace(logging_strategy="steps", logging_steps=10, logging_first_step=False)
    window, rows = LogWindow(args, 5), [{"loss": 1.0, "num_tokens": 4.0}, {"loss": 2.0, "num_tokens": 8.0, "x": 3.0}]
    assert window.add(rows[0], updates=1, ends_epoch=False, is_requested=False) is None
    both = window.add(rows[1], updates=2, ends_epoch=False, is_requested=True)
    assert both == {"loss": 1.5, "num_tokens": 8.0, "x": 3.0}
    assert window.rest() == {}
    window.add(rows[1], updates=3, ends_epoch=False, is_requested=False)
    assert window.rest() == {"num_tokens": 8.0, "x": 3.0}


def test_rewards_lengths_and_calls_are_logged_as_in_trl() -> None:
    def completion(length: int, reason: Any, *errors: str | None) -> Completion:
        calls = tuple(ToolCall("f", "{}", "", error, 0, 0.0) for error in errors)
        segments = (Segment(True, 0, length, ""),) if errors else ()
        tokens = (1,) * length
        more = {"index": 0, "policy_version": 1, "calls": calls, "segments": segments}
        return Completion((1, 2), tokens, "", (0.0,) * length, reason, **more)

    plain = [completion(2, "stop"), completion(6, "length"), completion(5, "stop"), completion(7, "length")]
    prompt = Prompt("q", (1, 2), 0, {})
    groups = [Group(prompt, tuple(plain[:2])), Group(prompt, tuple(plain[2:]))]
    rewards = [
        [Reward(1.0, {"a": 1.0, "b": 2.0}), Reward(2.0, {"a": 3.0})], [Reward(4.0, {"a": 5.0}), Reward(None,
         error="x")],
    ]  # fmt: skip
    logs = rollout_logs(groups, rewards, [("r", "a"), ("r", "b"), ("s", "c")])
    ends = {"mean": 3.5, "min": 2.0, "max": 5.0}
    assert logs == pytest.approx(
        {"completions/mean_length": 5.0, "completions/min_length": 2.0, "completions/max_length": 7.0,
         "completions/clipped_ratio": 0.5, **{f"completions/{name}_terminated_length": ends[name] for name in ends},
         "reward": 7 / 3, "reward_std": 0.5**0.5 / 2, "frac_reward_zero_std": 0.5, "rewards/r/mean": 2.5,
         "rewards/r/std": 1.0}
    )  # fmt: skip
    assert num_tokens(groups) == 28
    called = [completion(1, "stop", None, "timeout"), completion(1, "stop", "malformed", "raised", None)]
    logs = rollout_logs([Group(prompt, tuple(called))], [[Reward(None, error="x"), Reward(None, error="x")]], [])
    assert (logs["tools/call_frequency"], logs["tools/failure_frequency"]) == (2.0, 0.5)
    assert "reward" not in logs
    logs = rollout_logs([Group(prompt, (completion(3, "length", "malformed"),))], [[Reward(1.0)]], [])
    assert (logs["tools/call_frequency"], logs["tools/failure_frequency"]) == (0.0, 0.0)
    assert (logs["completions/mean_terminated_length"], logs["reward_std"]) == (0.0, 0.0)


def test_speeds_and_operations_are_counted_as_in_transformers() -> None:
    assert speeds("train", 2.0, samples=8, steps=3) == {
        "train_runtime": 2.0, "train_samples_per_second": 4.0, "train_steps_per_second": 1.5,
    }  # fmt: skip
    assert speeds("x", 0.0, samples=1, steps=0)["x_samples_per_second"] == 1e9
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 2))
    assert training_flops(model, 10) == 6 * 10 * (15 + 12)
    model[1].weight = model[0].weight
    assert training_flops(model, 10) == 6 * 10 * 12


def test_checkpoints_have_trls_names_and_the_best_is_better_and_no_equal(tmp_path: Path) -> None:
    out = tmp_path / "out"
    saved = out / "run" / "checkpoints" / "step_000002"
    saved.mkdir(parents=True)
    (out / "checkpoint-1").symlink_to("gone")
    (out / "checkpoint-9").mkdir()
    state = TrainerState(global_step=2, best_global_step=2, max_steps=7)
    name_checkpoint(saved, str(out), state)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-9"]
    assert (out / "checkpoint-2").resolve() == saved.resolve()
    assert not (out / "checkpoint-2").readlink().is_absolute()
    assert state.best_model_checkpoint == str(out / "checkpoint-2")
    assert str(get_last_checkpoint(str(out))).endswith("checkpoint-9")
    name_checkpoint(saved, str(out), TrainerState(global_step=3, best_global_step=2))
    assert (out / "checkpoint-3").resolve() == saved.resolve()
    fresh = TrainerState(max_steps=5, global_step=0)
    load_state(fresh, out / "run", None)
    assert (fresh.global_step, fresh.max_steps, fresh.best_global_step) == (3, 5, 2)
    load_state(fresh, tmp_path, None)
    assert fresh.global_step == 3
    for greater, better, worse in ((True, 3.0, 1.0), (False, 1.0, 3.0)):
        args = SimpleNamespace(metric_for_best_model="eval_x" if greater else "x", greater_is_better=greater)
        state = TrainerState(global_step=4)
        seen = [note_best({"eval_x": value}, args, state) for value in (2.0, 2.0, worse, better)]
        assert seen == [True, False, False, True]
        assert (state.best_metric, state.best_global_step) == (better, 4)
    assert not note_best({}, SimpleNamespace(metric_for_best_model=None), state)
    with pytest.raises(ConfigError, match="no evaluation measures 'eval_x'"):
        note_best({"eval_y": 1.0}, args, state)
    for wrong, says in ((3, "is 3. Give the path"), (True, "holds no run"), (str(tmp_path), "holds no run")):
        with pytest.raises(NoCheckpoint, match=says):
            find_run(wrong, str(out))  # type: ignore[arg-type]


def test_ready_rewards_have_the_numbers_of_their_papers() -> None:
    ids = [[0] * length for length in (0, 6, 7, 10, 11, 20)]
    assert get_soft_overlong_punishment(10, 4)(completion_ids=ids) == [0, 0, -0.25, -1, -1, -1]
    ids = [[0] * length for length in (1024, 1152, 1280, 1281)]
    assert soft_overlong_punishment(completion_ids=ids) == [0, -0.5, -1, -1]
    ids = [[1, 2, 3, 1, 2, 3], [1, 2, 3], [1, 2], [1] * 4]
    assert get_repetition_penalty_reward()(completion_ids=ids) == [-0.25, 0, 0, -0.5]
    assert get_repetition_penalty_reward(2, -0.5)(completion_ids=ids[:1]) == pytest.approx([-0.2])
    assert get_repetition_penalty_reward(3, 0.0)(completion_ids=ids[:1]) == [0]
    with pytest.raises(ConfigError, match=r"max_penalty is 0\.5"):
        get_repetition_penalty_reward(max_penalty=0.5)
    paid = get_cosine_scaled_reward(10)
    for text, values in (
        ("The answer is $4$", [1.0, 0.75, 0.5, 0.5]),
        ("The answer is $5$", [-1.0, -0.75, -0.5, -0.5]),
    ):
        ids = [[0] * length for length in (0, 5, 10, 20)]
        assert paid([text] * 4, ["4"] * 4, completion_ids=ids) == pytest.approx(values)
    texts = ["<think>a</think>b", " <think></think>", "x<think>a</think>", "<think>a<think>b</think>", "<think>a"]
    assert think_format_reward(texts) == [1, 1, 0, 0, 0]
    texts = ["The answer is $5$</think>The answer is $4$", "The answer is $4$", "a</think>b</t>The answer is $4$"]
    assert reasoning_accuracy_reward(texts, ["4"] * 3) == [1, 0, 1]
    assert reasoning_accuracy_reward([texts[0], "a</t>$4$", texts[2]], ["4"] * 3, ["</t>"]) == [0, 0, 1]


def test_objects_beside_the_trainer_have_trls_numbers() -> None:
    assert [reward_name(one) for one in ("a/b/", len, SimpleNamespace())] == ["b", "len", "SimpleNamespace"]
    assert get_peft_config(ModelConfig()) is None
    lora = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=["a"]))
    assert (lora.r, lora.lora_alpha, lora.lora_dropout, lora.task_type) == (16, 32, 0.05, "CAUSAL_LM")
    assert (lora.target_modules, lora.use_rslora, lora.use_dora) == ({"a"}, False, False)
    assert get_quantization_config(ModelConfig()) is None
    for four, eight in ((True, False), (False, True), (True, True)):
        bits = get_quantization_config(ModelConfig(load_in_4bit=four, load_in_8bit=eight))
        assert (bits.load_in_4bit, bits.load_in_8bit) == (four, not four)
        assert (bits.bnb_4bit_quant_type == "nf4", bits.bnb_4bit_use_double_quant) == (four, False)
    made = ModelConfig(torch_dtype="bfloat16", trust_remote_code=True)
    assert (made.dtype, made.torch_dtype, made.trust_remote_code) == ("bfloat16", "bfloat16", True)
    assert (ModelConfig().dtype, ModelConfig().torch_dtype) == ("float32", "float32")
    assert read_mapping("a: 1e-6\nb: x1\nc: abc\nd: 2", "f") == {"a": 1e-6, "b": "x1", "c": "abc", "d": 2}
    words = ["--vllm_device", "cuda:1", "--max_prompt_length=7", "--beta", "1", "--log_completions", "--vllm_device"]
    assert _take_old_options(words, {"beta", "log_completions", "vllm_device"}) == {"max_prompt_length": 7}
    words = ["--max_prompt_length", "7", "--vllm_device", "--beta", "1"]
    assert _take_old_options(words, {"beta"}) == {"max_prompt_length": 7, "vllm_device": True}
    assert words == ["--beta", "1"]
    for row, gold in (
        ({"answer": 4, "gold": "x"}, {"answer": "4"}), ({"answer": " ", "gold": 0.5}, {"answer": "0.5"}),
        ({"label": [1]}, {}), ({"solution": "s"}, {"answer": "s"}),
    ):  # fmt: skip
        assert _gold(row) == gold


def test_an_adapter_of_unsloth_is_in_the_layers_that_are_left() -> None:
    layers = [*ATTENTION, *MLP]
    for off, left in (
        ([], layers), (["finetune_attention_modules"], list(MLP)), (["finetune_mlp_modules"], list(ATTENTION)),
        (["finetune_vision_layers"], layers),
    ):  # fmt: skip
        assert _targets(layers, {"finetune_language_layers": True, **dict.fromkeys(off, False)}) == left
    for off, says in (
        (["finetune_language_layers"], "leaves no layer"), (["finetune_x"], "finetune_x is not known"),
        (["finetune_mlp_modules", "finetune_attention_modules"], "leaves no layer"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            _targets(layers, dict.fromkeys(off, False))
    _refuse_rest("f", {"max_seq_length": 3, "other": None, "another": False})
    with pytest.raises(ConfigError, match="f: other may change the model"):
        _refuse_rest("f", {"max_seq_length": 3, "other": 1})


def test_a_configuration_answers_as_that_of_transformers() -> None:
    args = GRPOConfig(use_cpu=True, per_device_train_batch_size=8, per_device_eval_batch_size=4, hub_token="hf_x")
    assert (args.train_batch_size, args.eval_batch_size, args.n_gpu, args.device.type) == (8, 4, 0, "cpu")
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert (args.should_log, args.should_save, args.parallel_mode.value) == (True, True, "not_parallel")
    levels = [
        GRPOConfig(use_cpu=True, log_level=name).get_process_log_level() for name in ("passive", "debug", "error")
    ]
    assert levels == [30, 10, 40]
    assert args.to_dict()["hub_token"] == "<HUB_TOKEN>"
    assert args.to_dict()["per_device_train_batch_size"] == 8
    assert (args.bf16, GRPOConfig(use_cpu=True, fp16=True).bf16) == (True, False)
    assert GRPOConfig(use_cpu=True, save_strategy=False, scale_rewards=True).options() == {
        "output_dir": "trainer_output", "use_cpu": True, "save_strategy": "no",
    }  # fmt: skip
    large = GRPOConfig(use_cpu=True, generation_batch_size=32)
    assert (large.steps_per_generation, large.options()["generation_batch_size"]) == (4, 32)
    assert "steps_per_generation" not in large.options()
    args.gradient_accumulation_steps = 5
    assert args.options()["steps_per_generation"] == 1
    assert GRPOConfig(use_cpu=True, chat_template_kwargs='{"a": 1}').chat_template_kwargs == {"a": 1}
