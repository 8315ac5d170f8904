"""Do TRL's own examples of GRPO run with the import changed, on the embedded model with rows made up?

Pictures and vLLM are left out: the model reads text, and servers are tested where vLLM is (tests/fleet).
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from oncurve.trl import GRPOConfig, GRPOTrainer

SHORT: dict[str, Any] = {
    "output_dir": "out", "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "use_cpu": True,
    "max_completion_length": 8, "bf16": False, "learning_rate": 1e-4, "logging_steps": 1,
}  # fmt: skip
Rows = list[dict[str, Any]]


def weights_of(folder: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    [file] = Path(folder).glob("*.safetensors")
    return load_file(file)


def test_quickstart(rows: Rows) -> None:
    def reward_num_unique_chars(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(set(completion))) for completion in completions]

    trainer = GRPOTrainer(
        model="embedded", reward_funcs=reward_num_unique_chars, args=GRPOConfig(**SHORT), train_dataset=rows
    )
    output = trainer.train()
    assert output.global_step == 2
    trainer.save_model("saved")
    from oncurve.observe.run_model import EMBEDDED

    before, after = weights_of(str(EMBEDDED)), weights_of("saved")
    assert any((before[name] != after[name]).any() for name in before)
    logged = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert len(logged) == 2
    assert all(1 <= reward <= 8 for reward in logged)


def test_rows_of_prompts_alone_are_enough() -> None:
    def short(completions: list[str], **kwargs: Any) -> list[float]:
        return [-float(len(completion)) for completion in completions]

    rows = [{"prompt": f"Say {number}."} for number in range(24)]
    assert GRPOTrainer("embedded", short, GRPOConfig(**SHORT), rows).train().global_step == 2


def test_custom_rewards_of_every_kind(rows: Rows) -> None:
    """The guide's examples: longer completions, a format, the answer, and one that calls asynchronously."""
    seen: list[Any] = []

    def longer(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    def formatted(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0 if re.match(r"^<think>.*?</think>", completion) else 0.0 for completion in completions]

    def correct(completions: list[str], gold: list[int], prompts: list[str], **kwargs: Any) -> list[float]:
        seen.extend(zip(prompts, gold, strict=True))
        return [float(str(answer) in text) for text, answer in zip(completions, gold, strict=True)]

    async def slow(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return [0.25] * len(completions)

    trainer = GRPOTrainer(
        model="embedded",
        reward_funcs=[longer, formatted, correct, slow],
        args=GRPOConfig(**SHORT, reward_weights=[0.5, 1.0, 1.0, 2.0]),
        train_dataset=rows,
    )
    trainer.train()
    assert all(isinstance(answer, int) and prompt == f"How much is {answer - 1} + 1?" for prompt, answer in seen)
    for row in [row for row in trainer.state.log_history if "reward" in row]:
        parts = {name: row[f"rewards/{name}/mean"] for name in ("longer", "formatted", "correct", "slow")}
        assert parts["slow"] == 0.25
        total = 0.5 * parts["longer"] + parts["formatted"] + parts["correct"] + 2 * parts["slow"]
        assert row["reward"] == pytest.approx(total)


def test_rewards_for_several_tasks_leave_out_what_is_not_theirs(rows: Rows) -> None:
    mixed = [{**row, "task": "math" if index % 2 else "coding"} for index, row in enumerate(rows)]

    def math(completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
        return [1.0 if name == "math" else None for name in task]

    def coding(completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
        return [3.0 if name == "coding" else None for name in task]

    trainer = GRPOTrainer(model="embedded", reward_funcs=[math, coding], args=GRPOConfig(**SHORT), train_dataset=mixed)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    assert {row.get("rewards/math/mean") for row in logged} <= {1.0, None}
    assert {row.get("rewards/coding/mean") for row in logged} <= {3.0, None}
    assert all(1.0 <= row["reward"] <= 3.0 for row in logged)
    assert not any(row["reward/error_fraction"] for row in logged)


def test_an_adapter_by_peft_config(rows: Rows) -> None:
    from peft import LoraConfig

    def short(completions: list[str], **kwargs: Any) -> list[float]:
        return [-float(len(completion)) for completion in completions]

    trainer = GRPOTrainer(
        model="embedded",
        reward_funcs=short,
        args=GRPOConfig(**SHORT, beta=0.04),
        train_dataset=rows,
        peft_config=LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM"),
    )
    trainer.train()
    assert type(trainer.model).__name__.startswith("Peft")
    trainer.save_model("adapter")
    assert set(trainer.oncurve.config.policy.lora.target_modules) == {"q_proj", "v_proj"}, "peft's choice for Qwen2"
    saved = weights_of("adapter")
    assert any(".lora_B." in name and tensor.any() for name, tensor in saved.items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_model_that_peft_has_around_it(rows: Rows) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from oncurve.observe.run_model import EMBEDDED

    base = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    model = get_peft_model(base, LoraConfig(r=2, use_rslora=True, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    before = {name: part.clone() for name, part in model.named_parameters()}

    def short(completions: list[str], **kwargs: Any) -> list[float]:
        return [-float(len(completion)) for completion in completions]

    trainer = GRPOTrainer(
        model,
        short,
        GRPOConfig(**SHORT),
        rows,
        processing_class=AutoTokenizer.from_pretrained(EMBEDDED),
    )
    trainer.train()
    changed = {name for name, part in model.named_parameters() if (part != before[name]).any()}
    assert changed, "its own weights are trained"
    assert all(".lora_" in name for name in changed)


def test_conversational_prompts_reach_rewards_as_messages(rows: Rows) -> None:
    from transformers import AutoTokenizer

    from oncurve.observe.run_model import EMBEDDED

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% if thinks %} <think>{% endif %}{% endif %}"
    )
    talks = [
        {
            "prompt": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": row["prompt"]}],
            "question": row["prompt"],
            "gold": row["gold"],
        }
        for row in rows
    ]
    seen: list[Any] = []

    def correct(prompts: list[Any], completions: list[Any], question: list[str], **kwargs: Any) -> list[float]:
        assert [prompt[-1]["content"] for prompt in prompts] == question
        seen.extend(completions)
        return [float(len(completion[0]["content"])) for completion in completions]

    args = GRPOConfig(**SHORT, chat_template_kwargs={"thinks": True})
    trainer = GRPOTrainer("embedded", correct, args, talks, processing_class=tokenizer)
    events: list[str] = []
    trainer.add_callback(_Watch(events))
    trainer.train()
    assert all(set(completion[0]) == {"role", "content"} for completion in seen)
    [run] = Path("out").glob("*/rollouts")
    text = next(run.iterdir()).read_text()
    assert "system:  Be brief. \\nuser: How much is" in text
    assert "assistant: <think>" in text
    assert events[-1] == "on_train_end"


class _Watch:
    """Not a TrainerCallback, but with all of its hooks."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: self.events.append(name)
