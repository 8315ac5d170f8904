"""Training from Python: the same recipe, loop and run folder as on the command line."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from oncurve.core.errors import ConfigError
from oncurve.core.records import Group
from oncurve.core.sampler import SamplingRequest
from oncurve.data.datasets import adapt_python_rows
from oncurve.data.prompts import render_prompts
from oncurve.data.python_objects import data_section
from oncurve.evaluate.evaluation import Evaluation
from oncurve.observe.terminal import quiet_libraries
from oncurve.policy.final_model import write_model
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.load import run_folder_path, validate_tree
from oncurve.recipe.schema import Config
from oncurve.run.builder import Parts, make_parts, make_policy, make_rewards, prompts_for, with_episodes
from oncurve.run.identity import weights_checksum
from oncurve.run.rendered import split_rows, tools_in_prompts
from oncurve.run.result import Result, Steps, finish
from oncurve.run.session import Evaluator
from oncurve.run.step_log import Step
from oncurve.run.training import recipe_steps, resume_steps
from oncurve.run.training_request import (
    KEYS_BESIDE_ROWS,
    ProgramObjects,
    TrainingRequest,
    request_of,
    request_of_recipe,
)
from oncurve.sample.engine import InProcessEngine


def train(
    model: str | os.PathLike[str] | nn.Module,
    data: Any = None,
    rewards: Any = None,
    *,
    evaluation_data: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tools: Any = None,
    environments: Any = None,
    agent: Any = None,
    **sections: Mapping[str, Any],
) -> Result:
    """Train a model with GRPO and return the result; the arguments are those of ``Trainer``.

    Example: ``oncurve.train("embedded", data="word_problems", run={"steps": 12})``
    """
    trainer = Trainer(
        model, data, rewards, evaluation_data=evaluation_data, tokenizer=tokenizer, tools=tools,
        environments=environments, agent=agent, **sections,
    )  # fmt: skip
    return trainer.train()


class Trainer:
    """A training run in this process: to train, watch step by step, sample from, evaluate, save and resume.

    Example::

        rows = [{"question": "2+3?", "answer": "5"}, ...]

        def correct(completion, answer):
            return float(completion.strip().endswith(answer))

        trainer = oncurve.Trainer("Qwen/Qwen2.5-0.5B", rows, correct, algorithm={"type": "dapo"}, run={"steps": 100})
        result = trainer.train()
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module | TrainingRequest,
        data: Any = None,
        rewards: Any = None,
        *,
        evaluation_data: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tools: Any = None,
        environments: Any = None,
        agent: Any = None,
        **sections: Mapping[str, Any],
    ) -> None:
        """Every other argument is a section of a recipe with its keys.

        - ``model``: a folder, a name on the Hugging Face Hub, "embedded", the path of a recipe (.yaml), or a model that
          transformers or peft loaded, whose own weights are then trained; ``tokenizer`` replaces its tokenizer.
        - ``data``: dictionaries in any iterable, a ``datasets.Dataset``, a data frame of pandas, a path, a data
          type such as "gsm8k", or a section of a recipe. Without ``data`` the environment asks the questions.
        - ``rewards``: a function, an object, a reward type, a section, a pair (reward, weight), or a list of these,
          which are summed.
        - ``evaluation_data``: as ``data``; without it some rows are held out.
        - ``tools``: functions with type hints and a docstring that the policy may call.
        - ``environments``: a class or function that makes one for each completion, or a dictionary of them by name.
        - ``agent``: ``async def agent(row, client) -> reward``, which talks to the policy as to a chat server.

        Raises ConfigError for what a recipe does not allow.
        """
        if isinstance(model, TrainingRequest):
            request = model
        else:
            objects = ProgramObjects(tokenizer=tokenizer, tools=tools, environments=environments, agent=agent)
            request = request_of(model, data, rewards, evaluation_data, objects, sections)
        config = request.config
        self.config: Config = config
        """The recipe, with all defaults."""
        self.folder: Path | None = Path(config.run.folder) / config.run.name if config.run.name else None
        """The run's folder; without ``run.name`` it gets a name when training begins."""
        self.result: Result | None = None
        """Result of the newest run; None before that."""
        self._recipe, self._objects = request.recipe, request.objects
        self._policy: TrainedPolicy | None = None
        self.on_load: Callable[[Parts], Parts] = lambda parts: parts
        """Called with the parts of every run before its first step; what it returns is trained."""
        self._num_requests = 0
        self._walk: weakref.ref[Iterator[Step]] | None = None

    @classmethod
    def from_recipe(
        cls, recipe: str, *overrides: str, data: Any = None, rewards: Any = None, evaluation_data: Any = None
    ) -> Trainer:
        """The trainer of a recipe file, of its folder, or of a recipe in the package, with ``key=value`` overrides.

        Example: ``oncurve.Trainer.from_recipe("word_problems", "run.steps=12").train()``
        """
        return cls(request_of_recipe(recipe, overrides, data, rewards, evaluation_data))

    def train(self) -> Result:
        """Train to the end. Ctrl-C stops after saving and leaves this object usable; see ``resume``."""
        return self._finish(self._new_steps)

    def steps(self) -> Iterator[Step]:
        """Train step by step, as a generator. Leaving the loop early saves the run, which ``resume`` continues.

        The result of a finished run is in ``result``. Example:
        ``for step in trainer.steps(): print(step.number, step.metrics["reward/mean"])``
        """
        return self._step_by_step(self._new_steps)

    def resume(self, *, after: int | None = None, allow_change: bool = False, extends: bool = False) -> Result:
        """Continue this run from its newest checkpoint, or from that ``after`` so many steps; the result is the same as
        without the stop.

        A run is trained further with more steps: ``run={"name": ..., "steps": 200}`` and ``extends``.

        Raises ConfigError if rows, rewards or recipe have changed, unless ``allow_change`` says that they may.
        """
        return self._finish(partial(self._resumed_steps, after, allow_change, extends))

    def resume_steps(
        self, *, after: int | None = None, allow_change: bool = False, extends: bool = False
    ) -> Iterator[Step]:
        """The same, step by step."""
        return self._step_by_step(partial(self._resumed_steps, after, allow_change, extends))

    def sample(
        self,
        questions: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
        n: int = 1,
        *,
        temperature: float | None = None,
        max_completion_tokens: int | None = None,
    ) -> list[Group]:
        """``n`` completions of each question with the current weights, in the recipe's template.

        A question is text or a row; ``temperature`` and the limit are the recipe's unless they are given. Every call
        draws anew.
        """
        rows = [questions] if isinstance(questions, (str, Mapping)) else list(questions)
        data, rollouts = self.config.data, {}
        rows = adapt_python_rows(
            [{"question": row} if isinstance(row, str) else dict(row) for row in rows], columns=data.columns
        )
        if temperature is not None:
            rollouts["temperature"] = temperature
        if max_completion_tokens is not None:
            rollouts["max_completion_tokens"] = max_completion_tokens
        policy = self.policy
        tokenizer: Any = policy.tokenizer
        tools_of = tools_in_prompts(self.config, self._objects)
        prompts, _ = render_prompts(rows, tokenizer, template=data.template, chat=data.chat, tools_of=tools_of)
        settings = self.config.rollouts.model_copy(update=rollouts)
        config = self.config.model_copy(update={"rollouts": settings})
        engine = with_episodes(InProcessEngine(config.sampling()), config, self._objects)
        engine.load_weights(policy, version=policy.num_updates)
        self._num_requests += 1
        try:
            return engine.sample(SamplingRequest(prompts, n, -self._num_requests))
        finally:
            engine.close()

    def evaluate(self, data: Any = None) -> Evaluation:
        """The current weights on test problems: the recipe's own, or ``data``, in any form that a trainer takes."""
        config, objects = self.config, self._objects
        if data is not None:
            options = {key: value for key, value in config.data.model_dump().items() if key in KEYS_BESIDE_ROWS[:3]}
            section, rows = data_section(data, options)
            tree = config.model_dump()
            tree["evaluation"] = {**tree["evaluation"], "data": section}
            config = validate_tree(tree, source="Trainer.evaluate")
            objects = replace(objects, evaluation_rows=rows)
        policy = self.policy
        rows = split_rows(config, objects)
        prompts = prompts_for(config, policy, rows=rows, objects=objects).test
        reward_function = make_rewards(config, rows=rows, objects=objects)
        sampler = with_episodes(InProcessEngine(config.sampling()), config, objects)
        params, samples = config.evaluation_sampling(), config.evaluation.samples
        evaluator = Evaluator(policy, sampler, reward_function, params=params, samples=samples)
        try:
            return evaluator.measure(prompts, name="evaluation", step=policy.num_updates)
        finally:
            evaluator.close()
            reward_function.close()

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the current weights as an ordinary Hugging Face checkpoint, or as an adapter; the folder."""
        policy = self.policy
        write_model(policy, Path(folder))
        return Path(folder)

    @property
    def policy(self) -> TrainedPolicy:
        """The model with its current weights; loaded when it is first needed."""
        if self._policy is None:
            quiet_libraries()
            self._policy = make_policy(self.config, objects=self._objects)
        return self._policy

    def hold_model(self, *, for_later: bool = True) -> nn.Module:
        """The model, with peft around it if it has an adapter; ``for_later``: a run that begins later trains this very
        object. One that goes on begins with the weights that it began with."""
        model = self.policy.model if self.policy.adapter is None else self.policy.adapter.peft_model
        if for_later:
            self._objects = replace(self._objects, model=model, tokenizer=self.policy.tokenizer)
        return model

    def _new_steps(self) -> Steps:
        quiet_libraries()
        path = run_folder_path(self.config)
        self.folder = path
        config = self.config.model_copy(update={"run": self.config.run.model_copy(update={"name": path.name})})
        return recipe_steps(
            config,
            self._recipe,
            console=Console(),
            objects=replace(self._objects, base_sha256=None),
            owns_process=False,
            load=self._load,
        )

    def _resumed_steps(self, after: int | None, allow_change: bool, extends: bool) -> Steps:
        quiet_libraries()
        if self.folder is None:
            raise ConfigError("this trainer has no run yet. Name an earlier one with run={'name': ...}, or train first")
        run = self.config.run.model_copy(update={"name": self.folder.name})
        return resume_steps(
            self.folder,
            new_config=self.config.model_copy(update={"run": run}),
            objects=self._objects,
            owns_process=False,
            load=self._load,
            console=Console(),
            after=after,
            allow_change=allow_change,
            extends=extends,
        )

    def _finish(self, begin: Callable[[], Steps]) -> Result:
        self._leave_walk()
        self.result = finish(begin())
        return self.result

    def _step_by_step(self, begin: Callable[[], Steps]) -> Iterator[Step]:
        def walk() -> Iterator[Step]:
            self.result = yield from begin()

        self._leave_walk()
        self.result = None
        steps = walk()
        self._walk = weakref.ref(steps)
        return steps

    def _leave_walk(self) -> None:
        """End a walk through steps that somebody left without closing it, as an error in a notebook's cell does."""
        steps = self._walk() if self._walk is not None else None
        if steps is not None:
            steps.close()  # type: ignore[attr-defined]
        self._walk = None

    def _load(self, *arguments: Any) -> Parts:
        """The parts of a run, whose policy this object keeps when the run has ended."""
        self._policy = None  # two models at once may not fit
        parts = make_parts(*arguments)
        self.folder = run_folder_path(parts.config)  # in several processes, the name is that of the first
        self._policy = parts.policy
        parts = self.on_load(parts)
        if parts.objects.model is not None and not parts.algorithm.needs_reference:
            # its own weights move, and a run that goes on is still that of the weights it had; with a reference, which
            # would be made of them, it must be loaded anew
            base = parts.objects.base_sha256 or weights_checksum(parts.policy)
            self._objects = replace(self._objects, base_sha256=base)
            parts = replace(parts, objects=replace(parts.objects, base_sha256=base))
        if self._objects.model is not None and parts.policy.adapter is not None:
            self._objects = replace(
                self._objects, model=parts.policy.adapter.peft_model
            )  # a second run goes on with it
        return parts
