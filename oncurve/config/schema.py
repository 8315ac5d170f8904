"""Every key of a recipe, with its unit, meaning and default.

A recipe holds only what differs from these defaults. Nothing below ``wiring`` sees these classes. Sections
that are settings as they are are in ``oncurve/settings.py``. A key that changes no number of a run is ``Harmless``.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.config.algorithm import AlgorithmSection
from oncurve.config.rewards import R1ZeroReward, Reward
from oncurve.config.rollouts import RolloutSection
from oncurve.settings import Fraction, Harmless, LoraSettings, NonNegative, OptimizerSettings, Section


class DataSection(Section):
    """Where prompts come from and how they are written."""

    path: str | None = None
    """File, folder or Hugging Face Hub name; None where the type says it already."""
    split: str = "train"
    columns: dict[str, str] = Field(default_factory=dict)
    """Names used here to names in the data, such as {question: problem, answer: label}."""
    template: str = "think_answer"
    """think_answer, r1_zero, boxed, gsm8k, reasoning_answer, question_only, plain, or a file with {question}."""
    chat: bool | dict[str, Any] = False
    """Write the template's messages through the model's chat template: for instruct models. true, or arguments of that
    template, such as {enable_thinking: false}."""
    few_shot: NonNegative = 0
    """Worked examples of the training set shown before the question."""
    limit: PositiveInt | None = None
    """Use at most this many rows; None takes all."""
    retire_above: Annotated[float, Field(gt=0, le=1)] | None = None
    """Leave out training prompts whose running pass rate reached this; None keeps all."""
    prefer_half_solved: bool = False
    """Choose the prompts whose running pass rate is nearest to one half among twice as many as a step takes."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are left out, and counted; None allows what the model's context leaves free."""


class JsonlData(DataSection):
    """A file of JSON lines."""

    type: Literal["jsonl"] = "jsonl"


class CsvData(DataSection):
    """A CSV or TSV file whose first line names the columns."""

    type: Literal["csv"] = "csv"


class HubData(DataSection):
    """A dataset on the Hugging Face Hub, or one in a local folder."""

    type: Literal["huggingface"] = "huggingface"


class Gsm8kData(DataSection):
    """GSM8K: openai/gsm8k, or its JSON lines at ``path``."""

    type: Literal["gsm8k"] = "gsm8k"


class MathData(DataSection):
    """MATH: problems with LaTeX answers, from ``path`` or the Hugging Face Hub."""

    type: Literal["math"] = "math"


class WordProblemsData(DataSection):
    """Word problems made on the spot: no file and no network."""

    type: Literal["word_problems"] = "word_problems"
    limit: PositiveInt = 4096  # pyright: ignore[reportIncompatibleVariableOverride]
    """How many problems to make."""
    levels: tuple[PositiveInt, ...] = (1, 2)
    """Which levels of difficulty."""


class ProgramProblemsData(DataSection):
    """Small functions to write, with tests, made on the spot: no file and no network."""

    type: Literal["program_problems"] = "program_problems"
    template: str = "program"
    limit: PositiveInt = 1000  # pyright: ignore[reportIncompatibleVariableOverride]
    """How many problems to make."""


class EpisodeData(DataSection):
    """Rows made on the spot for a policy that is answered within its completion."""

    template: str = "tool_answer"
    limit: PositiveInt = 4096  # pyright: ignore[reportIncompatibleVariableOverride]
    """How many to make."""


class CalculatorProblemsData(EpisodeData):
    """Word problems with numbers too long to work out verbatim, made on the spot, for a policy with a calculator."""

    type: Literal["calculator_problems"] = "calculator_problems"


class CalculatorChainsData(EpisodeData):
    """The same with two operations, of which the second takes the result of the first."""

    type: Literal["calculator_chains"] = "calculator_chains"


class NumberGamesData(EpisodeData):
    """Numbers to guess, made on the spot, for the environment oncurve.tasks.guess_number:GuessNumber."""

    type: Literal["number_games"] = "number_games"


