"""Supervised training of a base model from random weights on imperfect demonstrations, with its provenance."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve.coldstart.tiny_model import tiny_model, tiny_tokenizer
from oncurve.errors import CheckpointError, DataError, TrainingError, listed
from oncurve.observe.manifest import describe_run
from oncurve.policy.model_folder import load_model, save_model
from oncurve.tasks.calculator_problems import TAGS as CALL_TAGS
from oncurve.tasks.calculator_problems import calculator_demonstrations, calculator_lessons
from oncurve.tasks.guess_number import game_demonstrations, game_lessons
from oncurve.tasks.maze import maze_demonstrations, maze_lessons
from oncurve.tasks.program_problems import program_demonstrations, program_lessons
from oncurve.tasks.word_problems import demonstrations, lessons

Task = Literal["word_problems", "programs", "calculator", "calculator_chains", "guess_number", "maze"]
"""What the texts are about."""

Part = tuple[str, bool]
"""A text, and whether it is learned from: what a tool or an environment says is not."""
Pair = tuple[str, "str | tuple[Part, ...]"]
"""A prompt and its completion, without the end token: one text, or several of them."""

Stage = tuple[Sequence[Pair], int]
"""Texts, and the number of updates to spend on them."""

Progress = Callable[[int, int, float], None]
"""Called after each update with its number from 1, the number of updates, and the loss per completion token."""

MORE_TAGS: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("calculator", "calculator_chains", "guess_number", "maze"), CALL_TAGS
)
"""Tags that are tokens of a task's tokenizer, besides those of all."""

UPDATES = 800
"""Updates that made the model in this package."""

TASK_UPDATES = {"calculator": 900, "calculator_chains": 900}
"""Of tasks that take another number."""

IGNORED = -100
"""The label of a token without a loss."""

BUCKET_BATCHES = 32
"""So many batches are sorted by length together; the rows of one batch are then about equally long."""

PROVENANCE = "provenance.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class ColdStart:
    """What a base model is made of; the defaults made the one in this package."""

    lesson_fraction: float = 0.56
    """Share of the updates that goes to lessons, before the demonstrations. With demonstrations alone the noise of
    the wrong answer keys drowns what little there is to learn from about copying numbers."""
    num_texts: int = 10_000
    """Different lessons, and as many demonstrations."""
    batch_size: int = 16
    """Texts per update."""
    learning_rate: float = 3e-3
    levels: tuple[int, ...] = (1, 2)
    """Levels of the problems in lessons and demonstrations."""
    habit: float = 0.6
    """Share of the demonstrations that come from the source that their question sounds like."""
    wrong_key_fraction: float = 0.65
    """Share of the answer keys that are wrong."""
    hidden_size: int = 192
    num_layers: int = 4


SHIPPED = ColdStart()
SETTINGS = dict.fromkeys(("calculator", "calculator_chains"), ColdStart(lesson_fraction=0.62))
"""Of tasks that take others."""


@dataclass(frozen=True, slots=True)
class _Row:
    token_ids: list[int]
    """Prompt, completion and end token."""
    is_learned: list[bool]
    """Of each of them, whether it has a loss."""


