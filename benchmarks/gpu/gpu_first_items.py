"""The items of a first hour on a GPU: what each does, what it proves, and how long it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STAGES: Mapping[str, str] = {
    "A": "correctness: does everything that users do run on the device, and give what a CPU gives?",
    "B": "real sizes: how fast are training and sampling of 0.5 and 1.5 billion parameters, in how much memory?",
    "C": "choices: which of two ways is faster on this device, where the code could take either?",
}


@dataclass(frozen=True)
class Item:
    """One thing to find out, in a process of its own."""

    name: str
    probe: str
    """``module:function`` in this folder."""
    what: str
    proves: str
    seconds: int
    """It is ended after so long."""
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    """How the rows of docs/status.md begin that it speaks for."""

    @property
    def stage(self) -> str:
        """A, B or C."""
        return self.name[0]


VARIANTS: Mapping[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "kl": (("algorithm.kl_coef=0.04",), "a reference beside the policy, and its KL term", ()),
    "lora": (
        ("policy.lora.rank=16", "algorithm.kl_coef=0.04"),
        "adapters: trained, decoded with, saved; the base as the reference; frozen matrices in bfloat16",
        ("LoRA, in our own layers or through peft",),
    ),
    "checkpointing": (("policy.gradient_checkpointing=true",), "activations computed again in the backward pass", ()),
    "padded": (("policy.packing=false",), "padded rows under torch's causal attention", ()),
    "float32": (("policy.compute_type=float32",), "full width throughout", ("train, engine sampler, float32",)),
    "no_graphs": (("rollouts.cuda_graphs=false",), "the engine through the model's modules", ()),
    "transformers": (("rollouts.type=transformers",), "sampling by generate", ("train, transformers sampler",)),
    "offload": (("policy.offload_activations=true",), "activations in pinned memory of the host", ()),
    "fsdp": (("policy.parallel=fsdp",), "one process that was asked for FSDP trains as one without", ()),
    "updates": (
        ("run.completions_per_update=8", "algorithm.correction=truncate"),
        "several updates per batch of rollouts, with log-probabilities from before them",
        (),
    ),
    "profile": (("run.profile_trace_step=2",), "a trace of a step", ()),
}
"""Overrides of the word problems, what they prove, and their rows of docs/status.md."""

CORRECTNESS = (
    Item("A1", "gpu_first_correct:versions", "versions, device, operators",
         "every import is there, and the operators that are called have the arguments that they are given", 60),
    Item("A2", "gpu_first_correct:marked_tests", "pytest -m gpu", "the tests that need a device", 300,
         rows=("CUDA graphs, flash attention",)),
    Item("A3", "gpu_first_correct:trains", "oncurve train word_problems",
         "the whole path of a user: sample, grade, loss, backward, optimizer, save, evaluate, report", 120,
         rows=("bfloat16 compute with float32 master weights",)),
    *(Item(f"A4.{name}", "gpu_first_correct:trains", f"the same with {' '.join(overrides)}", proves, 120,
           {"overrides": list(overrides)}, rows)
      for name, (overrides, proves, rows) in VARIANTS.items()),
    Item("A5", "gpu_first_correct:resumes", "killed after step 2, then oncurve resume",
         "a killed run goes on and keeps the rows that it had; how near it comes to one that was not killed", 180,
         rows=("checkpoints, exact resume",)),
    Item("A6", "gpu_first_correct:learns", "oncurve train word_problems run.steps=10",
         "it learns as on a CPU: above 70 % after ten steps, from 26 %", 200),
    Item("A7", "gpu_first_correct:samples_as_a_cpu", "the engine on the device and on the CPU",
         "greedy in float32: the same tokens; sampled in bfloat16: the trainer finds the sampler's probabilities", 120),
    Item("A8", "gpu_first_correct:sanitized", "compute-sanitizer over a tiny model",
         "no kernel of a recorded decode step or a packed backward pass reads or writes out of bounds", 240),
)  # fmt: skip

SIZES = (
    Item("B0", "gpu_first_sizes:models", "random checkpoints of 0.5B and 1.5B", "nothing: later items read them", 240),
    *(
        item
        for size, limit in (("0.5B", 90), ("1.5B", 150))
        for item in (
            Item(f"B1.{size}", "gpu_first_sizes:proofs", f"{size}: numbers behind every proof at load",
                 "how far packed, flash and decoding's numbers are from float32, and what rounding is", limit,
                 {"model": size}),
            *(Item(f"B2.{size}.{way}", "gpu_first_sizes:training", f"{size}: 8,192 tokens a microbatch, {way}",
                   "tokens per second, share of the nominal rate, peak memory; with checkpointing", limit,
                   {"model": size, "way": way}) for way in ("shared", "packed", "padded")),
            Item(f"B3.{size}", "gpu_first_sizes:decoding", f"{size}: decode steps by rows, context and way",
                 "the step recorded, without recording and by modules; recording, replay, draw", 2 * limit,
                 {"model": size}),
            Item(f"B3.{size}.engine", "gpu_first_sizes:sampling", f"{size}: the engine's tokens per second",
                 "the whole of sampling, with and without a stop string; the host's share", limit, {"model": size}),
        )
    ),
    Item("B4", "gpu_first_memory:edge", "1.5B: memory after sampling and training, and sampling at its edge",
         "what is given back, what the recordings keep, and whether sampling survives too little memory", 150,
         {"model": "1.5B"}),
    Item("B5", "gpu_first_memory:whole_step", "1.5B: math_r1_zero on word problems",
         "a step of a recipe at its real size, by phase", 240, {"model": "1.5B"}),
)  # fmt: skip

CHOICES = (
    Item("C1", "gpu_first_choices:attention", "attention of a decode step",
         "the efficient kernel with a mask against the flash kernel over real lengths", 120),
    Item("C2", "gpu_first_choices:fusing", "add and norm as one Triton kernel; the step through torch.compile",
         "what fused kernels would save in a recorded step", 180),
    Item("C3", "gpu_first_choices:drawing", "ways to draw a token; rows at once", "the cheapest draw that is exact",
         150),
    Item("C4", "gpu_first_choices:layers", "training's small kernels fused or compiled",
         "what torch's fused norm and torch.compile save in an update of 1.5B", 180),
    Item("C5", "gpu_first_choices:parts", "FSDP2 of one process over NCCL; a checkpoint written by part",
         "the process groups and sharding start on this torch; seconds to copy, write, flush and hash weights", 150),
)  # fmt: skip

ITEMS: Mapping[str, Item] = {item.name: item for item in (*CORRECTNESS, *SIZES, *CHOICES)}


def chosen(stage: str, names: list[str]) -> list[Item]:
    """The items of a stage, or those of some names; a name stands for all that begin with it."""
    of_stage = [item for item in ITEMS.values() if item.stage == stage]
    if not names:
        return of_stage
    found = [item for item in of_stage if any(item.name == name or item.name.startswith(f"{name}.") for name in names)]
    if unknown := [name for name in names if not any(f"{item.name}.".startswith(f"{name}.") for item in found)]:
        known = ", ".join(item.name for item in of_stage)
        raise SystemExit(f"stage {stage} has no item {', '.join(unknown)}. It has: {known}")
    return found