class MazesData(EpisodeData):
    """Mazes made on the spot, for the environment oncurve.tasks.maze:Maze."""

    type: Literal["mazes"] = "mazes"


class GivenData(DataSection):
    """Rows that a Python program passes to oncurve.train or oncurve.Trainer."""

    type: Literal["given"] = "given"


FILE_TYPES = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv"}


def with_type(section: object) -> object:
    """A data section whose type its path says; any other as it is."""
    if isinstance(section, dict):
        keys = cast("dict[str, object]", section)
        found = FILE_TYPES.get(PurePath(str(keys.get("path"))).suffix)
        if found is not None and "type" not in keys:
            return {"type": found, **keys}
    return section


Data = Annotated[
    JsonlData
    | CsvData
    | HubData
    | Gsm8kData
    | MathData
    | WordProblemsData
    | ProgramProblemsData
    | CalculatorProblemsData
    | CalculatorChainsData
    | NumberGamesData
    | MazesData
    | GivenData,
    Field(discriminator="type"),
]


class EvaluationSection(Section):
    """How the model is measured, during the run and before and after it."""

    data: Data | None = None
    """Problems that are never trained on; None holds some out of the training data."""
    num_prompts: PositiveInt = 500
    """How many problems to measure on before and after the run, and to hold out where ``data`` is None: at most a fifth
    of the rows where more would leave too few to train on."""
    split_seed: NonNegative = 0
    """Which rows are held out. It does not follow run.seed, so that runs with several seeds are tested on the same
    problems and can be compared pairwise."""
    every_steps: NonNegative = 0
    """Measure after every so many steps; 0 measures only before and after the run."""
    num_prompts_during: PositiveInt = 100
    """How many problems to measure on during the run: the first of them."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy. The same for both models."""
    samples: PositiveInt = 1
    """Completions per problem; more than one needs a temperature above 0."""


