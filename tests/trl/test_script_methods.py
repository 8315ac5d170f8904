"""Scripts that replace TRL's methods to look at a step, and faults that are told as whose they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

from oncurve.core.errors import ConfigError, RewardError
from oncurve.observe.run_model import EMBEDDED
from oncurve.trl import GRPOConfig, GRPOTrainer

Rows = list[dict[str, Any]]


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [len(text) + index for index, text in enumerate(completions)]


def made(kind: type[GRPOTrainer], rows: Rows, **more: Any) -> GRPOTrainer:
    small: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2}
    small |= {"max_completion_length": 6, "bf16": False, "logging_steps": 1, "learning_rate": 1e-3, **more}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(EMBEDDED), AutoTokenizer.from_pretrained(EMBEDDED)
    return kind(model, lengths, GRPOConfig("out", **small), rows, processing_class=tokenizer)


class Looking(GRPOTrainer):
    """Logs the loss, and the length of prompts; changes nothing."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        texts = self.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
        assert all("How much is" in text for text in texts)
        assert inputs["prompt_mask"][:, -1].all(), "padded on the left, as in TRL"
        self._metrics["train"]["mine/loss"].append(loss.item())
        return loss

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        outputs = super()._generate_and_score_completions(inputs)
        texts = self.processing_class.batch_decode(outputs["prompt_ids"], skip_special_tokens=True)
        assert [row["prompt"] in text for row, text in zip(inputs, texts, strict=True)] == [True] * 4
        self._metrics["train"]["mine/gold"].append(sum(row["gold"] for row in inputs))
        return outputs


def test_a_subclass_may_look_at_every_loss_and_every_step(rows: Rows) -> None:
    plain, looking = made(GRPOTrainer, rows), made(Looking, rows)
    plain.train()
    looking.train()
    for first, second in zip(plain.model.parameters(), looking.model.parameters(), strict=True):
        assert torch.equal(first, second)
    logged = [row for row in looking.state.log_history if "mine/loss" in row]
    assert [row["mine/loss"] for row in logged] == [row["loss"] for row in logged]
    assert all(row["mine/gold"] > 0 for row in logged)


def test_advantages_that_a_subclass_changes_are_trained_on(rows: Rows) -> None:
    class Silent(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            outputs = super()._generate_and_score_completions(inputs)
            outputs["advantages"] = outputs["advantages"] * 0
            return outputs

    trainer = made(Silent, rows)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())


def test_another_loss_and_other_completions_are_refused(rows: Rows) -> None:
    class Twice(GRPOTrainer):
        def compute_loss(self, *args: Any, **named: Any) -> Any:
            return 2 * super().compute_loss(*args, **named)

    class Shorter(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            outputs = super()._generate_and_score_completions(inputs)
            outputs["completion_mask"][:, 2:] = 0
            return outputs

    with pytest.raises(ConfigError, match="compute_loss returns another loss than TRL's own"):
        made(Twice, rows).train()
    with pytest.raises(ConfigError, match="changes completion_mask of TRL's dictionary"):
        made(Shorter, rows).train()
    with pytest.raises(ConfigError, match="computes nothing by itself"):
        made(GRPOTrainer, rows).compute_loss(None, {})


class Counting(GRPOTrainer):
    """Keeps rewards, gives functions other columns, pays the second function's double, and reads logs before TRL."""

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        assert [row["prompt"] for row in inputs] == prompts
        assert len(completion_ids_list) == len(completions)
        changed = [{**row, "gold": 100} for row in inputs]
        self.kept = super()._calculate_rewards(changed, prompts, completions, completion_ids_list)
        self.modes = [*vars(self).get("modes", []), self.model.training]
        return torch.stack([self.kept[:, 0], 2 * self.kept[:, 1]], dim=1)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        outputs = super()._generate_and_score_completions(inputs)
        self.paid = (self.kept * torch.tensor([1.0, 2.0]) * self.reward_weights).nansum(dim=1)
        outputs["advantages"] = self.paid - self.paid.view(-1, 2).mean(dim=1).repeat_interleave(2)
        return outputs

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        if self.model.training and "loss" in logs:
            assert self._metrics["train"]["reward"][-1] == pytest.approx(float(self.paid.mean()))
            self._metrics["train"]["mine/reward"].append(float(self.paid.mean()))
        super().log(logs, start_time)


async def goods(completions: list[str], gold: list[int], **_: Any) -> list[float | None]:
    return [None if index == 1 else float(number) for index, number in enumerate(gold)]


@pytest.mark.parametrize("kind", ["subclass", "instance", "after a training"])
def test_rewards_that_a_script_computes_are_those_that_are_paid(kind: str, rows: Rows) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(EMBEDDED), AutoTokenizer.from_pretrained(EMBEDDED)
    small: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2, "logging_steps": 1}
    args = GRPOConfig("out", **small, max_completion_length=6, bf16=False, reward_weights=[1.0, 0.5])
    trainer = (Counting if kind == "subclass" else GRPOTrainer)(
        model, [lengths, goods], args, rows, rows[:2], processing_class=tokenizer
    )
    if kind != "subclass":
        if kind == "after a training":
            trainer.train()
        own = trainer._calculate_rewards
        trainer._calculate_rewards = lambda *args: own(*args).new_full((len(args[1]), 2), 3.0)  # type: ignore[method-assign]
        trainer.train()
        assert [row["reward"] for row in trainer.state.log_history if "reward" in row][-1] == pytest.approx(4.5)
        return
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["mine/reward"] for row in logs] == [row["reward"] for row in logs]
    assert logs[-1]["rewards/goods/mean"] == 200
    trainer.evaluate()
    assert trainer.modes[-1] is False, "the model says that it is measured"
    assert not trainer.model.training


