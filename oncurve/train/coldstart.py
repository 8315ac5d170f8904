"""How does a base model come from nothing: supervised fine-tuning on imperfect demonstrations, with its provenance?"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from oncurve.data.word_problems import demonstrations, lessons
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


VERSIONED = ("torch", "transformers", "tokenizers")
PROVENANCE = "provenance.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class ColdStart:
    """How a base model is made. The defaults made the one that comes with the package."""

    lesson_updates: int = 450
    """Updates on lessons: worked steps without tags. Demonstrations alone drown the copying of numbers in noise."""
    demonstration_updates: int = 350
    """Updates on imperfect demonstrations, after the lessons."""
    batch_size: int = 16
    """Rows of one update."""
    num_texts: int = 10_000
    """Different lessons, and as many demonstrations."""
    learning_rate: float = 3e-3
    levels: tuple[int, ...] = (1, 2)
    """Levels of the problems."""
    habit: float = 0.6
    """How often a demonstration comes from the source whose register its question has."""
    wrong_key_fraction: float = 0.5
    """How many of the answer keys are wrong."""
    hidden_size: int = 192
    num_layers: int = 4


@dataclass(frozen=True, slots=True)
class _Row:
    token_ids: list[int]
    """Prompt, completion and end token."""
    num_prompt_tokens: int


def coldstart(
    output: Path,
    *,
    seed: int = 0,
    settings: ColdStart | None = None,
    command: str | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """Build a base model for word problems from nothing and save it under ``output``, with its provenance.

    The seed decides the weights, the texts and their order.

    Raises CheckpointError if ``output`` exists, TrainingError if the loss is not finite.
    """
    settings = settings or ColdStart()
    _refuse_existing(output)
    reading = lessons(settings.num_texts, seed=seed, levels=settings.levels)
    imitating = demonstrations(
        settings.num_texts,
        seed=seed,
        levels=settings.levels,
        habit=settings.habit,
        wrong_key_fraction=settings.wrong_key_fraction,
    )
    tokenizer = tiny_tokenizer(prompt + completion for prompt, completion in imitating)
    model = tiny_model(tokenizer, seed=seed, hidden_size=settings.hidden_size, num_layers=settings.num_layers)
    batches = chain(
        islice(_batches(_tokenize(reading, tokenizer), settings.batch_size, seed=seed), settings.lesson_updates),
        islice(
            _batches(_tokenize(imitating, tokenizer), settings.batch_size, seed=seed), settings.demonstration_updates
        ),
    )
    updates = settings.lesson_updates + settings.demonstration_updates
    _fit(model, batches, updates=updates, learning_rate=settings.learning_rate, on_progress=on_progress)
    facts = {
        "command": command or f"oncurve coldstart --output {output.name} --seed {seed}",
        "seed": seed,
        "settings": asdict(settings),
    }
    return _save(output, model, tokenizer, facts)


def continue_coldstart(
    model_path: Path,
    pairs: Sequence[Pair],
    output: Path,
    *,
    seed: int = 0,
    updates: int = 300,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    command: str | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """More supervised training of a checkpoint on given pairs, saved under ``output``."""
    _refuse_existing(output)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    batches = islice(_batches(_tokenize(pairs, tokenizer), batch_size, seed=seed), updates)
    _fit(model, batches, updates=updates, learning_rate=learning_rate, on_progress=on_progress)
    facts = {
        "command": command,
        "seed": seed,
        "settings": {
            "model_path": model_path.name,
            "updates": updates,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "num_pairs": len(pairs),
        },
    }
    return _save(output, model, tokenizer, facts)


def _fit(
    model: PreTrainedModel,
    batches: Iterator[list[_Row]],
    *,
    updates: int,
    learning_rate: float,
    on_progress: Progress | None,
) -> None:
    """Minimise the loss per completion token, one update per batch."""
    optimizers = _optimizers(model)
    model.train()
    for update, rows in enumerate(batches, start=1):
        token_ids, labels = _pad(rows, model.config.pad_token_id)
        logits = model(input_ids=token_ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        if not math.isfinite(loss.item()):
            raise TrainingError(f"cold start: the loss of update {update} is {loss.item()}; lower learning_rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * _share_of_learning_rate(update, updates)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if on_progress is not None:
            on_progress(update, updates, loss.item())
    model.eval()


def _optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, with updates as large as AdamW's; AdamW for the embedding, norms and biases."""
    embeddings = {id(weight) for weight in model.get_input_embeddings().parameters()}
    matrices, others = [], []
    for weight in model.parameters():
        (matrices if weight.ndim == 2 and id(weight) not in embeddings else others).append(weight)
    return [
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _share_of_learning_rate(update: int, updates: int) -> float:
    """Up over the first twentieth of the updates, then down in a straight line to a twentieth."""
    warm_up = max(1, updates // 20)
    return min(update / warm_up, max(0.05, (updates - update) / max(1, updates - warm_up)))


def _tokenize(pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase) -> list[_Row]:
    if not pairs:
        raise DataError("cold start: there is not one pair of prompt and completion; give at least one")
    rows = []
    for prompt, completion in pairs:
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        completion_ids = tokenizer(completion, add_special_tokens=False).input_ids
        rows.append(_Row([*prompt_ids, *completion_ids, tokenizer.eos_token_id], len(prompt_ids)))
    return rows


def _batches(rows: Sequence[_Row], batch_size: int, *, seed: int) -> Iterator[list[_Row]]:
    """Rows in a new order each pass, without an end; the rows of one batch are about equally long."""
    rng = Random(f"batches {seed}")
    while True:
        order = rng.sample(rows, len(rows))
        for start in range(0, len(order), batch_size * BUCKET_BATCHES):
            bucket = sorted(order[start : start + batch_size * BUCKET_BATCHES], key=lambda row: len(row.token_ids))
            batches = [bucket[first : first + batch_size] for first in range(0, len(bucket), batch_size)]
            yield from rng.sample(batches, len(batches))


def _pad(rows: Sequence[_Row], pad_id: int) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Token ids, padded on the right, and labels that ignore the prompt and the padding."""
    width = max(len(row.token_ids) for row in rows)
    token_ids = torch.full((len(rows), width), pad_id)
    labels = torch.full((len(rows), width), IGNORED)
    for place, row in enumerate(rows):
        ids = torch.tensor(row.token_ids)
        token_ids[place, : len(ids)] = ids
        labels[place, row.num_prompt_tokens : len(ids)] = ids[row.num_prompt_tokens :]
    return token_ids, labels


def _refuse_existing(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output}: exists already; choose a new folder or remove it")


def _save(output: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]) -> Path:
    """Write the checkpoint beside its place, then move it there: ``output`` is complete or absent."""
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
        unfinished = Path(folder) / "checkpoint"
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        provenance = facts | {
            "commit": _commit(),
            "sha256": {WEIGHTS: hashlib.sha256((unfinished / WEIGHTS).read_bytes()).hexdigest()},
            "num_parameters": sum(weight.numel() for weight in model.parameters()),
            "num_threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version()} | {name: version(name) for name in VERSIONED},
        }
        (unfinished / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
        for path in unfinished.iterdir():
            path.chmod(0o644)
        unfinished.replace(output)
    return output


def _commit() -> str | None:
    """The commit this package was run from; None outside its own repository."""
    package = Path(__file__).parents[1]
    if not (package.parent / ".git").exists():
        return None
    asked = subprocess.run(
        ["git", "-C", str(package), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() if asked.returncode == 0 else None
