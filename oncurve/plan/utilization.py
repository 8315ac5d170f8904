"""Model FLOPs utilization (MFU) of training, by two counts."""

from __future__ import annotations

from dataclasses import dataclass

from oncurve.plan.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Mfu:
    """Shares of the nominal rate of matrix products in bfloat16, in [0, 1]."""

    least_fraction: float
    """By the least work: each prompt once for its group, the head on completions, no gradient of frozen weights."""
    in_rows_fraction: float
    """By the usual count, 6 N operations a token and the prompt in every row: PaLM, arXiv:2204.02311, appendix B."""

    def __str__(self) -> str:
        return f"MFU {self.least_fraction:.1%} by the least work, {self.in_rows_fraction:.1%} with prompts in every row"


def training_mfu(
    shape: ModelShape,
    *,
    completion_tokens: float,
    prompt_tokens: float,
    group_size: int,
    row_tokens: float,
    trains_adapter: bool,
    peak_operations: float,
) -> Mfu:
    """Operations of the model in training over ``peak_operations``, which the devices could have done in that time.

        least    k (P / G + C) (2 M + 2 layers Q T) + k C 2 V H      k = 3 passes, 2 over frozen weights
        in rows  (P + C) (6 N + 12 layers Q T)                       N = M + V H

    M: weights of the layers' matrices. P: prompt tokens with the prompt in every row. C: completion tokens.
    T: tokens of a mean row. Recomputation is not counted.
    """
    head, attention = shape.head_parameters, shape.layers * shape.query_size * row_tokens
    passes = 2 if trains_adapter else 3
    least = (prompt_tokens / group_size + completion_tokens) * 2 * (shape.matrix_parameters - head + attention)
    least += completion_tokens * 2 * head
    usual = (prompt_tokens + completion_tokens) * 6 * (shape.matrix_parameters + 2 * attention)
    return Mfu(passes * least / peak_operations, usual / peak_operations)
