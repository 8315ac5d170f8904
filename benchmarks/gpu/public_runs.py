"""Runs that others have published, beside what `oncurve plan` says of the same work.

    python benchmarks/gpu/public_runs.py            # benchmarks/results/public_runs.json, and the table in docs/gpus.md

Nothing is run: the figures are those that were published, and an estimate from nominal speeds. Where the two differ by
more than a quarter, the row says what the other software does that ours does not, or the other way round.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oncurve.cli.plan import plan_recipe

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "public_runs.json"
PAGE = ROOT / "docs" / "gpus.md"
BEGIN, END = "<!-- public runs -->", "<!-- end of public runs -->"
CLOSE = 0.25
"""So far from 1 may the ratio of the two be without a reason."""

RECIPE = """
data: {type: jsonl, path: rows.jsonl, chat: false, template: boxed}
rewards: [{type: mathematics, answer_from: prose}]
run: {steps: 10}
"""


@dataclass(frozen=True)
class PublicRun:
    """A published figure, and how the same work is planned."""

    name: str
    public: float
    what: Literal["seconds a step", "GiB on the fullest GPU"]
    overrides: tuple[str, ...]
    asked: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    """Where the two are far apart."""


DGX: Mapping[str, Any] = {"network_gbit": 3200.0, "prompt_tokens": 120}
"""Eight network cards of 400 Gbit for a machine of eight GPUs; prompts of its length by its tokens per second."""
NEMO = (
    "run.prompts_per_step=64", "algorithm.group_size=32", "algorithm.kl_coef=0.01", "policy.parallel=fsdp",
    "rollouts.max_completion_tokens=3976", "policy.gradient_checkpointing=true", "run.completions_per_update=512",
)  # fmt: skip
"""As its recipes for performance say; rows of at most 4,096 tokens."""
SERVED = ("rollouts.type=servers",)
AHEAD = (*SERVED, "rollouts.staleness=1")
NEMO_8B, NEMO_32B = (*NEMO, "model=meta-llama/Llama-3.1-8B"), (*NEMO, "model=Qwen/Qwen3-32B")
UNSLOTH = (
    "policy.gradient_checkpointing=true",
    "policy.lora.rank=32",
    "run.prompts_per_step=1",
    "algorithm.group_size=8",
)
RUNS = (
    PublicRun(
        "NeMo RL 0.4, Llama-3.1-8B, 16 x H100, 2,048 completions, mean 1,060 tokens",
        97.7,
        "seconds a step",
        NEMO_8B,
        {"gpu": "H100", "gpus": 16, **DGX, "mean_tokens": 1060},
    ),
    PublicRun(
        "the same one step ahead, 8 GPUs to train and 8 to sample, mean 1,129 tokens",
        74.6,
        "seconds a step",
        (*NEMO_8B, *AHEAD, "rollouts.vllm_servers=8"),
        {"gpu": "H100", "gpus": 8, **DGX, "sampler_gpus": 8, "placement": "split", "mean_tokens": 1129},
    ),
    PublicRun(
        "NeMo RL 0.4, Qwen3-32B, 32 x H100, 2,048 completions, mean 3,206 tokens",
        393.0,
        "seconds a step",
        (*NEMO_32B, *SERVED, "rollouts.vllm_servers=4", "rollouts.tensor_parallel=4"),
        {"gpu": "H100", "gpus": 16, **DGX, "sampler_gpus": 16, "placement": "split", "mean_tokens": 3206},
        "theirs trains and samples on all 32; of ours one half waits while the other works",
    ),
    PublicRun(
        "the same one step ahead, 32 GPUs to train and 32 to sample, mean 3,207 tokens",
        215.0,
        "seconds a step",
        (*NEMO_32B, *AHEAD, "rollouts.in_flight=true", "rollouts.vllm_servers=8", "rollouts.tensor_parallel=4"),
        {"gpu": "H100", "gpus": 32, **DGX, "sampler_gpus": 32, "placement": "split", "mean_tokens": 3207},
    ),
    PublicRun(
        "Unsloth, Llama-3.1-8B, QLoRA, 8 completions of 20,000 tokens, 1 GPU",
        54.3,
        "GiB on the fullest GPU",
        (*UNSLOTH, "model=meta-llama/Llama-3.1-8B", "policy.quantization=nf4", "rollouts.max_completion_tokens=20000"),
        {"gpu": "H100"},
        "theirs computes eight rows at once, ours one; with eight and `policy.offload_activations` ours takes 70.7",
    ),
    PublicRun(
        "Unsloth, Qwen3-32B, LoRA in bfloat16, 6,144 tokens, fits a GPU of",
        80.0,
        "GiB on the fullest GPU",
        (*UNSLOTH, "model=Qwen/Qwen3-32B", "rollouts.max_completion_tokens=6144", "policy.tokens_per_microbatch=2048"),
        {"gpu": "H100"},
        "ours keeps attention's matrices twice, in the order of its decoding",
    ),
)


def planned(run: PublicRun) -> dict[str, Any]:
    """The plan of the same work, as data."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipe.yaml").write_text("model: embedded" + RECIPE, encoding="utf-8")
        (Path(folder) / "rows.jsonl").write_text('{"question": "2+3?", "answer": "5"}\n', encoding="utf-8")
        return json.loads(plan_recipe(Path(folder) / "recipe.yaml", run.overrides, as_json=True, **run.asked))


def row_of(run: PublicRun) -> dict[str, Any]:
    """A row of the table."""
    plan = planned(run)
    ours = plan["seconds"]["step"]
    if run.what != "seconds a step":
        ours = max(need["peak_bytes"] for need in plan["memory"]) / 2**30
    ratio = ours / run.public
    return {
        "run": run.name,
        "what": run.what,
        "public": run.public,
        "planned": round(ours, 1),
        "ratio": round(ratio, 2),
        "reason": run.reason if abs(ratio - 1) > CLOSE or not plan["fits"] else "",
        "fits": plan["fits"],
        "overrides": list(run.overrides),
        "asked": dict(run.asked),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for the page."""
    lines = ["| run | figure | public | planned | ratio | why they differ |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row['run']} | {row['what']} | {row['public']:g} | {row['planned']:g} | {row['ratio']:.2f} "
        f"| {row['reason']} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Plan all of them and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    output = parser.parse_args().output
    rows = [row_of(run) for run in RUNS]
    output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    if output == RESULTS:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
