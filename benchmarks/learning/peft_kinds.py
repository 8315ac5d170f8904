"""Every kind of adapter in peft's registry under TRL and under `oncurve trl`: losses, gradients, KL and weights.

    python benchmarks/bench.py peft_kinds

Three steps with forced completions (trl_beside.py), a KL term, and an adapter that both begin with: what peft makes,
moved by small numbers that are a function of a weight's name. A kind that needs more than a target gets it in OPTIONS.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
import zlib
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import trl_beside
from record import Record

OPTIONS: dict[str, dict[str, Any]] = {
    "ROAD": {"group_size": 32}, "VBLORA": {"vector_length": 32, "num_vectors": 16}, "ADALORA": {"total_step": 2},
    "C3A": {"block_size": 32}, "TRAINABLE_TOKENS": {"token_indices": [30, 40, 50]},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4}, "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 16}, "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "CARTRIDGE": {"num_virtual_tokens": 4}, "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "CPT": {"cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 1, 1]},
}  # fmt: skip
SIDES = ("trl", "oncurve")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--only", help="a kind, such as IA3")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)


def bench(asked: argparse.Namespace, record: Record) -> None:
    if asked.child:
        one_side(asked)
        return
    words = ["--beta", str(asked.beta), *(["--only", asked.only] if asked.only else [])]
    theirs, ours = (trl_beside.in_child("peft_kinds", side, words) for side in SIDES)
    for kind, trl in theirs.items():
        here = ours[kind]
        row = {"kind": kind, "trl": trl.get("said", "trains"), "oncurve": here.get("said", "trains")}
        if "said" not in trl and "said" not in here:
            row |= {
                key: {"largest": max(map(abs, trl[key])), "largest_difference": difference(trl[key], here[key])}
                for key in ("loss", "grad_norm", "kl", "weights")
            }
        record.add(row)


def difference(theirs: list[float], ours: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(theirs, ours, strict=True))


def one_side(asked: argparse.Namespace) -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    warnings.filterwarnings("ignore")
    trl_beside.LENGTH = 8
    if asked.child == "trl":
        trl_beside.force_theirs()
    else:
        trl_beside.force_ours()
    found = {
        kind.value: trained(kind.value, make, asked)
        for kind, make in PEFT_TYPE_TO_CONFIG_MAPPING.items()
        if asked.only in (None, kind.value)
    }
    sys.stdout.write(f"\n{trl_beside.FOUND}" + json.dumps(found) + "\n")


def trained(kind: str, make: Any, asked: argparse.Namespace) -> dict[str, Any]:
    """Three steps with an adapter of a kind, or what was said instead."""
    import torch
    from datasets import Dataset
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from oncurve.observe.run_model import EMBEDDED

    if asked.child == "trl":
        from trl import GRPOConfig, GRPOTrainer
    else:
        from oncurve.trl import GRPOConfig, GRPOTrainer

    config, said = None, ""
    for targets in ({}, {"target_modules": ["q_proj", "v_proj"]}):
        try:
            settings = {"task_type": "CAUSAL_LM", **OPTIONS.get(kind, {}), **targets}
            get_peft_model(AutoModelForCausalLM.from_pretrained(EMBEDDED), make(**settings))
            config = make(**settings)
            break
        except (ValueError, TypeError, ImportError, KeyError) as error:
            said = f"peft: {' '.join(str(error).split())[:200]}"
    if config is None:
        return {"said": said}
    args = GRPOConfig(
        "out", max_steps=3, num_generations=8, per_device_train_batch_size=8, use_cpu=True, bf16=False,
        max_completion_length=8, learning_rate=1e-4, logging_steps=1, report_to="none", beta=asked.beta,
        save_strategy="no", lr_scheduler_type="constant", gradient_checkpointing=False,
    )  # fmt: skip
    try:
        torch.manual_seed(42)
        with redirect_stdout(StringIO()):
            trainer = GRPOTrainer(
                AutoModelForCausalLM.from_pretrained(EMBEDDED),
                lambda completions, **_: [float(len(text) % 5) for text in completions],
                args,
                Dataset.from_list([{"prompt": "How much is 1 + 1?"}] * 8),
                processing_class=AutoTokenizer.from_pretrained(EMBEDDED),
                peft_config=config,
            )
            weights = {name: part for name, part in trainer.model.named_parameters() if part.requires_grad}
            for name, part in weights.items():
                noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
                part.data.add_(0.02 * noise)
            trainer.train()
    except Exception as error:  # noqa: BLE001 whatever either side says
        return {"said": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    logged = [row for row in trainer.state.log_history if "loss" in row]
    sums = [float(part.detach().double().sum()) for part in weights.values()]
    return {key: [row.get(key, 0.0) for row in logged] for key in ("loss", "grad_norm", "kl")} | {"weights": sums}
