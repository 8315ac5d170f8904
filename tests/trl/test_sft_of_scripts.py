"""Does a script for TRL's SFTTrainer run as it is, alone and before GRPO, and learn what TRL would learn?"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from oncurve.errors import ConfigError, DataError
from oncurve.trl.settings import SETTINGS
from oncurve.trl.sft_config import SFTConfig, sft_options
from oncurve.trl.sft_trainer import SFTTrainer

SHORT: dict[str, Any] = {
    "output_dir": "out", "max_steps": 2, "per_device_train_batch_size": 4, "bf16": False, "use_cpu": True,
    "learning_rate": 1e-3,
}  # fmt: skip
ROWS = [{"prompt": f"How much is {n} + 1?", "completion": f" It is {n + 1}."} for n in range(12)]
TALK = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is 2."}]
CHAT = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% if message.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAIN = """
from trl import SFTConfig, SFTTrainer

shown = [{"prompt": f"How much is {i} + 1?", "completion": f" It is {i + 1}."} for i in range(24)]
demonstrations = Dataset.from_list(shown)
warm = SFTTrainer(
    model="embedded", train_dataset=demonstrations, eval_dataset=demonstrations.select(range(4)),
    args=SFTConfig(output_dir="warm", max_steps=6, per_device_train_batch_size=8, learning_rate=1e-3, bf16=False,
                   use_cpu=True, logging_steps=1),
)
before = warm.evaluate()["eval_loss"]
warm.train()
assert warm.evaluate()["eval_loss"] < before / 2, warm.state.log_history
warm.save_model("warm/final")
losses = [row["loss"] for row in warm.state.log_history if "loss" in row]
assert len(losses) == 6 and losses[-1] < losses[0]
trainer = GRPOTrainer("warm/final", correct, GRPOConfig(**SHORT), rows())
trainer.train()
assert trainer.state.log_history[-1]["step"] == 2
print("both trained")
"""


def learned(trainer: SFTTrainer) -> list[tuple[str, str]]:
    """Prompt and learned text of every row."""
    from oncurve.data.demonstrations import demonstrated_row, render_demonstrations

    rows = [demonstrated_row("row", row) or row for row in trainer.translation.rows]
    tokenizer: Any = trainer.processing_class
    shown, _ = render_demonstrations(rows, tokenizer)
    return [(one.prompt.text, tokenizer.decode(one.token_ids)) for one in shown]


def chatting() -> Any:
    from oncurve.policy.model_folder import load_model

    _, tokenizer = load_model("embedded")
    tokenizer.chat_template = CHAT
    return tokenizer


def test_a_script_chains_supervised_training_and_grpo(trl: Callable[..., Result]) -> None:
    done = trl(CHAIN)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    assert "both trained" in done.output
    assert Path("warm/final/model.safetensors").is_file()


def test_every_option_of_trl_is_here_with_its_default() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs: Any = pytest.importorskip("trl").SFTConfig
    found = {each.name: each for each in dataclasses.fields(theirs)}
    assert found.keys() == sft_options().keys()
    for name, option in sft_options().items():
        default = found[name].default
        if default is dataclasses.MISSING:
            default = found[name].default_factory()
        assert getattr(default, "value", default) == option.default, name
    assert SFTConfig().learning_rate == 2e-5
    assert SFTConfig(max_seq_length=64).max_length == 64


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        (ROWS[0], {}, ("How much is 0 + 1?", " It is 1.<|endoftext|>")),
        (ROWS[0], {"completion_only_loss": False}, ("H", "ow much is 0 + 1? It is 1.<|endoftext|>")),
        ({"text": "One two."}, {}, ("O", "ne two.<|endoftext|>")),
        ({"body": "One two."}, {"dataset_text_field": "body"}, ("O", "ne two.<|endoftext|>")),
        ({"messages": TALK}, {"assistant_only_loss": True}, ("[user]1+1?[assistant]", "It is 2.<|endoftext|>")),
        ({"messages": TALK}, {}, ("[", "user]1+1?[assistant]It is 2.<|endoftext|>")),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, {}, ("[user]1+1?[assistant]", "It is 2.<|endoftext|>")),
    ],
)
def test_what_is_learned_follows_from_rows_and_options(
    row: dict[str, Any], options: dict[str, Any], expected: tuple[str, str]
) -> None:
    trainer = SFTTrainer("embedded", SFTConfig(**SHORT, **options), None, [row] * 10, processing_class=chatting())
    assert learned(trainer)[0] == expected


def test_a_formatting_function_writes_the_text() -> None:
    def written(row: dict[str, Any]) -> str:
        return f"{row['prompt']}{row['completion']}"

    trainer = SFTTrainer("embedded", SFTConfig(**SHORT), train_dataset=ROWS, formatting_func=written)
    assert learned(trainer)[0] == ("H", "ow much is 0 + 1? It is 1.<|endoftext|>")


def test_steps_and_batch_are_those_of_trl() -> None:
    options = {**SHORT, "max_steps": -1, "num_train_epochs": 2.0, "gradient_accumulation_steps": 2}
    config = SFTTrainer("embedded", SFTConfig(**options), train_dataset=ROWS).oncurve.config
    assert (config.run.prompts_per_step, config.run.steps) == (8, 4)
    assert (config.optimizer.learning_rate, config.optimizer.schedule, config.optimizer.beta2) == (
        1e-3,
        "linear",
        0.999,
    )
    assert config.sft is not None
    assert config.sft.max_tokens == 1024


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        ({"loss_type": "dft"}, {}, r"loss_type = 'dft': the loss of a supervised stage"),
        ({"max_length": 12}, {}, r"max_length = 12: \d+ rows of 12 are longer. They are left out, where TRL cuts them"),
        ({"neftune_noise_alpha": 5.0}, {}, r"neftune_noise_alpha"),
        ({}, {"data_collator": object()}, r"data_collator: microbatches are made from the tokens"),
    ],
)
def test_what_would_be_learned_otherwise_is_one_message(
    options: dict[str, Any], arguments: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> SFTTrainer:
        return SFTTrainer("embedded", SFTConfig(**SHORT, **options), train_dataset=ROWS, **arguments)

    with pytest.raises(ConfigError, match=said) as caught:
        make()
    name = str(caught.value).split("\n")[1].split(":")[0].split(" = ")[0].strip()
    monkeypatch.setattr(SETTINGS, "accepted", {name})
    make()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, r"train_dataset is nothing. Pass rows of messages"),
        ([{"question": "1+1?"}], r"train_dataset: row 0 has none of the columns messages, completion and 'text'"),
        ([{"prompt": "1+1?", "completion": ""}], r"train_dataset: row 0: 'completion' is empty"),
        ([{"messages": TALK[:1]}], r"train_dataset: row 0: its rows are messages, and the tokenizer of"),
        (["text"], r"train_dataset: row 0 is a str"),
    ],
)
def test_rows_with_nothing_to_learn_are_one_message(rows: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        SFTTrainer("embedded", SFTConfig(**SHORT), train_dataset=rows)


def test_an_option_that_never_was_is_named() -> None:
    with pytest.raises(ConfigError, match=r"SFTConfig has no option 'max_lenght'. Did you mean 'max_length'"):
        SFTConfig(max_lenght=3)
    with pytest.raises(ConfigError, match=r"SFTTrainer has no argument 'dataset_text_field'"):
        SFTTrainer("embedded", train_dataset=ROWS, dataset_text_field="text")


def test_converting_such_a_script_is_one_message(trl: Callable[..., Result]) -> None:
    done = trl(CHAIN.replace('before = warm.evaluate()["eval_loss"]', ""), command="convert")
    assert "a recipe is written of GRPOTrainer alone" in str(done.exception)
