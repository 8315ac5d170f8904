"""The loaded parts of a recipe, and the identity by which a checkpoint recognizes them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from transformers import PreTrainedTokenizerBase

from oncurve.core.algorithm import Algorithm
from oncurve.core.errors import ConfigError
from oncurve.core.grading import RewardFunction
from oncurve.core.records import SOURCE_ROW, Group, Prompt
from oncurve.core.sampler import PolicyView, Sampler, check_ids
from oncurve.data.chat_template import asks_time, moment_of, prepare_tokenizer
from oncurve.data.curriculum import Curriculum
from oncurve.data.from_settings import Rows, shared_columns
from oncurve.data.given import NOTHING, Given
from oncurve.extensions import extension
from oncurve.model.context import context_of
from oncurve.observe.manifest import describe_run
from oncurve.observe.redact import redact_tree
from oncurve.observe.run_model import resolve_model
from oncurve.policy.distributed import ALONE, Processes
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.schema import Config
from oncurve.rewards.terms import make_reward_function, with_early_grading
from oncurve.run.assemble import make_algorithm, make_policy, make_sampler, with_episodes
from oncurve.run.code_files import file_of, fingerprints, variables
from oncurve.run.interruption import Interruption
from oncurve.run.rendered import Rendered, check_thinking, make_prompts, split_rows
from oncurve.run.state import checksum
from oncurve.wording import counted

if TYPE_CHECKING:
    from oncurve.policy.teacher import OutsideTeacher


class ServerSide(Sampler, Protocol):
    """The connection to rollout servers, as the run sees it."""

    notify: Callable[[str], None]
    """Hears of servers that come, go and come back."""

    def prepare(self, policy: PolicyView, version: int) -> bool:
        """Take a copy of weights before ``load_weights`` is called; whether it did."""
        ...

    def weight_metrics(self) -> dict[str, float]:
        """Metrics of how the newest weights came to the servers."""
        ...


class LookAhead(Sampler, Protocol):
    """A sampler that is ahead of the trainer, as the run sees it."""

    def finished(self, step: int) -> dict[int, list[Group]]:
        """The whole groups of this step and of later ones."""
        ...

    def restore(self, groups: Mapping[int, Sequence[Group]]) -> None:
        """Take groups that were finished before a run stopped."""
        ...


@dataclass(frozen=True)
class Parts:
    """A recipe's parts, loaded."""

    config: Config
    policy: TrainedPolicy
    algorithm: Algorithm
    sampler: Sampler
    reward_function: RewardFunction
    prompts: Rendered
    data: Curriculum
    servers: ServerSide | None = None
    """The client of rollout servers, in the process that has one."""
    given: Given = NOTHING
    """Objects that a Python program passed."""
    ahead: LookAhead | None = None
    """The sampler that is ahead of the trainer, in the process that has one."""
    examining_sampler: Sampler | None = None
    """Sampler of measurements; None: that of training."""
    examining_reward: RewardFunction | None = None
    """Reward of measurements; None: that of training."""
    correct_means: str = ""
    """Meaning of "correct" in measurements, where the recipe's rewards do not say it."""

    @property
    def closing(self) -> list[Sampler | RewardFunction | OutsideTeacher]:
        """Everything that must be closed at the end."""
        parts = (self.examining_reward, self.examining_sampler, self.reward_function, self.sampler, self.policy.teacher)
        return [part for part in parts if part is not None]

    @property
    def moves_reference(self) -> bool:
        """The reference follows the policy, so that a checkpoint must hold it."""
        return any(self.algorithm.reference_share(step) for step in range(self.config.run.steps))


