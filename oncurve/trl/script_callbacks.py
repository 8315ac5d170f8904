"""Callbacks of a script, called as transformers' Trainer calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from oncurve.core.errors import ConfigError
from oncurve.policy.trained_policy import TrainedPolicy


class _Flow(DefaultFlowCallback):
    """The loop here says itself what is due."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Nothing is due by transformers' count of steps."""
        return control

    on_epoch_end = on_step_end


class Schedule:
    """The learning-rate schedule, as far as callbacks may ask it."""

    def __init__(self, policy: TrainedPolicy) -> None:
        self.policy = policy

    def get_last_lr(self) -> list[float]:
        """The rate of the next update, as transformers has it after a step."""
        return [self.policy.rate_of(self.policy.num_scheduled)]


class Callbacks:
    """The callbacks of a trainer."""

    def __init__(self, trainer: Any, callbacks: Sequence[TrainerCallback | type[TrainerCallback]]) -> None:
        for callback in callbacks:
            self._require(callback)
        self.trainer = trainer
        self.handler = CallbackHandler([_Flow(), *callbacks], None, None, None, None)
        self.policy: TrainedPolicy
        self._hooks: list[Any] = []
        self.updates = 0
        """Updates of the step so far whose events were called."""
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = trainer.is_world_process_zero()
        self.call("on_init_end")

    @staticmethod
    def _require(callback: Any) -> None:
        """Raises ConfigError for what is no callback: it has no hooks, whatever its class."""
        try:
            is_callback = callable(callback.on_step_end)
        except AttributeError:
            is_callback = False
        if not is_callback:
            raise ConfigError(f"callbacks: {callback!r:.60} is none. Pass TrainerCallbacks or classes of them")

    def add(self, callback: Any) -> None:
        """One more."""
        self._require(callback)
        self.handler.add_callback(callback)

    def remove(self, callback: Any) -> None:
        """One less."""
        self.handler.remove_callback(callback)

    def watch(self, policy: TrainedPolicy, schedule: Any) -> None:
        """Call what comes around every update of the weights: gradients are there before it, and none after."""
        optimizer = policy.backend.optimizer  # type: ignore[attr-defined]
        self.handler.optimizer, self.handler.lr_scheduler, self.policy = optimizer, schedule, policy
        for hook in self._hooks:  # of a training before, whose optimizer may be a script's own
            hook.remove()
        if isinstance(optimizer, Optimizer):
            before = optimizer.register_step_pre_hook(lambda *_: self.before_update())
            self._hooks = [before, optimizer.register_step_post_hook(lambda *_: self.after_update())]

    def rate(self) -> float:
        """The learning rate of the update that was made last."""
        return self.policy.last_rate

    def before_update(self) -> None:
        """The passes of an update have come to their end."""
        if self.updates:  # the update before was a step of its own
            self.trainer.state.global_step += 1
            self.call("on_step_end")
            self.call("on_step_begin")
        for _ in range(self.trainer.args.gradient_accumulation_steps - 1):
            self.call("on_substep_end")
        self.call("on_pre_optimizer_step")

    def after_update(self) -> None:
        """The weights have moved."""
        self.updates += 1
        self.call("on_optimizer_step")

    def call(self, event: str, details: Mapping[str, Any] | None = None) -> None:
        """Tell all callbacks, with the event's own ``details`` by name. What they ask for is in ``trainer.control``."""
        if len(self.handler.callbacks) == 1:
            return
        trainer = self.trainer
        if event != "on_init_end":
            self.handler.model, self.handler.processing_class = trainer.model, trainer.processing_class
        if event == "on_step_begin":
            trainer.control._new_step()
        control = self.handler.call_event(event, trainer.args, trainer.state, trainer.control, **(details or {}))
        trainer.control = control or trainer.control
