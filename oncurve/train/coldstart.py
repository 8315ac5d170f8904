"""How does a base model come from nothing: supervised fine-tuning on imperfect demonstrations, with its provenance?"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from oncurve.data.word_problems import demonstrations
from oncurve.errors import CheckpointError, DataError, TrainingError
from oncurve.train.tiny_model import tiny_model, tiny_tokenizer

Pair = tuple[str, str]
"""A prompt and its completion."""

Progress = Callable[[int, int, float], None]
"""Called after each update with its number from 1, the number of updates, and the loss per token."""

IGNORED = -100
"""The label of a token without a loss."""

BUCKET_BATCHES = 32
"""Batches whose rows are sorted by length together: rows of one batch are then about equally long."""


@dataclass(frozen=True, slots=True)
class _Row:
    token_ids: list[int]
    num_prompt_tokens: int


def coldstart(
    output: Path,
    *,
    seed: int = 0,
    updates: int = 1200,
    batch_size: int = 16,
    num_demonstrations: int = 20_000,
    learning_rate: float = 3e-3,
    hidden_size: int = 192,
    num_layers: int = 4,
    levels: tuple[int, ...] = (1, 2),
    habit: float = 0.6,
    wrong_key_fraction: float = 0.5,
    command: str | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """Build a base model for word problems and save it under ``output``.

    The defaults are the settings of the base that comes with the package. The seed decides the weights, the
    demonstrations and their order.
    """
    settings = {key: value for key, value in locals().items() if key not in ("output", "command", "on_progress")}
    pairs = demonstrations(
        num_demonstrations, seed=seed, levels=levels, habit=habit, wrong_key_fraction=wrong_key_fraction
    )
    tokenizer = tiny_tokenizer(prompt + completion for prompt, completion in pairs)
    model = tiny_model(tokenizer, seed=seed, hidden_size=hidden_size, num_layers=num_layers)
    fine_tune(
        model,
        tokenizer,
        pairs,
        seed=seed,
        updates=updates,
        batch_size=batch_size,
        learning_rate=learning_rate,
        on_progress=on_progress,
    )
    _save(
        output,
        model,
        tokenizer,
        settings=settings,
        command=command or f"oncurve coldstart --output {output.name} --seed {seed}",
    )
    return output


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    *,
    seed: int,
    updates: int,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    on_progress: Progress | None = None,
) -> None:
    if not pairs:
        raise DataError("cold start: there are no demonstrations")
    rows = _tokenize(pairs, tokenizer)
    optimizers = _optimizers(model, learning_rate)
    batches = _batches(rows, batch_size, seed=seed)
    model.train()
    for update in range(1, updates + 1):
        token_ids, labels = _pad(next(batches), tokenizer.pad_token_id)
        logits = model(input_ids=token_ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        if not math.isfinite(loss.item()):
            raise TrainingError(f"cold start: the loss of update {update} is {loss.item()}; lower learning_rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * _schedule(update, updates)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if on_progress is not None:
            on_progress(update, updates, loss.item())
    model.eval()


def _optimizers(model: PreTrainedModel, learning_rate: float) -> list[torch.optim.Optimizer]:
    embedding = {id(parameter) for parameter in model.get_input_embeddings().parameters()}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or id(p) in embedding]
    return [
        torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _schedule(update: int, updates: int) -> float:
    warm_up = max(1, updates // 20)
    return min(update / warm_up, max(0.05, (updates - update) / max(1, updates - warm_up)))


def _tokenize(pairs, tokenizer):
    rows = []
    for prompt, completion in pairs:
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        completion_ids = tokenizer(completion, add_special_tokens=False).input_ids
        rows.append(_Row([*prompt_ids, *completion_ids, tokenizer.eos_token_id], len(prompt_ids)))
    return rows


def _batches(rows, batch_size, *, seed) -> Iterator[list[_Row]]:
    rng = Random(f"batches {seed}")
    while True:
        order = rng.sample(rows, len(rows))
        for start in range(0, len(order), batch_size * BUCKET_BATCHES):
            bucket = sorted(order[start : start + batch_size * BUCKET_BATCHES], key=lambda row: len(row.token_ids))
            batches = [bucket[i : i + batch_size] for i in range(0, len(bucket), batch_size)]
            yield from rng.sample(batches, len(batches))


def _pad(rows, pad_id):
    width = max(len(row.token_ids) for row in rows)
    token_ids = torch.full((len(rows), width), pad_id)
    labels = torch.full((len(rows), width), IGNORED)
    for i, row in enumerate(rows):
        ids = torch.tensor(row.token_ids)
        token_ids[i, : len(ids)] = ids
        labels[i, row.num_prompt_tokens : len(ids)] = ids[row.num_prompt_tokens :]
    return token_ids, labels


def _save(output, model, tokenizer, *, settings, command):
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
