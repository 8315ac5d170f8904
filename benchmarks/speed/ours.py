"""Training steps of oncurve for a benchmark, one at a time: from a recipe, with the parts of the loop."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from models import MEAN_TOKENS, SHAPES, CoinReward, build, make_prompts

from oncurve.core.batch import Batch, collate, stack_rewards
from oncurve.core.errors import ConfigError
from oncurve.core.grading import score
from oncurve.core.records import Group
from oncurve.core.sampler import SamplingRequest
from oncurve.recipe.load import parse_config
from oncurve.recipe.schema import Config
from oncurve.run.builder import make_algorithm, make_policy, make_sampler

GROUP_SIZE, PROMPTS, NEW_TOKENS = 8, 8, 128
LEARNING_RATE = 1e-6
LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Work:
    """What has to be done in a step, whoever does it."""

    model: str = "S"
    case: str = "full"
    """full: every completion has the most tokens; ragged: geometric lengths."""
    prompt_tokens: int = 48
    training: str = "full"
    """full: every weight; lora: adapters of rank 16 on every matrix of the layers."""
    kl_coef: float = 0.0
    updates: int = 1
    """Optimizer updates per batch of rollouts, each on as many of its completions."""
    group_size: int = GROUP_SIZE
    prompts: int = PROMPTS
    new_tokens: int = NEW_TOKENS

    @property
    def completions(self) -> int:
        """Completions in a step."""
        return self.group_size * self.prompts

    @property
    def name(self) -> str:
        """Model, lengths and prompt, for the name of a file."""
        return f"{self.model}-{self.case}-{self.prompt_tokens}"

    @property
    def variant(self) -> str:
        """What is trained, for the name of a file."""
        kl = "-kl" if self.kl_coef else ""
        return f"{self.training}{kl}{f'-{self.updates}updates' if self.updates > 1 else ''}"

    def build(self, folder: Path) -> Path:
        """The checkpoint that everybody starts from."""
        mean = MEAN_TOKENS if self.case == "ragged" else None
        length = self.prompt_tokens + self.new_tokens
        return build(folder, SHAPES[self.model], mean_tokens=mean, max_length=length)


def our_config(folder: Path, work: Work, **policy: Any) -> Config:
    """The recipe of a piece of work. ``policy`` replaces keys of the recipe's section of that name."""
    if work.training == "lora":
        policy["lora"] = {"rank": LORA_RANK}
    recipe = {
        "model": str(folder),
        "data": {"type": "word_problems"},
        "rewards": [{"type": "r1_zero"}],  # stands for the coin, which the benchmark hands in itself
        "algorithm": {"type": "dapo", "group_size": work.group_size, "kl_coef": work.kl_coef},
        "rollouts": {"type": "engine", "max_completion_tokens": work.new_tokens},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "policy": policy,
        "run": {
            "steps": 1000,
            "prompts_per_step": work.prompts,
            "completions_per_update": work.completions // work.updates,
        },
    }
    try:
        return parse_config(yaml.safe_dump(recipe), source="the benchmark's recipe")
    except ConfigError as error:
        if work.training == "lora" and "lora" in str(error):
            raise SystemExit(f"this version of oncurve has no policy.lora as the benchmark sets it: {error}") from None
        raise


class Ours:
    """One step at a time, timed by phase."""

    def __init__(self, config: Config, work: Work) -> None:
        self.algorithm, self.sampler = make_algorithm(config), make_sampler(config)
        self.policy = make_policy(config, with_reference=self.algorithm.needs_reference)
        self.prompts = make_prompts(self.policy.tokenizer, count=work.prompts, num_tokens=work.prompt_tokens)
        self.work, self.reward = work, CoinReward()
        self.tokens: list[int] = []
        """Completion tokens of each step."""

    def step(self, number: int) -> dict[str, float]:
        """Sample, grade, train; the seconds of the whole and of each phase."""
        started = time.perf_counter()
        groups = self.sample(number)
        sampled = time.perf_counter()
        graded = score(groups, self.reward)
        rewards = stack_rewards(groups, graded)
        done = time.perf_counter()
        batch = collate(groups, self.algorithm.advantages(rewards))
        batch = self.policy.annotate(
            batch,
            old=self.algorithm.needs_old(self.work.updates),
            entropy=self.algorithm.needs_entropy,
            reference=self.algorithm.needs_reference,
        )
        batch = self.algorithm.prepare(batch, rewards)
        annotated = time.perf_counter()
        self.train(batch)
        ended = time.perf_counter()
        self.tokens.append(sum(len(completion.token_ids) for group in groups for completion in group.completions))
        return {
            "step": ended - started,
            "sample": sampled - started,
            "grade": done - sampled,
            "old_reference": annotated - done,
            "train": ended - done,
        }

    def sample(self, number: int) -> Sequence[Group]:
        """The groups of a step."""
        self.sampler.load_weights(self.policy, version=number)
        return self.sampler.sample(SamplingRequest(self.prompts, self.work.group_size, step=number))

    def train(self, batch: Batch) -> None:
        """The updates of a step."""
        for update in batch.split(len(batch) // self.work.updates):
            trained = update if self.algorithm.needs_every_row else update.with_signal()
            for microbatch in self.policy.microbatches(trained):
                logprobs, entropy = self.policy.logprobs(microbatch)
                loss, _ = self.algorithm.loss(logprobs, entropy, microbatch.to(logprobs.device))
                self.policy.backward(loss)
            self.policy.update()


def add_work_arguments(parser: argparse.ArgumentParser, *, case: str = "full", is_trained: bool = True) -> None:
    """The work of a benchmark: model, completions, prompts, and what of the model is trained."""
    parser.add_argument("--model", choices=sorted(SHAPES), default="S")
    parser.add_argument("--case", choices=["full", "ragged"], default=case)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=128)
    if is_trained:
        parser.add_argument("--training", choices=["full", "lora"], default="full")


def work_of(arguments: argparse.Namespace) -> Work:
    """The work that the arguments name; a benchmark need not ask for all of it."""
    given = {"kl_coef" if name == "kl" else name: value for name, value in vars(arguments).items()}
    return Work(**{field.name: given[field.name] for field in fields(Work) if field.name in given})


def add_common_arguments(parser: argparse.ArgumentParser, *, steps: int, warmup: int = 1) -> None:
    """What every comparison of steps is asked: steps, warm-up, kernels."""
    parser.add_argument("--steps", type=int, default=steps, help="measured steps, after the warm-up")
    parser.add_argument("--warmup", type=int, default=warmup, help="steps before them that are left out")
    parser.add_argument("--kernels", choices=["on", "off"], default="on", help="oncurve's compiled kernels")


def prepare(arguments: argparse.Namespace) -> None:
    """Threads and kernels as asked. Call it before anything of oncurve is built."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    os.environ["ONCURVE_KERNELS"] = "1" if arguments.kernels == "on" else "0"
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*checkpointing.*")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def kernels_of(arguments: argparse.Namespace) -> str:
    """Which code multiplied and where, for the name of a file."""
    device = getattr(arguments, "device", "cpu")
    place = "" if device == "cpu" else f"-{device.split(':')[0]}"
    return f"{'kernels' if arguments.kernels == 'on' else 'torch'}{place}"
