"""The verbs of a training loop of one's own: sample, score, advantages, collate, forward and backward, step.

policy = oncurve.load_policy("embedded", optimizer={"learning_rate": 1e-4})
engine = oncurve.Engine(policy)
prompts = policy.prompts(rows)
for step in range(20):
    groups = engine.sample(prompts[8 * step : 8 * step + 8], group_size=8)
    scores = oncurve.score(groups, reward)
    batch = oncurve.collate(groups, oncurve.advantages(scores))
    policy.forward_backward(batch, loss="cispo")
    policy.step()
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from oncurve.algorithm.presets import advantage_of
from oncurve.core.algorithm import Algorithm
from oncurve.core.batch import Batch, stack_rewards
from oncurve.core.errors import ConfigError
from oncurve.core.grading import score as grade_groups
from oncurve.core.records import Group, Mean, Prompt, Reward, SamplingParams, html_table
from oncurve.core.sampler import SamplingRequest
from oncurve.data.datasets import adapt_python_rows
from oncurve.data.prompts import render_prompts
from oncurve.data.python_objects import as_list, reward_section
from oncurve.model.context import context_of
from oncurve.observe.terminal import quiet_libraries
from oncurve.policy.final_model import write_model
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.load import validate_tree
from oncurve.recipe.schema import Config
from oncurve.rewards.parameters import columns_of
from oncurve.rewards.terms import make_reward_function
from oncurve.run.builder import make_algorithm, make_policy
from oncurve.sample.engine import InProcessEngine


def load_policy(model: str | os.PathLike[str], **sections: Mapping[str, Any]) -> Policy:
    """A model ready for training; other arguments are sections of a recipe, such as ``optimizer``.

    The schedule of the learning rate spans ``run["steps"]`` updates. Raises ConfigError or CheckpointError.
    """
    quiet_libraries()
    tree: dict[str, Any] = {name: dict(section) for name, section in sections.items()}
    tree |= {"model": os.fspath(model), "data": {"type": "given", **tree.get("data", {})}}
    return Policy(validate_tree(tree, source="load_policy"))


class Policy:
    """A model in training, for your own loop."""

    def __init__(self, config: Config) -> None:
        """See ``load_policy``."""
        self.config = config
        self.algorithm = make_algorithm(config)
        self.inner: TrainedPolicy = make_policy(config, with_reference=self.algorithm.needs_reference)
        """The policy of the package, with everything that it can do."""
        self._sums: dict[str, Mean] = {}

    def prompts(self, rows: Sequence[Mapping[str, Any] | str]) -> list[Prompt]:
        """Prompts from rows or questions, tokenized in the template of the data section."""
        data, tokenizer = self.config.data, self.inner.tokenizer
        adapted = adapt_python_rows(
            [{"question": row} if isinstance(row, str) else dict(row) for row in rows], columns=data.columns
        )
        limit = self.config.prompt_limit(context_of(self.inner.model.config))
        options: dict[str, Any] = {"template": data.template, "chat": data.chat, "max_prompt_tokens": limit}
        return render_prompts(adapted, tokenizer, **options)[0]  # type: ignore[arg-type]

    def forward_backward(self, batch: Batch, loss: str | None = None) -> dict[str, float]:
        """Add the gradient of a batch, in microbatches of ``policy.tokens_per_microbatch``; its statistics.

        ``loss`` is the name of an algorithm whose loss is taken, with its defaults; None takes the algorithm section.
        The batch's own rows are the denominators, so several calls before ``step`` add up several updates' gradients.
        Raises ConfigError for a loss that needs the rewards themselves.
        """
        algorithm = self.algorithm if loss is None else self._algorithm(loss)
        if algorithm.needs_entropy or (algorithm.kl.coefficient > 0 and algorithm.kl.placement == "reward"):
            raise ConfigError(f"{algorithm.name} chooses tokens or shifts rewards before the loss. Use oncurve.Trainer")
        batch = self.inner.annotate(batch, old=False, entropy=False, reference=algorithm.needs_reference)
        update = batch if algorithm.needs_every_row else batch.with_signal()
        sums: dict[str, Mean] = {}
        for microbatch in self.inner.microbatches(update):
            logprobs, entropy = self.inner.logprobs(microbatch)
            value, statistics = algorithm.loss(logprobs, entropy, microbatch.to(logprobs.device))
            self.inner.backward(value)
            for key, mean in statistics.items():
                sums[key] = sums[key] + mean if key in sums else mean
        return {key: mean.total if key == "policy/loss" else mean.value for key, mean in sums.items()}

    def step(self) -> dict[str, float]:
        """Clip the gradient, move the weights, forget the gradient; the norm, the learning rate, what was skipped."""
        return {key: mean.value for key, mean in self.inner.update().items() if key != "policy/loss"}

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the weights as an ordinary Hugging Face checkpoint, or as an adapter; the folder."""
        write_model(self.inner, Path(folder))
        return Path(folder)

    def _algorithm(self, name: str) -> Algorithm:
        try:
            return self.config.algorithm.with_row(name).make(self.config.sampling())
        except ValueError as error:
            raise ConfigError(f"loss: {error}") from None


