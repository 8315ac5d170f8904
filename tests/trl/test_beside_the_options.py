"""Is what scripts change beside the options taken or refused: attributes, methods, modules, code of the model?"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from typer.testing import Result

from oncurve.core.errors import ConfigError
from oncurve.observe.run_model import EMBEDDED
from oncurve.run_errors import Stopped
from oncurve.trl import GRPOConfig, GRPOTrainer
from oncurve.trl.overridden import ATTRIBUTES, OF_TRL

Rows = list[dict[str, Any]]
SHORT: dict[str, Any] = {
    "output_dir": "out", "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "use_cpu": True,
    "max_completion_length": 8, "bf16": False, "learning_rate": 1e-4, "logging_steps": 1,
}  # fmt: skip
Script = Callable[..., Result]


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def shortness(completions: list[str], **kwargs: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def trainer_of(rows: Rows, **options: Any) -> GRPOTrainer:
    return GRPOTrainer("embedded", length, GRPOConfig(**{**SHORT, **options}), rows)


def test_a_script_that_keeps_only_known_options_keeps_all_of_them() -> None:
    options = {**SHORT, "beta": 0.04, "no_such_option": 1}
    known = set(inspect.signature(GRPOConfig).parameters)
    args = GRPOConfig(**{name: value for name, value in options.items() if name in known})
    assert (args.beta, args.learning_rate, args.max_steps) == (0.04, 1e-4, 2)
    assert known == {field.name for field in dataclasses.fields(GRPOConfig)}
    assert isinstance(args, TrainingArguments)

    @dataclasses.dataclass
    class Mine(GRPOConfig):  # type: ignore[misc]
        extra: int = 3

    assert {*known, "extra"} == set(inspect.signature(Mine).parameters)


def test_the_signature_is_that_of_the_installed_trl() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: it comes with the extra trl")
    assert set(inspect.signature(GRPOConfig).parameters) == set(inspect.signature(trl.GRPOConfig).parameters)
    assert list(inspect.signature(GRPOTrainer).parameters) == list(inspect.signature(trl.GRPOTrainer).parameters)


def test_every_name_of_the_installed_trainer_is_known() -> None:
    """A new version of TRL with a method or an attribute that nobody here thought of fails this test."""
    import re

    trl = pytest.importorskip("trl", reason="TRL is not installed: it comes with the extra trl")
    kind = trl.GRPOTrainer
    source = inspect.getsource(kind)
    attributes = set(re.findall(r"^ +self\.(\w+)(?:: [^=\n]+)? = ", source, re.MULTILINE))
    methods = {name for name, value in vars(kind).items() if inspect.isfunction(value)} - {"__init__"}
    from oncurve.trl.overridden import of_trl

    own = {"train_dataset", "eval_dataset", "reward_funcs", "reward_func_names", "_signature_columns", "_log_metric"}
    own |= {name for name in attributes if name in ("commit_scheduler",)}
    assert attributes - of_trl() - own == set()
    assert methods - of_trl() - own == set()
    assert set(OF_TRL).isdisjoint(ATTRIBUTES)


def test_sizes_that_follow_from_others_can_be_read() -> None:
    args = GRPOConfig(**SHORT, gradient_accumulation_steps=3)
    assert (args.steps_per_generation, args.generation_batch_size) == (3, 24)
    assert "steps_per_generation" not in args.options()
    longer = dataclasses.replace(args, gradient_accumulation_steps=2)
    assert longer.generation_batch_size == 16


def test_rows_that_are_set_between_two_trainings_are_trained_on(rows: Rows) -> None:
    trainer = trainer_of(rows)
    trainer.train()
    before = {name: part.clone() for name, part in trainer.model.named_parameters()}
    seen: list[str] = []

    def watching(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [float(len(text)) for text in completions]

    trainer.train_dataset = [{"prompt": f"hard {number}"} for number in range(8)]
    trainer.reward_funcs = watching
    assert all((part == before[name]).all() for name, part in trainer.model.named_parameters()), "the weights go on"
    trainer.train()
    assert seen
    assert all(prompt.startswith("hard") for prompt in seen)
    assert trainer.reward_func_names == ["watching"]


def test_options_that_trl_reads_when_training_begins_are_taken_then(rows: Rows) -> None:
    trainer = trainer_of(rows)
    trainer.args.learning_rate = 3e-3
    trainer.args.max_steps = 1
    assert trainer.train().global_step == 1
    assert trainer.oncurve.config.optimizer.learning_rate == 3e-3
    late = trainer_of(rows)
    late.args.beta = 0.1
    with pytest.raises(ConfigError, match="'beta' changed after GRPOTrainer was made"):
        late.train()


@pytest.mark.parametrize(
    "name",
    ["ref_model", "beta", "temperature", "loss_type", "epsilon_low", "num_generations",
     "num_iterations", "scale_rewards", "max_completion_length", "data_collator",
     "compute_metrics", "generation_config", "_generate", "training_step", "get_train_dataloader"],
)  # fmt: skip
def test_what_nothing_reads_cannot_be_set(name: str, rows: Rows) -> None:
    trainer = trainer_of(rows)
    with pytest.raises((ConfigError, AttributeError)):
        setattr(trainer, name, object())
    trainer.my_own_attribute = 3
    assert trainer.my_own_attribute == 3


def test_options_can_be_read_from_the_trainer_and_what_is_missing_is_named(rows: Rows) -> None:
    trainer = trainer_of(rows, beta=0.0, epsilon=0.1)
    assert (trainer.beta, trainer.num_generations, trainer.epsilon_low, trainer.epsilon_high) == (0.0, 4, 0.1, 0.1)
    assert not hasattr(trainer, "ref_model")
    for name in ("get_train_dataloader", "create_optimizer_and_scheduler", "generation_config", "predict"):
        with pytest.raises(ConfigError, match=f"{name} is TRL's, and oncurve's trainer has none"):
            getattr(trainer, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = trainer.nonsense
    state = trainer.accelerator.state
    assert (state.num_processes, state.is_main_process, state.deepspeed_plugin) == (1, True, None)
    trainer.accelerator.end_training()
    assert not hasattr(trainer.accelerator, "gather_for_metrics")
    with pytest.raises(ConfigError, match="gather is asked of accelerate's Accelerator"):
        trainer.accelerator.gather(1)


@pytest.mark.parametrize(
    "text",
    ["GRPOTrainer._generate = lambda self, inputs: inputs",
     "GRPOTrainer.training_step = lambda self, *a, **k: 0",
     "original = GRPOTrainer._tool_call_loop",
     "import trl.trainer.grpo_trainer as m; m.selective_log_softmax = print",
     "import trl.trainer.utils\ntrl.trainer.utils.pad = print"],
)  # fmt: skip
def test_a_patched_method_is_refused_as_an_overridden_one_is(text: str, trl: Script) -> None:
    train = (
        "GRPOTrainer(model='embedded', reward_funcs=correct, args=GRPOConfig(**SHORT), train_dataset=rows()).train()"
    )
    try:
        done = trl(f"{text}\n{train}")
    finally:
        for name in set(vars(GRPOTrainer)) & {"_generate", "training_step"}:
            delattr(GRPOTrainer, name)
    assert isinstance(done.exception, ConfigError)
    message = str(done.exception)
    assert (
        "nothing calls here" in message or "oncurve's trainer has none" in message or "oncurve.trl has not" in message
    )


def test_a_method_that_is_called_here_may_be_patched(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    original = GRPOTrainer.log

    def log(self: Any, logs: dict[str, Any], start_time: float | None = None) -> None:
        logged.append(logs)
        original(self, logs, start_time)

    monkeypatch.setattr(GRPOTrainer, "log", log)
    trainer_of(rows).train()
    assert len(logged) == 3


@pytest.mark.parametrize("kind", ["subclass", "forward", "generate", "hook", "layer"])
def test_a_model_with_code_of_its_own_is_refused(kind: str, rows: Rows) -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    forward = model.forward
    if kind == "subclass":
        model.__class__ = type("Mine", (type(model),), {"forward": lambda self, *a, **k: forward(*a, **k)})
    elif kind == "forward":
        model.forward = lambda *a, **k: forward(*a, **k)
    elif kind == "generate":
        model.generate = lambda *a, **k: None
    elif kind == "hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    else:
        inner = model.model.norm
        inner.__class__ = type("Norm", (type(inner),), {"forward": lambda self, x: x})
    with pytest.raises(ConfigError, match="would not be called"):
        GRPOTrainer(model, length, GRPOConfig(**SHORT), rows, processing_class=AutoTokenizer.from_pretrained(EMBEDDED))


def test_a_model_whose_inputs_ask_for_gradients_is_taken(rows: Rows) -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    model.enable_input_require_grads()
    model.activation_checkpointing_enable()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    assert GRPOTrainer(model, length, GRPOConfig(**SHORT), rows, processing_class=tokenizer).train().global_step == 2


def test_two_rewards_of_one_name_are_logged_as_their_mean_and_extra_columns_are_kept(rows: Rows) -> None:
    import pandas

    def r(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("letters", [len(text) for text in completions])
        return [0.5 + (len(text) % 2) for text in completions]

    def five(completions: list[str], **_: Any) -> list[float]:
        return [5.0] * len(completions)

    five.__name__ = "r"
    trainer = GRPOTrainer("embedded", [r, five], GRPOConfig(**SHORT, log_completions=True), rows)
    trainer.train()
    row = next(row for row in trainer.state.log_history if "reward" in row)
    assert row["rewards/r/mean"] == pytest.approx(row["reward"] / 2)
    assert trainer.evaluate(rows[:2])["eval_rewards/r/mean"] > 2
    table = pandas.read_parquet("out/completions/completions_00001.parquet")
    assert list(table.columns) == ["step", "prompt", "completion", "r", "letters", "advantage"]
    assert list(table["letters"]) == [len(text) for text in table["completion"]]
    assert table["advantage"].sum() == pytest.approx(0, abs=1e-4)


def test_a_script_that_never_trains_ends_with_1(trl: Script) -> None:
    done = trl("print('no training')")
    assert isinstance(done.exception, Stopped)
    assert done.exception.exit_code == 1
    assert "ended without GRPOTrainer(...).train()" in str(done.exception)


def test_a_missing_checkpoint_is_a_value_error_as_in_trl(rows: Rows) -> None:
    trainer = trainer_of(rows)
    with pytest.raises(ValueError, match="holds no run"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.train().global_step == 2
    assert Path("out/checkpoint-2/trainer_state.json").is_file()
