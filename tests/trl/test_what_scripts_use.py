"""Does the trainer take what public scripts do with it besides training: replace, subclass, assign, go on, upload?"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from typer.testing import Result

from oncurve.core.errors import ConfigError
from oncurve.observe.run_model import EMBEDDED
from oncurve.run_errors import CheckpointError, Stopped
from oncurve.trl import GRPOConfig, GRPOTrainer, TrlParser
from oncurve.trl.names import SHOWING, named

Rows = list[dict[str, Any]]
SHORT: dict[str, Any] = {
    "output_dir": "out", "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "use_cpu": True,
    "max_completion_length": 8, "bf16": False, "learning_rate": 1e-4, "logging_steps": 1,
}  # fmt: skip


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def test_a_replaced_configuration_keeps_older_names_and_their_time() -> None:
    args = GRPOConfig(max_prompt_length=256, vllm_device="cuda:1", beta=0.1)
    other = dataclasses.replace(args, beta=0.2, max_prompt_length=99)
    assert (other.beta, other.temperature, other.max_prompt_length, other.vllm_device) == (0.2, 0.9, 99, "cuda:1")
    assert other.dated == args.dated
    assert other.options() == {**args.options(), "beta": 0.2, "max_prompt_length": 99}
    assert args.max_prompt_length == 256
    plain = dataclasses.replace(GRPOConfig(), beta=0.2)
    assert (plain.dated, plain.temperature) == (None, 1.0)


def test_a_configuration_can_be_subclassed_and_parsed() -> None:
    @dataclasses.dataclass
    class Mine(GRPOConfig):
        servers: list[str] = dataclasses.field(default_factory=list)

        def __post_init__(self) -> None:
            super().__post_init__()
            self.seen = len(self.servers)

    made = Mine("out", max_prompt_length=7, servers=["a", "b"])
    assert (made.seen, made.max_prompt_length, made.bf16) == (2, 7, True)
    assert dataclasses.replace(made, servers=[]).seen == 0
    [parsed] = TrlParser(Mine).parse_args_and_config(["--servers", "a", "--beta", "0.1", "--max_prompt_length", "9"])
    assert (parsed.servers, parsed.beta, parsed.max_prompt_length) == (["a"], 0.1, 9)


def test_arguments_of_transformers_are_a_configuration(tmp_path: Path) -> None:
    theirs = TrainingArguments(output_dir=str(tmp_path), learning_rate=3e-5, use_cpu=True, report_to="none")
    args = GRPOConfig(**theirs.to_dict())
    assert (args.learning_rate, args.use_cpu, args.report_to) == (3e-5, True, theirs.report_to)


def test_attributes_may_be_assigned_as_scripts_do(rows: Rows) -> None:
    trainer = GRPOTrainer("embedded", length, GRPOConfig(**SHORT), rows)
    trainer.model = trainer.model.to("cpu")
    with pytest.raises(ConfigError, match="Pass it to GRPOTrainer"):
        trainer.model = torch.nn.Linear(1, 1)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.pad_token = tokenizer.eos_token
    trainer.tokenizer = tokenizer
    assert trainer.processing_class is tokenizer
    trainer.train()
    with pytest.raises(ConfigError, match="training has begun"):
        trainer.processing_class = AutoTokenizer.from_pretrained(EMBEDDED)
    trainer.args.distributed_state.wait_for_everyone()
    with trainer.args.main_process_first():
        assert trainer.accelerator.is_main_process


def test_a_second_training_goes_on_with_the_weights_of_the_first(rows: Rows) -> None:
    factor = [1.0]

    def scaled(completions: list[str], **kwargs: Any) -> list[float]:
        return [factor[0] * len(completion) for completion in completions]

    trainer = GRPOTrainer("embedded", scaled, GRPOConfig(**SHORT), rows)
    trainer.train()
    after = {name: weight.clone() for name, weight in trainer.oncurve.policy.model.named_parameters()}
    factor[0] = 0.0  # without a signal weights stay as they are
    assert trainer.train().global_step == 2
    assert all((weight == after[name]).all() for name, weight in trainer.model.named_parameters())
    assert [row["step"] for row in trainer.state.log_history if "reward" in row] == [1, 2]
    assert len(list(Path("out").glob("embedded*"))) == 2


def test_a_decorated_reward_gets_everything_by_name(rows: Rows) -> None:
    def counted(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            assert not args
            return [value + 1 for value in function(**kwargs)] if kwargs["completions"] else []

        return call

    args = GRPOConfig(**{**SHORT, "max_steps": 1})
    assert GRPOTrainer("embedded", counted(length), args, rows).train().global_step == 1


def test_dataclasses_that_share_an_option_are_one_sentence() -> None:
    @dataclasses.dataclass
    class Own:
        seed: int = 3

    with pytest.raises(ConfigError, match=r"TrlParser: these dataclasses are not the options of one command: .*--seed"):
        TrlParser((Own, GRPOConfig))


@pytest.mark.parametrize("options", [{}, pytest.param({"beta": 0.04}, marks=pytest.mark.nightly)])
def test_an_interrupt_stops_and_saves_and_the_trainer_goes_on(options: dict[str, Any], rows: Rows) -> None:
    texts: list[str] = []

    def interrupting(completions: list[str], **kwargs: Any) -> list[float]:
        texts.extend(completions)
        if len(texts) == 24:  # eight were measured before and eight are of the first step
            os.kill(os.getpid(), signal.SIGINT)
        return [float(len(completion)) for completion in completions]

    args = GRPOConfig(**{**SHORT, "max_steps": 3}, **options)
    trainer = GRPOTrainer("embedded", interrupting, args, rows, callbacks=[TrainerCallback()])
    with pytest.raises(Stopped, match="goes on"):
        trainer.train()
    assert 1 <= trainer.state.global_step < 3
    assert trainer.train(resume_from_checkpoint=True).global_step == 3


@pytest.mark.parametrize("how", ["object", "name", "adapter"])
def test_a_model_in_half_precision_is_saved_in_it(
    how: str, rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = GRPOConfig(**SHORT, **({"model_init_kwargs": {"dtype": "bfloat16"}} if how == "name" else {}))
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    model = "embedded" if how == "name" else AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.bfloat16)
    adapter = LoraConfig(r=2, target_modules=["q_proj"]) if how == "adapter" else None
    trainer = GRPOTrainer(model, length, args, rows, processing_class=tokenizer, peft_config=adapter)
    assert "save_model writes bfloat16" in capsys.readouterr().out or how == "name"
    trainer.train()
    trainer.save_model("saved")
    if how == "adapter":
        weights = load_file("saved/adapter_model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.float32}, "as TRL trains adapters"
        return
    again = AutoModelForCausalLM.from_pretrained("saved")
    assert again.dtype == torch.bfloat16
    trained = dict(trainer.model.named_parameters())
    assert all(torch.equal(weight, trained[name].bfloat16()) for name, weight in again.named_parameters())
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    trainer.push_to_hub(token="mine")
    assert hub.weight_bytes < 1.1 * Path("saved/model.safetensors").stat().st_size


def test_callbacks_that_only_show_can_be_made(rows: Rows) -> None:
    made = [named("trl", name)(trainer=None, num_prompts=8) for name in SHOWING]
    GRPOTrainer("embedded", length, GRPOConfig(**SHORT), rows, callbacks=made)


def test_a_column_of_messages_beside_a_prompt_of_text_changes_nothing(rows: Rows) -> None:
    talks = [{**row, "messages": [{"role": "user", "content": "Hi."}]} for row in rows]
    trainer = GRPOTrainer("embedded", length, GRPOConfig(**SHORT), talks)
    trainer.train()
    assert not any(row.get("reward/error_fraction") for row in trainer.state.log_history)


def test_a_script_that_looks_for_the_last_checkpoint_goes_on_from_it(rows: Rows) -> None:
    args = GRPOConfig(**{**SHORT, "max_steps": 4}, save_steps=1, save_total_limit=2)
    first = GRPOTrainer("embedded", length, args, rows)
    for step in first._watched(first.oncurve.steps()):
        if step.number == 3:
            break
    assert sorted(path.name for path in Path("out").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    last = get_last_checkpoint("out")
    assert str(last).endswith("checkpoint-3")
    again = GRPOTrainer("embedded", length, args, rows)
    assert again.train(resume_from_checkpoint=last).global_step == 4
    assert again.oncurve.folder.resolve() == first.oncurve.folder.resolve()
    before = sorted(path.name for path in Path("out/checkpoint-4").iterdir())
    again.save_model("out/checkpoint-4")
    assert Path("out/checkpoint-4/model.safetensors").is_file()
    assert not Path("out/checkpoint-4").is_symlink()
    run = again.oncurve.folder / "checkpoints" / "step_000004"
    assert sorted(path.name for path in run.iterdir()) == before, "the run's own checkpoint is as it was"


class Hub:
    """Takes down what it is asked, as the hub's client."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.weight_bytes = 0

    def __call__(self, token: str | None = None) -> Hub:
        self.asked.append(token)
        return self

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> Any:
        self.asked.append((name, private))
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, repo_id: str, folder_path: Path, allow_patterns: list[str], commit_message: str) -> Any:
        self.asked.append((repo_id, sorted(allow_patterns), commit_message))
        assert all((folder_path / name).is_file() for name in allow_patterns)
        self.weight_bytes = (folder_path / "model.safetensors").stat().st_size
        return SimpleNamespace(commit_url="https://hub/commit")


