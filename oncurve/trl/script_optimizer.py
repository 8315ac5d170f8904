"""An optimizer and a schedule that a script brings: the part of a trainer that has them move the weights."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from transformers import Trainer as TransformersTrainer
from transformers import get_scheduler

from oncurve.core.errors import ConfigError
from oncurve.policy.backend import DataParallel, trained_parameters
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.trl.conversion import OPTIMIZERS
from oncurve.trl.grpo_config import plain
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


MOVES_OTHERWISE = ("lomo", "layerwise", "schedule_free")
"""In the names of optimizers that move weights within the backward pass, or have others to sample from."""


def require_optimizers(pair: Any) -> None:
    """Raises ConfigError for what is no pair of an optimizer and a schedule."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ConfigError("optimizers: pass a pair, (optimizer, schedule), of which either may be None")
    for kind, part in ((Optimizer, pair[0]), (LRScheduler, pair[1])):
        if part is not None and not isinstance(part, kind):
            raise ConfigError(f"optimizers: {part!r:.60} is not a {kind.__name__} of torch. Pass the object itself")


def rates_only(args: Any) -> Optimizer:
    """An optimizer of no weight of the model, whose learning rate the real one takes: that of the options."""
    return SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)


def make_schedule(args: Any, steps: int, optimizer: Optimizer) -> LambdaLR:
    """The schedule of the options over an optimizer, as transformers makes it.

    Raises ConfigError for names and numbers that transformers refuses, and for schedules that wait for a measurement.
    """
    name, kwargs = plain(args.lr_scheduler_type), args.lr_scheduler_kwargs or {}
    try:
        schedule: Any = get_scheduler(
            name,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=json.loads(kwargs) if isinstance(kwargs, str) else dict(kwargs),
        )
    except (TypeError, ValueError) as error:
        detail = f" with lr_scheduler_kwargs {kwargs}" if kwargs else ""
        raise ConfigError(f"lr_scheduler_type is {name}{detail}, and transformers refuses it: {error}") from None
    if not isinstance(schedule, LambdaLR):
        raise ConfigError(f"lr_scheduler_type is {name}, whose rates follow from measurements. Take another schedule")
    return schedule


class ScriptOptimizer:
    """The part of a trainer that has an optimizer. Subclasses may replace what makes it, as in transformers."""

    args: Any
    state: Any
    model: Any
    _callbacks: Callbacks
    _optimizers: tuple[Any, Any]
    _policy: TrainedPolicy
    _stand_in: Any = None
    """Optimizer that the schedule of the options moves where the real one is oncurve's."""
    get_decay_parameter_names = TransformersTrainer.get_decay_parameter_names
    get_optimizer_cls_and_kwargs = staticmethod(TransformersTrainer.get_optimizer_cls_and_kwargs)

    @property
    def optimizer(self) -> Any:
        """The optimizer of the weights, or None before training."""
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
        """The script's own, or that of the options. Raises ConfigError for one that transformers cannot make here."""
        name = str(plain(self.args.optim))
        if self.optimizer is not None or name in OPTIMIZERS:
            return self.optimizer or self._policy.backend.optimizer
        model = self._policy.model if model is None else model
        if any(word in name for word in MOVES_OTHERWISE):
            raise ConfigError(f"optim is {name}, which does not move the weights between two passes. Take another one")
        decayed = set(self.get_decay_parameter_names(model))
        trained = trained_parameters(model).items()
        groups: Any = [
            {"params": [weight for key, weight in trained if (key in decayed) is kind], "weight_decay": decay}
            for kind, decay in ((True, self.args.weight_decay), (False, 0.0))
        ]
        try:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            groups = options.pop("params", [group for group in groups if group["params"]])
            return kind(groups, **options)
        except (ImportError, TypeError, ValueError) as error:
            raise ConfigError(f"optim is {name}, and transformers cannot make it: {error}") from None

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The script's own, or that of the options."""
        if self._optimizers[1] is not None:
            return self._optimizers[1]
        optimizer = optimizer or self._optimizers[0] or self._policy.backend.optimizer
        if optimizer is self._policy.backend.optimizer:
            optimizer = self._stand_in = rates_only(self.args)
        return make_schedule(self.args, num_training_steps, optimizer)

    def _optimizer_of_script(self) -> dict[str, str]:
        """Facts about a foreign optimizer that a resume must find again: its kind, groups and schedule."""
        handler: Any = self._callbacks.handler
        optimizer, schedule = handler.optimizer, handler.lr_scheduler
        if optimizer is None or isinstance(schedule, Schedule):
            return {}
        groups = [
            {key: len(value) if key == "params" else str(value) for key, value in group.items() if key != "lr"}
            for group in optimizer.param_groups
        ]
        state = {key: str(value) for key, value in schedule.state_dict().items() if not key.startswith(("_", "last_"))}
        return {"optimizers": f"{type(optimizer).__name__} {groups}, {type(schedule).__name__} {state}"}

    def _take_optimizer(self, policy: TrainedPolicy) -> Any:
        """Have the weights moved by what the script brings; the schedule that callbacks see.

        Raises ConfigError for an optimizer that holds none of the weights in training, and for weights in parts.
        """
        self._policy, self._callbacks.handler.optimizer = policy, None
        backend: Any = policy.backend
        optimizer = self.create_optimizer() or self.optimizer
        is_own = optimizer is not backend.optimizer
        if is_own:
            self._optimizers = (optimizer, self._optimizers[1])
        schedule = self.create_scheduler(self.state.max_steps, optimizer) or self._optimizers[1]
        if not is_own and vars(schedule)["optimizer"] is self._stand_in:
            policy.rate_of = OwnSchedule(self._stand_in, schedule).rate
            return Schedule(policy)
        if type(backend) is not DataParallel:
            raise ConfigError("optimizers: an optimizer of one's own needs all weights in each process, not in parts")
        trained = {id(weight) for weight in trained_parameters(policy.model).values()}
        if not trained & {id(weight) for group in optimizer.param_groups for weight in group["params"]}:
            raise ConfigError(
                "optimizers: the optimizer holds none of the weights in training. Make it of those of the model that "
                "GRPOTrainer gets, after adapters were put in"
            )
        if vars(schedule)["optimizer"] is not optimizer:
            raise ConfigError(
                "optimizers: the schedule is of another optimizer. Give both: optimizers=(one, its schedule)"
            )
        if isinstance(schedule, ReduceLROnPlateau):
            raise ConfigError("optimizers: the schedule must follow from the number of updates, as LambdaLR's does")
        backend.optimizer, backend.has_own_rates = optimizer, True
        policy.rate_of = OwnSchedule(optimizer, schedule).rate
        return schedule
