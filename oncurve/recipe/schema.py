"""A whole recipe: the sections of the rooms, and the rules between them.

A recipe holds only what differs from the defaults. Every key, with its unit, meaning and default, stands in the
``settings.py`` of the room that is given it. A key that changes no number of a run is ``Harmless``.
"""

from __future__ import annotations

import math
from typing import Annotated, cast

from pydantic import Field, model_validator

from oncurve.algorithm.settings import AlgorithmSection
from oncurve.core.records import SamplingParams
from oncurve.data.settings import Data, SftSection, with_type
from oncurve.episodes.settings import EpisodeKeys
from oncurve.evaluate.settings import EvaluationSection
from oncurve.fleet.settings import ServerKeys
from oncurve.policy.settings import OptimizerSettings, PolicySection
from oncurve.rewards.settings import R1ZeroReward, Reward
from oncurve.run.settings import RunSection
from oncurve.section import Section

SUPERVISED = {"type": "rft", "group_size": 1}
"""The loss of a supervised stage: the mean of -log p over all tokens of an update's demonstrations."""


_SAME = "{} training and evaluation. Set data.{} in its place"
UNREAD_IN_EVALUATION = {
    "chat_template": _SAME.format("a model has one chat template for", "chat_template"),
    "now": _SAME.format("chat templates see one time in", "now"),
    "few_shot": _SAME.format("prompts show the same examples in", "few_shot"),
    "max_prompt_tokens": _SAME.format("prompts have one limit in", "max_prompt_tokens"),
    **dict.fromkeys(
        ("retire_above", "shuffle", "prefer_half_solved"), "an evaluation asks all its problems in order. Leave it out"
    ),
}
"""Keys of ``evaluation.data`` that would do nothing, and why."""


class RolloutSection(EpisodeKeys, ServerKeys):
    """How completions are sampled, where, and who answers in them."""


class Config(Section):
    """A whole recipe."""

    model: str
    """A causal language model: folder, run or Hugging Face Hub name; "embedded" is the small one in this package."""
    data: Data
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)] = (R1ZeroReward(),)
    algorithm: AlgorithmSection = AlgorithmSection()
    rollouts: RolloutSection = RolloutSection()
    policy: PolicySection = PolicySection()
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSection = EvaluationSection()
    run: RunSection = RunSection()
    sft: SftSection | None = None
    """With this section the recipe is a supervised stage: completions come from the data, and keys of algorithm count
    for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _supervise(cls, tree: object) -> object:
        """A supervised stage is rejection sampling with completions that are there, all of them right."""
        if not isinstance(tree, dict):
            return tree
        keys = cast("dict[str, object]", tree)
        return keys if keys.get("sft") is None else {**keys, "algorithm": SUPERVISED}

    def steps_over(self, num_rows: int) -> int:
        """Steps of a run over so many training rows: as ``sft.epochs`` asks for, else ``run.steps``."""
        if self.sft is None or self.sft.epochs is None:
            return self.run.steps
        return max(1, math.ceil(self.sft.epochs * num_rows / self.run.prompts_per_step))

    @property
    def has_default_reward(self) -> bool:
        """It names no reward, and something is graded."""
        return self.sft is None and "rewards" not in self.model_fields_set

    def sampling(self) -> SamplingParams:
        """Sampling parameters of training."""
        return self.rollouts.sampling(self.run.seed)

    def evaluation_sampling(self) -> SamplingParams:
        """Sampling parameters of measurements."""
        return self.evaluation.sampling(self.sampling())

    def prompt_limit(self, context_tokens: int | None) -> int | None:
        """The longest prompt that leaves room for a completion in the model's context; None where nothing limits it.

        Raises ConfigError where none does.
        """
        limit = self.data.max_prompt_tokens
        if context_tokens is None:
            return limit
        room = self.rollouts.prompt_room(context_tokens)
        return min(limit, room) if limit else room

    @property
    def evaluation_data(self) -> Data:
        """The settings of test prompts: those of the evaluation's data, or of training."""
        return self.evaluation.data or self.data

    @property
    def completions_per_step(self) -> int:
        """Prompts times group size."""
        return self.algorithm.num_rows(self.run.prompts_per_step)

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates on one batch of rollouts."""
        per_pass = self.completions_per_step // (self.run.completions_per_update or self.completions_per_step)
        return per_pass * self.run.passes_per_step

    @model_validator(mode="before")
    @classmethod
    def _infer_types(cls, tree: object) -> object:
        """A data file says by its ending what it is."""
        if not isinstance(tree, dict):
            return tree
        known = dict(cast("dict[str, object]", tree))
        known["data"] = with_type(known["data"]) if "data" in known else None
        if known["data"] is None:
            del known["data"]
        evaluation = known.get("evaluation")
        if isinstance(evaluation, dict) and "data" in evaluation:
            section = cast("dict[str, object]", evaluation)
            known["evaluation"] = {**section, "data": with_type(section["data"])}
        return known

    @model_validator(mode="after")
    def _check_batch(self) -> Config:
        size = self.run.completions_per_update
        if size and self.completions_per_step % size:
            fitting = [n for n in range(1, self.completions_per_step + 1) if self.completions_per_step % n == 0]
            nearest = min(fitting, key=lambda n: abs(n - size))
            raise ValueError(
                f"run.completions_per_update is {size}, which does not divide the {self.completions_per_step} "
                f"completions of a step (run.prompts_per_step {self.run.prompts_per_step} x algorithm.group_size "
                f"{self.algorithm.group_size}). The nearest that does is {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _check_transfer(self) -> Config:
        if self.rollouts.transfer == "nccl" and self.policy.lora is not None:
            raise ValueError(
                "rollouts.transfer is nccl, which sends whole weights, and policy.lora trains an adapter, a hundredth "
                "of them. Set `rollouts.transfer=fetch`"
            )
        return self

    @model_validator(mode="after")
    def _check_deepspeed(self) -> Config:
        if self.policy.deepspeed is not None and self.policy.parallel != "deepspeed":
            raise ValueError(
                f"policy.deepspeed names a file, but policy.parallel is {self.policy.parallel}. Set it to deepspeed, "
                f"or leave the file out"
            )
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Config:
        if self.policy.quantization and self.policy.lora is None:
            raise ValueError(
                f"policy.quantization is {self.policy.quantization}, and weights of few bits cannot be trained. "
                f"Set policy.lora as well, such as policy.lora.rank=16, or leave quantization out"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation_data(self) -> Config:
        measured = self.evaluation.data
        if measured is None:
            return self
        for key, why in UNREAD_IN_EVALUATION.items():
            unset = type(measured).model_fields[key].default
            if vars(measured)[key] not in (unset, vars(self.data)[key]):
                raise ValueError(f"evaluation.data.{key} is set, and {why}")
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> Config:
        if self.evaluation.samples > 1 and self.evaluation.temperature == 0:
            raise ValueError(
                f"evaluation.samples is {self.evaluation.samples} at evaluation.temperature 0, which would sample the "
                f"same completion each time. Set the temperature above 0 or the samples to 1"
            )
        return self