def coldstart(
    output: Path,
    *,
    seed: int = 0,
    updates: int = UPDATES,
    task: Task = "word_problems",
    model: str | Path | None = None,
    settings: ColdStart | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """A base model for a task, saved under ``output`` as a Hugging Face checkpoint with its provenance.

    Without ``model`` it is made from nothing: lessons first, then imperfect demonstrations. With ``model``, the name or
    folder of a checkpoint, every update trains that one on the demonstrations: what GRPO has to beat. The seed decides
    the weights, the texts and their order.

    Raises CheckpointError if ``output`` exists already, TrainingError if the loss is not finite.
    """
    settings = settings or SETTINGS.get(task, SHIPPED)
    output = Path(output).absolute()
    if output.exists() and (output.is_file() or any(output.iterdir())):
        raise CheckpointError(f"{output}: exists already. Name a new folder, or remove this one")
    command = ["oncurve", "coldstart", "--output", output.name, "--seed", str(seed)]
    command += [] if updates == TASK_UPDATES.get(task, UPDATES) else ["--updates", str(updates)]
    command += [] if task == "word_problems" else ["--task", task]
    command += [] if model is None else ["--model", Path(model).name]
    provenance = describe_run(
        command, num_threads=torch.get_num_threads(), seed=seed, updates=updates, settings=asdict(settings)
    )
    steps, answers = make_texts(task, settings, seed=seed)
    if model is None:
        texts = (prompt + text for prompt, completion in answers for text, _ in _parts(completion))
        tokenizer = tiny_tokenizer(texts, more_tags=MORE_TAGS.get(task, ()))
        network: PreTrainedModel = tiny_model(
            tokenizer, seed=seed, hidden_size=settings.hidden_size, num_layers=settings.num_layers
        )
        lesson_updates = round(updates * settings.lesson_fraction)
        stages = [(steps, lesson_updates), (answers, updates - lesson_updates)]
    else:
        network, tokenizer = load_model(str(model))
        stages = [(answers, updates)]
    fine_tune(
        network,
        tokenizer,
        stages,
        seed=seed,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        on_progress=on_progress,
    )
    save_model(network, tokenizer, output)
    _write_provenance(output, provenance)
    return output


def make_texts(task: Task, settings: ColdStart, *, seed: int) -> tuple[list[Pair], list[Pair]]:
    """The lessons and the imperfect demonstrations of a task."""
    match task:
        case "word_problems":
            steps = lessons(settings.num_texts, seed=seed, levels=settings.levels)
            answers = demonstrations(
                settings.num_texts,
                seed=seed,
                levels=settings.levels,
                habit=settings.habit,
                wrong_key_fraction=settings.wrong_key_fraction,
            )
            return steps, answers
        case "programs":
            return program_lessons(settings.num_texts, seed=seed), program_demonstrations(settings.num_texts, seed=seed)
        case "calculator" | "calculator_chains":
            operations: Literal[1, 2] = 1 if task == "calculator" else 2
            copied = calculator_lessons(settings.num_texts, seed=seed, operations=operations)
            called = calculator_demonstrations(
                settings.num_texts, seed=seed, habit=settings.habit, operations=operations
            )
            return list(copied), list(called)
        case "maze":
            return list(maze_lessons(settings.num_texts, seed=seed)), list(
                maze_demonstrations(settings.num_texts, seed=seed)
            )
        case "guess_number":
            return list(game_lessons(settings.num_texts, seed=seed)), list(
                game_demonstrations(settings.num_texts, seed=seed)
            )
    raise DataError(f"cold start: there is no task {task!r}. Use one of {listed(get_args(Task))}")


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stages: Sequence[Stage],
    *,
    seed: int,
    batch_size: int = SHIPPED.batch_size,
    learning_rate: float = SHIPPED.learning_rate,
    on_progress: Progress | None = None,
) -> None:
    """Train a model in place on the completions and end tokens of some pairs, stage after stage.

    The loss of an update is the mean over its completion tokens. Muon moves the matrices, AdamW the rest, both at
    ``learning_rate``, which warms up and then falls in a straight line over all stages.

    Raises TrainingError if the loss is not finite.
    """
    updates = sum(num_updates for _, num_updates in stages)
    batches = chain.from_iterable(
        islice(_batches(_tokenize(pairs, tokenizer), batch_size, seed=seed), num_updates)
        for pairs, num_updates in stages
    )
    optimizers = _optimizers(model)
    model.train()
    for update, rows in enumerate(batches, start=1):
        token_ids, labels = _pad(rows)
        logits = model(input_ids=token_ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        if not math.isfinite(loss.item()):
            raise TrainingError(f"cold start: the loss of update {update} is {loss.item()}. Lower the learning rate")
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
    end = str(tokenizer.eos_token)
    rows = []
    for prompt, completion in pairs:
        ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
        learned = [False] * len(ids)
        for place, (text, is_learned) in enumerate(parts := _parts(completion)):
            more: list[int] = tokenizer.encode(
                text + end if place == len(parts) - 1 else text, add_special_tokens=False
            )
            ids += more
            learned += [is_learned] * len(more)
        rows.append(_Row(ids, learned))
    return rows


def _parts(completion: str | tuple[Part, ...]) -> tuple[Part, ...]:
    return ((completion, True),) if isinstance(completion, str) else completion


def _batches(rows: Sequence[_Row], batch_size: int, *, seed: int) -> Iterator[list[_Row]]:
    """Rows in a new order each pass, without an end; the rows of one batch are about equally long."""
    rng = Random(f"batches {seed}")
    while True:
        order = rng.sample(rows, len(rows))
        for start in range(0, len(order), batch_size * BUCKET_BATCHES):
            bucket = sorted(order[start : start + batch_size * BUCKET_BATCHES], key=lambda row: len(row.token_ids))
            batches = [bucket[first : first + batch_size] for first in range(0, len(bucket), batch_size)]
            yield from rng.sample(batches, len(batches))


def _pad(rows: Sequence[_Row]) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Token ids, zeros behind the shorter rows, and labels that ignore the prompt and what is behind the row."""
    width = max(len(row.token_ids) for row in rows)
    token_ids = torch.zeros((len(rows), width), dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for place, row in enumerate(rows):
        ids = torch.tensor(row.token_ids)
        token_ids[place, : len(ids)] = ids
        learned = torch.tensor(row.is_learned)
        labels[place, : len(ids)] = torch.where(learned, ids, IGNORED)
    return token_ids, labels


def _write_provenance(output: Path, provenance: Mapping[str, Any]) -> None:
    """Where a checkpoint came from, beside it, with the checksum of its weights."""
    checksum = hashlib.sha256((output / WEIGHTS).read_bytes()).hexdigest()
    text = json.dumps({**provenance, "sha256": {WEIGHTS: checksum}}, indent=2)
    (output / PROVENANCE).write_text(text + "\n", encoding="utf-8")
