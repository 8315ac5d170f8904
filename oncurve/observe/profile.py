"""Profile of a step: time per phase, the least work in it, and the share of the machine's peak.

Times are those of a run with ``run.profile``. Work is the least that the tokens need, so that a share says how far a
phase is from what the machine was measured to do, whatever way it takes:

    multiplying: operations / seconds / (operations per second of a large matrix product in the compute type)
    reading:     bytes / seconds / (bytes per second of reading memory that no cache holds)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from oncurve.observe.record import read_rows

PROFILE = "profile.jsonl"
"""In the run folder: the limits of the machine, then a row for each step."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "sample": ("load", "prefill", "decode"),
    "grade": (),
    "refill": (),
    "train": ("old_reference", "forward", "backward", "optimizer"),
}
"""The phases of the loop, and the parts of them that are measured inside."""


@dataclass(frozen=True)
class TokenWork:
    """What of a model decides how much work a token is."""

    matrix_weights: int
    """Weights that every token of a forward pass is multiplied with: those of the layers, adapters included."""
    trained_matrix_weights: int
    """Those among them that are trained."""
    head_weights: int
    trained_head_weights: int
    """All of the head or none of it."""
    trained_weights: int
    """All weights that the optimizer moves."""
    layers: int
    query_size: int
    """Numbers in all query heads of a token."""
    kv_numbers: int
    """Numbers that a token leaves in the cache, over all layers."""
    number_bytes: int
    """Bytes of a number in the compute type."""


@dataclass(frozen=True)
class Spent:
    """What a phase took, and the least work that its tokens need."""

    seconds: float = 0.0
    tokens: int = 0
    operations: float = 0.0
    bytes: float = 0.0
    calls: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True)
class MachineLimits:
    """What the machine was measured to do."""

    operations_per_second: float
    bytes_per_second: float


def attention_operations(size: TokenWork, contexts: float) -> float:
    """Scores and their mixture: 4 layers Q per token and token that it sees; ``contexts`` adds up what tokens see."""
    return 4.0 * size.layers * size.query_size * contexts


def prefill(size: TokenWork, prompt_lengths: Sequence[int]) -> Spent:
    """Each prompt once: 2 operations per weight and token, the head for its last token, the matrices read once."""
    tokens = sum(prompt_lengths)
    operations = 2.0 * (size.matrix_weights * tokens + size.head_weights * len(prompt_lengths))
    contexts = sum(length * (length + 1) / 2 for length in prompt_lengths)
    written = size.kv_numbers * tokens + size.matrix_weights
    return Spent(0.0, tokens, operations + attention_operations(size, contexts), float(written * size.number_bytes))


def decode(size: TokenWork, groups: Sequence[tuple[int, Sequence[int]]], *, steps: int) -> Spent:
    """Every completion token after the first, from (prompt length, completion lengths) of each group.

    Bytes: all matrices in each of the ``steps``, the cache of own tokens for each row, the prompt's once for its group.
    """
    tokens, contexts, cached = 0, 0.0, 0.0
    for prompt, lengths in groups:
        later = [length - 1 for length in lengths]
        own = sum(length * (length + 1) / 2 for length in later)
        tokens += sum(later)
        contexts += prompt * sum(later) + own
        cached += prompt * max(later, default=0) + own
    weights = size.matrix_weights + size.head_weights
    operations = 2.0 * weights * tokens + attention_operations(size, contexts)
    return Spent(0.0, tokens, operations, (weights * steps + size.kv_numbers * cached) * size.number_bytes)


def load(size: TokenWork) -> Spent:
    """Weights brought into the form that sampling reads: read in float32 and written in the compute type."""
    return Spent(bytes=float(size.matrix_weights * (4 + size.number_bytes)))


def forward(size: TokenWork, rows: Iterable[tuple[int, int, int]], *, predicted: int) -> Spent:
    """A training pass over (group, prompt length, completion length) of each row, a group's prompt once.

    ``predicted`` tokens pass through the head. The last token of a completion is never read.
    """
    prompts: dict[int, int] = {}
    tokens, contexts = 0, 0.0
    for group, prompt, completion in rows:
        own = completion - 1
        if group not in prompts:
            prompts[group] = prompt
            tokens += prompt
            contexts += prompt * (prompt + 1) / 2
        tokens += own
        contexts += own * prompt + own * (own + 1) / 2
    operations = 2.0 * (size.matrix_weights * tokens + size.head_weights * predicted)
    read = (size.matrix_weights + size.head_weights) * size.number_bytes
    return Spent(0.0, tokens, operations + attention_operations(size, contexts), float(read))


