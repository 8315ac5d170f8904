"""Faults of training that users of such programs have reported: what one of them sees here, a test for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from typer.testing import CliRunner, Result

import oncurve
from oncurve.cli.app import app
from oncurve.core.errors import ConfigError, DataError, OncurveError, RewardError
from oncurve.observe.run_model import EMBEDDED
from oncurve.run_errors import CheckpointError
from oncurve.trl import GRPOConfig, GRPOTrainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of peft, about tied layers
ROWS: list[dict[str, Any]] = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(12)]
SHORT: dict[str, Any] = {
    "algorithm": {"group_size": 4},
    "run": {"steps": 1, "prompts_per_step": 2, "name": "short"},
    "rollouts": {"max_completion_tokens": 6},
    "evaluation": {"num_prompts": 2},
}
TRL: dict[str, Any] = {
    "output_dir": "out", "num_generations": 4, "per_device_train_batch_size": 8, "use_cpu": True, "bf16": False,
    "max_completion_length": 6, "logging_steps": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def letters(completion: str) -> float:
    return float(sum(map(ord, completion)) % 7)  # which differs within every group


def command(*words: str, reward: str = "mine.py:mine") -> Result:
    given = ["run.steps=1", "run.prompts_per_step=2", "run.name=small", "evaluation.num_prompts=2", "data.limit=40"]
    given += ["rollouts.max_completion_tokens=6", "algorithm.group_size=4", "run.completions_per_update=null"]
    own = f"rewards=[{{type: custom, function: '{reward}'}}]"
    return CliRunner().invoke(app, ["train", "word_problems", *given, "evaluation.every_steps=0", own, *words])


def test_exit_in_a_reward_is_an_error_of_that_reward() -> None:
    Path("mine.py").write_text("import sys\n\n\ndef mine(completion):\n    sys.exit(0)\n")
    ended = command()
    assert isinstance(ended.exception, RewardError)
    assert ended.exit_code != 0
    assert "it called sys.exit(0)" in str(ended.exception)


def test_a_reward_that_returns_nothing_stops_the_run_in_its_first_step() -> None:
    Path("mine.py").write_text("def mine(completion):\n    len(completion)\n")
    ended = command("run.steps=3")
    assert isinstance(ended.exception, RewardError)
    assert "returned None" in str(ended.exception) or "gave no reward" in str(ended.exception)


def test_a_reward_file_imports_a_module_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rewards").mkdir()
    Path("rewards/letters_of_mine.py").write_text("def count(text):\n    return float(len(text))\n")
    text = "from letters_of_mine import count\n\n\ndef mine(completion):\n    return count(completion)\n"
    Path("rewards/own.py").write_text(text)
    assert command(reward="rewards/own.py:mine").exit_code == 0


@pytest.mark.parametrize("targets", ["lm_head", "embed_tokens"])
def test_an_adapter_on_head_or_embedding_is_sampled_with(targets: str) -> None:
    """The sampler must not draw from the base while the adapter is trained."""
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", targets], init_lora_weights=False))
    trainer = oncurve.Trainer(model, ROWS, letters, tokenizer=AutoTokenizer.from_pretrained(EMBEDDED), **SHORT)
    [row] = [row for row in trainer.train().metrics if row["step"]]
    assert row["mismatch/max_ratio"] == pytest.approx(1, abs=1e-3)


def test_merging_an_adapter_of_a_tied_head_is_refused() -> None:
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    assert base.config.tie_word_embeddings
    config = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained("adapter")
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained("adapter")
    ended = CliRunner().invoke(app, ["merge", "adapter", "--output", "merged"])
    assert isinstance(ended.exception, OncurveError), ended.output
    assert "both" in str(ended.exception)


def test_a_token_without_a_row_in_the_model_is_refused_before_it_is_read() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.add_tokens(["<number>"])  # and the model is not resized
    rows = [{**row, "question": f"<number> {row['question']}"} for row in ROWS]
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    with pytest.raises(OncurveError, match=r"embedding|rows|vocabulary"):
        oncurve.Trainer(model, rows, letters, tokenizer=tokenizer, **SHORT).train()


def test_a_stop_text_of_nothing_is_refused() -> None:
    Path("mine.py").write_text("def mine(completion):\n    return 1.0\n")
    assert isinstance(command("rollouts.stop=['']").exception, ConfigError)


def test_a_keyword_only_completion_is_graded() -> None:
    seen: list[str] = []

    def mine(*, completion: str, answer: str) -> float:
        seen.append(completion)
        return float(len(completion))

    result = oncurve.train("embedded", ROWS, mine, **SHORT)
    assert seen
    assert not any(row.get("reward/error_fraction") for row in result.metrics)


def test_rows_with_pictures_are_refused() -> None:
    rows = [{**row, "images": ["a.png"]} for row in ROWS]
    with pytest.raises(DataError, match=r"picture|image"):
        oncurve.train("embedded", rows, letters, **SHORT)


def test_the_schedule_goes_on_while_updates_have_no_signal() -> None:
    """As under TRL: linear from 4e-4 over four updates, of which the first two move nothing."""
    trainer: Any = None

    def late(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        return [float(place) if trainer_state.global_step >= 2 else 1.0 for place, _ in enumerate(completions)]

    args = GRPOConfig(**TRL, max_steps=4, learning_rate=4e-4)
    trainer = GRPOTrainer("embedded", late, args, [{"prompt": row["question"]} for row in ROWS])
    trainer.train()
    rates = {row["step"]: row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row}
    assert rates == pytest.approx({1: 4e-4, 2: 3e-4, 3: 2e-4, 4: 1e-4})
    assert [row["grad_norm"] > 0 for row in trainer.state.log_history if "grad_norm" in row] == [
        False,
        False,
        True,
        True,
    ]


def test_a_checkpoint_that_a_callback_asked_for_is_resumed_from() -> None:
    class Saves(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_save = state.global_step == 1
            return control

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    rows = [{"prompt": row["question"]} for row in ROWS]
    args = GRPOConfig(**TRL, max_steps=3, save_strategy="no")
    first = GRPOTrainer("embedded", reward, args, rows, callbacks=[Saves()])
    for step in first._watched(first.oncurve.steps()):
        if step.number == 2:
            break
    again = GRPOTrainer("embedded", reward, args, rows)
    again.train(resume_from_checkpoint="out/checkpoint-1")
    assert [row["step"] for row in again.state.log_history if "reward" in row] == [1, 2, 3]
    with pytest.raises(CheckpointError, match="holds no run"):
        again.train(resume_from_checkpoint="elsewhere/checkpoint-1")


def test_a_run_of_a_program_says_how_its_program_trains_it_further() -> None:
    result = oncurve.train("embedded", ROWS, letters, **SHORT)
    ended = CliRunner().invoke(app, ["resume", str(result.folder)])
    assert "resume(extends=True)" in str(ended.exception)
    with pytest.raises(ConfigError, match=r"its trainer's resume\(\)"):
        oncurve.train("embedded", ROWS, letters, **SHORT)


def test_a_model_in_bfloat16_loses_no_small_update() -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.bfloat16)
    before = {name: part.detach().float().clone() for name, part in model.named_parameters()}
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    trainer = oncurve.Trainer(model, ROWS, letters, tokenizer=tokenizer, optimizer={"learning_rate": 1e-6}, **SHORT)
    trainer.train()
    moved = [name for name, part in trainer.policy.model.named_parameters() if not torch.equal(part, before[name])]
    assert len(moved) == len(before)


def test_answers_that_are_no_texts_reach_a_reward_as_they_are() -> None:
    answers: list[Any] = [["25", "25 shells"], {"least": 3}, False, True, None, "six"]
    rows = [{"question": f"{place}?", "answer": answer} for place, answer in enumerate(answers)]
    seen: list[Any] = []

    def mine(completion: str, question: str, answer: Any) -> float:
        seen.append((question, answer))
        return 0.5

    oncurve.train(
        "embedded",
        rows,
        mine,
        run={"steps": 2, "prompts_per_step": 2, "name": "kinds"},
        rollouts={"max_completion_tokens": 4},
        algorithm={"group_size": 2},
        evaluation={"num_prompts": 2},
    )
    assert len({question for question, _ in seen}) == len(rows)
    for question, answer in seen:
        assert answer == answers[int(question[0])]
        assert type(answer) is type(answers[int(question[0])])
