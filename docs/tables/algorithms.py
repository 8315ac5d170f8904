"""The generated page of algorithms, from the table of presets and the docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from oncurve.algorithm import advantages, correction, losses
from oncurve.algorithm.pairings import RULES
from oncurve.algorithm.table import CHOICES, PRESETS, Preset
from oncurve.core import formulas, policy

Piece = Callable[..., Any] | type

ADVANTAGES: dict[str, tuple[Piece, int | None]] = {
    "group_std": (formulas.group_relative, 0),
    "group_mean": (formulas.group_relative, 1),
    "batch_std": (advantages.batch_std, None),
    "batch_centered_std": (advantages.batch_centered_std, None),
    "whitened": (advantages.whitened, None),
    "leave_one_out": (advantages.leave_one_out, None),
    "mean_normalized": (advantages.mean_normalized, None),
    "length_weighted": (advantages.length_weighted, None),
    "multi_objective": (advantages.multi_objective, None),
    "raw": (advantages.raw, None),
    "none": (advantages.none, None),
}
"""The function of each name, and which line of its formula is meant where it has several."""
SECTIONS: dict[str, tuple[str, dict[str, Piece]]] = {
    "Advantages": (
        "`algorithm.advantage`: from rewards to one number per completion.",
        {name: piece for name, (piece, _) in ADVANTAGES.items() if name != "group_mean"},
    ),
    "Token losses": (
        "`algorithm.loss`: one number per token.",
        {
            "policy_gradient": losses.policy_gradient,
            "importance_weighted": losses.importance_weighted,
            "clipped": formulas.clipped,
            "sequence_clipped": losses.sequence_clipped,
            "sequence_clipped_token": losses.sequence_clipped_token,
            "truncated_importance": losses.truncated_importance,
            "sequence_truncated_importance": losses.sequence_truncated_importance,
            "soft_gated": losses.soft_gated,
            "sequence_soft_gated": losses.sequence_soft_gated,
            "sequence_gated": losses.sequence_gated,
        },
    ),
    "Normalizers": (
        "`algorithm.normalize`: from token losses to a scalar; the denominator is that of the whole update.",
        {
            "sequence_mean": formulas.sequence_mean,
            "token_mean": formulas.token_mean,
            "constant": losses.constant,
            "prompt_mean": losses.prompt_mean,
            "sequence_sum": losses.sequence_sum,
        },
    ),
    "KL to a reference": (
        "`algorithm.kl_estimator`, with `kl_coef`, `kl_in`, `kl_importance` and `reference`.",
        {
            "k1": losses.k1,
            "k2": losses.k2,
            "k3": formulas.k3,
            "absolute": losses.absolute,
            "k1_reversed": losses.k1_reversed,
            "kl_importance": formulas.importance_corrected,
            "reference: refreshed, average": policy.move_reference,
        },
    ),
    "Correction of the sampler": (
        "`algorithm.correction`, with `correction_level`, `correction_low` and `correction_high`; "
        "`algorithm.off_policy_threshold`.",
        {
            "truncate": correction.truncate,
            "mask": correction.mask_out,
            "off_policy_threshold": correction.without_off_policy,
        },
    ),
    "Entropy": (
        "`algorithm.entropy_coef`, `entropy_target`, `high_entropy_share`.",
        {"entropy_coef, entropy_target": formulas.EntropyBonus, "high_entropy_share": losses.high_entropy},
    ),
}
INTRODUCTION = """# Algorithms

`algorithm: {type: dapo}` in a recipe selects a row of this table. A row is a set of choices: how rewards become advantages, the
loss of a token, and the denominator. Each can be replaced: `algorithm: {type: dapo, normalize: constant, clip_high: 0.3}`.