class Engine:
    """Samples from a policy's current weights, in this process."""

    def __init__(self, policy: Policy, **params: Any) -> None:
        """``params`` are sampling keys of the section rollouts, such as temperature."""
        known = sorted(field.name for field in fields(SamplingParams))
        if unknown := [name for name in params if name not in known]:
            raise ConfigError(f"Engine: there is no {unknown[0]!r}. Known: {', '.join(known)}")
        self.policy = policy
        self.params = replace(policy.config.sampling(), **params)
        self._engine = InProcessEngine(self.params)
        self._calls = 0

    def sample(self, prompts: Sequence[Prompt | str], group_size: int = 1, *, step: int | None = None) -> list[Group]:
        """A group of completions for each prompt. Each call draws new ones; ``step`` fixes the random numbers."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        rendered: Iterator[Prompt] = iter(self.policy.prompts(texts)) if texts else iter(())
        all_prompts = [next(rendered) if isinstance(prompt, str) else prompt for prompt in prompts]
        number = self._calls if step is None else step
        self._calls += 1
        self._engine.load_weights(self.policy.inner, version=number)
        return self._engine.sample(SamplingRequest(all_prompts, group_size, number))

    def close(self) -> None:
        """Release the policy."""
        self._engine.close()


@dataclass(frozen=True)
class Scores:
    """The rewards of groups, in their order."""

    groups: Sequence[Group]
    rewards: Sequence[Sequence[Reward]]

    @property
    def mean(self) -> float:
        """Mean over all graded completions; NaN without any."""
        values = [reward.value for row in self.rewards for reward in row if reward.value is not None]
        return sum(values) / len(values) if values else float("nan")

    def __repr__(self) -> str:
        failed = sum(reward.value is None for row in self.rewards for reward in row)
        return f"<Scores of {len(self.groups)} groups: mean {self.mean:.3f}{f', {failed} failed' if failed else ''}>"

    def _repr_html_(self) -> str:
        """Every completion with its reward, for a notebook."""
        rows = [
            (group.prompt.index, completion.text, reward.error if reward.value is None else f"{reward.value:g}")
            for group, graded in zip(self.groups, self.rewards, strict=True)
            for completion, reward in zip(group.completions, graded, strict=True)
        ]
        return f"<p>{html.escape(repr(self))}</p>" + html_table(("prompt", "completion", "reward"), rows)


def score(groups: Sequence[Group], reward: Any) -> Scores:
    """The reward of every completion.

    ``reward`` is whatever ``oncurve.train`` takes: a function, an object, the name of a type, ``file.py:name``, a
    section of a recipe, a pair with a weight, or a list of these, which are summed. What fails gives an error, which is
    kept out of the group's baseline, and never a zero.

    Raises ConfigError for a reward that no recipe allows, and for a function that asks for something no row has.
    """
    objects: dict[str, Any] = {}
    sections = [reward_section(term, objects) for term in as_list(reward)]
    tree = {"model": "embedded", "data": {"type": "word_problems"}, "rewards": sections}
    columns = columns_of([group.prompt.source_row for group in groups])
    function = make_reward_function(
        validate_tree(tree, source="score").rewards, objects=objects, columns=[*columns, "answer"]
    )
    try:
        return Scores(groups, grade_groups(groups, function))
    finally:
        function.close()


def advantages(scores: Scores, algorithm: str = "grpo", **choices: Any) -> Float[Tensor, "P G"]:
    """The advantage of every completion from the rewards of its group, by a row of the table of algorithms [P, G].

        grpo:  A_i = (r_i - mean(r)) / (std(r) + epsilon)         DeepSeekMath, arXiv:2402.03300

    ``choices`` replace the row's own, such as scale_by_std=False. Raises ConfigError for an unknown algorithm.
    """
    sizes = {len(group.completions) for group in scores.groups}
    if len(sizes) != 1:
        raise ConfigError(f"advantages: groups have {sorted(sizes)} completions; all must have the same number")
    try:
        return advantage_of(algorithm, **choices)(stack_rewards(scores.groups, scores.rewards))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"advantages: {error}") from None
