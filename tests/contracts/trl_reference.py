"""TRL's own code on plain tensors: its loss method called on a light object, its inline formulas cut from its source.

Nothing of TRL is written down here: what is compared with is computed by the installed package.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import math
import textwrap
import warnings
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from oncurve.core.batch import Batch, Rewards, Size

VERSION = "1.16.0"
try:
    found = importlib.metadata.version("trl")
    REASON = "" if found == VERSION else f"this compares with TRL {VERSION}, installed is {found}"
except importlib.metadata.PackageNotFoundError:
    REASON = f"TRL is not installed; install it with: pip install -c constraints.txt trl=={VERSION}"


@cache
def module_of(algorithm: str) -> Any:
    """TRL's module of a trainer, imported when it is first used: every process collects every test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"trl.trainer.{algorithm}_trainer")


def grpo() -> Any:
    """TRL's class for GRPO."""
    return module_of("grpo").GRPOTrainer


def rloo() -> Any:
    """TRL's class for RLOO."""
    return module_of("rloo").RLOOTrainer


@dataclass(frozen=True)
class Rows:
    """Random ragged completions of P prompts by G, as both libraries want them."""

    logprobs: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor
    group_size: int

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        dtype: torch.dtype = torch.float64,
        prompts: int = 3,
        group_size: int = 4,
        spread: float = 0.3,
    ) -> Rows:
        draw = torch.Generator().manual_seed(seed)
        rows, width = prompts * group_size, 17

        def noise() -> Tensor:
            return torch.randn(rows, width, generator=draw, dtype=torch.float64)

        old = -torch.rand(rows, width, generator=draw, dtype=torch.float64) * 4
        lengths = torch.randint(1, width + 1, (rows,), generator=draw)
        tensors = {
            "logprobs": old + spread * noise(),
            "old": old,
            "ref": old + spread * noise(),
            "sampler": old + spread * noise(),
            "entropy": noise().abs(),
            "advantages": torch.randn(rows, generator=draw, dtype=torch.float64),
        }
        mask = torch.arange(width)[None, :] < lengths[:, None]
        return cls(**{key: value.to(dtype) for key, value in tensors.items()}, mask=mask, group_size=group_size)

    def select(self, rows: slice) -> Rows:
        """Some of the rows."""
        picked = {key: value[rows] for key, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **picked)

    def batch(self, *, with_old: bool = True, size: Size | None = None, first_row: int = 0) -> Batch:
        """The rows as a microbatch; its size is that of an update of its own unless given."""
        count, width = self.mask.shape
        groups = (torch.arange(count) + first_row) // self.group_size
        lengths = self.mask.sum(dim=1)
        return Batch(
            prompt_ids=torch.zeros(count, 1, dtype=torch.long),
            prompt_lengths=torch.ones(count, dtype=torch.long),
            completion_ids=torch.zeros(count, width, dtype=torch.long),
            mask=self.mask,
            completion_lengths=lengths,
            group_ids=groups,
            advantages=self.advantages,
            sampler_logprobs=self.sampler,
            size=size or Size(count, int(lengths.sum()), len(groups.unique())),
            old_logprobs=self.old if with_old else None,
            ref_logprobs=self.ref,
        )


def trainer(**options: Any) -> SimpleNamespace:
    """The attributes that TRL's loss reads, with the defaults of its configuration unless given."""
    values = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "top_entropy_quantile": 1.0,
        "max_completion_length": 50,
        "entropy_coef": 0.0,
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
        "off_policy_mask_threshold": None,
    }
    arguments = {
        "use_bias_correction_kl": True,
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    values |= {key: value for key, value in options.items() if key in values}
    arguments |= {key: value for key, value in options.items() if key in arguments}
    if unknown := options.keys() - values.keys() - arguments.keys():
        raise TypeError(f"TRL's loss reads no {unknown}")
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        reduce=lambda tensor, reduction: tensor,
        gather=lambda tensor: tensor,
        pad_across_processes=lambda tensor, dim, pad_index: tensor,
    )
    made = SimpleNamespace(
        **values,
        args=SimpleNamespace(**arguments),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=values["entropy_coef"] != 0,
        _metrics={"train": _Lists(), "eval": _Lists()},
    )
    made.get_off_policy_mask = grpo().get_off_policy_mask
    made.get_gamma_weights = grpo().get_gamma_weights
    made.get_high_entropy_mask = lambda entropies, mask, threshold: grpo().get_high_entropy_mask(
        made, entropies, mask, threshold
    )
    return made


