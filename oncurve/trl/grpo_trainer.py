"""GRPOTrainer: TRL's signature over oncurve.Trainer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from oncurve.core.errors import ConfigError, OncurveError
from oncurve.core.grading import score
from oncurve.rewards.section import RunLength
from oncurve.rewards.terms import make_reward_function
from oncurve.run.builder import Parts, make_algorithm
from oncurve.run.state import is_trained_whole
from oncurve.run.step_log import Step
from oncurve.run.trainer import Trainer
from oncurve.run.training_request import ProgramObjects, request_of_tree
from oncurve.run_errors import CheckpointError, Stopped
from oncurve.trl.checkpoints import find_run, load_best, load_state, name_checkpoint, note_best
from oncurve.trl.completions_table import write_table
from oncurve.trl.grpo_config import GRPOConfig
from oncurve.trl.logs import (
    LogWindow,
    ScriptLogs,
    idle_logs,
    measured_loss,
    num_tokens,
    rollout_logs,
    speeds,
    step_logs,
    training_flops,
)
from oncurve.trl.overridden import TrlAttributes, refuse_overridden
from oncurve.trl.rewards_of_scripts import REWARDS, sum_inside
from oncurve.trl.script_arguments import require_kinds
from oncurve.trl.script_callbacks import Callbacks
from oncurve.trl.script_files import ScriptFiles, loaded_type
from oncurve.trl.script_methods import ScriptMethods
from oncurve.trl.script_optimizer import ScriptOptimizer, make_schedule, rates_only, require_optimizers
from oncurve.trl.settings import SETTINGS
from oncurve.trl.translation import (
    TrainerArguments,
    Translation,
    changed_options,
    evaluation_rows,
    translate,
    with_adapter,
)


class GRPOTrainer(ScriptFiles, ScriptLogs, ScriptOptimizer, ScriptMethods, TrlAttributes):
    """The trainer of a script for TRL. Its arguments become a recipe, Python objects and a run of oncurve.

    Everything that would be learned otherwise than with TRL is one message when it is made; the rest is said in lines.
    """

    _is_training = False
    _next_rows: Any = None
    """Rows that a script set while it trained."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Any] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        """As in TRL. Raises ConfigError for what is lost and not accepted by name, and for what TRL refuses too."""
        refuse_overridden(type(self), GRPOTrainer)
        type(self).refuse_patched()
        require_kinds(model, args, processing_class)
        require_optimizers(optimizers)
        name = model if isinstance(model, str) else model.name_or_path or "model"
        self.args = args if args is not None else GRPOConfig(f"{name.rstrip('/').split('/')[-1]}-GRPO")
        self._saved_type = loaded_type(model, self.args.model_init_kwargs)
        self.state, self.control = TrainerState(), TrainerControl()
        self._metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
        self._mode, self._extra = "train", defaultdict(list)
        self._optimizers = optimizers
        has_own = any(part is not None for part in optimizers)
        lost = {"rollout_func": rollout_func, "optimizers": has_own and SETTINGS.instead_of_training is not None}
        arguments = with_adapter(
            TrainerArguments(
                model=model,
                reward_funcs=_listed(reward_funcs),
                args=self.args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=_listed(reward_processing_classes),
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=_listed(tools),
                environment_factory=environment_factory,
                lost={name: value for name, value in lost.items() if value},
                extras={"trainer_state": self.state, "log_metric": self._log_metric, "log_extra": self._log_extra},
            )
        )
        self.translation: Translation = translate(arguments)
        """The recipe, and what of the script stands in none."""
        self.oncurve: Trainer
        """The trainer behind this one."""
        self._make(is_described=SETTINGS.instead_of_training is not None)
        self._callbacks = Callbacks(self, callbacks or ())
        self._is_made = True

    def _make(self, *, is_described: bool) -> None:
        """Refuse what is lost, say what differs, and make the trainer behind this one."""
        arguments, translation = self.translation.arguments, self.translation
        if not is_described:  # by a recipe, or before
            translation.refuse_losses()
            for line in translation.describe() if self.is_world_process_zero() else ():
                Console().print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
        objects = ProgramObjects(
            model=None if isinstance(arguments.model, str) else arguments.model,
            reference_is_named=arguments.reference_is_named,
            tokenizer=translation.tokenizer,
            tools=list(arguments.tools) or None,
            environments=arguments.environment_factory,
        )
        self.oncurve = Trainer(
            request_of_tree(
                translation.recipe(),
                translation.rows,
                self._script_rewards() or None,
                translation.measured(),
                objects,
                {},
            )
        )
        self.oncurve.on_load = self._loaded
        self._options = self.args.options()
        config = self.oncurve.config
        per_step = config.run.prompts_per_step
        self.state.max_steps = config.run.steps * config.updates_per_step
        self.state.num_train_epochs = -(-config.run.steps * per_step // len(translation.rows))
        if SETTINGS.instead_of_training is None:
            make_schedule(self.args, self.state.max_steps, rates_only(self.args))
        self._window = LogWindow(self.args, self.state.max_steps)
        self.state.logging_steps = self._window.every

    def _loaded(self, parts: Parts) -> Parts:
        """The work before the first step that needs the optimizer."""
        schedule = self._take_optimizer(parts.policy)
        self._callbacks.watch(parts.policy, schedule)
        self._callbacks.call("on_train_begin")
        if self.args.eval_on_start:
            self.evaluate()
        self._callbacks.call("on_epoch_begin")
        self._callbacks.call("on_step_begin")
        self._graded_by = sum_inside(parts.reward_function)
        self._graded_by.reweigh(self.reward_weights.tolist())
        fingerprints = {**parts.objects.fingerprints, **self._optimizer_of_script()}
        return self._watch(replace(parts, objects=replace(parts.objects, fingerprints=fingerprints)))

    @property
    def reward_func_names(self) -> list[str]:
        """The names of the rewards in logs."""
        names = [reward.name for reward, _ in self.translation.rewards]
        return [*names, *self._paying_environments]

    def _reward_names(self) -> list[tuple[str, str]]:
        """The same, and the name of each in a completion's reward: two of one name are told apart there."""
        return list(zip(self.reward_func_names, [section.key for section in self.oncurve.config.rewards], strict=True))

    def _ask_again(self, name: str, value: Any) -> None:
        """Take an argument that a script set when the trainer was made.

        Raises ConfigError while it trains, but for rows to train on: they are those of the next training, as in TRL.
        """
        if self._is_training and name == "train_dataset":
            self._next_rows = value
            Console().print("note: train_dataset is set while it trains: the next train() takes it", soft_wrap=True)
            return
        if self._is_training:
            raise ConfigError(f"trainer.{name} cannot be changed while it trains. Set it before train()")
        arguments = replace(self.translation.arguments, **{name: value})
        if self.oncurve.result is not None:  # the weights of the run before go on
            has_base = arguments.has_made_adapter or arguments.peft_config is not None
            if self.oncurve.config.algorithm.measures_kl and not has_base:
                raise ConfigError(
                    f"trainer.{name} is set after training, with beta > 0: the KL would be measured "
                    f"against the weights of now, in TRL against those of the start. Make a new GRPOTrainer"
                )
            arguments = replace(arguments, model=self.oncurve.hold_model(), processing_class=self.processing_class)
            arguments = replace(arguments, peft_config=None, has_made_adapter=has_base)
        self.translation = translate(arguments)
        self._make(is_described=True)
        self.translation.refuse_losses()

    @property
    def train_dataset(self) -> Any:
        """The rows to train on. Others may be set between two trainings."""
        return self.translation.arguments.train_dataset if self._next_rows is None else self._next_rows

    @train_dataset.setter
    def train_dataset(self, rows: Any) -> None:
        """Raises ConfigError while it trains."""
        self._ask_again("train_dataset", rows)

    @property
    def eval_dataset(self) -> Any:
        """The rows to evaluate on. Others may be set between two trainings."""
        return self.translation.arguments.eval_dataset

    @eval_dataset.setter
    def eval_dataset(self, rows: Any) -> None:
        """Raises ConfigError while it trains."""
        self._ask_again("eval_dataset", rows)

    @property
    def reward_funcs(self) -> list[Any]:
        """The rewards as the script gave them. Others may be set between two trainings."""
        return list(self.translation.arguments.reward_funcs)

    @reward_funcs.setter
    def reward_funcs(self, functions: Any) -> None:
        """Raises ConfigError while it trains."""
        self._ask_again("reward_funcs", _listed(functions))

    @property
    def callback_handler(self) -> Any:
        """The object that calls the callbacks."""
        return self._callbacks.handler

    @property
    def is_deepspeed_enabled(self) -> bool:
        """DeepSpeed holds the weights."""
        return self.oncurve.config.policy.parallel == "deepspeed"

    @property
    def is_fsdp_enabled(self) -> bool:
        """FSDP holds the weights."""
        return self.oncurve.config.policy.parallel == "fsdp"

    @property
    def is_in_train(self) -> bool:
        """Training is going on."""
        return self._is_training

    @property
    def model(self) -> nn.Module:
        """The model with its current weights, with peft around it if it has an adapter."""
        return self.oncurve.hold_model(for_later=not self._is_training)

    @model.setter
    def model(self, model: nn.Module) -> None:
        """The same model may be assigned. Raises ConfigError for another one."""
        if model is not self.model:
            raise ConfigError("trainer.model is another model now, which would not be trained. Pass it to GRPOTrainer")

    model_wrapped = model

    @property
    def processing_class(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Another one may be set before training."""
        return self.translation.tokenizer or self.oncurve.policy.tokenizer

    @processing_class.setter
    def processing_class(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Rows are read again with it. Raises ConfigError when training has begun."""
        if tokenizer is self.processing_class:
            return
        if self.oncurve.result is not None or self.state.global_step:
            raise ConfigError("the tokenizer cannot be replaced when training has begun. Pass it to GRPOTrainer")
        self.translation = translate(replace(self.translation.arguments, processing_class=tokenizer))
        self._make(is_described=True)

    tokenizer = processing_class

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train to the end, or go on with the newest run in ``output_dir``, or with the one that is named.

        Raises Stopped where a signal ended it.
        """
        type(self).refuse_patched()
        self._take_changed_options()
        if self._next_rows is not None:
            self._next_rows, rows = None, self._next_rows
            self._ask_again("train_dataset", rows)
        if SETTINGS.instead_of_training is not None:
            SETTINGS.instead_of_training(self.translation)
        SETTINGS.has_trained = True
        steps = self._begin(resume_from_checkpoint)
        first = self.state.global_step
        seconds, losses, self._is_training = 0.0, [], True
        try:
            for step in self._watched(steps):
                seconds += step.metrics.get("time/step_seconds", 0.0)
                losses.append(step.metrics.get("policy/loss", 0.0))
                if self.control.should_training_stop:
                    steps.close()  # type: ignore[attr-defined]
        finally:
            self._is_training = False
        result = self.oncurve.result
        if not self.control.should_training_stop and result is not None and result.is_interrupted:
            raise Stopped(
                "training was stopped; train(resume_from_checkpoint=True) goes on", exit_code=result.exit_code
            )
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            load_best(self.oncurve.policy, self.state)
        loss = fmean(losses) if losses else 0.0
        samples = len(losses) * self.oncurve.config.run.prompts_per_step
        metrics = speeds("train", seconds, samples=samples, steps=self.state.global_step - first)
        metrics |= {"total_flos": self.state.total_flos, "train_loss": loss}
        self._take_means("train")  # of the measurement at the end
        self._say({**self._window.rest(), **metrics})
        self._callbacks.call("on_train_end")
        if self.args.push_to_hub and not self.control.should_training_stop:
            try:
                self.push_to_hub()
            except OncurveError as error:  # the model is safe: an upload can be made later
                Console().print(f"not uploaded: {error}", markup=False, highlight=False, soft_wrap=True)
        return TrainOutput(self.state.global_step, loss, metrics)

    def _begin(self, resume_from_checkpoint: str | bool | None) -> Iterator[Step]:
        """The steps to make, and the trainer's state before the first of them."""
        self.control, self._window = TrainerControl(), LogWindow(self.args, self.state.max_steps)
        if not resume_from_checkpoint:
            if self.oncurve.result is not None:  # a second run goes on with the weights of the first
                self.oncurve.hold_model()
            self.state.global_step, self.state.epoch, self.state.log_history = 0, 0.0, []
            self.state.num_input_tokens_seen, self.state.total_flos = 0, 0.0
            return self.oncurve.steps()
        self.oncurve.folder, step = find_run(resume_from_checkpoint, self.args.output_dir)
        load_state(self.state, self.oncurve.folder, step)
        self._window.updates = self.state.global_step
        return self.oncurve.resume_steps(after=step, extends=True, allow_change="changed_run" in SETTINGS.accepted)

    def _take_changed_options(self) -> None:
        """Take options changed in ``args`` since the trainer was made. Raises ConfigError for what TRL read then."""
        if self._has_columns != self._replaces(REWARDS):
            self._ask_again("reward_funcs", self.reward_funcs)
        if changed := changed_options(self._options, self.args.options()):
            self._ask_again("args", self.args)
            names = ", ".join(changed)
            Console().print(f"note: args changed after GRPOTrainer was made: {names}", markup=False, soft_wrap=True)

    def _watched(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Every step, with what callbacks, logs and evaluations make of it."""
        config, control = self.oncurve.config, self._callbacks
        control.updates = 0
        for step in steps:
            for _ in range(config.updates_per_step - control.updates):  # without a signal, so that they moved nothing
                control.before_update()
                control.after_update()
            self.state.global_step = step.number * config.updates_per_step
            epochs = int(self.state.epoch or 0)
            self.state.epoch = step.number * config.run.prompts_per_step / len(self.translation.rows)
            self.state.num_input_tokens_seen += (tokens := num_tokens(step.groups))
            self.state.total_flos += training_flops(self.oncurve.policy.model, tokens * self.args.num_iterations)
            control.call("on_step_end")
            is_last = step.number == config.run.steps
            has_ended = int(self.state.epoch) > epochs
            self._log_step(step, ends_epoch=has_ended or is_last)
            self._do_due(step, is_last=is_last)
            goes_on = not is_last and not self.control.should_training_stop
            if has_ended or not goes_on:
                control.call("on_epoch_end")
            yield step
            if goes_on and has_ended:
                control.call("on_epoch_begin")
            if goes_on:
                control.call("on_step_begin")
            control.updates = 0

    def _log_step(self, step: Step, *, ends_epoch: bool) -> None:
        logs = {
            **step_logs(step, self._reward_names(), self.args.loss_type),
            "num_tokens": float(self.state.num_input_tokens_seen),
        }
        if not any(name in logs for name in ("grad_norm", "sft/loss")):  # nothing was trained on
            logs = idle_logs(self.oncurve, step, self._callbacks.rate(), self.args) | logs
        is_requested, updates = self.control.should_log, self.state.global_step
        row = self._window.add(
            logs | self._take_means("train"), updates=updates, ends_epoch=ends_epoch, is_requested=is_requested
        )
        if row is not None:
            self._say(row)
        if self.args.log_completions and self.is_world_process_zero():
            folder = Path(self.args.output_dir) / "completions"
            write_table(folder, step, make_algorithm(self.oncurve.config), self._reward_names(), self._extra)
        self._extra.clear()

    def _do_due(self, step: Step, *, is_last: bool) -> None:
        """Evaluate and save where the configuration, the end or a callback asks for it."""
        every, saves = self.translation.evaluate_every_steps, self.oncurve.config.run.save_every_steps
        is_due = bool(saves) and (is_last or step.number % saves == 0)
        if self.control.should_evaluate or (every and (is_last or step.number % every == 0)):
            is_best = note_best(self.evaluate(), self.args, self.state)
            is_due |= is_best and self.args.save_strategy == "best"
        if self.control.should_save or is_due:
            saved, policy = step.save(), self.oncurve.policy
            if policy.adapter is None and not is_trained_whole(policy.trained_model):
                self.save_model(str(saved))  # a model to load, beside the trained part of it
            if saved is not None and self.is_world_process_zero():
                name_checkpoint(saved, self.args.output_dir, self.state)
            self._callbacks.call("on_save")

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Rewards and lengths on the evaluation rows, sampled as in training, as TRL measures."""
        sets = self.translation.evaluation
        if eval_dataset is not None:
            sets = evaluation_rows(self.translation.arguments, eval_dataset, metric_key_prefix)
        if not sets:
            raise CheckpointError("evaluate: the trainer has no eval_dataset. Pass one")
        config, weights = self.oncurve.config, self.reward_weights.tolist()
        count = self.args.num_generations_eval or self.args.num_generations
        functions = {
            section.key: reward for section, (reward, _) in zip(config.rewards, self._script_rewards(), strict=False)
        }
        function = make_reward_function(
            [
                section.model_copy(update={"weight": weight})
                for section, weight in zip(config.rewards, weights, strict=True)
            ],
            seed=config.run.seed,
            length=RunLength(config.run.steps),
            objects=functions,
        )
        measured: dict[str, float] = {}
        self._mode = "eval"
        for prefix, rows in sets.items():
            started = time.perf_counter()
            groups = self.oncurve.sample(rows, n=count)
            graded = score(groups, function)
            logs = rollout_logs(groups, graded, self._reward_names())
            logs |= measured_loss(self.oncurve.policy, make_algorithm(config), groups, graded, self.args.loss_type)
            logs["num_tokens"] = float(self.state.num_input_tokens_seen)
            batches = -(-len(rows) * count // (self.args.eval_batch_size * self.args.world_size))
            for _ in range(batches):
                self._callbacks.call("on_prediction_step")
            logs |= self._take_means("eval")
            metrics = {
                f"{name}_{key}": value for name in dict.fromkeys(("eval", prefix)) for key, value in logs.items()
            }
            metrics |= speeds(prefix, time.perf_counter() - started, samples=len(rows) * count, steps=batches)
            self._say(metrics)  # a row for each set, where TRL names all but loss and speed "eval_"
            self._callbacks.call("on_evaluate", {"metrics": metrics})
            measured |= metrics
        self._mode = "train"
        self._extra.clear()
        return measured

    def add_callback(self, callback: Any) -> None:
        """A TrainerCallback, or a class of it."""
        self._callbacks.add(callback)

    def remove_callback(self, callback: Any) -> None:
        """The same callback, no more."""
        self._callbacks.remove(callback)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