def make_parts(
    config: Config,
    processes: Processes = ALONE,
    interruption: Interruption | None = None,
    given: Given = NOTHING,
) -> Parts:
    """Load the model and the data of a recipe. Each of several processes samples and grades a share.

    ``given`` holds the rows and rewards that a Python program passed.

    Raises ConfigError for arithmetic that DeepSpeed is not asked for here.
    """
    if config.policy.compute_type == "float16" and config.policy.parallel == "deepspeed":
        raise ConfigError(
            "policy.compute_type is float16 and policy.parallel is deepspeed, whose arithmetic is bfloat16 or float32 "
            "here. Set policy.compute_type=bfloat16, or policy.parallel=fsdp"
        )
    rows = split_rows(config, given)  # what a user can mistake is found before the model is loaded
    reward_function = make_reward_function(
        config.rewards,
        seed=config.run.seed,
        total_steps=config.run.steps,
        given=given.rewards,
        columns=shared_columns(rows),
    )
    algorithm = make_algorithm(config)
    policy = make_policy(config, with_reference=algorithm.needs_reference, processes=processes, given=given)
    check_thinking(config, policy.tokenizer)
    config = with_moment(config, policy.tokenizer, processes)
    if processes.count > 1:
        from oncurve.run.data_parallel import ShardedRewards  # lazy

        reward_function = ShardedRewards(reward_function, processes, interruption)
    else:
        reward_function = with_early_grading(reward_function, config.rewards)
    prompts = _make_checked_prompts(config, policy, given, rows)
    data = Curriculum(
        prompts.train,
        config.run.prompts_per_step,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        retire_above=config.data.retire_above,
        prefer_half_solved=config.data.prefer_half_solved,
        lag=config.rollouts.staleness,
    )
    sampler, servers, ahead = make_shared_sampler(config, processes, data, interruption, given)
    if config.sft is None:
        return Parts(config, policy, algorithm, sampler, reward_function, prompts, data, servers, given, ahead)
    from oncurve.run.demonstrated import DemonstratedReward, DemonstrationSampler, SameTextReward  # lazy

    correct_means = ""
    if not prompts.are_answered and config.rewards == Config.model_fields["rewards"].default:
        reward_function.close()
        reward_function, correct_means = SameTextReward(), "the text is the demonstration's"
    shown = DemonstrationSampler(prompts.demonstrations)
    return Parts(
        config, policy, algorithm, shown, DemonstratedReward(), prompts, data, servers, given,
        examining_sampler=sampler, examining_reward=reward_function, correct_means=correct_means,
    )  # fmt: skip


def _make_checked_prompts(
    config: Config, policy: TrainedPolicy, given: Given, rows: tuple[Rows, Rows, Rows, Rows]
) -> Rendered:
    """The prompts of a run, all of whose tokens the model has."""
    context = context_of(policy.model.config)
    prompts = make_prompts(config, policy.tokenizer, context_tokens=context, given=given, rows=rows)
    policy.reference_prompts = prompts.hinted
    for prompt in (*prompts.written, *prompts.during, *prompts.test):
        check_ids(policy.trained_model, prompt.prompt_ids)
    if not isinstance(prompts.train, list):
        prompts.train.check = lambda token_ids: check_ids(policy.trained_model, token_ids)
    for shown in prompts.shown:
        check_ids(policy.trained_model, shown.token_ids)
    return prompts


def with_moment(config: Config, tokenizer: PreTrainedTokenizerBase, processes: Processes) -> Config:
    """The recipe with the moment that the chat template writes into prompts, for whoever resumes or evaluates the run.

    Processes on several machines have several clocks; the first one's counts.
    """
    if config.data.now is not None or not asks_time(tokenizer):
        return config
    moment = processes.broadcast_from_main(lambda: moment_of(tokenizer))
    prepare_tokenizer(tokenizer, template=None, moment=moment)
    return config.model_copy(update={"data": config.data.model_copy(update={"now": moment})})


