"""What public scripts do that was once lost on the way: orders, names, checkpoints, batches, sets to evaluate on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, Trainer, TrainerCallback

from oncurve.core.errors import ConfigError
from oncurve.observe.run_model import EMBEDDED
from oncurve.policy.backend import make_adamw
from oncurve.policy.settings import OptimizerSettings
from oncurve.trl import GRPOConfig, GRPOTrainer
from oncurve.trl.conversion import convert
from oncurve.trl.options import OptionOutcome
from oncurve.trl.rewards_of_scripts import reward_name

Rows = list[dict[str, Any]]


def options(tmp_path: Path, **more: Any) -> Any:
    small = {"max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6}
    return GRPOConfig(str(tmp_path / "out"), bf16=False, report_to="none", logging_steps=1, **{**small, **more})


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [len(text) + index for index, text in enumerate(completions)]


def test_rows_keep_their_order_where_a_script_does_not_shuffle(tmp_path: Path, rows: Rows) -> None:
    seen: list[str] = []

    def watching(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
        seen.extend(dict.fromkeys(prompts))
        return lengths(completions)

    GRPOTrainer("embedded", watching, options(tmp_path, shuffle_dataset=False), rows).train()
    first = seen.index(rows[0]["prompt"], 8)  # after the measurement before the run
    assert seen[first : first + 4] == [row["prompt"] for row in rows[:4]]


def test_a_learning_rate_of_zero_moves_nothing(tmp_path: Path, rows: Rows) -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    before = model.get_input_embeddings().weight.clone()
    GRPOTrainer(model, lengths, options(tmp_path, learning_rate=0.0), rows).train()
    assert (model.get_input_embeddings().weight == before).all()


class Named:
    __name__ = "named"

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return lengths(completions)


def test_a_reward_has_the_name_that_its_class_gives_it() -> None:
    assert [reward_name(function) for function in (Named(), partial(lengths, word="e"), lengths)] == [
        "named",
        "lengths",
        "lengths",
    ]


def test_every_checkpoint_is_kept_without_a_limit_and_through_an_extension(tmp_path: Path, rows: Rows) -> None:
    class Places(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.asked = more["optimizer"].param_groups[0]["lr"], more["lr_scheduler"].get_last_lr()

    listens = Places()
    GRPOTrainer("embedded", lengths, options(tmp_path, save_steps=2, max_steps=3), rows, callbacks=[listens]).train()
    assert listens.asked, "optimizer and schedule are there when training begins"
    GRPOTrainer("embedded", lengths, options(tmp_path, save_steps=2, max_steps=5), rows).train(True)
    checkpoints = sorted((tmp_path / "out").glob("checkpoint-*"))
    assert [path.name for path in checkpoints] == ["checkpoint-2", "checkpoint-3", "checkpoint-4", "checkpoint-5"]
    assert all((path / "trainer_state.json").is_file() for path in checkpoints)


def test_each_set_of_an_evaluation_has_a_row_as_in_trl(tmp_path: Path, rows: Rows) -> None:
    class Listens(TrainerCallback):
        heard: ClassVar[list[set[str]]] = []

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
            self.heard.append({key for key in metrics if key.endswith("_runtime")})

    sets = {"a": rows[:1], "b": rows[1:3]}
    trainer = GRPOTrainer("embedded", lengths, options(tmp_path), rows, eval_dataset=sets, callbacks=[Listens()])
    evaluated = trainer.evaluate()
    assert Listens.heard == [{"eval_a_runtime"}, {"eval_b_runtime"}]
    assert [row["eval_reward"] for row in trainer.state.log_history] == [
        evaluated["eval_a_reward"],
        evaluated["eval_b_reward"],
    ]


def test_sampling_as_unsloth_writes_it_is_taken() -> None:
    outcome = OptionOutcome("the script", "embedded", {"generation_kwargs": {"top_k": -1, "min_p": 0.1}}, num_rewards=1)
    values = convert(outcome, rows=64).values
    assert (values["rollouts.top_k"], values["rollouts.min_p"]) == (0, 0.1)


def test_weights_decay_that_decay_in_transformers() -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    trained = [list(model.parameters())]
    optimizer = make_adamw(model, trained, OptimizerSettings(weight_decay=0.1))
    names = {id(weight): name for name, weight in model.named_parameters()}
    decays = {
        names[id(weight)] for group in optimizer.param_groups if group["weight_decay"] for weight in group["params"]
    }
    assert decays == set(Trainer.get_decay_parameter_names(None, model)) & set(names.values())  # type: ignore[arg-type]
    assert 0 < len(decays) < len(names)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


@pytest.mark.parametrize("is_greater", [True, False])
def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path, rows: Rows, *, is_greater: bool) -> None:
    def by_time(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        best = 10.0 if trainer_state.global_step == 2 else 0.0  # at no other measurement
        return [(best if is_greater else -best) + index for index, _ in enumerate(completions)]

    args = options(
        tmp_path, max_steps=4, learning_rate=1e-3, eval_strategy="steps", eval_steps=1, save_steps=1,
        save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="reward", greater_is_better=is_greater,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    stops = EarlyStoppingCallback(early_stopping_patience=5)
    trainer = GRPOTrainer(
        model, by_time, args, rows, eval_dataset=rows[:2], processing_class=AutoTokenizer.from_pretrained(EMBEDDED),
        callbacks=[stops],
    )  # fmt: skip
    trainer.train()
    best = tmp_path / "out" / "checkpoint-2"
    assert Path(str(trainer.state.best_model_checkpoint)) == best
    best_model, last = (AutoModelForCausalLM.from_pretrained(path) for path in (best, best.with_name("checkpoint-4")))
    for name, weight in model.named_parameters():
        assert torch.equal(weight, best_model.get_parameter(name)), name
    assert any(not torch.equal(weight, last.get_parameter(name)) for name, weight in model.named_parameters())


def test_a_metric_that_no_evaluation_has_is_named(tmp_path: Path, rows: Rows) -> None:
    args = options(tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model="rewrd")
    with pytest.raises(ConfigError, match=r"no evaluation measures 'eval_rewrd'.*eval_reward"):
        GRPOTrainer("embedded", lengths, args, rows, eval_dataset=rows[:1]).train()
