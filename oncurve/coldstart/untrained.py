"""A model with random weights and a tokenizer of its own: what the base of a task is trained from."""

from __future__ import annotations

from pathlib import Path

from oncurve.coldstart.tiny_model import tiny_model, tiny_tokenizer
from oncurve.policy.model_folder import save_model
from oncurve.tasks.texts import demonstrated_texts, tags_of

NUM_TEXTS = 10_000
"""Demonstrations that a tokenizer is learned from."""


def write_untrained(
    folder: Path, task: str, *, seed: int = 0, hidden_size: int = 192, num_layers: int = 4, num_texts: int = NUM_TEXTS
) -> Path:
    """Random weights from a seed, and a tokenizer learned from the demonstrations of a task, as a checkpoint."""
    demonstrated = demonstrated_texts(task, lessons=0, demonstrations=num_texts)
    tokenizer = tiny_tokenizer(
        (prompt + text for prompt, parts in demonstrated for text, _ in parts), more_tags=tags_of(task)
    )
    model = tiny_model(tokenizer, seed=seed, hidden_size=hidden_size, num_layers=num_layers)
    return save_model(model, tokenizer, folder)