def make_shared_sampler(
    config: Config,
    processes: Processes,
    data: Curriculum,
    interruption: Interruption | None,
    given: Given = NOTHING,
) -> tuple[Sampler, ServerSide | None, LookAhead | None]:
    """The sampler of the loop, the client of rollout servers inside of it, and the look-ahead around it: of
    several processes, the first one alone has servers."""
    several, rollouts = processes.count > 1, config.rollouts
    is_ahead = rollouts.staleness > 0 and config.sft is None
    ahead: LookAhead | None = None
    schedule = {"total_steps": config.run.steps, "staleness": rollouts.staleness}
    if rollouts.type != "servers":
        sampler = make_sampler(config, given)
        if several:
            from oncurve.run.data_parallel import ShardedSampler  # lazy

            sampler = ShardedSampler(sampler, processes, interruption)
        if is_ahead:
            sampler = ahead = extension("look-ahead sampling")(sampler, data.at, at_once=True, **schedule)
        return sampler, None, ahead
    servers: ServerSide | None = extension("servers")(config) if processes.is_main else None
    leader: Sampler | None = servers if servers is None else with_episodes(servers, config, given)
    if leader is not None and servers is not None and is_ahead:
        leader = ahead = extension("look-ahead sampling")(
            leader, data.at, in_flight=rollouts.in_flight, prepare=servers.prepare, **schedule
        )
    if several:
        from oncurve.run.data_parallel import MainRankSampler  # lazy

        return MainRankSampler(leader, processes, interruption), servers, ahead
    return cast("Sampler", leader), servers, ahead


def identity(parts: Parts) -> dict[str, Any]:
    """The identity of a checkpoint: the recipe, the data, the base and the machine, for its manifest.

    Call it in all processes, while the policy still has the weights of the base.

    Raises ConfigError if another process loaded other data or another model.
    """
    facts = own_identity(parts)
    names = {
        "data": "training prompts",
        "base": "weights of the base model",
        "recipe_sha256": "recipe",
        "given": "rows or rewards",
        "code": "code of rewards, tools or environments",
        "model_files": "configuration or tokenizer",
    }
    for rank, theirs in enumerate(parts.policy.processes.all_gather({key: facts.get(key) for key in names})):
        if other := [text for key, text in names.items() if theirs[key] != facts.get(key)]:
            raise ConfigError(
                f"process {rank} has another {other[0]} than process {parts.policy.processes.rank}. Put recipe, data "
                f"and model where all machines see the same files"
            )
    return facts


def own_identity(parts: Parts) -> dict[str, Any]:
    """The same, as this process sees it."""
    config = recorded(parts.config)
    digest = hashlib.sha256()
    if not isinstance(parts.prompts.train, list):
        digest.update(parts.prompts.train.fingerprint.encode())
    for prompt in parts.prompts.written:
        digest.update(f"{prompt.index}\0{prompt.text}\0{prompt.row.get('answer')}\n".encode("utf-8", "replace"))
    for shown in parts.prompts.shown:
        digest.update(repr(shown.token_ids).encode())
    described = describe_run()
    return {
        "config": config,
        "recipe_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "data": {"num_prompts": len(parts.prompts.train), "sha256": digest.hexdigest()},
        "base": {
            "name": config["model"],
            "sha256": parts.given.base_sha256 or weights_checksum(parts.policy),
        },
        **({"given": dict(parts.given.fingerprints)} if parts.given.fingerprints else {}),
        "code": code_fingerprints(parts.config),
        "model_files": model_fingerprints(str(config["model"])),
        "environment": read_variables(parts.config),
        "columns": column_fingerprints(parts.prompts.written),
        "rank": 0,
        "world_size": parts.policy.processes.count,
        "threads": torch.get_num_threads(),
        "device": str(parts.policy.trained_model.device.type),
        "versions": {"oncurve": described["oncurve"], "python": described["python"], **described["packages"]},
    }


def code_fingerprints(config: Config) -> dict[str, str]:
    """Fingerprints of the code files that the recipe names, by their use and name."""
    return {
        f"{kind}: {name}": digest for kind, file in _code_files(config) for name, digest in fingerprints(file).items()
    }


def read_variables(config: Config) -> dict[str, str]:
    """Fingerprints of the environment variables that this code asks for by name; they may be secrets. "": not set."""
    names = {name for _, file in _code_files(config) for name in variables(file)}
    known = {name: os.environ.get(name) for name in sorted(names)}
    return {name: "" if value is None else hashlib.sha256(value.encode()).hexdigest() for name, value in known.items()}


