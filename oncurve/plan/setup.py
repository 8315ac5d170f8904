"""The setup of a run as the planner sees it: the work of a step, and how and where the model is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oncurve.core.records import USUAL_ROWS
from oncurve.episodes.settings import EpisodeSection
from oncurve.plan.shape import ModelShape
from oncurve.policy.settings import LoraSettings, OptimizerSettings, PolicySection
from oncurve.run.settings import RunSection

Method = Literal["full", "lora"]
Shard = Literal["none", "zero1", "zero2", "zero3"]
Placement = Literal["colocated", "split", "disaggregated"]
Transfer = Literal["fetch", "nccl"]
Quantization = Literal["nf4", "int8"]
Compute = Literal["float32", "bfloat16", "float16"]

POLICY, RUN = PolicySection(), RunSection()
"""The defaults of a plan are those of a recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """Turns of completions with tools or an environment. By default there is one turn and no answer."""

    limit: int = 1
    """Turns of the policy, at most."""
    mean: float = 1.0
    """Turns of the average completion; an answer comes between two."""
    answer_limit: int = 0
    """Tokens of one answer, at most."""
    mean_answer: float = 0.0
    """Tokens of the average answer."""
    seconds: float = 0.0
    """Until a tool or an environment has answered."""
    threads: int = EpisodeSection().threads
    """Answers that are worked on at the same time."""
    cached: bool = False
    """Waiting completions keep their cache: in vLLM, and in our engine on a CPU. On a GPU ours reads them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One step: how many tokens are sampled and trained on."""

    prompts: int
    """Prompts in a step, P."""
    group_size: int
    """Completions per prompt, G."""
    prompt_tokens: int
    """Tokens of a long prompt, S."""
    completion_tokens: int
    """Limit on the tokens of a completion, T: memory is planned for the longest."""
    mean_completion_tokens: float
    """Tokens of the average completion: time is planned for the average."""
    updates: int = 1
    """Optimizer updates on the completions of a step."""
    passes: int = 1
    """Number of passes over the completions of a step; the updates of all passes are in ``updates``."""
    extra_passes: int = 0
    """Forward passes over all tokens without a gradient: for the reference, for recomputed old log-probabilities."""
    max_rows: int = USUAL_ROWS
    """Completions sampled at the same time."""
    steps: int = RUN.steps
    save_every_steps: int = RUN.save_every_steps
    """Steps between two checkpoints; 0 saves none before the end."""
    keep_checkpoints: int = RUN.keep_checkpoints
    keep_every_steps: int = RUN.keep_every_steps
    records_all: bool = False
    """Tokens and log-probabilities of every step are written, to replay them."""
    turns: TurnPlan = TurnPlan()
    """The limits above are on what the policy writes, in all turns together; answers come on top."""
    context_tokens: int | None = None
    """Prompt, turns and answers together, at most; None: no limit."""
    is_supervised: bool = False
    """Completions come from the data: only evaluations sample."""
    epochs: float | None = None
    """Passes over rows that nobody has counted yet, so that ``steps`` is not known; None: it is."""

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest completion, with its answers."""
        answers = (self.turns.limit - 1) * self.turns.answer_limit
        if self.context_tokens is not None:
            answers = min(answers, max(0, self.context_tokens - self.prompt_tokens - self.completion_tokens))
        return self.completion_tokens + answers

    @property
    def mean_tokens(self) -> float:
        """Tokens of the average completion, with its answers."""
        answers = (self.turns.mean - 1) * self.turns.mean_answer
        return min(self.mean_completion_tokens + answers, float(self.longest_tokens))

    @property
    def held_tokens(self) -> int:
        """Positions of a completion in the engine's cache beyond the prompt that its group shares.

        Where nothing is kept, a completion that comes back from a tool is a prompt of its own, and shares nothing.
        """
        has_own_prompt = self.turns.limit > 1 and not self.turns.cached
        return self.longest_tokens + (self.prompt_tokens if has_own_prompt else 0)

    @property
    def read_again_tokens(self) -> float:
        """Tokens that the average completion makes the sampler read after its first turn.

        With n turns of t tokens, answers of a, a prompt of S:  (n - 1) S + (t + a) n (n - 1) / 2,
        or the n - 1 answers alone where the cache keeps the rest.
        """
        turns = self.turns.mean
        if self.turns.cached:
            return (turns - 1) * self.turns.mean_answer
        each = self.mean_completion_tokens / turns + self.turns.mean_answer
        return (turns - 1) * (self.prompt_tokens + each * turns / 2)

    @property
    def completions(self) -> int:
        """Completions of a step, P x G."""
        return self.prompts * self.group_size

    @property
    def completions_per_update(self) -> int:
        """Completions that one optimizer update sees."""
        return self.completions * self.passes // self.updates

    @property
    def rows_at_once(self) -> int:
        """Completions sampled together: whole groups, at most ``max_rows``, at least one group."""
        return min(self.completions, max(1, self.max_rows // self.group_size) * self.group_size)

    def tokens(self, *, completion_tokens: float, packed: bool) -> float:
        """Tokens that one pass over all completions of a step computes: packing computes each prompt once."""
        prompts = self.prompts if packed else self.completions
        return prompts * self.prompt_tokens + self.completions * completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The method and the devices of training."""

    method: Method = "full"
    rank: int = LoraSettings().rank
    """Rank of a LoRA adapter."""
    targets: tuple[str, ...] | None = None
    """Linear layers that get an adapter; None takes all."""
    quantization: Quantization | None = None
    """Type of the frozen linear layers under an adapter; None keeps them in float32."""
    compute: Compute = "bfloat16"
    """Type of the arithmetic; trained weights and their optimizer state stay in float32."""
    is_gpu: bool = True
    packed: bool = POLICY.packing
    checkpointing: bool = POLICY.gradient_checkpointing
    """Keep only the inputs of layers and compute the rest again in the backward pass."""
    offloads_activations: bool = POLICY.offload_activations
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = OptimizerSettings().type
    tokens_per_microbatch: int = POLICY.tokens_per_microbatch
    has_reference: bool = False
    """A copy of the model stays in memory for the KL term; an adapter's base needs no copy."""
    teacher: ModelShape | None = None
    """A model that stays in memory, whole or cut like the policy, to be learned from."""
    records_decoding: bool = True
    """A GPU samples with our own decode step, where it knows the family; off: through the model's modules."""
    ranks: int = 1
    """Devices that train, each with its own completions."""
    shard: Shard = "none"
    """zero1: the optimizer's state is cut over the ranks. zero2: the gradients too. zero3: the weights too (FSDP)."""
    degree: int | None = None
    """With zero3: devices in a row over which weights are cut, as over those of every other row (HSDP); None: all."""
    loads_by_parts: bool = True
    """With zero3: weights are read in parts, as FSDP does; DeepSpeed and a model with a teacher are whole first."""
    offloads_optimizer: bool = False
    """Master weights and moments in the CPU's memory, half-width weights and gradients on the device."""
    placement: Placement = "colocated"
    """colocated: one process samples and trains. split: other devices of the machine sample. disaggregated: other
    machines sample."""
    sampler_devices: int = 0
    """Devices that only sample; 0 when colocated."""
    server_devices: int = 0
    """GPUs over which the weights of one of its servers are cut; 0: over all of them."""
    transfer: Transfer = "fetch"
    """Way of new weights: as files, over NCCL, or through the memory of a shared GPU."""
    delta_rate: float | None = None
    """Learning rate of a step, where servers get what changed of the weights, in bfloat16; None: they get all."""
    staleness: int = 0
    """Steps that devices which only sample may be ahead of training."""
    in_flight: bool = False
    """They take new weights under rows that run."""
    has_server_beside: bool = False
    """If colocated: a server on the trainer's device samples, not the process that trains."""

    @property
    def parts(self) -> int:
        """Number of parts into which weights, gradients and moments are cut, as far as ``shard`` says."""
        return self.degree if self.shard == "zero3" and self.degree and self.ranks % self.degree == 0 else self.ranks

    @property
    def has_servers(self) -> bool:
        """Servers sample, on devices of their own or on the trainer's."""
        return bool(self.sampler_devices) or self.has_server_beside

    @property
    def has_own_layers(self) -> bool:
        """Packed rows go through the layers of ``oncurve.model``: on a CPU, whole weights; see ``policy/forward.py``.

        An adapter with dropout goes through the model's own, which is not told apart here.
        """
        return not self.is_gpu and self.packed and self.quantization is None

    @property
    def has_flash_kernel(self) -> bool:
        """Packed rows attend through torch's flash kernel, see ``policy/flash_varlen.py``; heads of other sizes than it
        knows are not told apart here."""
        return self.is_gpu and self.packed and self.width == 2

    @property
    def halves_frozen(self) -> bool:
        """Frozen matrices of linear layers are in bfloat16; see ``policy/half_precision.py``."""
        is_plain = self.quantization is None and self.shard == "none" and not self.offloads_optimizer
        return self.is_gpu and self.method == "lora" and self.compute == "bfloat16" and is_plain

    @property
    def records_copies(self) -> bool:
        """A GPU decodes on copies of the matrices in the type of the arithmetic."""
        return self.is_gpu and self.records_decoding and self.width == 2 and self.quantization is None

    @property
    def width(self) -> int:
        """Bytes of a number in the arithmetic."""
        return 4 if self.compute == "float32" else 2