def test_the_model_is_uploaded_when_the_script_says_so(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    args = GRPOConfig(**SHORT, push_to_hub=True, hub_token="hf_" + "secret" * 6, hub_private_repo=False)
    trainer = GRPOTrainer("embedded", length, args, rows)
    assert "hf_secret" not in capsys.readouterr().out, "no token is shown"
    with pytest.raises(CheckpointError, match="Call train"):
        trainer.push_to_hub()
    trainer.train()
    assert ("out", False) in hub.asked
    assert hub.asked[-1][0] == "me/out"
    files = next(request for request in hub.asked if isinstance(request, tuple) and len(request) == 3)[1]
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= set(files)
    assert args.hub_token in hub.asked
    assert trainer.push_to_hub("Mine.", dataset_name="rows", token="other") == "https://hub/commit"
    assert hub.asked[-1][2] == "Mine."
    trainer.args.hub_token = None
    with pytest.raises(ConfigError, match="no token"):
        trainer.push_to_hub()


def test_an_upload_that_fails_at_the_end_of_training_is_said(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    trainer = GRPOTrainer("embedded", length, GRPOConfig(**{**SHORT, "max_steps": 1}, push_to_hub=True), rows)
    assert trainer.train().global_step == 1
    assert "not uploaded: no token for the hub" in capsys.readouterr().out


def test_a_script_may_ask_for_vllm_and_say_that_it_is_not_there(trl: Callable[..., Result]) -> None:
    ended = trl(
        """
        import trl.import_utils
        from trl.import_utils import is_vllm_available
        trl.import_utils._vllm_available = False
        trl.import_utils.is_vllm_available = lambda: False
        assert is_vllm_available() in (True, False)
        GRPOTrainer("embedded", correct, GRPOConfig(**SHORT), rows()).train()
        """
    )
    assert ended.exit_code == 0, ended.output


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_logs_of_a_step_without_a_signal_have_the_keys_of_any_other(rows: Rows, beta: float) -> None:
    """All completions are rewarded alike, so that nothing is trained on; TRL logs entropy and KL all the same."""
    args = GRPOConfig(**SHORT, beta=beta)
    trainer = GRPOTrainer("embedded", lambda completions, **_: [1.0] * len(completions), args, rows)
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["entropy"] > 0
    assert row["grad_norm"] == 0
    assert ("kl" in row) == (beta > 0)


def test_a_bound_of_cispo_below_1_trains_as_in_trl(rows: Rows, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that carries GRPO's epsilon_high over to cispo: TRL scales every gradient down to it."""
    trainer = GRPOTrainer("embedded", length, GRPOConfig(**SHORT, loss_type="cispo", epsilon_high=0.28), rows)
    assert trainer.train().global_step == 2
    assert "every gradient is scaled down to 0.28" in capsys.readouterr().out
