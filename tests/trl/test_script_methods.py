"""Scripts that replace TRL's methods to look at a step, and faults that are told as whose they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import Result

from oncurve.errors import ConfigError
from oncurve.observe.run_model import EMBEDDED
from oncurve.trl import GRPOConfig, GRPOTrainer

Rows = list[dict[str, Any]]


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [len(text) + place for place, text in enumerate(completions)]


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
        words = self.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
        assert all("How much is" in text for text in words)
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
    for one, other in zip(plain.model.parameters(), looking.model.parameters(), strict=True):
        assert torch.equal(one, other)
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
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            return 2 * super().compute_loss(*given, **named)

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
    said = str(done.exception)
    assert "oncurve itself failed with TypeError in oncurve/trl/grpo_trainer.py, line" in said
    assert "in evaluate" in done.output + capfd.readouterr().err
    assert "the script raised" not in said


@pytest.mark.parametrize(
    ("argument", "given", "expected"),
    [
        ("args", {"max_steps": 1}, "args is a dict. Pass a GRPOConfig"),
        ("processing_class", "embedded", "processing_class is a str. Pass a PreTrainedTokenizerBase"),
        ("callbacks", ["x"], "callbacks: 'x' is none"),
        ("optimizers", torch.optim.SGD, "pass a pair"),
        ("optimizers", (torch.optim.SGD, None), "is not a Optimizer of torch"),
        ("optimizers", (None, "cosine"), "'cosine' is not a LRScheduler of torch"),
    ],
)
def test_an_argument_of_another_type_is_one_sentence(argument: str, given: Any, expected: str, rows: Rows) -> None:
    with pytest.raises(ConfigError, match=expected):
        GRPOTrainer("embedded", lengths, **{"train_dataset": rows, argument: given})


def test_a_resume_from_what_is_no_path_is_one_sentence(rows: Rows) -> None:
    with pytest.raises(ValueError, match="resume_from_checkpoint is 1"):
        made(GRPOTrainer, rows).train(resume_from_checkpoint=1)  # type: ignore[arg-type]