class PolicySection(Section):
    """The model in training."""

    lora: LoraSettings | None = None
    """None trains the model itself; {} trains an adapter with the defaults."""
    quantization: Literal["nf4", "int8"] | None = None
    """Keep the frozen weights under an adapter in 4 or 8 bits, through bitsandbytes; None keeps them whole."""
    train_only: tuple[str, ...] = ()
    """Regular expressions; only weights whose names match one are trained. None at all: everything is."""
    parallel: Literal["auto", "none", "ddp", "data_parallel", "fsdp", "deepspeed"] = "auto"
    """What several processes do with the model. ddp: each has all of it; data_parallel is an older name for that. fsdp:
    each trains a part of every weight and keeps a copy to sample from. deepspeed: as its file says. auto: none for one
    process, ddp otherwise."""
    deepspeed: str | None = None
    """deepspeed: its JSON file, where "auto" takes the recipe's number; None is ZeRO-2."""
    reshard_after_forward: bool = True
    """fsdp: free the weights of a block until its backward pass, as ZeRO-3; false keeps them until then, as ZeRO-2."""
    offload: bool = False
    """fsdp: keep weights in training, gradients and moments in the CPU's memory. deepspeed: the moments."""
    timeout_seconds: PositiveFloat = 1800.0
    """The longest that one process waits for another."""
    silent_seconds: PositiveFloat = 60.0
    """A process that gives no sign of life for so long is lost, and the others end."""
    offload_activations: bool = False
    """Keep what the backward pass needs in the CPU's memory: less on the GPU, and slower."""

    compute_type: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Type of the arithmetic; weights and optimizer stay in float32. auto: bfloat16 on a GPU, float32 on a CPU. float16
    is for measuring and sampling on GPUs without bfloat16; training refuses it."""
    device: str = "auto"
    """auto takes a GPU if there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time. On a CPU what is free then goes back
    to the system between sampling and training as well."""
    tokens_per_microbatch: PositiveInt = 8192
    """Prompt and completion tokens in one forward and backward pass."""
    packing: bool = True
    """Compute without padding and each prompt once for its group, where the model allows; false pads every row."""
    liger: Literal["auto"] | bool = "auto"
    """Let Liger's kernels compute norms, SwiGLU and rotary embeddings of a model in training on a CUDA device. auto:
    where the package is installed, knows the model and computes the same on a small batch; true: that or an error."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose authors you trust."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hugging Face Hub."""


class RunSection(Section):
    """How long, how much, where to."""

    steps: PositiveInt = 100
    prompts_per_step: PositiveInt = 16
    """Prompts sampled in one step; times algorithm.group_size gives the completions of the step."""
    refill_rounds: NonNegative = 0
    """Replace groups without a signal by groups of other prompts, at most so many times a step (dynamic sampling)."""
    completions_per_update: PositiveInt | None = None
    """Completions in one optimizer update; None makes one update of all of them. Must divide them."""
    passes_per_step: PositiveInt = 1
    """How often the completions of a step are trained on before new ones are sampled, mu in the paper of GRPO."""
    seed: NonNegative = 0
    folder: Harmless[str] = "runs"
    """The run gets a folder of its own inside this one."""
    name: Harmless[str | None] = None
    """Name of that folder; None makes one from the recipe and the time."""
    save_every_steps: Harmless[NonNegative] = 10
    """Save a checkpoint after every so many steps, to resume from; 0 saves only the final model."""
    keep_checkpoints: Harmless[PositiveInt] = 2
    """How many checkpoints to keep, besides the one with the best held-out score and the final model."""
    on_save_error: Harmless[Literal["stop", "continue"]] = "stop"
    """When a checkpoint cannot be written, as on a full disk: end the run, or continue and try again when it is due."""
    grace_seconds: Harmless[PositiveFloat] = 25.0
    """Time to save after SIGTERM, Ctrl-C or SIGUSR1; keep it below what the scheduler gives before it kills."""
    max_nonfinite_updates: Harmless[NonNegative] = 3
    """End the run after so many updates in a row whose loss or gradient is not finite; 0 never does."""
    on_kl_alarm: Harmless[Literal["warn", "return"]] = "warn"
    """When the policy drifts from its reference: warn, or continue from an earlier checkpoint with twice the KL."""
    rollouts_every_steps: Harmless[PositiveInt] = 10
    """Write the completions of every so many steps to the run folder."""
    logprobs_of_prompts: Harmless[NonNegative] = 8
    """Of so many prompts of a written step, write the log-probability of every token as well; 0: of none."""
    profile: bool = False
    """Measure the time of each phase of every step and of its parts."""
    profile_trace_step: PositiveInt | None = None
    """Also write a trace of this step by torch's profiler to the run folder; the first step is 1."""
    max_error_fraction: Harmless[Fraction] = 0.2
    """Stop when grading fails for more than this fraction of a step's completions."""
    track: Harmless[tuple[Literal["tensorboard", "wandb", "trackio"], ...] | None] = None
    """Where else the metrics go; None takes what has a key in the environment (WANDB_API_KEY), [] nothing."""
    track_aliases: Harmless[tuple[Literal["trl", "tutorials"], ...]] = ()
    """Log the metrics there under these other names as well."""


SUPERVISED = {"type": "rft", "group_size": 1}
"""The loss of a supervised stage: the mean of -log p over all tokens of an update's demonstrations."""


class SftSection(Section):
    """A supervised stage: the policy learns completions that are in the data. `oncurve sft` sets it."""

    epochs: PositiveFloat | None = None
    """Passes over the training rows; sets run.steps. None leaves them to run.steps."""
    train_on: Literal["assistant", "last"] = "assistant"
    """Rows of messages: learn all that the assistant says, or only what it says last."""
    max_tokens: PositiveInt | None = None
    """Rows whose prompt and completion together are longer are left out, and counted; None is the model's context."""