class _Lists(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


def loss(
    rows: Rows, *, with_old: bool = True, num_items: int | None = None, weights: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """TRL's loss of some rows, and its gradient with respect to log-probabilities and entropies."""
    made = trainer(**options)
    logprobs, entropy = rows.logprobs.clone().requires_grad_(), rows.entropy.clone().requires_grad_()
    made._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logprobs, entropy, None)
    ids = torch.zeros(rows.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": rows.mask.to(rows.logprobs.dtype),
        "advantages": rows.advantages,
        "ref_per_token_logps": rows.ref,
        "num_items_in_batch": torch.tensor(num_items or int(rows.mask.sum())),
        "importance_sampling_ratio": weights,
        "sampling_per_token_logps": rows.sampler,
    }
    if with_old:
        inputs["old_per_token_logps"] = rows.old
    value = grpo()._compute_loss(made, made.model, inputs)
    gradients = torch.autograd.grad(value, (logprobs, entropy), allow_unused=True, materialize_grads=True)
    return value.detach(), *gradients


def rloo_gradient(rows: Rows) -> Tensor:
    """The gradient of TRL's RLOO loss with respect to log-probabilities, on policy."""
    made = trainer()
    logprobs = rows.logprobs.clone().requires_grad_()
    made._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logprobs, rows.entropy, None)
    mask = rows.mask.to(logprobs.dtype)
    ids = torch.zeros(rows.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "old_logps": (logprobs.detach() * mask).sum(dim=1),
        "advantages": rows.advantages,
    }
    value = rloo()._compute_loss(made, made.model, inputs)
    return torch.autograd.grad(value, logprobs)[0]


def advantages(per_function: Tensor, *, group_size: int, algorithm: str = "grpo", **options: Any) -> Tensor:
    """TRL's advantages [P, G] of rewards [P * G, K], NaN where a function gave none: the lines of its own source."""
    owner = grpo() if algorithm == "grpo" else rloo()
    names = {
        "self": SimpleNamespace(
            reward_weights=options.pop("weights", torch.ones(per_function.shape[1], dtype=per_function.dtype)),
            reward_funcs=[None] * per_function.shape[1],
            reward_clip_range=None,
            beta=options.pop("beta", 0.0),
            multi_objective_aggregation=options.pop("multi_objective_aggregation", "sum_then_normalize"),
            scale_rewards=options.pop("scale_rewards", "group"),
            normalize_advantages=False,
        ),
        "rewards_per_func": per_function,
        "num_generations": group_size,
        "device": per_function.device,
        "gather": lambda tensor: tensor,
        **options,
    }
    return _run_lines(
        module_of("grpo" if algorithm == "grpo" else "rloo"),
        owner._generate_and_score_completions,
        first="unscorable_mask = torch.isnan(rewards_per_func)",
        last="advantages = torch.nan_to_num(advantages, nan=0.0)",
        names=names,
    )["advantages"].reshape(-1, group_size)


def importance_weights(rows: Rows, *, mode: str, low: float | None, high: float | None) -> Tensor:
    """TRL's weights for the gap between sampler and trainer: the lines of its own source."""
    names = {
        "self": SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        ),
        "completion_mask": rows.mask.to(rows.old.dtype),
        "tool_mask": None,
        "old_per_token_logps": rows.old,
        "sampling_per_token_logps": rows.sampler,
        "math": math,
    }
    return _run_lines(
        module_of("grpo"),
        grpo()._generate_and_score_completions,
        first="if self.use_vllm and self.vllm_importance_sampling_correction:",
        last="# Compute the per-token log probabilities for the reference model",
        names=names,
    )["vllm_importance_sampling_ratio"]


def _run_lines(module: Any, method: Any, *, first: str, last: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the lines of a method from the one that starts with ``first`` to the one that starts with ``last``."""
    lines = inspect.getsource(method).splitlines()
    start = next(place for place, line in enumerate(lines) if line.strip().startswith(first))
    stop = next(place for place, line in enumerate(lines) if place >= start and line.strip().startswith(last))
    exec(textwrap.dedent("\n".join(lines[start : stop + 1])), vars(module), names)
    return names


def as_rewards(per_function: Tensor, *, group_size: int) -> Rewards:
    """The same rewards for oncurve: the sum as the value, each function as a part, ungraded where there is none."""
    graded = ~per_function.isnan().all(dim=1)
    filled = per_function.nan_to_num(nan=0.0)

    def shaped(values: Tensor) -> Tensor:
        return values.reshape(-1, group_size)

    return Rewards(
        values=shaped(filled.sum(dim=1)),
        graded=shaped(graded),
        num_tokens=torch.ones(len(filled) // group_size, group_size, dtype=torch.long),
        is_truncated=torch.zeros(len(filled) // group_size, group_size, dtype=torch.bool),
        parts={f"part_{place}": shaped(filled[:, place]) for place in range(filled.shape[1])},
    )
