"""TRL's GRPOTrainer at a given setting, and a clock around its phases.

Nothing of TRL is changed. Its methods are wrapped on the trainer that is timed; the wrappers read a clock.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from models import coin
from ours import LEARNING_RATE, LORA_RANK, Work
from transformers import PrinterCallback, TrainerCallback

from oncurve.core.records import Prompt

if TYPE_CHECKING:
    from trl import GRPOConfig, GRPOTrainer

PHASES = ("generate", "grade", "old_reference", "forward", "backward")


@dataclass(frozen=True)
class TrlSetting:
    """How TRL is set up: type of the arithmetic, completions in a micro-batch, gradient checkpointing."""

    arithmetic: str
    """fp32; bf16weights: the model itself in bfloat16; autocast: weights in float32, products in bfloat16."""
    micro_batch: int
    checkpointing: bool = False

    @classmethod
    def parse(cls, text: str) -> TrlSetting:
        """From "fp32:32" or "autocast:8+checkpointing". Raises ValueError for anything else."""
        match = re.fullmatch(r"(fp32|bf16weights|autocast):(\d+)(\+checkpointing)?", text)
        if match is None or int(match[2]) < 1:
            raise ValueError(f"{text!r} is no setting of TRL; write for example fp32:32 or autocast:8+checkpointing")
        return cls(match[1], int(match[2]), match[3] is not None)

    def __str__(self) -> str:
        return f"{self.arithmetic}:{self.micro_batch}{'+checkpointing' if self.checkpointing else ''}"


def trl_config(setting: TrlSetting, *, completions: int, updates: int, **options: Any) -> GRPOConfig:
    """TRL's configuration for steps of so many completions, with everything off that a step does not need."""
    from trl import GRPOConfig

    micro_batch = min(setting.micro_batch, completions // updates)
    if completions // updates % micro_batch:
        raise SystemExit(f"{completions // updates} completions per update do not divide by micro-batches of {setting}")
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=completions // updates // micro_batch,
        steps_per_generation=completions // micro_batch,
        bf16=setting.arithmetic == "autocast",
        gradient_checkpointing=setting.checkpointing,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        **options,
    )


def make_trainer(
    work: Work,
    setting: TrlSetting,
    folder: Path,
    prompts: Sequence[Prompt],
    *,
    steps: int,
    callback: TrainerCallback | None = None,
) -> GRPOTrainer:
    """A trainer for the same checkpoint, prompts, loss, optimizer and reward as oncurve's side."""
    from datasets import Dataset
    from trl import GRPOTrainer

    config = trl_config(
        setting,
        completions=work.completions,
        updates=work.updates,
        num_generations=work.group_size,
        max_completion_length=work.new_tokens,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        loss_type="dapo",
        epsilon_high=0.28,
        beta=work.kl_coef,
        adam_beta2=0.99,
        weight_decay=0.0,
        max_steps=steps * work.updates,
        model_init_kwargs={"dtype": "bfloat16" if setting.arithmetic == "bf16weights" else "float32"},
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=coin_rewards,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts]),
        peft_config=lora_config() if work.training == "lora" else None,
        callbacks=[] if callback is None else [callback],
    )
    trainer.remove_callback(PrinterCallback)
    if list(trainer.processing_class(prompts[0].text)["input_ids"]) != list(prompts[0].prompt_ids):
        raise SystemExit("TRL reads other prompt tokens than oncurve; the comparison would not be one")
    return trainer


def lora_config() -> Any:
    """Adapters of the same rank on the same matrices as oncurve's."""
    from peft import LoraConfig

    return LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")


def coin_rewards(completions: list[str], **_: Any) -> list[float]:
    """The benchmark's reward in TRL's form."""
    return [coin(text) for text in completions]


class Clock(TrainerCallback):
    """Times a trainer's steps and their phases; a step is as many updates as share a batch of rollouts.

    The time between steps (data loading, logging) does not count, which favours TRL a little. ``between`` is called
    there, after each step.
    """

    def __init__(self, updates: int, between: Callable[[], None] | None = None) -> None:
        self.updates, self.between = updates, between
        self.steps: list[dict[str, float]] = []
        self.tokens: list[int] = []
        """Completion tokens of each step."""
        self._begun, self._updates_done = 0.0, 0
        self._open = dict.fromkeys(("step", *PHASES), 0.0)

    def watch(self, trainer: GRPOTrainer) -> None:
        """Wrap the trainer's methods. The old and the reference pass are those that take no gradient."""
        watched: Any = trainer
        for method, phase in (
            ("_generate", "generate"),
            ("_calculate_rewards", "grade"),
            ("compute_loss", "forward"),
        ):
            setattr(watched, method, self._timed(phase, getattr(watched, method)))
        name = "_get_per_token_logps_and_entropies"
        setattr(watched, name, self._timed("old_reference", getattr(watched, name), only_without_gradient=True))
        watched.accelerator.backward = self._timed("backward", watched.accelerator.backward)
        self._count_tokens(watched)

    def _timed(
        self, phase: str, call: Callable[..., Any], *, only_without_gradient: bool = False
    ) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if only_without_gradient and torch.is_grad_enabled():
                return call(*args, **kwargs)
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self._open[phase] += time.perf_counter() - started
            return result

        return timed

    def _count_tokens(self, trainer: Any) -> None:
        single = trainer._generate_single_turn

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = single(*args, **kwargs)
            self.tokens.append(sum(map(len, result[0])))
            return result

        trainer._generate_single_turn = counted

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """An update begins; the first of a step samples."""
        self._begun = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """An update has ended; the last of a step ends the step."""
        self._open["step"] += time.perf_counter() - self._begun
        self._updates_done += 1
        if self._updates_done % self.updates == 0:
            closed = self._open
            closed["train"] = closed["step"] - closed["generate"] - closed["grade"]
            self.steps.append(closed)
            self._open = dict.fromkeys(("step", *PHASES), 0.0)
            if self.between is not None:
                self.between()
