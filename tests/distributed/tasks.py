"""What the processes of these tests do: the same training on any number of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, Literal

import torch
from tiny_models import make_trained_policy
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from oncurve.algorithm.precision import use_dither
from oncurve.algorithm.presets import build
from oncurve.core.batch import Batch, collate
from oncurve.core.records import Completion, Group, Mean, Prompt
from oncurve.policy.distributed import Processes
from oncurve.policy.lora import add_adapter
from oncurve.policy.settings import LoraSettings, OptimizerSettings
from oncurve.policy.sharding import Sharding, ZeroSettings
from oncurve.policy.trained_policy import Parallelism, TrainedPolicy

VOCABULARY, GROUP_SIZE, LONGEST, PROMPTS, UPDATES = 64, 4, 12, 10, 5


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Two blocks of 32 numbers, weights large enough for distributions that depend on the context."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def in_double(model: Any) -> Any:
    """The model in float64 throughout, its norms included."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model.double()


def make_policy(
    processes: Processes,
    way: Literal["ddp", "fsdp", "deepspeed"],
    *,
    double: bool,
    lora: bool,
    reshard: bool = True,
    degree: int | None = None,
    settings: ZeroSettings | None = None,
    publishes: bool = False,
    dither: int | None = None,
    **options: Any,
) -> TrainedPolicy:
    """The same policy in every process, with a reference where the model has no adapter.

    With a seed of a ``dither`` it computes with such copies in bfloat16.
    """
    model: Any = in_double(tiny_llama()) if double else tiny_llama()
    if dither is not None:
        use_dither(model, dither)
    reference = None if lora else copy.deepcopy(model).requires_grad_(False)
    adapter = add_adapter(model, LoraSettings(rank=4, alpha=8.0), base="", seed=3) if lora else None
    tokenizer: Any = None
    sharding = Sharding(reshard_after_forward=reshard, degree=degree) if way == "fsdp" else settings
    place: Any = "device" if not publishes else "cpu" if processes.is_main else "none"
    return make_trained_policy(
        model,
        tokenizer,
        # An epsilon far above rounding: with 1e-8 Adam makes a whole step of a gradient that is only rounding.
        optimizer=OptimizerSettings(learning_rate=1e-3, epsilon=1e-5, max_gradient_norm=0.5, weight_decay=0.1),
        compute_type="float64" if double else "float32" if dither is None else "bfloat16",
        tokens_per_microbatch=50,
        reference=reference,
        adapter=adapter,
        parallelism=Parallelism(processes, sharding, place),
        **options,
    )


def ragged_groups() -> list[Group]:
    """Groups of random tokens; prompts and completions of very different lengths."""
    draw = random.Random(0)
    groups = []
    for index in range(PROMPTS):
        prompt = Prompt("", tuple(draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, 9))), index)
        completions = []
        for place in range(GROUP_SIZE):
            ids = tuple(draw.randrange(2, VOCABULARY) for _ in range(draw.randint(1, LONGEST)))
            logprobs = tuple(draw.uniform(-6.0, -0.1) for _ in ids)
            reason: Any = draw.choice(("stop", "stop", "length"))
            completions.append(Completion(prompt.prompt_ids, ids, "", logprobs, reason, 0, place))
        groups.append(Group(prompt, tuple(completions)))
    return groups


def batch_of(*, one_row: bool) -> Batch:
    """The rows of five updates; with ``one_row`` each has a single one to learn from."""
    advantages = torch.randn(PROMPTS, GROUP_SIZE, generator=torch.Generator().manual_seed(1))
    if one_row:
        advantages[:, 1:], advantages[1::2] = 0.0, 0.0
    return collate(ragged_groups(), advantages, mask_truncated=not one_row)


def train(
    processes: Processes,
    *,
    way: Literal["ddp", "fsdp", "deepspeed"],
    double: bool,
    lora: bool,
    kl_coef: float = 0.1,
    one_row: bool = False,
    preset: str = "grpo",
    policy: TrainedPolicy | None = None,
    span: tuple[int, int] = (0, UPDATES),
    after: Callable[[TrainedPolicy], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Five updates as the loop makes them, or a span of them; the weights at their end and how the work was divided."""
    policy = policy or make_policy(processes, way, double=double, lora=lora, **options)
    algorithm = build(preset, group_size=GROUP_SIZE, max_completion_tokens=LONGEST, kl_coef=kl_coef)
    statistics: dict[str, Mean] = {}
    rows, tokens = 0, 0
    batch = policy.annotate(batch_of(one_row=one_row), old=True, entropy=False, reference=algorithm.needs_reference)
    for update in list(batch.split(len(batch) // UPDATES))[slice(*span)]:
        trained = update if algorithm.needs_every_row else update.with_signal()
        for microbatch in policy.microbatches(trained):
            rows, tokens = rows + len(microbatch), tokens + int(microbatch.mask.sum())
            logprobs, entropy = policy.logprobs(microbatch)
            loss, measured = algorithm.loss(logprobs, entropy, microbatch.to(logprobs.device))
            policy.backward(loss)
            add(statistics, measured)
        add(statistics, policy.update())
    if after is not None:
        after(policy)
    weights = {name: policy.backend.full_tensor(p).clone() for name, p in policy.trained_model.named_parameters()}
    policy.publish()
    has_all = not policy.backend.is_divided or policy.model is not policy.trained_model
    shown = {name: p.detach().clone() for name, p in policy.model.named_parameters()} if has_all else None
    return {
        "weights": weights,
        "shown": shown,
        "statistics": {key: mean.value for key, mean in processes.add_means(statistics).items()},
        "rows": rows,
        "tokens": tokens,
        "numbers_held": sum(local(p).numel() for p in policy.trained_model.parameters()),
    }


def local(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter."""
    from torch.distributed.tensor import DTensor

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def add(sums: dict[str, Mean], statistics: dict[str, Mean]) -> None:
    for key, mean in statistics.items():
        sums[key] = sums[key] + mean if key in sums else mean