def test_rewards_of_another_form_are_refused(rows: Rows) -> None:
    class Flat(GRPOTrainer):
        def _calculate_rewards(self, *args: Any) -> Any:
            return super()._calculate_rewards(*args)[:, 0]

    with pytest.raises(RewardError, match=r"_calculate_rewards returns \(1,\), not a tensor of completions"):
        made(Flat, rows).train()


def test_what_every_pass_trains_on_can_be_looked_at_and_weighed(rows: Rows) -> None:
    class Silent(GRPOTrainer):
        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            assert [row["prompt"][:11] for row in generation_batch] == ["How much is"] * 4
            return {**inputs, "advantages": inputs["advantages"] * 0}

    trainer = made(Silent, rows)
    trainer.train()
    assert [row["grad_norm"] for row in trainer.state.log_history if "loss" in row] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "instead"),
    [("get_train_dataloader", "shuffle_dataset=False"), ("_get_train_sampler", "shuffle_dataset=False"),
     ("training_step", "on_pre_optimizer_step"), ("evaluation_loop", "replace evaluate"),
     ("prediction_step", "replace evaluate"), ("_save_checkpoint", "save_model"), ("_generate", "docs/python.md")],
)  # fmt: skip
def test_a_method_that_is_not_called_is_refused_with_what_to_use(name: str, instead: str, rows: Rows) -> None:
    with pytest.raises(ConfigError, match=f"{name}.* of TRL's GRPOTrainer, which nothing calls here") as refused:
        made(type("Mine", (GRPOTrainer,), {name: lambda *_: None}), rows)
    assert instead in str(refused.value)
    assert made(type("Mine", (GRPOTrainer,), {"predict": lambda *_: 3}), rows).predict() == 3  # which TRL never calls


def test_both_sides_of_clipping_are_logged(rows: Rows) -> None:
    trainer = made(GRPOTrainer, rows, num_iterations=2, max_steps=4, learning_rate=3e-3)
    trainer.train()
    row = next(row for row in trainer.state.log_history if row.get("clip_ratio/region_mean"))
    assert row["clip_ratio/low_mean"] + row["clip_ratio/high_mean"] == pytest.approx(row["clip_ratio/region_mean"])
    assert row["clip_ratio/low_mean"] > 0


def test_a_fault_of_oncurve_is_not_told_as_the_scripts(
    trl: Callable[..., Result], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncurve.trl.grpo_trainer.rollout_logs", None)
    done = trl("GRPOTrainer('embedded', correct, GRPOConfig(**SHORT), rows(), rows(4)).evaluate()")
    message = str(done.exception)
    assert "oncurve itself failed with TypeError in oncurve/trl/grpo_trainer.py, line" in message
    assert "in evaluate" in done.output + capfd.readouterr().err
    assert "the script raised" not in message


def test_a_script_that_is_no_python_is_the_scripts_own_error(trl: Callable[..., Result]) -> None:
    message = str(trl("reward_funcs = [").exception)
    assert "train.py: the script raised SyntaxError" in message
    assert "oncurve itself failed" not in message


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("args", {"max_steps": 1}, "args is a dict. Pass a GRPOConfig"),
        ("processing_class", "embedded", "processing_class is a str. Pass a PreTrainedTokenizerBase"),
        ("callbacks", ["x"], "callbacks: 'x' is none"),
        ("optimizers", torch.optim.SGD, "pass a pair"),
        ("optimizers", (torch.optim.SGD, None), "is not a Optimizer of torch"),
        ("optimizers", (None, "cosine"), "'cosine' is not a LRScheduler of torch"),
    ],
)
def test_an_argument_of_another_type_is_one_sentence(argument: str, value: Any, expected: str, rows: Rows) -> None:
    with pytest.raises(ConfigError, match=expected):
        GRPOTrainer("embedded", lengths, **{"train_dataset": rows, argument: value})


def test_a_resume_from_what_is_no_path_is_one_sentence(rows: Rows) -> None:
    with pytest.raises(ValueError, match="resume_from_checkpoint is 1"):
        made(GRPOTrainer, rows).train(resume_from_checkpoint=1)  # type: ignore[arg-type]
