"""Callbacks of a script, called as transformers' Trainer calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback


class _Flow(DefaultFlowCallback):
    """The loop here says itself what is due."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Nothing is due by transformers' count of steps."""
        return control

    on_epoch_end = on_step_end


class Callbacks:
    """The callbacks of a trainer."""

    def __init__(self, trainer: Any, given: Sequence[TrainerCallback | type[TrainerCallback]]) -> None:
        self.trainer = trainer
        self.handler = CallbackHandler([_Flow(), *given], None, None, None, None)
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = trainer.is_world_process_zero()
        self.call("on_init_end")

    def add(self, callback: Any) -> None:
        """One more."""
        self.handler.add_callback(callback)

    def remove(self, callback: Any) -> None:
        """One less."""
        self.handler.remove_callback(callback)

    def call(self, event: str, **details: Any) -> None:
        """Tell all callbacks; what they ask for is in the trainer's ``control``."""
        if len(self.handler.callbacks) == 1:
            return
        trainer = self.trainer
        if event != "on_init_end":
            self.handler.model, self.handler.processing_class = trainer.model, trainer.processing_class
        if event == "on_step_begin":
            trainer.control._new_step()
        control = self.handler.call_event(event, trainer.args, trainer.state, trainer.control, **details)
        trainer.control = control or trainer.control