def backward(size: TokenWork, pass_: Spent, *, predicted: int) -> Spent:
    """What follows a forward pass: gradients of all inputs, of the trained matrices, and twice its attention."""
    plain = 2.0 * (size.matrix_weights * pass_.tokens + size.head_weights * predicted)
    trained = 2.0 * (size.trained_matrix_weights * pass_.tokens + size.trained_head_weights * predicted)
    return replace(pass_, operations=plain + trained + 2.0 * (pass_.operations - plain))


def optimizer(size: TokenWork) -> Spent:
    """AdamW in float32: weight, gradient and two moments read, weight and moments written, the gradient's norm read."""
    return Spent(bytes=32.0 * size.trained_weights)


def shares(spent: Spent, limits: MachineLimits) -> tuple[float | None, float | None]:
    """Of what the machine can multiply and of what it can read; None where the phase has no such work."""
    if spent.seconds <= 0:
        return None, None
    multiplied = spent.operations / spent.seconds / limits.operations_per_second
    read = spent.bytes / spent.seconds / limits.bytes_per_second
    return multiplied or None, read or None


@dataclass(frozen=True)
class ProfileRow:
    """A phase over the steps of a run."""

    name: str
    is_part: bool
    """Of the phase above it."""
    spent: Spent
    """Medians over the steps."""
    multiplied: float | None
    read: float | None


def write_limits(run: Path, limits: MachineLimits, **facts: Any) -> None:
    """Begin the file, or go on with it after a restart."""
    _append(run, {"limits": {**asdict(limits), **facts}})


def write_step(run: Path, step: int, spent: Mapping[str, Spent]) -> None:
    """One step: what each phase and part took."""
    _append(run, {"step": step, "phases": {name: asdict(each) for name, each in spent.items()}})


def _append(run: Path, row: Mapping[str, Any]) -> None:
    with (run / PROFILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_profile(run: Path) -> tuple[dict[str, Any], list[ProfileRow]]:
    """The limits as they were last measured, and the phases; both empty for a run without a profile.

    Medians leave out the first step of the run where there are three or more: it allocates and compiles. Of a step that
    was done twice, the later time counts.

    Raises DataError for a broken file.
    """
    if not (run / PROFILE).is_file():
        return {}, []
    rows = read_rows(run / PROFILE)
    described: dict[str, Any] = next((row["limits"] for row in reversed(rows) if "limits" in row), {})
    steps = {row["step"]: row["phases"] for row in rows if "step" in row}
    kept = [steps[step] for step in sorted(steps)][1 if len(steps) > 2 else 0 :]
    limits = MachineLimits(
        described.get("operations_per_second", math.inf), described.get("bytes_per_second", math.inf)
    )
    found: list[ProfileRow] = []
    for phase, parts in PARTS.items():
        for name in (phase, *parts):
            values = [step[name] for step in kept if name in step]
            if values:
                spent = Spent(**{key: median(value[key] for value in values) for key in values[0]})
                found.append(ProfileRow(name, name != phase, spent, *shares(spent, limits)))
    return described, found


def profile_text(run: Path) -> str:
    """The profile of a run as a table for a terminal; empty if there is none."""
    described, rows = read_profile(run)
    if not rows:
        return ""
    limit = (
        f"products of {described.get('compute_type', '?')} matrices {described['operations_per_second'] / 1e9:,.0f} "
        f"GFLOP/s, memory {described['bytes_per_second'] / 2**30:,.1f} GiB/s, measured at the start"
    )
    lines = [f"profile of a step ({limit})", f"  {'phase':17s} {'seconds':>9s} {'tokens':>9s} {'products':>9s} memory"]
    for row in rows:
        name = f"  {row.name}" if row.is_part else row.name
        tokens = f"{row.spent.tokens:,.0f}" if row.spent.tokens else ""
        multiplied, read = ("" if share is None else f"{share:.1%}" for share in (row.multiplied, row.read))
        lines.append(f"  {name:17s} {row.spent.seconds:9.4f} {tokens:>9s} {multiplied:>9s} {read:>6s}".rstrip())
    return "\n".join(lines)