def _code_files(config: Config) -> Iterator[tuple[str, Path]]:
    """The code files that the recipe names, each with its use."""
    algorithm, rollouts = config.algorithm, config.rollouts
    named: list[tuple[str, Any]] = []
    for one in config.rewards:
        named += [(f"reward {one.name}", value) for value in (one.code_file(), *vars(one).values())]
    named += [("loss", algorithm.function), ("advantage", algorithm.advantage_function)]
    named += [(f"tool {place}", place) for place in rollouts.tools]
    named += [(f"environment {name}", place) for name, place in rollouts.environments.items()]
    named.append(("agent", rollouts.agent))
    for kind, place in named:
        if not isinstance(place, str) or place.startswith("given:") or not (":" in place or place.endswith(".py")):
            continue
        if (file := file_of(place)) is not None:
            yield kind, file


MODEL_FILES = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip


def model_fingerprints(model: str) -> dict[str, str]:
    """Fingerprints of what a folder says of a model beside its weights: its shape, its tokenizer, its end tokens."""
    folder = Path(resolve_model(str(Path(model).expanduser())))
    files = [folder / name for name in MODEL_FILES if (folder / name).is_file()]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def column_fingerprints(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Fingerprints of the columns of the training rows, which rewards and environments may read."""
    digests: dict[str, Any] = {}
    for prompt in prompts:
        for name, value in prompt.row.items():
            if name != SOURCE_ROW:
                text = json.dumps(value, sort_keys=True, default=lambda one: type(one).__name__)
                digests.setdefault(name, hashlib.sha256()).update(f"{prompt.index} {text}\n".encode("utf-8", "replace"))
    return {name: digest.hexdigest() for name, digest in digests.items()}


def weights_checksum(policy: TrainedPolicy) -> str:
    """The checksum of all weights as they are now. All processes call it."""
    weights = policy.trained_model.named_parameters()
    found = checksum(weights, in_full_precision=True, whole=policy.backend.full_tensor)
    assert found is not None  # of a model without weights
    return found


def recorded(config: Config) -> dict[str, Any]:
    """A recipe as it is written down: resolved, as JSON gives it back, without what looks like a key."""
    return json.loads(json.dumps(redact_tree(config.model_dump(mode="json"))))


def count_prompts(prompts: Rendered) -> dict[str, int]:
    """Numbers of prompts by their use, for the manifest."""
    return {
        "training": len(prompts.train),
        "test": len(prompts.test),
        "held_out": len(prompts.during),
        "too_long": len(prompts.excluded),
    }


def arithmetic(config: Config, prompts: Rendered) -> str:
    """The arithmetic of the batch in a few lines; a run's page has all of it."""
    run, size, count = config.run, config.algorithm.group_size, config.completions_per_step
    updates = counted(config.updates_per_step, "update")
    lines = [
        f"each step: {run.prompts_per_step} prompts x {size} completions = {count} completions, {updates}",
        f"the run: {counted(run.steps, 'step')}, {len(prompts.train):,} training prompts "
        f"({run.steps * run.prompts_per_step / len(prompts.train):.2g} passes), {len(prompts.test):,} test",
    ]
    if prompts.during:
        lines[1] += f", {len(prompts.during):,} validation"
    if not isinstance(prompts.train, list):
        lines.append(
            "many rows: each is read when a step takes it. Evaluation rows were drawn by their places, so that equal "
            "questions may stand on both sides; in the place of a row that is too long comes the next one"
        )
    if prompts.excluded:
        what, limit = "prompt", "the model's context"
        if config.sft is not None:
            what, limit = "row", f"sft.max_tokens={config.sft.max_tokens}" if config.sft.max_tokens else limit
        lines.append(f"left out: {counted(len(prompts.excluded), what)} too long for {limit}")
    return "\n".join(lines)
