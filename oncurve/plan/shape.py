"""The size of a model, from its config.json alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from oncurve.constants import STATIC_ROTARY
from oncurve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """Traits of a family's layers, beyond the sizes in its config.json."""

    has_qkv_bias: bool = False
    """The query, key and value projections always have a bias; otherwise ``attention_bias`` says so for all four."""
    has_qk_norm: bool = False
    """Queries and keys are normalized per head, with one weight per head dimension each."""
    head_size: int | None = None
    """Width of a head where config.json does not say; None divides the hidden size by the heads."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(has_qkv_bias=True),
    "qwen3": Family(has_qk_norm=True, head_size=128),
}
"""Families whose parameters are counted exactly, by ``model_type``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Weights of a family that no formula is for, counted on transformers' modules."""

    parameters: int
    linear: int
    """In the matrices of all layers, without embedding and head."""
    active: int
    """The parameters that a token is multiplied with: its own experts and no others."""
    kv_numbers: int | None
    """That a token leaves in transformers' cache; None where it was not found out."""
    adapted: Mapping[str, int]
    """Inputs and outputs of linear layers, added up by the ends of their names. Experts in one tensor are not there."""
    ways: tuple[str, str] | None = None
    """Ways in which a small model of the family is trained, and sampled in this process; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only model: everything that memory and time depend on.

    Example: ``ModelShape(name="Qwen/Qwen2.5-0.5B", family="qwen2", hidden=896, layers=24, heads=14, kv_heads=2,
    head_size=64, mlp=4864, vocabulary=151936, is_tied=True)``
    """

    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    is_tied: bool
    """The head is the embedding's matrix."""
    has_attention_bias: bool = False
    has_mlp_bias: bool = False
    max_tokens: int = 32_768
    """Longest row that the model was made for."""
    is_plain: bool = True
    """Nothing in config.json keeps oncurve's own layers from computing it, of the families that have them."""
    counted: Counted | None = None
    """None where the family's formula counts."""

    @property
    def query_size(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all keys of a token, and of all its values."""
        return self.kv_heads * self.head_size

    @property
    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one decoder layer: inputs and outputs of each."""
        return {
            "q_proj": (self.hidden, self.query_size),
            "k_proj": (self.hidden, self.kv_size),
            "v_proj": (self.hidden, self.kv_size),
            "o_proj": (self.query_size, self.hidden),
            "gate_proj": (self.hidden, self.mlp),
            "up_proj": (self.hidden, self.mlp),
            "down_proj": (self.mlp, self.hidden),
        }

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights of the linear layers of one decoder layer, without biases; of the average one where they differ."""
        if self.counted is not None:
            return self.counted.linear // self.layers
        return sum(inputs * outputs for inputs, outputs in self.layer_matrices.values())

    @property
    def layer_parameters(self) -> int:
        """All weights of one decoder layer: matrices, biases, norms."""
        if self.counted is not None:
            return (self.counted.parameters - self.head_parameters * (1 if self.is_tied else 2)) // self.layers
        family = FAMILIES[self.family]
        biases = 0
        if family.has_qkv_bias or self.has_attention_bias:
            biases += self.query_size + 2 * self.kv_size
        if self.has_attention_bias and not family.has_qkv_bias:
            biases += self.hidden
        if self.has_mlp_bias:
            biases += 2 * self.mlp + self.hidden
        norms = 2 * self.hidden + (2 * self.head_size if family.has_qk_norm else 0)
        return self.layer_matrix_parameters + biases + norms

    @property
    def head_parameters(self) -> int:
        """Weights of the language-model head, V x H; those of the embedding are as many."""
        return self.vocabulary * self.hidden

    @property
    def num_parameters(self) -> int:
        """All weights, exactly: embedding, layers, last norm, and the head where it is not the embedding.

        Source: the modules of transformers' Llama, Qwen2 and Qwen3; the tests count those on the meta device.
        """
        if self.counted is not None:
            return self.counted.parameters
        embeddings = self.head_parameters * (1 if self.is_tied else 2)
        return embeddings + self.layers * self.layer_parameters + self.hidden

    @property
    def matrix_parameters(self) -> int:
        """Weights that every token is multiplied with: the linear layers and the head, not the embedding."""
        if self.counted is not None:
            return self.counted.active + self.head_parameters
        return self.layers * self.layer_matrix_parameters + self.head_parameters

    @property
    def is_mixture(self) -> bool:
        """A token is multiplied with some of the matrices alone: those of its experts."""
        return self.counted is not None and self.counted.active < self.counted.linear

    def parameters_read(self, rows: float) -> float:
        """Weights that a decoding step of so many rows reads: of a mixture, the experts that some row is sent to.

        all (1 - (1 - active / all)^rows)        each row chooses at random
        """
        if self.counted is None:
            return float(self.matrix_parameters)
        every, share = self.counted.linear, self.counted.active / self.counted.linear
        return self.head_parameters + every * (1 - (1 - share) ** rows)

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that one token leaves in the cache: a key and a value per layer."""
        if self.counted is not None and self.counted.kv_numbers is not None:
            return self.counted.kv_numbers
        return 2 * self.layers * self.kv_size

    def lora_parameters(self, rank: int, targets: tuple[str, ...] | None = None) -> int:
        """Weights of an adapter: rank x (inputs + outputs) for each chosen linear layer, LoRA, arXiv:2106.09685.

        ``targets`` are names of linear layers; None takes all of them, as peft's all-linear does (without the head).
        """
        if self.counted is not None:
            sizes = self.counted.adapted.items()
            return rank * sum(size for name, size in sizes if targets is None or name in targets)
        chosen = [size for name, size in self.layer_matrices.items() if targets is None or name in targets]
        return self.layers * sum(rank * (inputs + outputs) for inputs, outputs in chosen)


def shape_of_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape that a config.json describes.

    Raises ConfigError for a family that has no formula here, and for a file that lacks a size.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"model {name!r}: config.json says model_type {family!r}; the planner's formulas count "
            f"{', '.join(FAMILIES)}. Plan with a model of nearly the same size, such as model=Qwen/Qwen2.5-7B"
        )
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if absent := [key for key in needed if not _is_size(config.get(key))]:
        raise ConfigError(f"model {name!r}: config.json has no usable {', '.join(absent)}; is the file whole?")
    heads = config["num_attention_heads"]
    return ModelShape(
        name=name,
        family=family,
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or FAMILIES[family].head_size or config["hidden_size"] // heads,
        mlp=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_attention_bias=bool(config.get("attention_bias", False)),
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        max_tokens=config.get("max_position_embeddings") or 32_768,
        is_plain=_is_plain(config),
    )


def _is_plain(config: Mapping[str, Any]) -> bool:
    """No windows, rotary angles that depend on the position alone, and the activation of the Llama family."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else "default"
    has_window = bool(config.get("use_sliding_window", config.get("model_type") == "mistral"))
    return kind in STATIC_ROTARY and config.get("hidden_act", "silu") == "silu" and not has_window


def counted_shape(path: Path, *, name: str, family: str) -> ModelShape:
    """The shape of a model of any family, counted on transformers' modules in a process of its own.

    Raises ConfigError for a model that transformers does not know as a causal language model.
    """
    command = [sys.executable, "-m", "oncurve.run.model_paths", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last_line = done.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        raise ConfigError(
            f"model {name!r}: config.json says model_type {family!r}, of which transformers makes no model to count "
            f"({last_line[0]}). Plan with a model of nearly the same size, such as model=Qwen/Qwen2.5-7B"
        )
    sizes = json.loads(done.stdout)
    own = {field.name for field in fields(Counted)}
    counted = Counted(**{key: value for key, value in sizes.items() if key in own})
    rest = {key: value for key, value in sizes.items() if key not in own}
    return ModelShape(name=name, family=family, counted=counted, **rest)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
