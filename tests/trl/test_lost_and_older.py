"""Is every option taken, idle or lost; are losses one message; do older names bring the defaults of their time?"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, TrainingArguments
from transformers import Trainer as TransformersTrainer

from oncurve.core.errors import ConfigError, DataError
from oncurve.observe.run_model import EMBEDDED
from oncurve.trl import GRPOConfig, GRPOTrainer, TrlParser, accept_lost
from oncurve.trl.names import ELSEWHERE
from oncurve.trl.options import raw_table, table
from oncurve.trl.overridden import OF_TRL
from oncurve.trl.versions import date, default_at, number

Rows = list[dict[str, Any]]
SMALL: dict[str, Any] = {
    "num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 1, "max_completion_length": 4, "bf16": False,
}  # fmt: skip


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def notes(rows: Rows, **options: Any) -> dict[str, str]:
    """What is said about a script, by option."""
    trainer = GRPOTrainer("embedded", length, GRPOConfig(**{**SMALL, **options}), rows)
    return {note.option: note.kind for note in trainer.translation.draft.notes}


def test_fields_and_defaults_are_those_of_the_installed_trl() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: it comes with the extra trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
    ours = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    assert set(ours) == set(theirs)
    for name, field in theirs.items():
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        mine = ours[name]
        assert default == (mine.default if mine.default is not dataclasses.MISSING else mine.default_factory()), name
    assert set(ELSEWHERE) <= set(dir(trl))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"report_to": "all", "eval_strategy": "steps", "logging_steps": 20.0, "lr_scheduler_type": "cosine"},
        {"report_to": "wandb", "load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"fp16": True, "warmup_steps": 0.1, "optim": "adafactor", "lr_scheduler_kwargs": '{"power": 2}'},
        {"output_dir": "~/out", "save_steps": 5.0, "include_num_input_tokens_seen": True, "scale_rewards": False},
        {"gradient_checkpointing": False, "steps_per_generation": 4}, {"generation_batch_size": 32},
    ],
)  # fmt: skip
def test_what_is_filled_in_is_what_the_installed_trl_fills_in(options: dict[str, Any]) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: it comes with the extra trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = trl.GRPOConfig(use_cpu=True, **options)
    ours = GRPOConfig(use_cpu=True, **options)
    names = {field.name for field in dataclasses.fields(theirs)} - {"dataloader_pin_memory"}
    assert {name: vars(ours)[name] for name in names} == {name: vars(theirs)[name] for name in names}
    assert vars(dataclasses.replace(ours))["report_to"] == theirs.report_to
    assert GRPOConfig(**ours.options()).options() == ours.options()


@pytest.mark.parametrize(
    "options",
    [{"eval_strategy": "sometimes"}, {"load_best_model_at_end": True}, {"logging_steps": 0}, {"warmup_steps": -1},
     {"optim": "sgdx"}, {"fp16": True, "bf16": True}],
)  # fmt: skip
def test_what_transformers_refuses_is_refused_with_its_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w") as theirs:
        TrainingArguments(use_cpu=True, **options)
    with pytest.raises(ConfigError) as ours:
        GRPOConfig(use_cpu=True, **options)
    assert str(ours.value) == f"GRPOConfig: {theirs.value}"


def test_options_of_accelerate_prepare_nothing_and_are_kept() -> None:
    options = {"tf32": True, "deepspeed": "none.json", "fsdp": "full_shard", "torch_compile": True, "optim": "adamw_hf"}
    before = torch.get_float32_matmul_precision()
    args = GRPOConfig(bf16=True, **options)
    assert {name: vars(args)[name] for name in options} == options
    assert torch.get_float32_matmul_precision() == before


def test_everything_that_is_lost_is_one_message(rows: Rows) -> None:
    args = GRPOConfig(**SMALL, repetition_penalty=1.2, neftune_noise_alpha=5.0, push_to_hub=True)
    with pytest.raises(ConfigError) as caught:
        GRPOTrainer("embedded", length, args, rows, rollout_func=print)
    text = str(caught.value)
    for lost in (
        "rollout_func: completions come from the engine or from servers",
        "repetition_penalty = 1.2",
        "neftune_noise_alpha = 5.0",
    ):
        assert lost in text
    assert "push_to_hub" not in text, "where files go changes nothing that is learned"


def test_end_tokens_that_end_a_completion_anyway_are_no_loss(rows: Rows) -> None:
    """In generation_kwargs; others are refused, since they would end completions elsewhere."""
    end = AutoTokenizer.from_pretrained(EMBEDDED).eos_token_id
    kwargs = {"eos_token_id": end, "stop_token_ids": [end], "max_time": 60}
    trainer = GRPOTrainer("embedded", length, GRPOConfig(**SMALL, generation_kwargs=kwargs), rows)
    assert not trainer.oncurve.config.rollouts.stop
    with pytest.raises(ConfigError, match="drawn without eos_token_id"):
        GRPOTrainer("embedded", length, GRPOConfig(**SMALL, generation_kwargs={"eos_token_id": end + 1}), rows)


def test_what_is_accepted_by_name_is_left_out_and_said(rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    accept_lost("repetition_penalty")
    GRPOTrainer("embedded", length, GRPOConfig(**SMALL, repetition_penalty=1.2, push_to_hub=True), rows)
    output = capsys.readouterr().out
    assert "note: repetition_penalty = 1.2: Completions are drawn without it." in output
    assert "note: push_to_hub" in output


TAKEN = {"lr_scheduler_kwargs", "optim_args", "optim_target_modules"}
"""What a recipe cannot say, and transformers makes for a script."""


@pytest.mark.parametrize(
    "name",
    [o.name for o in table().values() if o.fate == "unsupported" and o.changes_learning and o.name not in TAKEN],
)
def test_each_lost_option_that_changes_what_is_learned_stops(name: str, rows: Rows) -> None:
    default = table()[name].default
    other = not default if isinstance(default, bool) else default * 2 + 1 if default else "something"
    with pytest.raises(ConfigError, match=name):
        GRPOTrainer("embedded", length, GRPOConfig(**SMALL, **{name: other}), rows)


def test_unknown_names_are_refused_together_with_the_nearest(rows: Rows) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(num_generation=4, learning_rat=1e-6)
    assert "Did you mean 'num_generations'?" in str(caught.value)
    assert "Did you mean 'learning_rate'?" in str(caught.value)


def test_an_older_name_brings_the_defaults_of_its_time() -> None:
    args = GRPOConfig(max_prompt_length=256, vllm_device="cuda:1", beta=0.1)
    assert (args.beta, args.temperature, args.loss_type, args.max_completion_length) == (0.1, 0.9, "bnpo", 256)
    assert args.max_prompt_length == 256
    description = args.dated.describe()
    assert description.startswith("max_prompt_length, vllm_device: of TRL 0.15 to 0.17")
    assert "temperature 0.9" in description
    assert "loss_type (grpo or bnpo)" in description


def test_a_version_can_be_named() -> None:
    args = GRPOConfig(trl_version="0.15")
    assert (args.beta, args.loss_type, args.temperature) == (0.04, "grpo", 0.9)
    with pytest.raises(ConfigError, match=r"versions 0.15 to 1.16.0"):
        GRPOConfig(trl_version="0.14")
    assert GRPOConfig().dated is None


def test_todays_defaults_end_every_history() -> None:
    for name, history in raw_table()["history"].items():
        versions = list(history)
        assert versions == sorted(versions, key=number)
        if name in table():
            assert default_at(name, "1.16") == table()[name].default
    assert date(["learning_rate"]) is None


def test_older_names_on_a_command_line_and_in_its_file(tmp_path: Any) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("learning_rate: 2e-6\nmax_prompt_length: 99\n")
    [args] = TrlParser(GRPOConfig).parse_args_and_config(["--config", str(file), "--vllm_device", "cuda:0"])
    assert args.report_to == [], "scripts look for a tracker in it"
    assert (args.learning_rate, args.max_prompt_length, args.vllm_device) == (2e-6, 99, "cuda:0")
    assert args.beta == 0.04, "the default of its time"
    file.write_text("learning_rat: 2e-6\n")
    with pytest.raises(ConfigError, match=r"'learning_rat'\. Did you mean 'learning_rate'"):
        TrlParser(GRPOConfig).parse_args_and_config(["--config", str(file)])


def test_a_subclass_that_replaces_what_nothing_calls_is_refused(rows: Rows) -> None:
    class Mine(GRPOTrainer):
        def _inner_training_loop(self, inputs: Any) -> None: ...

        def compute_metrics_of_mine(self) -> None: ...

    with pytest.raises(ConfigError, match="Mine replaces '_inner_training_loop'"):
        Mine("embedded", length, GRPOConfig(**SMALL), rows)


def test_methods_of_trl_are_known_by_name() -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed: it comes with the extra trl")
    own = {name for name in vars(trl.GRPOTrainer) if callable(vars(trl.GRPOTrainer)[name]) and name[:2] != "__"}
    assert own - set(OF_TRL) - set(dir(TransformersTrainer)) == {"_log_metric"}, "which is ours too"


@pytest.mark.parametrize(
    ("data", "error", "expected"),
    [
        ([{"question": "1+1?"}], DataError, "row 0 has no column 'prompt'.*'question'"),
        ([], DataError, "there are no rows"),
        (None, DataError, "train_dataset is nothing"),
        ([{"prompt": "x", "image": object()}], DataError, "row 0 has pictures"),
        ([{"prompt": [{"role": "user", "content": "hi"}]}], DataError, "no chat template"),
        ([{"prompt": 3}], DataError, "its prompt is 3"),
    ],
)
def test_rows_that_are_no_prompts_are_refused(data: Any, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        GRPOTrainer("embedded", length, GRPOConfig(**SMALL), data)


def test_idle_options_are_named_in_one_line(rows: Rows) -> None:
    kinds = notes(rows, logging_steps=1, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert kinds["logging_steps"] == kinds["gradient_checkpointing_kwargs"] == "nothing"


def test_the_interval_of_logs_counts_where_evaluations_take_theirs_from_it(rows: Rows) -> None:
    trainer = GRPOTrainer(
        "embedded", length, GRPOConfig(**SMALL, eval_strategy="steps", logging_steps=3), rows, eval_dataset=rows
    )
    assert trainer.translation.evaluate_every_steps == 3
    assert "logging_steps" not in {note.option for note in trainer.translation.draft.notes}
