"""Methods of TRL's trainer that a script replaces to look at a step: they are called where TRL calls them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch, Rewards
from oncurve.core.errors import ConfigError
from oncurve.core.records import SOURCE_ROW
from oncurve.run.builder import Parts
from oncurve.trl.overridden import WHY, NotHere
from oncurve.trl.rewards_of_scripts import REWARDS, ScriptRewards


class ScriptMethods(ScriptRewards):
    """The part of a trainer that computes. A replaced method may look, log and change advantages."""

    model: Any
    oncurve: Any
    _loss: Tensor | None = None
    """Loss of the microbatch that is trained on."""
    _outputs: dict[str, Any] | None = None
    """Outputs of the step that is trained on, or of one pass over a part of it."""
    _rows: Sequence[Any] = ()
    """Rows of the completions of that step."""
    _mode: str

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a microbatch while it is trained on."""
        if return_outputs:
            raise ValueError("The GRPOTrainer does not support returning outputs")
        return self._compute_loss(model, inputs)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self._loss is None:
            raise NotHere(
                f"GRPOTrainer.compute_loss is called by the script, and computes nothing by itself here. {WHY}"
            )
        return self._loss

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self._outputs is None:
            raise NotHere(f"the script calls a method of GRPOTrainer that samples nothing by itself here. {WHY}")
        return dict(self._outputs)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        return ScriptMethods._generate_and_score_completions(self, generation_batch)

    @contextmanager
    def _in_mode(self) -> Iterator[None]:
        """While code of the script runs, its model says that it is trained, or measured, as it does with TRL.

        Its layers are not told: dropout stays off.
        """
        model = self.oncurve.hold_model(for_later=False)
        model.training = self._mode == "train"
        try:
            yield
        finally:
            model.training = False

    def _watch(self, parts: Parts) -> Parts:
        """The parts with an algorithm that calls what the script replaces."""
        own = {field.name: getattr(parts.algorithm, field.name) for field in fields(Algorithm)}
        is_seen = any(map(self._replaces, OWN))
        return replace(parts, algorithm=Watched(**own, trainer=self, parts=parts)) if is_seen else parts

    def _replaces(self, name: str) -> bool:
        return name in vars(self) or getattr(type(self), name) is not OWN[name]

    def _seen_loss(self, loss: Tensor, microbatch: Batch) -> None:
        """Have the script look at a loss. Raises ConfigError where it makes another one of it."""
        self._loss = loss
        try:
            with self._in_mode():
                own_loss = self.compute_loss(self.model, tensors_of(microbatch))
        finally:
            self._loss = None
        if own_loss is not loss:
            raise ConfigError(
                f"compute_loss returns another loss than TRL's own, which is not trained on here. {WHY}. A formula of "
                f"one's own is `algorithm.function` (docs/own_algorithm.md)"
            )

    def _seen_rows(self, name: str, batch: Batch) -> Batch:
        """Have a method of the script look at the completions of a step, or at those of one pass; their advantages are
        as it leaves them.

        Raises ConfigError where it changes anything else.
        """
        if not self._replaces(name):
            return batch
        method = self._prepare_inputs if name == "_prepare_inputs" else self._generate_and_score_completions
        self._outputs = tensors_of(batch)
        before = {name: value.clone() for name, value in self._outputs.items()}
        try:
            with self._in_mode():
                returned = method(list(self._rows))
        finally:
            self._outputs = None
        if not isinstance(returned, dict):
            raise ConfigError(f"{name} returns {type(returned).__name__}, not TRL's dictionary")
        other = [name for name in before if name != "advantages" and not _is_same(returned.get(name), before[name])]
        advantages = returned.get("advantages")
        if other or not isinstance(advantages, Tensor) or advantages.shape != batch.advantages.shape:
            raise ConfigError(
                f"{name} changes {other[0] if other else 'the form of advantages'} of TRL's "
                f"dictionary; here a script may change advantages, one for each completion. {WHY}"
            )
        return replace(batch, advantages=advantages.detach().to(batch.advantages))


STEP, PASS = "_generate_and_score_completions", "_prepare_inputs"
OWN: dict[str, Any] = {
    name: inspect.getattr_static(ScriptMethods, name) for name in ("compute_loss", "_compute_loss", STEP, PASS, REWARDS)
}
"""The methods as they are where no script has replaced them."""


@dataclass(frozen=True)
class Watched(Algorithm):
    """An algorithm at whose steps and losses a script looks."""

    trainer: Any = None
    parts: Any = None

    def prepare(self, batch: Batch, rewards: Rewards) -> Batch:
        """The same, and what the script makes of the advantages."""
        batch = super().prepare(batch, rewards)
        trainer = self.trainer
        step = trainer.state.global_step // self.parts.config.updates_per_step
        rows = [prompt.row.get(SOURCE_ROW, prompt.row) for prompt in self.parts.data.at(step)]
        trainer._rows = [rows[group] for group in batch.group_ids.tolist()]
        return trainer._seen_rows(STEP, batch)

    def loss(self, logprobs: Tensor, entropy: Tensor, microbatch: Batch) -> tuple[Tensor, Any]:
        """The same, and the script sees it."""
        microbatch = self.trainer._seen_rows(PASS, microbatch)
        loss, statistics = super().loss(logprobs, entropy, microbatch)
        if self.trainer._replaces("compute_loss") or self.trainer._replaces("_compute_loss"):
            self.trainer._seen_loss(loss, microbatch)
        return loss, statistics


def tensors_of(batch: Batch) -> dict[str, Any]:
    """Rows under TRL's names; prompts are padded on the left."""
    width = batch.prompt_ids.shape[1]
    positions = torch.arange(width, device=batch.prompt_ids.device) - (width - batch.prompt_lengths[:, None])
    written = torch.arange(batch.completion_ids.shape[1], device=positions.device) < batch.completion_lengths[:, None]
    tensors = {
        "prompt_ids": batch.prompt_ids.gather(1, positions % max(width, 1)),
        "prompt_mask": (positions >= 0).long(),
        "completion_ids": batch.completion_ids,
        "completion_mask": written.long(),
        "advantages": batch.advantages,
        "num_items_in_batch": torch.tensor(batch.size.num_tokens),
        "old_per_token_logps": batch.old_logprobs,
        "ref_per_token_logps": batch.ref_logprobs,
        "sampling_per_token_logps": batch.sampler_logprobs,
        "tool_mask": None if bool((batch.mask == written).all()) else batch.mask.long(),
    }
    return {name: value for name, value in tensors.items() if value is not None}


def _is_same(value: Any, before: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == before.shape and bool((value == before).all())