class Config(Section):
    """A whole recipe."""

    model: str
    """Folder or Hugging Face Hub name of a causal language model; "embedded" is the small one inside this package."""
    data: Data
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)] = (R1ZeroReward(),)
    algorithm: AlgorithmSection = AlgorithmSection()
    rollouts: RolloutSection = RolloutSection()
    policy: PolicySection = PolicySection()
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSection = EvaluationSection()
    run: RunSection = RunSection()
    sft: SftSection | None = None
    """With this section the recipe is a supervised stage: completions come from the data, and keys of algorithm count
    for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _supervise(cls, tree: object) -> object:
        """A supervised stage is rejection sampling with completions that are there, all of them right."""
        if isinstance(tree, dict) and tree.get("sft") is not None:
            return {**tree, "algorithm": SUPERVISED}
        return cast("object", tree)

    @property
    def completions_per_step(self) -> int:
        """Prompts times group size."""
        return self.run.prompts_per_step * self.algorithm.group_size

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates on one batch of rollouts."""
        per_pass = self.completions_per_step // (self.run.completions_per_update or self.completions_per_step)
        return per_pass * self.run.passes_per_step

    @model_validator(mode="before")
    @classmethod
    def _infer_types(cls, tree: object) -> object:
        """A data file says by its ending what it is."""
        if not isinstance(tree, dict):
            return cast("object", tree)
        known = dict(cast("dict[str, object]", tree))
        known["data"] = with_type(known["data"]) if "data" in known else None
        if known["data"] is None:
            del known["data"]
        evaluation = known.get("evaluation")
        if isinstance(evaluation, dict) and "data" in evaluation:
            section = cast("dict[str, object]", evaluation)
            known["evaluation"] = {**section, "data": with_type(section["data"])}
        return known

    @model_validator(mode="after")
    def _check_batch(self) -> Config:
        size = self.run.completions_per_update
        if size and self.completions_per_step % size:
            fitting = [n for n in range(1, self.completions_per_step + 1) if self.completions_per_step % n == 0]
            nearest = min(fitting, key=lambda n: abs(n - size))
            raise ValueError(
                f"run.completions_per_update is {size}, which does not divide the {self.completions_per_step} "
                f"completions of a step (run.prompts_per_step {self.run.prompts_per_step} x algorithm.group_size "
                f"{self.algorithm.group_size}). The nearest that does is {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _check_transfer(self) -> Config:
        if self.rollouts.transfer in ("nccl", "ipc") and self.policy.lora is not None:
            raise ValueError(
                f"rollouts.transfer is {self.rollouts.transfer}, which sends whole weights, and policy.lora trains an "
                f"adapter, a hundredth of them. Set `rollouts.transfer=fetch`"
            )
        return self

    @model_validator(mode="after")
    def _check_staleness(self) -> Config:
        if self.rollouts.staleness and (self.data.retire_above is not None or self.data.prefer_half_solved):
            raise ValueError(
                "rollouts.staleness is 1, which chooses the prompts of a step before the step before it is graded, and "
                "data.retire_above and data.prefer_half_solved need those grades. Set `rollouts.staleness=0`, or "
                "`data.retire_above=null data.prefer_half_solved=false`"
            )
        return self

    @model_validator(mode="after")
    def _check_deepspeed(self) -> Config:
        if self.policy.deepspeed is not None and self.policy.parallel != "deepspeed":
            raise ValueError(
                f"policy.deepspeed names a file, but policy.parallel is {self.policy.parallel}. Set it to deepspeed, "
                f"or leave the file out"
            )
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Config:
        if self.policy.quantization and self.policy.lora is None:
            raise ValueError(
                f"policy.quantization is {self.policy.quantization}, and weights of few bits cannot be trained. "
                f"Set policy.lora as well, such as policy.lora.rank=16, or leave quantization out"
            )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> Config:
        if self.evaluation.samples > 1 and self.evaluation.temperature == 0:
            raise ValueError(
                f"evaluation.samples is {self.evaluation.samples} at evaluation.temperature 0, which would sample the "
                f"same completion each time. Set the temperature above 0 or the samples to 1"
            )
        return self
