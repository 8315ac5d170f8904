"""A run before it begins: its recipe, its model, its devices and its lengths, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from oncurve.core.errors import ConfigError
from oncurve.core.records import USUAL_ROWS, DecodeCall
from oncurve.data.settings import DemonstrationsData
from oncurve.plan.layout import DeviceLayout
from oncurve.plan.shape import ModelShape
from oncurve.plan.token_lengths import TokenLengths
from oncurve.policy.settings import PolicySection
from oncurve.recipe.load import apply_overrides, validate_tree
from oncurve.recipe.schema import Config, RolloutSection

Trainer = Literal["GRPO", "PPO", "DPO"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A recipe, and what no recipe has. The properties are the quantities that several formulas share."""

    config: Config
    shape: ModelShape
    layout: DeviceLayout
    lengths: TokenLengths
    teacher: ModelShape | None = None
    """A model that stays in memory, whole or cut like the policy, to be learned from."""
    rows_in_memory: int | None = None
    """Completions that the memory of the devices has room for, where ``rollouts.max_rows`` is auto; None: not known."""
    trainer: Trainer = "GRPO"
    """PPO trains a critic as well, which reads all tokens once more before the updates. DPO samples nothing, and has a
    reference whatever the recipe says."""

    def with_keys(self, section: str, values: Mapping[str, Any]) -> PlannedRun:
        """The run with other values of a section of its recipe, which nothing checks."""
        part = getattr(self.config, section).model_copy(update=values)
        return replace(self, config=self.config.model_copy(update={section: part}))

    def with_overrides(self, overrides: Sequence[str]) -> PlannedRun:
        """The run with ``key=value`` overrides of its recipe. Raises ConfigError where they do not go together."""
        tree = apply_overrides(self.config.model_dump(), overrides)
        return replace(self, config=validate_tree(tree, source="the changed recipe"))

    def with_layout(self, values: Mapping[str, Any]) -> PlannedRun:
        """The run on other devices."""
        return replace(self, layout=replace(self.layout, **values))

    def with_room_for(self, rows: int) -> PlannedRun:
        """The run with so many completions sampled at a time; as it is where a group does not fit."""
        return replace(self, rows_in_memory=rows) if self.config.algorithm.num_groups(rows) else self

    @property
    def policy(self) -> PolicySection:
        """The recipe's section."""
        return self.config.policy

    @property
    def rollouts(self) -> RolloutSection:
        """The recipe's section."""
        return self.config.rollouts

    @property
    def is_supervised(self) -> bool:
        """Completions come from the data: only evaluations sample."""
        return self.config.sft is not None

    @property
    def known_rows(self) -> int | None:
        """Rows of the data, where the recipe says how many are generated."""
        return self.config.data.limit if isinstance(self.config.data, DemonstrationsData) else None

    @property
    def steps(self) -> int:
        """Steps of the run; ``run.steps`` where epochs set others once the rows have been counted."""
        return self.config.run.steps if self.known_rows is None else self.config.steps_over(self.known_rows)

    @property
    def uncounted_epochs(self) -> float | None:
        """Passes over rows that nobody has counted yet, so that ``steps`` is not known; None: it is."""
        return self.config.sft.epochs if self.config.sft is not None and self.known_rows is None else None

    # -- tokens

    @property
    def written_tokens(self) -> int:
        """Tokens that the policy writes in the longest completion, T: answers come on top."""
        return self.rollouts.max_completion_tokens

    @property
    def turn_limit(self) -> int:
        """Turns of a completion, at most."""
        return self.rollouts.episodes.max_turns if self.rollouts.has_episodes else 1

    @property
    def answer_limit(self) -> int:
        """Tokens of one answer, at most."""
        return self.rollouts.episodes.max_answer_tokens if self.rollouts.has_episodes else 0

    @property
    def keeps_cache(self) -> bool:
        """Completions that wait for an answer keep their cache: in vLLM, and in our engine on a CPU.

        On a GPU our engine reads them again.
        """
        rollouts = self.rollouts
        has_vllm = bool(rollouts.vllm_servers or rollouts.sleep)
        has_vllm = has_vllm or (rollouts.type == "auto" and self.layout.placement != "colocated")
        return rollouts.has_episodes and (has_vllm or not self.layout.is_gpu)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest completion, with its answers."""
        answers = (self.turn_limit - 1) * self.answer_limit
        if self.lengths.context_tokens is not None:
            room = self.lengths.context_tokens - self.lengths.prompt_tokens - self.written_tokens
            answers = min(answers, max(0, room))
        return self.written_tokens + answers

    @property
    def mean_tokens(self) -> float:
        """Tokens of the average completion, with its answers."""
        answers = (self.lengths.turns - 1) * self.lengths.answer_tokens
        return min(self.lengths.completion_tokens + answers, float(self.longest_tokens))

    @property
    def resident_tokens(self) -> int:
        """Positions of a completion in the engine's cache beyond the prompt that its group shares.

        Where nothing is kept, a completion that comes back from a tool is a prompt of its own, and shares nothing.
        """
        has_own_prompt = self.turn_limit > 1 and not self.keeps_cache
        return self.longest_tokens + (self.lengths.prompt_tokens if has_own_prompt else 0)

    @property
    def read_again_tokens(self) -> float:
        """Tokens that the average completion makes the sampler read after its first turn.

        With n turns of t tokens, answers of a, a prompt of S:  (n - 1) S + (t + a) n (n - 1) / 2,
        or the n - 1 answers alone where the cache keeps the rest.
        """
        turns, answer = self.lengths.turns, self.lengths.answer_tokens
        if self.keeps_cache:
            return (turns - 1) * answer
        turn = self.lengths.completion_tokens / turns + answer
        return (turns - 1) * (self.lengths.mean_prompt_tokens + turn * turns / 2)

    @property
    def trained_tokens(self) -> float:
        """Completion tokens that the passes of a step train on."""
        return self.config.run.passes_per_step * self.config.completions_per_step * self.lengths.completion_tokens

    @property
    def step_tokens(self) -> float:
        """Tokens that one pass over all completions of a step computes: packing computes each prompt once."""
        prompts = self.config.run.prompts_per_step if self.policy.packing else self.config.completions_per_step
        return prompts * self.lengths.mean_prompt_tokens + self.config.completions_per_step * self.mean_tokens

    # -- rows

    @property
    def completions_per_update(self) -> int:
        """Completions that one optimizer update sees."""
        return self.config.run.completions_per_update or self.config.completions_per_step

    @property
    def max_rows(self) -> int:
        """Completions sampled at the same time, at most."""
        if self.rollouts.max_rows == "auto":
            return self.rows_in_memory or USUAL_ROWS
        return self.rollouts.max_rows

    @property
    def groups_at_once(self) -> int:
        """Groups sampled together: those of at most ``max_rows`` completions, at least one."""
        return min(self.config.run.prompts_per_step, max(1, self.config.algorithm.num_groups(self.max_rows)))

    @property
    def rows_at_once(self) -> int:
        """Completions sampled together: whole groups."""
        return self.config.algorithm.num_rows(self.groups_at_once)

    @property
    def decode_call(self) -> DecodeCall:
        """Rows and lengths that the engine of a device that trains is made for."""
        return DecodeCall(
            num_prompts=-(-self.config.run.prompts_per_step // self.layout.ranks),
            group_size=self.config.algorithm.group_size,
            prompt_tokens=self.lengths.prompt_tokens,
            completion_tokens=self.resident_tokens,
            cuts=self.config.sampling().cuts,
        )

    # -- the model in training

    @property
    def trains_adapter(self) -> bool:
        """A LoRA adapter is trained, and the model under it is frozen."""
        return self.policy.lora is not None

    @property
    def adapter_targets(self) -> tuple[str, ...] | None:
        """Linear layers that get an adapter; None: all of them."""
        if self.policy.lora is None or isinstance(self.policy.lora.target_modules, str):
            return None
        return self.policy.lora.target_modules

    @property
    def trained_parameters(self) -> int:
        """Weights that the optimizer moves: all of them, or the adapter's."""
        if self.policy.lora is None:
            return self.shape.num_parameters
        return self.shape.lora_parameters(self.policy.lora.rank, self.adapter_targets)

    @property
    def has_reference(self) -> bool:
        """A KL term whose other side is neither the policy that sampled nor a teacher.

        An adapter's base is the reference without a copy.
        """
        algorithm = self.config.algorithm
        return self.trainer == "DPO" or (algorithm.measures_kl and algorithm.teacher is None)

    @property
    def extra_passes(self) -> int:
        """Forward passes over all tokens without a gradient: for the reference or the teacher, for old
        log-probabilities where several updates need them from the trainer, for a critic."""
        if self.trainer == "DPO":
            return 1
        recomputes_old = self.config.updates_per_step > 1 and self.config.algorithm.old_logprobs == "trainer"
        return int(self.config.algorithm.measures_kl) + int(recomputes_old) + int(self.trainer == "PPO")

    @property
    def loads_by_parts(self) -> bool:
        """With zero3 weights are read in parts, as FSDP does. DeepSpeed, a model with a teacher, and a mixture, whose
        experts transformers joins when it loads them, are whole first."""
        is_whole = self.policy.parallel == "deepspeed" or self.config.algorithm.teacher is not None
        return not is_whole and not self.shape.is_mixture

    @property
    def parts(self) -> int:
        """Number of parts into which weights, gradients and moments are cut, as far as the layout's ``shard`` says:
        over all ranks, or over those of a row (HSDP)."""
        degree, ranks = self.policy.shard_degree, self.layout.ranks
        return degree if self.layout.shard == "zero3" and degree and ranks % degree == 0 else ranks

    @property
    def compute(self) -> str:
        """Type of the arithmetic; trained weights and their optimizer state stay in float32."""
        if self.policy.compute_type == "auto":
            return "bfloat16" if self.layout.is_gpu else "float32"
        return self.policy.compute_type

    @property
    def width(self) -> int:
        """Bytes of a number in the arithmetic."""
        return 4 if self.compute == "float32" else 2

    @property
    def has_own_layers(self) -> bool:
        """Packed rows go through the layers of ``oncurve.model``: on a CPU, whole weights; see ``policy/forward.py``.

        An adapter with dropout goes through the model's own, which is not told apart here.
        """
        return not self.layout.is_gpu and self.policy.packing and self.policy.quantization is None

    @property
    def has_flash_kernel(self) -> bool:
        """Packed rows attend through torch's flash kernel, see ``policy/packed_attention.py``;
        heads of other sizes than it
        knows are not told apart here."""
        return self.layout.is_gpu and self.policy.packing and self.width == 2

    @property
    def halves_frozen(self) -> bool:
        """Frozen matrices of linear layers are in bfloat16; see ``policy/half_precision.py``."""
        layout = self.layout
        is_plain = self.policy.quantization is None and layout.shard == "none" and not layout.offloads_optimizer
        return layout.is_gpu and self.trains_adapter and self.compute == "bfloat16" and is_plain

    # -- sampling, and the way of new weights

    @property
    def records_copies(self) -> bool:
        """A GPU decodes on copies of the matrices in the type of the arithmetic."""
        can_record = self.rollouts.cuda_graphs and self.policy.quantization is None
        return self.layout.is_gpu and self.width == 2 and can_record

    @property
    def has_server_beside(self) -> bool:
        """A server on the trainer's device samples, not the process that trains."""
        return self.layout.placement == "colocated" and self.rollouts.sleep

    @property
    def has_servers(self) -> bool:
        """Servers sample, on devices of their own or on the trainer's."""
        return bool(self.layout.sampler_devices) or self.has_server_beside

    @property
    def server_devices(self) -> int:
        """GPUs over which the weights of one server are cut; 0 where the recipe does not say: an address may be that
        of any."""
        if self.layout.placement == "colocated":
            return 0
        if self.rollouts.vllm_servers:
            return self.rollouts.tensor_parallel
        return int(bool(self.rollouts.own_servers or self.rollouts.registry))

    @property
    def sends_by_nccl(self) -> bool:
        """New weights go from GPU to GPU, not as files."""
        return self.rollouts.transfer == "nccl"

    @property
    def delta_rate(self) -> float | None:
        """Learning rate of a step, where servers get what changed of the weights, in bfloat16; None: they get all."""
        if self.rollouts.deltas is None or self.trains_adapter:
            return None
        return self.config.optimizer.rate_of(self.config.updates_per_step)

    # -- what does not go together

    def check_ranks(self) -> None:
        """Raises ConfigError where the completions of an update do not divide over the ranks."""
        rows, degree, ranks = self.completions_per_update, self.policy.shard_degree, self.layout.ranks
        if degree is not None and self.parts != degree:
            raise ConfigError(
                f"--gpus {ranks} is no multiple of policy.shard_degree, {degree}. Choose one, or leave it out"
            )
        if rows % ranks:
            raise ConfigError(
                f"--gpus {ranks}: the {rows} completions of an update do not divide over them. "
                f"Choose a divisor, or another run.prompts_per_step"
            )

    def row_warning(self) -> str | None:
        """A warning where prompt and completion are longer than the model was made for; None otherwise."""
        row = self.lengths.prompt_tokens + self.written_tokens
        name, context = self.shape.name, self.shape.max_tokens
        if row > context:
            return (
                f"a prompt and its completion may take {row} tokens, more than the context of {name}, {context}: "
                f"longer prompts are left out"
            )
        row += (self.turn_limit - 1) * self.answer_limit
        if row <= context:
            return None
        return (
            f"a prompt, its turns and their answers may take {row} tokens, more than the context of {name}, {context}: "
            f"such completions end with the reason context"
        )
