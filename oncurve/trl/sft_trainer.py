"""SFTTrainer: TRL's signature over a supervised stage of oncurve.Trainer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from oncurve.data.demonstrations import demonstrated_row, render_demonstrations
from oncurve.errors import CheckpointError, ConfigError
from oncurve.session.session import demonstrated_loss
from oncurve.trl.grpo_trainer import GRPOTrainer
from oncurve.trl.overridden import refuse_overridden
from oncurve.trl.script_callbacks import Callbacks
from oncurve.trl.settings import SETTINGS
from oncurve.trl.sft_config import SFTConfig
from oncurve.trl.sft_translation import Formatting, sft_rows, translate_supervised
from oncurve.trl.translation import TrainerArguments, Translation, evaluation_sets

OF_SAMPLING = ("reward", "rewards/", "frac_", "completions/", "evaluation/")
"""How metrics begin that say something only where completions are sampled and graded."""


class SFTTrainer(GRPOTrainer):
    """The trainer of a script for TRL: its arguments become a recipe with completions from the data."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        formatting_func: Formatting | None = None,
        quantization_config: Any = None,
        **others: Any,
    ) -> None:
        """As in TRL. Raises ConfigError for what is lost and not accepted by name."""
        refuse_overridden(type(self), SFTTrainer)
        if "tokenizer" in others:
            processing_class = others.pop("tokenizer")
        if others:
            raise ConfigError(f"SFTTrainer has no argument {next(iter(others))!r}. Put options into SFTConfig")
        name = model if isinstance(model, str) else model.name_or_path or "model"
        self.args = args if args is not None else SFTConfig(f"{name.rstrip('/').split('/')[-1]}-SFT")
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.state, self.control = TrainerState(), TrainerControl()
        self._logged: dict[str, list[float]] = defaultdict(list)
        self._formatting = formatting_func
        lost = {
            "data_collator": data_collator,
            "compute_loss_func": compute_loss_func,
            "compute_metrics": compute_metrics,
            "optimizers": any(part is not None for part in optimizers),
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
        }
        asked = TrainerArguments(
            model=model,
            reward_funcs=(),
            args=self.args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            quantization_config=quantization_config,
            peft_config=peft_config,
            lost={name: value for name, value in lost.items() if value},
        )
        self.translation = self._translate(asked)
        self.reward_func_names: list[str] = []
        self._make(is_said=False)
        self._callbacks = Callbacks(self, callbacks or ())

    def _translate(self, asked: TrainerArguments) -> Translation:
        return translate_supervised(asked, self._formatting)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train to the end, or go on with the newest run in ``output_dir``, or with the one that is named."""
        if SETTINGS.instead_of_training is not None:
            raise ConfigError(
                "the script trains with SFTTrainer first, and a recipe is written of GRPOTrainer alone. Run it with "
                "`oncurve trl SCRIPT`, or make the supervised stage with `oncurve sft` (docs/sft.md)"
            )
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Put a row into ``state.log_history`` and show it to callbacks."""
        super().log({name: value for name, value in logs.items() if not name.startswith(OF_SAMPLING)}, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The loss per token on the evaluation rows."""
        sets: Mapping[str, Any] = self.translation.evaluation
        asked, policy = self.translation.asked, self.oncurve.policy
        if eval_dataset is not None:
            named = (
                evaluation_sets(eval_dataset)
                if isinstance(eval_dataset, Mapping)
                else {metric_key_prefix: eval_dataset}
            )
            sets = {
                prefix: sft_rows(rows, asked, self.processing_class, self._formatting) for prefix, rows in named.items()
            }
        if not sets:
            raise CheckpointError("evaluate: the trainer has no eval_dataset. Pass one")
        metrics: dict[str, float] = {}
        for prefix, rows in sets.items():
            checked = [demonstrated_row(f"{prefix}: row {place}", row) or row for place, row in enumerate(rows)]
            limit = self.args.max_length
            tokenizer: Any = policy.tokenizer
            shown, _ = render_demonstrations(checked, tokenizer, template="plain", max_tokens=limit)
            loss = demonstrated_loss(policy, shown)
            metrics |= {f"{prefix}_loss": loss, f"{prefix}_perplexity": math.exp(min(loss, 700.0))}
        self.log(metrics)
        self._callbacks.call("on_evaluate", metrics=metrics)
        return metrics
