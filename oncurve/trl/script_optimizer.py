"""An optimizer and a schedule that a script brings: the part of a trainer that has them move the weights."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer as TransformersTrainer
from transformers import get_scheduler

from oncurve.errors import ConfigError
from oncurve.policy.backend import OneDevice, trained_parameters
from oncurve.policy.policy import TrainedPolicy
from oncurve.trl.script_callbacks import Callbacks, Schedule


class OwnSchedule:
    """The learning rates of a script's optimizer, as its schedule sets them update by update."""

    def __init__(self, optimizer: Optimizer, schedule: Any) -> None:
        self.optimizer, self.schedule, self.count = optimizer, schedule, 0

    def rate(self, update: int) -> float:
        """Bring all groups to an update, counted from 0; the rate of the first of them."""
        with warnings.catch_warnings():  # of torch: after a resume the schedule catches up without an update
            warnings.simplefilter("ignore", UserWarning)
            while self.count < update:
                self.schedule.step()
                self.count += 1
        return float(self.optimizer.param_groups[0]["lr"])


class ScriptOptimizer:
    """The part of a trainer that has an optimizer. Subclasses may replace what makes it, as in transformers."""

    args: Any
    state: Any
    model: Any
    _callbacks: Callbacks
    _optimizers: tuple[Any, Any]
    _policy: TrainedPolicy
    get_decay_parameter_names = TransformersTrainer.get_decay_parameter_names
    get_optimizer_cls_and_kwargs = staticmethod(TransformersTrainer.get_optimizer_cls_and_kwargs)

    @property
    def optimizer(self) -> Any:
        """Of the weights as they are, or None before training."""
        return self._optimizers[0] or self._callbacks.handler.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        """For the next training; a schedule of the one before goes with it."""
        self._optimizers = (optimizer, None if optimizer is None else self._optimizers[1])

    @property
    def lr_scheduler(self) -> Any:
        """Its learning rate."""
        return self._optimizers[1] or self._callbacks.handler.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, schedule: Any) -> None:
        """For the next training, of the optimizer that the script brings."""
        self._optimizers = (self._optimizers[0], schedule)

    def create_optimizer(self, model: Any = None) -> Any:
        """The script's own, or that of the options."""
        return self.optimizer or self._policy.backend.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The script's own, or that of the options over the script's optimizer; None where both are of the options."""
        optimizer = optimizer or self._optimizers[0]
        if self._optimizers[1] is not None or optimizer in (None, self._policy.backend.optimizer):
            return self._optimizers[1]
        return get_scheduler(
            self.args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
        )

    def _take_optimizer(self, policy: TrainedPolicy) -> Schedule | Any:
        """Have the weights moved by what the script brings; the schedule that callbacks see.

        Raises ConfigError for an optimizer that holds none of the weights in training, and for weights in parts.
        """
        self._policy, self._callbacks.handler.optimizer = policy, None
        backend = policy.backend
        optimizer = self.create_optimizer() or self.optimizer
        is_own = optimizer is not backend.optimizer  # type: ignore[attr-defined]
        if is_own:
            self._optimizers = (optimizer, self._optimizers[1])
        schedule = self.create_scheduler(self.state.max_steps, optimizer) or self._optimizers[1]
        if not is_own and schedule is None:
            return Schedule(policy)
        if type(backend) is not OneDevice:
            raise ConfigError("optimizers: an optimizer of one's own needs all weights in each process, not in parts")
        trained = {id(weight) for weight in trained_parameters(policy.model).values()}
        if not trained & {id(weight) for group in optimizer.param_groups for weight in group["params"]}:
            raise ConfigError(
                "optimizers: the optimizer holds none of the weights in training. Make it of those of the model that "
                "GRPOTrainer gets, after adapters were put in"
            )
        if vars(schedule or self).get("optimizer") is not optimizer:
            raise ConfigError(
                "optimizers: the schedule is of another optimizer. Give both: optimizers=(one, its schedule)"
            )
        if isinstance(schedule, ReduceLROnPlateau):
            raise ConfigError("optimizers: the schedule must follow from the number of updates, as LambdaLR's does")
        backend.optimizer, backend.has_own_rates = optimizer, True
        policy.rate_of = OwnSchedule(optimizer, schedule).rate
        return schedule
