"""GRPOTrainer: TRL's signature over oncurve.Trainer."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from oncurve.episodes.from_settings import give_rewards
from oncurve.errors import CheckpointError, ConfigError, OncurveError, Stopped
from oncurve.observe.run_model import is_run, resolve_model
from oncurve.rewards.terms import make_reward_function
from oncurve.run.publish import push
from oncurve.run.scoring import score
from oncurve.run.step_log import Step
from oncurve.run.trainer import Trainer
from oncurve.run.training_request import ProgramObjects, request_of_tree
from oncurve.trl.grpo_config import GRPOConfig
from oncurve.trl.logs import num_tokens, rollout_logs, step_logs
from oncurve.trl.overridden import refuse_overridden
from oncurve.trl.processes import ProcessState
from oncurve.trl.script_callbacks import Callbacks
from oncurve.trl.script_episodes import ENVIRONMENT_REWARD
from oncurve.trl.settings import SETTINGS
from oncurve.trl.translation import TrainerArguments, Translation, evaluation_rows, translate


class GRPOTrainer:
    """The trainer of a script for TRL. Its arguments become a recipe, Python objects and a run of oncurve.

    Everything that would be learned otherwise than with TRL is one message when it is made; the rest is said in lines.
    """

    _is_training = False

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
        name = model if isinstance(model, str) else model.name_or_path or "model"
        self.args = args if args is not None else GRPOConfig(f"{name.rstrip('/').split('/')[-1]}-GRPO")
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.state, self.control = TrainerState(), TrainerControl()
        self._logged: dict[str, list[float]] = defaultdict(list)
        lost = {
            "rollout_func": rollout_func,
            "optimizers": any(part is not None for part in optimizers),
        }
        self.translation: Translation = translate(
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
                tools=tuple(tools or ()),
                environment_factory=environment_factory,
                lost={name: value for name, value in lost.items() if value},
                extras={"trainer_state": self.state, "log_metric": self._log_metric, "log_extra": _ignore},
            )
        )
        """The recipe, and what of the script stands in none."""
        self.oncurve: Trainer
        """The trainer behind this one."""
        self.reward_func_names = [reward.name for reward, _ in self.translation.rewards]
        if environment_factory is not None and give_rewards(environment_factory):
            self.reward_func_names.append(ENVIRONMENT_REWARD)
        self._make(is_said=SETTINGS.instead_of_training is not None)
        self._callbacks = Callbacks(self, callbacks or ())

    def _make(self, *, is_said: bool) -> None:
        """Refuse what is lost, say what differs, and make the trainer behind this one."""
        asked, found = self.translation.asked, self.translation
        if not is_said:  # by a recipe, or before
            found.refuse_losses()
            for line in found.describe() if self.is_world_process_zero() else ():
                Console().print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
        objects = ProgramObjects(
            model=None if isinstance(asked.model, str) else asked.model,
            tokenizer=found.tokenizer,
            tools=list(asked.tools) or None,
            environments=asked.environment_factory,
        )
        self.oncurve = Trainer(
            request_of_tree(found.recipe(), found.rows, found.rewards or None, found.measured(), objects, {})
        )
        config = self.oncurve.config
        per_step = config.run.prompts_per_step
        self.state.max_steps = config.run.steps * config.updates_per_step
        self.state.num_train_epochs = -(-config.run.steps * per_step // len(found.rows))
        self.state.logging_steps = 1

    @property
    def model(self) -> nn.Module:
        """The model with its current weights, with peft around it if it has an adapter."""
        return self.oncurve.hold_model()

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
        self.translation = translate(replace(self.translation.asked, processing_class=tokenizer))
        self._make(is_said=True)

    tokenizer = processing_class

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train to the end, or go on with the newest run in ``output_dir``, or with the one that is named.

        Raises Stopped where a signal ended it.
        """
        if SETTINGS.instead_of_training is not None:
            SETTINGS.instead_of_training(self.translation)
        SETTINGS.has_trained = True
        if resume_from_checkpoint:
            self.oncurve.folder = find_run(resume_from_checkpoint, self.args.output_dir)
            steps = self.oncurve.resume_steps()
        else:
            if self.oncurve.result is not None:  # a second run goes on with the weights of the first
                self.oncurve.hold_model()
            self.state.global_step, self.state.epoch, self.state.log_history = 0, 0.0, []
            self.control.should_training_stop = False
            steps = self.oncurve.steps()
        self._callbacks.call("on_train_begin")
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
        loss = fmean(losses) if losses else 0.0
        metrics = {"train_runtime": round(seconds, 4), "train_loss": loss}
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        self._callbacks.call("on_train_end")
        if self.args.push_to_hub and not self.control.should_training_stop:
            try:
                self.push_to_hub()
            except OncurveError as error:  # the model is safe: an upload can be made later
                Console().print(f"not uploaded: {error}", markup=False, highlight=False, soft_wrap=True)
        return TrainOutput(self.state.global_step, loss, metrics)

    def _watched(self, steps: Iterator[Step]) -> Iterator[Step]:
        """Every step, with what callbacks, logs and evaluations make of it."""
        config = self.oncurve.config
        self._callbacks.call("on_epoch_begin")
        self._callbacks.call("on_step_begin")
        for step in steps:
            self.state.global_step = step.number * config.updates_per_step
            epochs, self.state.epoch = (
                int(self.state.epoch or 0),
                step.number * config.run.prompts_per_step / len(self.translation.rows),
            )
            self.state.num_input_tokens_seen += num_tokens(step.groups)
            self._callbacks.call("on_step_end")
            logs = {**step_logs(step, self.reward_func_names), "num_tokens": float(self.state.num_input_tokens_seen)}
            logs |= {name: fmean(values) for name, values in self._logged.items()}
            self._logged.clear()
            self.log(logs)
            every = self.translation.evaluate_every_steps
            if self.control.should_evaluate or (every and step.number % every == 0):
                self.evaluate()
            saves = config.run.save_every_steps
            if self.control.should_save:
                self.save_model(str(Path(self.args.output_dir or "runs") / f"checkpoint-{self.state.global_step}"))
            if saves and step.number % saves == 0:
                self._name_checkpoint()
            if self.control.should_save or (saves and step.number % saves == 0):
                self._callbacks.call("on_save")
            goes_on = step.number < config.run.steps and not self.control.should_training_stop
            has_ended = int(self.state.epoch) > epochs
            if has_ended or not goes_on:
                self._callbacks.call("on_epoch_end")
            yield step
            if goes_on and has_ended:
                self._callbacks.call("on_epoch_begin")
            if goes_on:
                self._callbacks.call("on_step_begin")

    def _name_checkpoint(self) -> None:
        """Name the newest checkpoint as TRL does, so that a script that looks for ``checkpoint-N`` goes on from it."""
        newest = max((Path(str(self.oncurve.folder)) / "checkpoints").glob("step_" + 6 * "[0-9]"), default=None)
        link = Path(self.args.output_dir or "runs") / f"checkpoint-{self.state.global_step}"
        if newest is None or not self.is_world_process_zero():
            return
        for old in link.parent.glob("checkpoint-*"):
            if old.is_symlink() and (old == link or not old.exists()):
                old.unlink()  # of a checkpoint that was removed, or of an earlier run
        if not link.exists():
            link.symlink_to(newest.resolve().relative_to(link.parent.resolve()), target_is_directory=True)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Put a row into ``state.log_history`` and show it to callbacks."""
        row = {**logs, "epoch": self.state.epoch or 0.0, "step": self.state.global_step}
        self.state.log_history.append(row)
        self._callbacks.call("on_log", logs=row)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Rewards and lengths on the evaluation rows, sampled as in training, as TRL measures."""
        sets = self.translation.evaluation
        if eval_dataset is not None:
            sets = evaluation_rows(self.translation.asked, eval_dataset, metric_key_prefix)
        if not sets:
            raise CheckpointError("evaluate: the trainer has no eval_dataset. Pass one")
        config = self.oncurve.config
        count = self.args.num_generations_eval or self.args.num_generations
        function = make_reward_function(
            config.rewards, seed=config.run.seed, given={reward.name: reward for reward, _ in self.translation.rewards}
        )
        metrics: dict[str, float] = {}
        for prefix, rows in sets.items():
            groups = self.oncurve.sample(rows, n=count)
            logs = rollout_logs(groups, score(groups, function), self.reward_func_names)
            metrics |= {f"{prefix}_{name}": value for name, value in logs.items()}
        self._logged.clear()
        self.log(metrics)
        self._callbacks.call("on_evaluate", metrics=metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights and the tokenizer as files of a model; other files of the folder stay."""
        folder, place = Path(output_dir or self.args.output_dir or "trainer_output"), self.accelerator
        made = folder.absolute().with_name(f".{folder.absolute().name}-{os.getpid()}")
        if self._is_training:
            self.oncurve.save(made)  # all processes together
        if not place.is_main_process:
            return
        if folder.is_symlink():
            folder.unlink()  # a checkpoint of a run, which stays as it is
        folder.mkdir(parents=True, exist_ok=True)
        if not self._is_training and place.num_processes > 1 and self.oncurve.result is not None:
            shutil.copytree(resolve_model(str(self.oncurve.folder)), made)  # what was trained together is there alone
        elif not self._is_training:
            self.oncurve.save(made)
        for path in made.iterdir():
            path.replace(folder / path.name)
        shutil.rmtree(made)

    def add_callback(self, callback: Any) -> None:
        """A TrainerCallback, or a class of it."""
        self._callbacks.add(callback)

    def remove_callback(self, callback: Any) -> None:
        """The same callback, no more."""
        self._callbacks.remove(callback)

    def is_world_process_zero(self) -> bool:
        """This process writes."""
        return self.args.process_index == 0

    is_local_process_zero = is_world_process_zero

    @property
    def accelerator(self) -> ProcessState:
        """What scripts ask of accelerate: which process this is, and to wait for the others."""
        return self.args.distributed_state

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics, in one process."""
        if self.is_world_process_zero():
            Console().print(f"{split} metrics: {dict(metrics)}", markup=False, highlight=False)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics beside the runs."""
        self._write(f"{split}_results.json", json.dumps(dict(metrics), indent=2))

    def save_state(self) -> None:
        """Write ``state`` beside the runs."""
        self._write("trainer_state.json", json.dumps(asdict(self.state), indent=2, sort_keys=True))

    def _write(self, name: str, text: str) -> None:
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir or "trainer_output")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text + "\n", encoding="utf-8")

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Nothing to do: a run that is finished has a card beside its model."""

    def push_to_hub(self, commit_message: str | None = None, *_: Any, token: str | None = None, **__: Any) -> str:
        """Upload the model of the finished run with its card to ``hub_model_id``; the address of the commit.

        The repository is private unless ``hub_private_repo`` is False. Raises ConfigError without a token and for files
        that look like secrets, CheckpointError without a finished run or if the hub refuses.
        """
        if self.oncurve.folder is None or not is_run(self.oncurve.folder):
            raise CheckpointError("push_to_hub: there is no run yet. Call train() first")
        if not self.is_world_process_zero():
            return ""
        name = self.args.hub_model_id or Path(self.args.output_dir or "trainer_output").resolve().name
        folder, key = Path(resolve_model(str(self.oncurve.folder))), token or self.args.hub_token
        is_private = self.args.hub_private_repo is not False
        address = push(folder, name, private=is_private, token=key, message=commit_message)
        kind = "private" if is_private else "public"
        Console().print(f"uploaded to {name} ({kind}): {address}", markup=False, soft_wrap=True)
        return address

    def _log_metric(self, name: str, value: float) -> None:
        self._logged[name].append(float(value))


def find_run(wanted: str | bool, output_dir: str | None) -> Path:
    """The folder of a run to go on with: the one that is named, by itself or by a checkpoint of it, or the newest.

    Raises CheckpointError where there is none.
    """
    if not isinstance(wanted, bool):
        path = Path(wanted).resolve()
        for place in (path, path.parent.parent):
            if is_run(place):
                return place
        output_dir = str(path)
    folder = Path(output_dir or "runs")
    runs = [path for path in folder.glob("*/") if is_run(path) and (path / "checkpoints").is_dir()]
    if not runs:
        raise CheckpointError(f"resume_from_checkpoint: {folder} holds no run of oncurve with a checkpoint")
    return max(runs, key=lambda path: path.stat().st_mtime)


def _listed(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def _ignore(*_: Any, **__: Any) -> None:
    """Whatever is passed has a place elsewhere, or none."""
