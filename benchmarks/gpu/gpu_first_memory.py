"""Memory between the phases of a step and at its edge, and whole steps of a recipe, in a first hour on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import torch
from gpu_first_agreement import policy_of, sample
from gpu_first_correct import judged_run, last_line
from gpu_first_probe import Answer, Setting, call, judged
from gpu_first_sizes import half, make_batch, update
from gpu_first_timing import checkpoint, is_gpu, memory
from models import make_prompts

from oncurve.core.records import SamplingParams

LEFT_GIB = 3.0
"""What is left free at the edge: less than the keys and values of all rows take."""
COIN = '''"""A reward of 0 or 1 with equal chance, so that a random model has something to learn from."""

import zlib


def coin(completions, **_):
    return [float(zlib.crc32(completion.encode()) & 1) for completion in completions]
'''


def edge(setting: Setting) -> Answer:
    """What is held after each phase, and whether sampling survives where keys and values find no room."""
    if not is_gpu(setting.device) or torch.version.cuda is None:
        return Answer("absent", "only a real device has an edge")
    policy = policy_of(setting.device, half(setting), str(checkpoint(setting.work, setting.options["model"])))
    prompts = make_prompts(policy.tokenizer, count=32, num_tokens=256)
    held = {"loaded": memory(setting.device)}
    sample(policy, prompts, 8, SamplingParams(max_completion_tokens=128))
    held["sampled"] = memory(setting.device) | {"private_gib": private_gib()}
    update(policy, make_batch(setting, policy.tokenizer, prompts=8, group=8, prompt=256, most=512))()
    held["trained"] = memory(setting.device) | {"private_gib": private_gib()}
    gc.collect()
    torch.cuda.empty_cache()
    held["emptied"] = memory(setting.device) | {"private_gib": private_gib()}
    free = torch.cuda.mem_get_info()[0]
    filler = torch.empty(max(free - int(LEFT_GIB * 2**30), 0), dtype=torch.uint8, device=setting.device)
    try:
        groups = sample(policy, prompts, 8, SamplingParams(max_completion_tokens=1024))
        ended = f"sampled {sum(len(group.completions) for group in groups)} completions with {LEFT_GIB:.0f} GiB free"
        survived = True
    except torch.OutOfMemoryError as error:
        ended, survived = f"out of memory with {LEFT_GIB:.0f} GiB free: {str(error).splitlines()[0][:120]}", False
    del filler
    said = ", ".join(
        f"{phase} {row['allocated_gib']:.1f} of {row['reserved_gib']:.1f} GiB" for phase, row in held.items()
    )
    return judged(survived, f"{ended}; {said}", held=held)


def private_gib() -> float:
    """What pools of recorded steps hold."""
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
    return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0)) / 2**30


def whole_step(setting: Setting) -> Answer:
    """Steps of math_r1_zero with the engine, on word problems, with a coin as its reward."""
    reward = setting.folder / "coin.py"
    reward.write_text(COIN, encoding="utf-8")
    size = ["rollouts.max_completion_tokens=8", "run.prompts_per_step=2", "algorithm.group_size=4"]
    words = [
        "python", "-m", "oncurve", "train", "math_r1_zero",
        f"model={checkpoint(setting.work, setting.options['model'])}", f"policy.device={setting.device}",
        "rollouts.type=engine", "rollouts.vllm_servers=0", "rollouts.vllm_options=[]",
        "data.type=word_problems", "evaluation.data.type=word_problems", "evaluation.num_prompts=8",
        "evaluation.num_prompts_during=8", "evaluation.every_steps=0",
        f"rewards=[{{type: custom, function: '{reward}:coin'}}]",
        "run.steps=3", f"run.folder={setting.folder / 'runs'}", "run.name=run", "run.save_every_steps=0",
        *(size if setting.tiny else []),
    ]  # fmt: skip
    code, printed, seconds = call(words, setting)
    if code != 0:
        return judged(False, f"the command ended with {code}: {last_line(printed)}")
    return judged_run(setting.folder / "runs" / "run", printed, 3, seconds)
