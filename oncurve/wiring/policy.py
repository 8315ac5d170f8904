"""Which policy is trained, and what samples from it?"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from oncurve.config.schema import Config
from oncurve.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from oncurve.rollouts.base import Sampler, SamplingParams
    from oncurve.train.policy import OptimizerSettings, Policy


def make_sampling(config: Config) -> SamplingParams:
    """How completions are drawn in training."""
    from oncurve.rollouts.base import SamplingParams

    return SamplingParams(seed=config.run.seed, **config.rollouts.model_dump(exclude={"type", "max_rows"}))


def evaluation_sampling(config: Config) -> SamplingParams:
    """How completions are drawn when the model is measured: random numbers apart from those of training."""
    from dataclasses import replace

    return replace(
        make_sampling(config),
        temperature=config.evaluation.temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=config.run.seed + 1_000_003,
    )


def make_sampler(config: Config) -> Sampler:
    """What samples completions."""
    params = make_sampling(config)
    match config.rollouts.type:
        case "engine":
            from oncurve.rollouts.engine.engine import Engine

            return Engine(params, max_rows=config.rollouts.max_rows)
        case "transformers":
            from oncurve.rollouts.hf import HfSampler

            return HfSampler(params, max_rows=config.rollouts.max_rows)


def make_device(name: str) -> torch.device:
    """The device of a recipe; auto takes a GPU if there is one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"policy.device is {name!r}, which this machine does not have: {error}") from None
    return device


def make_policy(config: Config, *, with_reference: bool = False) -> Policy:
    """The model of the recipe, ready to be trained; with a copy of it as reference if the algorithm needs one."""
    from oncurve.train.checkpoint import load_model
    from oncurve.train.policy import Policy

    device = make_device(config.policy.device)
    model, tokenizer = load_model(
        config.model,
        device=device,
        revision=config.policy.revision,
        trust_remote_code=config.policy.trust_remote_code,
    )
    reference = copy.deepcopy(model).requires_grad_(False) if with_reference else None
    compute = config.policy.compute_type
    if compute == "auto":
        compute = "bfloat16" if device.type == "cuda" else "float32"
    return Policy(
        model,
        tokenizer,
        optimizer=make_optimizer(config),
        temperature=config.rollouts.temperature,
        compute_type=compute,
        tokens_per_microbatch=config.policy.tokens_per_microbatch,
        gradient_checkpointing=config.policy.gradient_checkpointing,
        packing=config.policy.packing,
        reference=reference,
    )


def make_optimizer(config: Config) -> OptimizerSettings:
    """AdamW's settings, with the number of updates that the schedule spans."""
    from oncurve.train.policy import OptimizerSettings

    chosen = config.optimizer.model_dump(exclude={"beta1", "beta2"})
    return OptimizerSettings(
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        total_updates=config.run.steps * config.updates_per_step,
        **chosen,
    )
