"""Random weights for a task of one's own: the tokenizer learned from demonstrations, the model small."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from oncurve.coldstart.tiny_model import tiny_model, tiny_tokenizer
from oncurve.constants import ROLES
from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import SOURCE_ROW
from oncurve.data.from_settings import make_rows
from oncurve.data.settings import FILE_TYPES
from oncurve.data.sources import SAVED
from oncurve.observe.record import to_yaml
from oncurve.policy.model_folder import load_tokenizer, save_model
from oncurve.recipe.load import parse_config, parse_tree

SIZES: Mapping[str, Mapping[str, int]] = {
    "nano": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "mlp_size": 176},
    "tiny": {"hidden_size": 192, "num_layers": 4, "num_heads": 4, "mlp_size": 512},
    "small": {"hidden_size": 384, "num_layers": 6, "num_heads": 6, "mlp_size": 1024},
}
"""Widths and depths of the Qwen2 models: 0.1, 1.7 and 9 million parameters."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UPDATES = 800
"""Updates that a cold start has if its recipe does not say otherwise, as the embedded model had."""
MOST_EPOCHS = 20
SHORT_CHARACTERS = 256
"""Up to this length of the longest row every character is a token, so that a model sees the letters of a word; longer
rows are written in pieces that are learned from them."""
MERGES = 400
PER_UPDATE = 16


HEAD = "# The supervised stage of a model from random weights, written by `oncurve coldstart`.\n"


def recipe_of(data: Path, model: Path, num_rows: int | None = None) -> str:
    """The recipe of the supervised stage, as YAML; ``num_rows`` sets the number of passes over them."""
    epochs = 1 if num_rows is None else min(MOST_EPOCHS, max(1, math.ceil(UPDATES * PER_UPDATE / num_rows)))
    return (
        f"model: {json.dumps(str(model))}\n"
        f"data: {{path: {json.dumps(str(data.resolve()))}{_type_of(data)}}}\n"
        f"rollouts: {{type: engine, max_completion_tokens: 64}}\n"
        f"optimizer: {{type: muon, learning_rate: 3e-3, beta2: 0.95, schedule: linear, warmup_updates: 40}}\n"
        f"evaluation: {{num_prompts: 100}}\n"
        f"sft: {{epochs: {epochs}}}\n"
        f"run: {{prompts_per_step: {PER_UPDATE}}}\n"
    )


def _type_of(data: Path) -> str:
    return ", type: huggingface" if data.is_dir() or data.suffix in (".parquet", ".arrow") else ""


def write_from_data(
    folder: Path, data: Path, *, size: str, like: str | None, layers: int | None, seed: int, overrides: Sequence[str]
) -> str:
    """Write random weights and a tokenizer for the demonstrations in a file; the recipe that trains them.

    With ``like``, the model has the architecture, widths and tokenizer of that one, and so many ``layers``.

    Raises ConfigError for a size that there is none of, DataError for rows that are no demonstrations.
    """
    if size not in SIZES:
        raise ConfigError(f"--size {size}: there is no such size. Use one of {', '.join(SIZES)}")
    if layers is not None and (like is None or layers < 1):
        raise ConfigError("--layers is the number of layers, 1 or more, of a model --like another; --size has its own")
    if not data.exists():
        raise DataError(f"--data {data}: there is no such file. Give JSON lines such as {{prompt, completion}}")
    if data.is_dir() and not any((data / name).is_file() for name in ("train.jsonl", *SAVED)):
        files = sorted(file.name for file in data.iterdir() if file.suffix in FILE_TYPES)
        raise DataError(
            f"--data {data}: is a folder without a train.jsonl or a saved data set. Name the file with the "
            f"demonstrations{f', such as {data / files[0]}' if files else ''}"
        )
    config = parse_config(recipe_of(data, folder), overrides, source="coldstart")
    rows = make_rows(config.data, seed=seed, demonstrated=True, needs_answer=False)
    if bare := next((row for row in rows if not _is_demonstration(row)), None):
        raise DataError(
            f"{data}: a row shows nothing to learn ({', '.join(map(str, bare))}). Write {{prompt, completion}}, "
            f"{{messages}}, {{prompt, turns}}, {{prompt, parts}}, {{text}} or {{question, answer, solution}}"
        )
    texts = [list(_texts(row)) for row in rows]
    made = _like(like, layers, seed) if like is not None else _small(rows, texts, SIZES[size], seed)
    save_model(*made, folder)
    tree = parse_tree(recipe_of(data, folder, len(rows)), overrides, source="coldstart")
    return f"{HEAD}{to_yaml(tree)}"


def _is_demonstration(row: Mapping[str, Any]) -> bool:
    return any(row.get(name) for name in ("completion", "messages", "parts", "text", "answer"))


def _small(
    rows: Sequence[Mapping[str, Any]], texts: Sequence[Sequence[str]], size: Mapping[str, int], seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Qwen2 model of our own size with a context of twice the longest row, 512 tokens at least."""
    has_messages = any("messages" in row for row in rows)
    marks = [f"<|{role}|>" for role in ROLES] if has_messages else []
    is_short = max(sum(map(len, texts_of_row)) for texts_of_row in texts) <= SHORT_CHARACTERS
    merges = 0 if is_short else MERGES
    tokenizer = tiny_tokenizer(
        (text for texts_of_row in texts for text in texts_of_row), num_merges=merges, more_tags=marks
    )
    if has_messages:
        tokenizer.chat_template = CHAT_TEMPLATE
    longest = max(sum(len(tokenizer.encode(text)) + 2 for text in texts_of_row) for texts_of_row in texts)
    context = max(512, 2 ** math.ceil(math.log2(2 * longest)))
    return tiny_model(tokenizer, seed=seed, max_tokens=context, **size), tokenizer


def _like(name: str, layers: int | None, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Random weights of a model's kind and widths, with its tokenizer."""
    config, tokenizer = load_tokenizer(name)
    text: Any = config.get_text_config()
    if layers is not None:
        before = text.num_hidden_layers
        if layers > before:
            raise ConfigError(f"--layers {layers}: {name} has {before}. Ask for as many or fewer")
        for key, value in [*vars(text).items()]:
            if isinstance(value, (list, tuple)) and len(value) == before:  # one entry for each layer
                setattr(text, key, value[:layers])
        text.num_hidden_layers = layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(text, dtype=torch.float32)
    return model, tokenizer


def _texts(value: Any) -> Iterator[str]:
    """Every text in a row, such as a prompt and the contents of messages; what the row was read from counts once."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in (SOURCE_ROW, "role", "tokens"):
                yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)
