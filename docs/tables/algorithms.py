"""The generated page of algorithms, from the table of presets and the docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from oncurve.algorithm import advantages, correction, entropy, kl, losses, normalize, reference
from oncurve.algorithm.pairings import RULES
from oncurve.algorithm.table import PRESETS, Preset

Piece = Callable[..., Any] | type

ADVANTAGES: dict[str, tuple[Piece, int | None]] = {
    "group_std": (advantages.group_relative, 0),
    "group_mean": (advantages.group_relative, 1),
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
        "`algorithm.advantage`: rewards to one number per completion.",
        {name: piece for name, (piece, _) in ADVANTAGES.items() if name != "group_mean"},
    ),
    "Token losses": (
        "`algorithm.loss`: one number per token.",
        {
            "policy_gradient": losses.policy_gradient,
            "importance_weighted": losses.importance_weighted,
            "clipped": losses.clipped,
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
        "`algorithm.normalize`: losses of tokens to a scalar, with the denominator of the whole update.",
        {
            "sequence_mean": normalize.sequence_mean,
            "token_mean": normalize.token_mean,
            "constant": normalize.constant,
            "prompt_mean": normalize.prompt_mean,
            "sequence_sum": normalize.sequence_sum,
        },
    ),
    "KL to a reference": (
        "`algorithm.kl_estimator`, with `kl_coef`, `kl_in`, `kl_importance` and `reference`.",
        {
            "k1": kl.k1,
            "k2": kl.k2,
            "k3": kl.k3,
            "absolute": kl.absolute,
            "k1_reversed": kl.k1_reversed,
            "kl_importance": kl.importance_corrected,
            "reference: refreshed, average": reference.move_reference,
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
        {"entropy_coef, entropy_target": entropy.EntropyBonus, "high_entropy_share": entropy.high_entropy},
    ),
}
INTRODUCTION = """# Algorithms

An algorithm is a row of choices: how rewards become advantages, what a token contributes to the loss, and what the sum
is divided by. `algorithm: {type: dapo}` in a recipe takes a row, and every choice in it can be replaced:
`algorithm: {type: dapo, normalize: constant, clip_high: 0.3}`. Your own loss is named by
`algorithm: {type: custom, function: "my_losses.py:hinge"}`: it gets `(logprobs, old_logprobs, advantages, mask)` and
returns one number per token; everything else is then the row `grpo`. `advantage_function` does the same for advantages.
This page is made from `oncurve/algorithm/table.py` and the docstrings of the functions.

r_i is the reward of completion i of a group of G, A_i its advantage, o_i its tokens, p_t the probability of a token
now, p_old,t when it was sampled, w_t = p_t / p_old,t, sg[.] what is taken as a constant."""
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
    lines = [INTRODUCTION, "", "| name | what it changes | use it when |", "|---|---|---|"]
    lines += [f"| [{name}](#{name}) | {_cell(row.changes)} | {_cell(row.use_when)} |" for name, row in PRESETS.items()]
    lines += ["", "## Names", ""]
    for name, row in PRESETS.items():
        lines += [*_row(name, row), ""]
    for title, (key, pieces) in SECTIONS.items():
        lines += [f"## {title}", "", key, ""]
        if module := {"KL to a reference": kl, "Correction of the sampler": correction}.get(title):
            lines += [_as_block(inspect.getdoc(module) or ""), ""]
        for name, piece in pieces.items():
            heading = "group_std, group_mean" if name == "group_std" else name
            lines += [f"### {heading}", "", _as_block(inspect.getdoc(piece) or ""), ""]
    lines += ["## Pairings that are refused or warned about", "", "| | choices | why | do |", "|---|---|---|---|"]
    rules = sorted(RULES, key=lambda rule: rule.severity != "refuse")
    lines += [f"| {rule.severity} | {_cell(rule.what)} | {_cell(rule.why)} | {_cell(rule.do)} |" for rule in rules]
    lines += ["", "## Defaults, and where sources disagree", ""]
    lines += ["| choice | what the rows take | evidence | against it |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in DISAGREEMENTS]
    return "\n".join([*lines, ""])


def formula(piece: Piece, line: int | None = None) -> list[str]:
    """The lines of the formula in a docstring, without their sources; one of them if asked for."""
    indented = [text for text in (inspect.getdoc(piece) or "").splitlines()[1:] if text.startswith("    ")]
    found = [re.split(r"\s{2,}", text.strip())[0] for text in indented if " = " in text or ">=" in text]
    return found if line is None else [found[line]]


def _row(name: str, row: Preset) -> list[str]:
    piece, line = ADVANTAGES[row.advantage]
    formulas = [
        *formula(piece, line),
        *formula(SECTIONS["Token losses"][1][row.loss]),
        *formula(SECTIONS["Normalizers"][1][row.normalize]),
    ]
    if row.kl_coef or row.kl_in == "reward":
        formulas += formula(SECTIONS["KL to a reference"][1][row.kl_estimator])
    if row.high_entropy_share < 1:
        formulas += formula(entropy.high_entropy)
    made_of = f"`advantage: {row.advantage}`, `loss: {row.loss}`, `normalize: {row.normalize}`"
    lines = [f"### {name}", "", f"{row.paper}. {row.changes}", "", "```text", *formulas, "```", ""]
    constants = ", ".join(f"`{key}: {value}`" for key, value in _constants(row).items())
    lines += [f"{made_of}{'; ' if constants else ''}{constants}. Use it when: {row.use_when}"]
    return [*lines, "", row.differs] if row.differs else lines


def _constants(row: Preset) -> dict[str, object]:
    """The numbers that matter in a row, as a recipe writes them."""
    keys: list[str] = []
    if row.advantage in ("group_std", "batch_std", "batch_centered_std", "whitened", "multi_objective"):
        keys += ["std_ddof", "std_epsilon"]
    if "clipped" in row.loss:
        keys += ["clip_low", "clip_high"]
    keys += ["ratio_max"] if row.ratio_max is not None else []
    if row.kl_coef or row.kl_in == "reward" or row.kl_estimator != "k3":
        keys += ["kl_coef", "kl_in", "kl_estimator", "kl_importance", "reference"]
    keys += ["reference_every_steps"] if row.reference == "refreshed" else []
    keys += ["high_entropy_share"] if row.high_entropy_share < 1 else []
    return {key: _yaml(getattr(row, key)) for key in keys}


def _yaml(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else value


def _as_block(docstring: str) -> str:
    """A docstring as Markdown: indented lines become code, doctests are left out."""
    kept: list[str] = []
    is_code = False
    for text in docstring.split("\n>>> ")[0].splitlines():
        starts = text.startswith("    ")
        if starts and not is_code:
            kept += ["```text"]
        elif is_code and text and not starts:
            while not kept[-1]:
                kept.pop()
            kept += ["```", ""]
        is_code = starts or (is_code and not text)
        kept.append(text[4:] if starts else text.replace("``", "`"))
    while kept and not kept[-1]:
        kept.pop()
    return "\n".join([*kept, "```"] if is_code else kept)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def unknown_pieces(names: Sequence[str]) -> list[str]:
    """Names that no section of the page explains, sorted."""
    explained = {"group_mean", *(name for _, pieces in SECTIONS.values() for name in pieces)}
    return sorted(set(names) - explained)
