"""Scripts that bring their own optimizer: through an argument, an attribute or a method of a subclass."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import gate
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from oncurve.core.errors import ConfigError
from oncurve.observe.run_model import EMBEDDED
from oncurve.trl import GRPOConfig, GRPOTrainer

Rows = list[dict[str, Any]]
TOKENIZER = AutoTokenizer.from_pretrained(EMBEDDED)


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [len(text) + index for index, text in enumerate(completions)]


def options(name: str = "out", **more: Any) -> Any:
    small = {"max_steps": 4, "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6}
    return GRPOConfig(name, bf16=False, report_to="none", logging_steps=1, save_steps=2, **{**small, **more})


def two_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Matrices of layers at one rate, norms at another; embeddings are in neither."""
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for name, weight in model.named_parameters():
        if "layers" in name:
            kinds[weight.ndim > 1].append(weight)
    return torch.optim.AdamW([{"params": kinds[True]}, {"params": kinds[False], "lr": 1e-2}], lr=1e-4)


def trained(name: str, rows: Rows, *, after: int | None = None) -> tuple[torch.nn.Module, list[float]]:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    optimizer = two_groups(model)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 4)
    args = options(name, save_total_limit=None)
    trainer = GRPOTrainer(
        model, lengths, args, rows, processing_class=TOKENIZER, optimizers=(optimizer, schedule)
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if after is None else f"{name}/checkpoint-{after}")
    return model, [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]


def test_its_groups_and_its_schedule_move_the_weights_and_a_resume_goes_on_with_them(rows: Rows) -> None:
    before = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    whole, rates = trained("out", rows)
    assert rates == pytest.approx([0.0, 1e-4, 0.75e-4, 0.25e-4])
    moved = {
        name: float((after - weight).detach().abs().max())
        for (name, weight), after in zip(before.named_parameters(), whole.parameters(), strict=True)
    }
    assert moved["model.embed_tokens.weight"] == 0, "in no group"
    assert moved["model.layers.0.input_layernorm.weight"] > 20 * moved["model.layers.0.mlp.up_proj.weight"] > 0
    again, _ = trained("out", rows, after=2)
    assert all(torch.equal(first, second) for first, second in zip(whole.parameters(), again.parameters(), strict=True))


class WithSgd(GRPOTrainer):
    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            trained = [weight for name, weight in self.model.named_parameters() if "norm" in name]
            self.optimizer = torch.optim.SGD(trained, lr=self.args.learning_rate)
        return self.optimizer


def test_a_subclass_may_make_it_and_the_schedule_of_the_options_follows(rows: Rows) -> None:
    model, before = (AutoModelForCausalLM.from_pretrained(EMBEDDED) for _ in range(2))
    trainer = WithSgd(model, lengths, options(learning_rate=0.1), rows, processing_class=TOKENIZER)
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])
    for (name, weight), after in zip(before.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, after) == ("norm" not in name)


def test_one_that_holds_no_weight_in_training_is_refused(rows: Rows) -> None:
    second = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    trainer = GRPOTrainer("embedded", lengths, options(), rows, optimizers=(second, None))
    with pytest.raises(ConfigError, match="holds none of the weights in training"):
        trainer.train()
    assert not list(Path("out").glob("checkpoint-*"))


def test_a_schedule_of_another_optimizer_is_refused(rows: Rows) -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    schedule = get_cosine_schedule_with_warmup(two_groups(model), 1, 4)
    trainer = GRPOTrainer(model, lengths, options(), rows, processing_class=TOKENIZER, optimizers=(None, schedule))
    with pytest.raises(ConfigError, match="the schedule is of another optimizer"):
        trainer.train()


@pytest.mark.parametrize("optim", gate(["adafactor", "adagrad"], "adafactor"))
def test_one_of_transformers_by_name_is_the_same_after_a_resume(optim: str, rows: Rows) -> None:
    """And a schedule with its own options, and a warm-up from 0."""

    def trained_by(name: str, after: int | None = None) -> tuple[torch.nn.Module, list[float]]:
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
        own = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}}
        args = options(name, optim=optim, learning_rate=1e-3, warmup_steps=2, **own)
        trainer = GRPOTrainer(model, lengths, args, rows, processing_class=TOKENIZER)
        trainer.train(resume_from_checkpoint=None if after is None else f"{name}/checkpoint-{after}")
        assert type(trainer.optimizer).__name__.lower() == optim
        return model, [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]

    whole, rates = trained_by("out")
    assert rates == pytest.approx([0, 0.5e-3, 1e-3, 0.75e-3])
    again, _ = trained_by("out", 2)
    assert all(torch.equal(first, second) for first, second in zip(whole.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"optim": "lomo"}, "optim is lomo, which does not move the weights between two passes"),
        ({"optim": "lion_32bit"}, "optim is lion_32bit, and transformers cannot make it"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "reduce_lr_on_plateau requires an eval strategy"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "warmup_stable_decay, and transformers refuses it"),
        ({"lr_scheduler_kwargs": {"nonsense": 3}}, r"linear with lr_scheduler_kwargs \{'nonsense': 3\}"),
    ],
)
def test_what_transformers_or_the_loop_cannot_do_is_refused(arguments: Any, expected: str, rows: Rows) -> None:
    if arguments.get("optim") == "lion_32bit" and find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is installed, so that there is such an optimizer")
    with pytest.raises(ConfigError, match=expected):
        GRPOTrainer("embedded", lengths, options(**arguments), rows).train()


def test_a_resume_notices_another_optimizer(rows: Rows) -> None:
    trained("out", rows)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    second = torch.optim.AdamW(model.parameters(), lr=1e-4)
    again = (second, get_cosine_schedule_with_warmup(second, 1, 4))
    trainer = GRPOTrainer(model, lengths, options(), rows, processing_class=TOKENIZER, optimizers=again)
    with pytest.raises(ConfigError, match="optimizers: not as when the run began"):
        trainer.train(resume_from_checkpoint="out/checkpoint-2")


def test_a_checkpoint_of_a_model_with_frozen_weights_is_a_model_and_is_resumed(rows: Rows) -> None:
    def trained_in_part(after: int | None = None) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
        for name, weight in model.named_parameters():
            weight.requires_grad_("layers.1" in name)
        trainer = GRPOTrainer(model, lengths, options(learning_rate=1e-3), rows, processing_class=TOKENIZER)
        trainer.train(resume_from_checkpoint=None if after is None else f"out/checkpoint-{after}")
        return model

    whole = trained_in_part()
    saved = AutoModelForCausalLM.from_pretrained("out/checkpoint-4")
    assert all(torch.equal(first, second) for first, second in zip(whole.parameters(), saved.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained("out/checkpoint-4").vocab == TOKENIZER.vocab
    again = trained_in_part(2)
    assert all(torch.equal(first, second) for first, second in zip(whole.parameters(), again.parameters(), strict=True))
