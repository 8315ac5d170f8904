"""FSDP2 of one process over NCCL, and what it takes to hand weights over as files, by part."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from gpu_first_agreement import questions
from gpu_first_probe import Answer, Setting, judged
from gpu_first_timing import checkpoint, is_gpu, wait
from torch import distributed

from oncurve.core.batch import collate
from oncurve.core.policy import torch_type
from oncurve.core.records import Completion, Group
from oncurve.policy.activation_checkpointing import recomputable_layers
from oncurve.policy.distributed import ALONE, join_alone
from oncurve.policy.forward import completion_logprobs
from oncurve.policy.model_folder import load_model
from oncurve.policy.sharding import Sharding, make_mesh, shard, whole
from oncurve.policy.trained_policy import Scorer


def compare(setting: Setting) -> Answer:
    """Log-probabilities and gradients of a model in parts beside those of a whole one; seconds of a checkpoint."""
    figures: dict[str, Any] = {"files": files(setting)}
    device = torch.device(setting.device)
    if is_gpu(setting.device):
        torch.cuda.set_device(0)
    join_alone(device)
    figures["backend"] = distributed.get_backend_config()
    kind = "bfloat16" if is_gpu(setting.device) else "float32"
    batch, found = None, []
    for in_parts in (False, True):
        model, tokenizer = load_model("embedded")
        model = model.to(device)
        batch = batch or collate(example(tokenizer), torch.ones(2, 2))
        scorer = Scorer(model, False, recompute=False)
        if in_parts:
            sharding = Sharding()
            mesh = make_mesh(ALONE, sharding, device)
            shard(scorer, recomputable_layers(model), mesh, sharding, compute_type=torch_type(kind))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=kind == "bfloat16"):
            logprobs, _ = scorer(batch, 1.0, False)
        logprobs.sum().backward()
        norm = torch.nn.utils.get_total_norm([whole(p.grad) for p in model.parameters() if p.grad is not None])
        found.append((logprobs.detach().float().cpu(), float(norm)))
    exact = completion_logprobs(load_model("embedded")[0], batch, temperature=1.0)[0].detach()
    gaps = [float((logprobs - exact).abs().mean()) for logprobs, _ in found]
    figures |= {
        "logprob_gaps": dict(zip(("whole", "in parts"), gaps, strict=True)),
        "norms": [norm for _, norm in found],
    }
    holds = gaps[1] <= 3 * gaps[0] + 1e-3 and abs(found[1][1] / found[0][1] - 1) < 0.05
    seconds = ", ".join(f"{part} {taken:.2f} s" for part, taken in figures["files"].items() if part != "gigabytes")
    said = (f"{figures['backend']}: in parts {gaps[1]:.1e} from float32, whole {gaps[0]:.1e}; "
            f"{figures['files']['gigabytes']:.2f} GB: {seconds}")  # fmt: skip
    return judged(holds, said, **figures)


def example(tokenizer: Any) -> list[Group]:
    """Two prompts with two completions each."""

    class Named:
        """Has a tokenizer, as a policy has."""

    Named.tokenizer = tokenizer  # type: ignore[attr-defined]
    groups = []
    for prompt in questions(Named, 2):  # type: ignore[arg-type]
        rows = [tuple(range(30 + index, 70 - 9 * index)) for index in range(2)]
        completions = (
            Completion(prompt.prompt_ids, ids, "", (0.0,) * len(ids), "stop", 0, n) for n, ids in enumerate(rows)
        )
        groups.append(Group(prompt, tuple(completions)))
    return groups


def files(setting: Setting) -> dict[str, float]:
    """Seconds to copy the weights to the host, write them, flush them, hash them, in float32 as it is."""
    from safetensors.torch import save_file

    model, _ = load_model(str(checkpoint(setting.work, "1.5B")))
    model = model.to(setting.device)
    taken: dict[str, float] = {}
    weights: dict[str, torch.Tensor] = {}
    path = setting.folder / "weights.safetensors"

    def copy() -> None:
        weights.update((name, weight.detach().cpu()) for name, weight in model.named_parameters())
        wait(setting.device)

    def flush() -> None:
        with path.open("rb") as written:
            os.fsync(written.fileno())

    def digest() -> None:
        with path.open("rb") as written:
            hashlib.file_digest(written, "sha256")

    def in_memory() -> None:
        shared = Path("/dev/shm/oncurve_gpu_first.safetensors")
        save_file({name: weight.bfloat16() for name, weight in weights.items()}, shared)
        shared.unlink()

    steps = {
        "copy": copy,
        "write": lambda: save_file(weights, path),
        "flush": flush,
        "hash": digest,
        "bfloat16 to /dev/shm": in_memory,
    }
    for name, part in steps.items():
        started = time.perf_counter()
        part()
        taken[name] = time.perf_counter() - started
    taken["gigabytes"] = path.stat().st_size / 1e9
    path.unlink()
    return taken