Start with one of three: **`grpo`** to compare with published results, **`dapo`** for long completions or several updates per
batch, **`dr_grpo`** if lengths vary a lot. For your own loss or advantages, see [your own algorithm](own_algorithm.md)."""
NOTATION = """r_i is the reward of completion i in a group of G, A_i its advantage, o_i its tokens, p_t the probability of a token now,
p_old,t when it was sampled, w_t = p_t / p_old,t. sg[.] is treated as a constant."""
DISAGREEMENTS: tuple[tuple[str, str, str, str], ...] = (
    (
        "standard deviation of the group",
        "as the row says; `dr_grpo` has none",
        "dropping it: arXiv:2503.20783, 2512.02556",
        "arXiv:2508.08221 finds the standard deviation of the batch robust; arXiv:2510.13786 finds that the choice moves the "
        "speed, not the end",
    ),
    (
        "n or n - 1",
        "n - 1 (`std_ddof: 1`)",
        "CS336 and TRL; DeepSeekMath does not say",
        "worked examples often divide by n: 1, 1, 0, 0 then gives 1 in place of 0.866",
    ),
    (
        "denominator",
        "tokens of the update, or a constant",
        "arXiv:2503.14476, 2503.20783",
        "arXiv:2510.13786 slightly prefers the mean per prompt",
    ),
    (
        "KL",
        "none",
        "arXiv:2503.14476, 2503.20783, 2506.10910",
        "runs that must stay near a model; then k1 in the reward, k2 in the loss, or k3 with `kl_importance`",
    ),
    (
        "k3 in the loss",
        "with `kl_importance`",
        "arXiv:2510.01555, 2512.21852, 2512.02556: without it the gradient is that of another KL",
        "DeepSeekMath and most code until 2025 have it without; rows `trl_0_14` and `iterative_grpo`",
    ),
    (
        "clip bounds",
        "0.2; upper bound 0.28 in `dapo`",
        "arXiv:2503.14476",
        "with one update per step nothing is clipped, whatever they are",
    ),
    (
        "correction of the sampler",
        "none: sampler and trainer are the same code",
        "arXiv:2510.26788: the gap comes from number formats",
        "with a sampler of its own take `truncate` at 2, token level; others defend masks of whole completions, "
        "arXiv:2512.23075",
    ),
    (
        "entropy bonus",
        "none",
        "arXiv:2503.14476, 2506.10910: more room upward when clipping is enough",
        "arXiv:2505.22312 adapts one to a target",
    ),
)
"""Choice, what the rows take, the evidence for it, and what speaks against it."""


def algorithms_markdown() -> str:
    """The whole page."""
    lines = [INTRODUCTION, "", "| name | advantage, loss, normalize | what it changes, and what for |"]
    lines += ["|---|---|---|", *(_row(name, row) for name, row in PRESETS.items()), ""]
    lines += ["Where a row differs from its paper:", ""]
    lines += [f"- `{name}`: {row.differs}" for name, row in PRESETS.items() if row.differs]
    lines += ["", "## Formulas", "", NOTATION, ""]
    for title, (key, pieces) in SECTIONS.items():
        lines += [f"### {title}", "", key, "", *_formulas(pieces), ""]
        if title not in ("Advantages", "Normalizers"):  # whose formulas say it all
            lines += [*(f"- `{name}`: {_first_sentence(piece)}" for name, piece in pieces.items()), ""]
    lines += ["## Pairings that are refused or warned about", "", "| | choices | do |", "|---|---|---|"]
    rules = sorted(RULES, key=lambda rule: rule.severity != "refuse")
    lines += [f"| {rule.severity} | {_cell(rule.what)} | {_cell(rule.do)} |" for rule in rules]
    lines += ["", "## Where papers disagree", ""]
    lines += ["| choice | here | evidence for it | against it |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in DISAGREEMENTS]
    return "\n".join([*lines, ""])


def _formulas(pieces: dict[str, Piece]) -> list[str]:
    """A block with a line for every formula of a section, behind its name."""
    named: list[tuple[str, str]] = []
    for name, piece in pieces.items():
        names = ["group_std", "group_mean"] if name == "group_std" else [name]
        found = formula(piece)
        named += list(zip([*names, *[""] * len(found)], found, strict=False))
    width = max((len(name) for name, _ in named), default=0)
    return ["```text", *(f"{name:{width}}  {text}".rstrip() for name, text in named), "```"] if named else []


def _first_sentence(piece: Piece) -> str:
    """What a docstring begins with, on one line."""
    return " ".join((inspect.getdoc(piece) or "").split("\n\n")[0].split()).replace("``", "`")


def formula(piece: Piece, line: int | None = None) -> list[str]:
    """The lines of the formula in a docstring, without their sources; one of them if asked for."""
    indented = [text for text in (inspect.getdoc(piece) or "").splitlines()[1:] if text.startswith("    ")]
    found = [re.split(r"\s{2,}", text.strip())[0] for text in indented if " = " in text or ">=" in text]
    return found if line is None else [found[line]]


def _row(name: str, row: Preset) -> str:
    constants = "".join(f"<br>`{key}: {value}`" for key, value in _constants(row).items())
    made_of = f"`{row.advantage}`<br>`{row.loss}`<br>`{row.normalize}`{constants}"
    return f"| **`{name}`**<br>{_cell(row.paper)} | {made_of} | {_cell(row.changes)} *{_cell(row.use_when)}* |"


def _constants(row: Preset) -> dict[str, object]:
    """The numbers in which a row differs from the defaults, as a recipe writes them."""
    plain = {field.name: field.default for field in fields(Preset)}
    keys = [key for key in CHOICES if key not in ("advantage", "loss", "normalize")]
    return {key: _yaml(getattr(row, key)) for key in keys if getattr(row, key) != plain[key]}


def _yaml(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else value


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def unknown_pieces(names: Sequence[str]) -> list[str]:
    """Names that no section of the page explains, sorted."""
    explained = {"group_mean", *(name for _, pieces in SECTIONS.values() for name in pieces)}
    return sorted(set(names) - explained)
