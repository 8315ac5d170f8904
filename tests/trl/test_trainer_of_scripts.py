"""Does the trainer do what scripts do with it: callbacks, evaluation, saving, going on, looking at the model?"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, PromptTuningConfig, VeraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from oncurve.core.errors import ConfigError
from oncurve.observe.record import read_rows
from oncurve.observe.run_model import EMBEDDED
from oncurve.policy.distributed import ALONE
from oncurve.policy.model_folder import load_model
from oncurve.rewards.custom import from_function
from oncurve.rewards.terms import PipelinedRewards
from oncurve.rewards.weighted_sum import Term, WeightedSum
from oncurve.run.data_parallel import ShardedRewards
from oncurve.run_errors import CheckpointError
from oncurve.trl import GRPOConfig, GRPOTrainer
from oncurve.trl.rewards_of_scripts import sum_inside

Rows = list[dict[str, Any]]
SHORT: dict[str, Any] = {
    "output_dir": "out", "max_steps": 3, "num_generations": 4, "per_device_train_batch_size": 8, "use_cpu": True,
    "max_completion_length": 8, "bf16": False, "learning_rate": 1e-4, "logging_steps": 1,
}  # fmt: skip


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


class Events(TrainerCallback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("begin", state.max_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("step", state.global_step))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("epoch", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("epoch ends", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(("eval" if "eval_reward" in logs else "log", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end", state.global_step))


def test_callbacks_hear_everything_in_order(rows: Rows) -> None:
    events = Events()
    args = GRPOConfig(**SHORT, eval_strategy="steps", eval_steps=2, num_generations_eval=2)
    trainer = GRPOTrainer("embedded", length, args, rows[:4], eval_dataset=rows[:3])
    trainer.add_callback(events)
    trainer.train()
    assert events.seen == [
        ("begin", 3), ("epoch", 0), ("step", 1), ("log", 1), ("step", 2), ("log", 2), ("eval", 2), ("epoch ends", 2),
        ("epoch", 2), ("step", 3), ("log", 3), ("eval", 3), ("epoch ends", 3), ("log", 3), ("end", 3),
    ]  # fmt: skip
    measured = next(row for row in trainer.state.log_history if "eval_reward" in row)
    assert measured["eval_reward"] == measured["eval_rewards/length/mean"]
    assert not Path("out/completions").exists(), "nothing asks for log_completions"


def test_a_callback_can_stop_the_run_and_the_model_can_be_saved(rows: Rows) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    trainer = GRPOTrainer("embedded", length, GRPOConfig(**SHORT), rows, callbacks=[Stop])
    assert trainer.train().global_step == 2
    trainer.save_model()
    assert AutoModelForCausalLM.from_pretrained("out").num_parameters() > 0
    assert AutoTokenizer.from_pretrained("out").vocab_size
    assert list(Path("out").glob("*/metrics.jsonl")), "runs in the same folder stay"


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        pytest.param({"logging_steps": 2}, [2, 4, 5], marks=pytest.mark.nightly),
        ({"logging_steps": 2, "logging_first_step": True}, [1, 2, 4, 5]),
        pytest.param({"logging_steps": 0.5}, [3, 5], marks=pytest.mark.nightly),
        pytest.param({"logging_strategy": "no"}, [5], marks=pytest.mark.nightly),
        ({"logging_strategy": "epoch"}, [3, 5, 5]),
        pytest.param({"logging_steps": 10}, [5], marks=pytest.mark.nightly),
    ],
)
def test_a_callback_hears_of_logs_as_often_as_the_script_says(options: dict[str, Any], logged: list[int]) -> None:
    """As under TRL: the last is the row with train_loss, which says what steps without a row of their own say."""
    rows = [{"prompt": f"How much is {number} + 1?"} for number in range(6)]
    args = GRPOConfig(**{**SHORT, "max_steps": 5, **options})
    trainer = GRPOTrainer("embedded", length, args, rows)
    trainer.train()
    history = trainer.state.log_history
    assert [row["step"] for row in history] == logged
    assert [("loss" in row, "train_loss" in row) for row in history] == [(True, False)] * (len(logged) - 1) + [
        (False, True)
    ]
    if options == {"logging_steps": 10}:
        path = trainer.oncurve.result.folder / "metrics.jsonl"
        steps = [row["reward/mean"] for row in read_rows(path) if row.get("step")]
        assert history[-1]["reward"] == pytest.approx(sum(steps) / 5)


def test_numbers_of_an_evaluation_are_not_those_of_the_training(rows: Rows) -> None:
    def watching(completions: list[str], log_metric: Any, prompts: list[str], **_: Any) -> list[float]:
        log_metric("mine", 7.0 if "held" in prompts[0] else 2.0)
        return [float(len(text)) for text in completions]

    args = GRPOConfig(**{**SHORT, "logging_steps": 3}, eval_strategy="steps", eval_steps=1)
    trainer = GRPOTrainer("embedded", watching, args, rows, eval_dataset=[{"prompt": "held"}, {"prompt": "held too"}])
    trainer.train()
    measured = [row["eval_mine"] for row in trainer.state.log_history if "eval_mine" in row]
    assert measured == [7.0] * 3
    trained = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in trained] == [3]
    assert "eval_mine" not in trained[0]


def test_rewards_see_the_state_and_may_log(rows: Rows) -> None:
    steps: list[int] = []

    def watching(completions: list[str], trainer_state: Any, log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        steps.append(trainer_state.global_step)
        log_metric("mine", 2.0)
        log_extra("column", completions)
        return [1.0] * len(completions)

    trainer = GRPOTrainer("embedded", watching, GRPOConfig(**SHORT), rows)
    trainer.train()
    assert {0, 1, 2} <= set(steps)
    assert [row["mine"] for row in trainer.state.log_history if "mine" in row] == [2.0] * 3


def test_a_loaded_model_is_trained_itself_and_may_be_changed_before(rows: Rows) -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    trainer = GRPOTrainer(
        model, length, GRPOConfig(**SHORT), rows, processing_class=AutoTokenizer.from_pretrained(EMBEDDED)
    )
    assert trainer.model is model
    frozen = model.model.embed_tokens.weight
    model.lm_head.weight.requires_grad_(False)
    frozen.requires_grad_(False)
    before = {name: part.clone() for name, part in model.named_parameters()}
    trainer.train()
    changed = {name for name, part in model.named_parameters() if (part != before[name]).any()}
    assert changed
    assert not any("embed_tokens" in name or "lm_head" in name for name in changed)


def test_a_run_goes_on_from_its_checkpoint(rows: Rows) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 1

    args = GRPOConfig(**SHORT, save_steps=1)
    first = GRPOTrainer("embedded", length, args, rows, callbacks=[Stop])
    first.train()
    again = GRPOTrainer("embedded", length, args, rows)
    assert again.train(resume_from_checkpoint=True).global_step == 3
    assert [row["step"] for row in again.state.log_history if "reward" in row] == [1, 2, 3]
    weights = sum(part.numel() for name, part in again.model.named_parameters() if "embed_tokens" not in name)
    last = again.state.log_history[-1]
    assert last["total_flos"] == 6 * weights * again.state.num_input_tokens_seen > 0
    with pytest.raises(CheckpointError, match="holds no run"):
        again.train(resume_from_checkpoint="elsewhere")


def test_a_reward_model_scores_prompt_and_completion(rows: Rows, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "scorer")
    tokenizer.save_pretrained(tmp_path / "scorer")
    trainer = GRPOTrainer("embedded", [str(tmp_path / "scorer"), length], GRPOConfig(**SHORT), rows)
    trainer.train()
    row = next(row for row in trainer.state.log_history if "reward" in row)
    assert row["reward"] == pytest.approx(row["rewards/scorer/mean"] + row["rewards/length/mean"])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        GRPOTrainer("embedded", str(tmp_path / "nothing"), GRPOConfig(**SHORT), rows)


def test_a_stream_needs_max_steps(rows: Rows) -> None:
    from datasets import IterableDataset

    stream = IterableDataset.from_generator(lambda: iter(rows))
    trainer = GRPOTrainer("embedded", length, GRPOConfig(**SHORT), stream)
    assert len(trainer.translation.rows) == 24
    with pytest.raises(ConfigError, match="Set max_steps"):
        GRPOTrainer("embedded", length, GRPOConfig(**{**SHORT, "max_steps": -1}), stream)


def test_epochs_become_steps_by_the_number_of_rows(rows: Rows) -> None:
    options = {**SHORT, "max_steps": -1, "num_train_epochs": 2.0}
    trainer = GRPOTrainer("embedded", length, GRPOConfig(**options), rows)
    assert trainer.oncurve.config.run.steps == 24, "two epochs of 24 rows, 2 prompts at a time"
    assert trainer.state.max_steps == 24


def test_the_best_checkpoint_is_saved_and_handed_over(rows: Rows) -> None:
    class Measured(GRPOTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"eval_reward": {1: -3.0, 2: -2.0, 3: -5.0}[self.state.global_step]}

    options = dict(SHORT, eval_strategy="steps", eval_steps=1, save_strategy="best", load_best_model_at_end=True)
    args = GRPOConfig(**options, metric_for_best_model="reward", greater_is_better=True)
    trainer = Measured("embedded", length, args, rows, eval_dataset=rows[:2])
    trainer.train()
    assert sorted(path.name for path in Path("out").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert trainer.state.best_model_checkpoint == "out/checkpoint-2"
    best = AutoModelForCausalLM.from_pretrained("out/checkpoint-2")
    assert all(
        torch.equal(mine, part) for mine, part in zip(trainer.model.parameters(), best.parameters(), strict=True)
    )


def test_weights_and_rows_may_be_set_while_it_trains(rows: Rows) -> None:
    class Sets(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.reward_weights = torch.tensor([0.0, 2.0])
            trainer.train_dataset = rows[:8]

    def one(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.pad_token = None
    trainer = GRPOTrainer(
        "embedded", [length, one], GRPOConfig(**SHORT), rows, callbacks=[Sets()], processing_class=tokenizer
    )
    assert tokenizer.pad_token == tokenizer.eos_token
    trainer.train()
    logged = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert logged[0] > 2.0 == logged[1] == logged[2]
    assert len(trainer.train_dataset) == 8
    with pytest.raises(
        ConfigError, match=r"reward_weights is \[1.0\]. Give a finite number for each of \['length', 'one'\]"
    ):
        trainer.reward_weights = [1.0]
    trainer.create_model_card(model_name="sums")
    assert "# sums" in Path("out/README.md").read_text()


def test_the_reference_of_a_model_changed_in_memory_is_the_model_it_is_named_after(rows: Rows) -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    trainer = GRPOTrainer(model, length, GRPOConfig(**{**SHORT, "max_steps": 1}, beta=0.1), rows)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] > 0.01


TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    ("config", "trained"),
    [
        (LoraConfig(r=4, use_dora=True, **TARGETS), ["lora_magnitude_vector", "lora_B"]),
        (IA3Config(**TARGETS, feedforward_modules=[]), ["ia3_l"]),
        (LNTuningConfig(task_type="CAUSAL_LM"), ["ln_tuning_layers"]),
        pytest.param(VeraConfig(**TARGETS, r=4), ["vera_lambda_d"], marks=pytest.mark.nightly),
    ],
)
@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # peft, of norms
def test_every_adapter_that_peft_puts_into_layers_is_trained(config: Any, trained: list[str], rows: Rows) -> None:
    trainer = GRPOTrainer("embedded", length, GRPOConfig(**{**SHORT, "max_steps": 2}), rows, peft_config=config)
    before = {name: part.detach().clone() for name, part in trainer.model.named_parameters() if part.requires_grad}
    trainer.train()
    moved = {name for name, part in trainer.model.named_parameters() if name in before and (part != before[name]).any()}
    assert all(any(kind in name for name in moved) for kind in trained)
    trainer.save_model("saved")
    again, batch = load_model("saved")[0], torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.allclose(again(batch).logits, trainer.model(batch).logits, atol=1e-4)


def test_an_adapter_beside_the_layers_is_refused(rows: Rows) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match=r"of kind PROMPT_TUNING holds .* outside of the model's layers, which alone"):
        GRPOTrainer("embedded", length, GRPOConfig(**SHORT), rows, peft_config=config)


def test_a_model_under_any_adapter_is_what_its_files_hold(rows: Rows, tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    save_file({**tensors, "model.layers.9.extra": torch.ones(2)}, tmp_path / "model" / "model.safetensors")
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", use_dora=True)
    with pytest.raises(CheckpointError, match="no layer of Qwen2ForCausalLM takes 1 tensor of its files"):
        GRPOTrainer(str(tmp_path / "model"), length, GRPOConfig(**SHORT), rows, peft_config=adapter)


@pytest.mark.nightly
def test_weights_reach_the_sum_of_rewards_in_several_processes_too() -> None:
    total = WeightedSum([Term(from_function(length))])
    assert sum_inside(PipelinedRewards(ShardedRewards(total, ALONE))) is total
