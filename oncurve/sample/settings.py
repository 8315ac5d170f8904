"""The section of a recipe about sampling."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.section import Fraction, Harmless, NonNegative, Section

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that mean this machine."""
SANDBOX = "sandbox:"
"""Stands before a tool that runs in the sandbox."""
OPENENV, VERIFIERS = "openenv:", "verifiers:"
"""Stand before the address of an environment's server, and the name of a taskset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. The neutral setting samples from the policy itself, which GRPO's gradient assumes."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token (greedy)."""
    max_completion_tokens: int = 256
    min_completion_tokens: int = 0
    """The end token and stop strings cannot end a completion before it has this many tokens."""
    top_p: float = 1.0
    """Smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: int = 0
    """Number of most likely tokens to keep; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they stay in its text and tokens."""
    seed: int = 0


class DeltaSettings(Section):
    """How servers get weights as differences from the version before."""

    anchor_every: Harmless[PositiveInt] = 20
    """Versions after which one is written whole as well, for servers that join."""
    mbit: Harmless[PositiveFloat | None] = None
    """Megabits per second that the trainer sends over rollouts.weights_address, to all servers together; None: no
    limit."""

    @model_validator(mode="before")
    @classmethod
    def _no_relay(cls, tree: object) -> object:
        if isinstance(tree, dict) and "relay" in tree:
            raise ValueError(
                "rollouts.deltas.relay is removed: servers fetch from the trainer, or take an object store behind "
                "rollouts.weights_address"
            )
        return tree


class Deadlines(Section):
    """Timeouts of rollout servers, in seconds."""

    connect_seconds: Harmless[PositiveFloat] = 5.0
    """To open a connection."""
    request_seconds: Harmless[PositiveFloat] = 600.0
    """For the completions of one prompt."""
    push_seconds: Harmless[PositiveFloat] = 300.0
    """For each part of a weight transfer: fetching, loading."""
    silent_seconds: Harmless[PositiveFloat] = 10.0
    """Without a heartbeat, before a server is dropped and its prompts go to others."""
    gone_seconds: Harmless[PositiveFloat] = 300.0
    """Without any server, before the run saves and stops."""

    @property
    def heartbeat_seconds(self) -> float:
        """Between two questions to a server that is well."""
        return self.silent_seconds / 4


class EpisodeSection(Section):
    """Limits of completions in which tools or an environment answer; each ends them in a way of its own."""

    max_turns: PositiveInt = 8
    """How often the policy may write. rollouts.max_completion_tokens limits all turns together."""
    max_answer_tokens: PositiveInt = 256
    """Tokens of one tool or environment answer; longer ones are truncated and marked."""
    max_malformed_calls: PositiveInt = 3
    """Malformed calls are answered with the error; so many end the episode."""
    max_seconds: PositiveFloat | None = None
    """Time limit of an episode, checked between turns; None: no limit."""
    tool_seconds: PositiveFloat = 10.0
    """Time limit of a tool call; the policy is told about a timeout."""
    environment_seconds: PositiveFloat = 60.0
    """Time limit of an environment call; a timeout leaves the completion ungraded."""
    agent_seconds: PositiveFloat = 600.0
    """Time limit of an agent, not counting its waits for the policy; a timeout leaves the completion ungraded."""
    forks: Literal["rows", "refuse"] = "rows"
    """An agent's second conversation, or one continued from an earlier or edited message. rows: a row of its own, with
    the episode's advantage. refuse: an error."""
    threads: PositiveInt = 64
    """Tool and environment calls, and agents, running at the same time."""


class AgentProgram(Section):
    """A program that is started for each completion and talks to the policy as to a chat server."""

    command: tuple[str, ...] = Field(min_length=1)
    """The program with its arguments. It gets OPENAI_BASE_URL and OPENAI_API_KEY, reads the row as JSON from standard
    input and prints the reward as its last line."""
    deterministic: bool = False
    """The same answers lead to the same requests, so that a resumed run is bit-identical."""


class RolloutSection(Section):
    """How completions are sampled."""

    type: Literal["auto", "engine", "transformers", "servers"] = "auto"
    """Who samples. engine: this process. transformers: its generate, slow. servers: other processes, here or
    elsewhere. auto: vLLM servers on idle GPUs, or one that shares the only GPU if it fits; otherwise engine."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities are taken at the same one."""
    max_completion_tokens: PositiveInt = 256
    """Longest completion."""
    min_completion_tokens: NonNegative = 0
    """No end token before so many tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; keep 1 in training."""
    top_k: NonNegative = 0
    """Sample from the k most likely tokens; 0 is off. Keep 0 in training."""
    min_p: Fraction = 0.0
    """Drop tokens below this fraction of the most likely one; keep 0 in training."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion; they are part of it."""
    max_rows: PositiveInt | Literal["auto"] = "auto"
    """Completions sampled at a time. auto: 256; with the engine on a GPU as many as free memory allows, up to 1,024."""
    kv_tokens: PositiveInt | None = None
    """engine: most positions in the KV cache. None: what fits into free GPU memory; no limit on a CPU."""
    cuda_graphs: bool = True
    """engine: on a GPU, record the decode steps of Llama, Qwen2 and Qwen3 as CUDA graphs, on bfloat16 copies of the
    weights. false: the model's own modules, slower and without copies."""
    servers: Harmless[tuple[str, ...]] = ()
    """servers: their addresses, such as [http://10.0.0.5:8100]."""
    registry: Harmless[str | None] = None
    """servers: a folder in which servers register, also during the run."""
    own_servers: NonNegative = 0
    """servers: number of `oncurve serve` processes to start on this machine."""
    vllm_servers: NonNegative = 0
    """servers: number of vLLM servers to start on this machine."""
    tensor_parallel: PositiveInt = 1
    """servers: GPUs per vLLM server."""
    vllm_python: Harmless[str | None] = None
    """servers: Python of the vLLM environment; None reads ONCURVE_VLLM_PYTHON."""
    vllm_options: tuple[str, ...] = ()
    """servers: further options of vLLM, such as [--gpu-memory-utilization, "0.8"]."""
    transfer: Harmless[Literal["auto", "fetch", "nccl"]] = "auto"
    """servers: how new weights reach them. fetch: files with checksums. nccl: broadcast from the trainer's GPU to
    vLLM servers. auto: nccl for vLLM servers of this run on other GPUs, if this process has the same vLLM; otherwise
    fetch."""
    sleep: bool = False
    """servers: the one vLLM server shares the trainer's GPU and frees its memory during training."""
    weights_folder: Harmless[str | None] = None
    """servers: where new weights are written. None: this machine's memory for servers that the run starts, if two
    versions fit; otherwise run.folder."""
    weights_address: Harmless[str | None] = None
    """servers: host:port from which servers without access to that folder download weights; with rollouts.deltas also
    a URL, such as that of an object store with the content of rollouts.weights_folder."""
    deltas: DeltaSettings | None = None
    """servers: with {}, send only what changed, in bfloat16, for slow links; null sends all weights."""
    staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """servers: 1 samples the next step while this one trains."""
    deadlines: Deadlines = Deadlines()
    """servers: timeouts."""
    tools: tuple[str, ...] = ()
    """Tools of the policy: calculator, python, or functions as module:name or file.py:name; with sandbox: before it, a
    function runs in the sandbox."""
    environments: dict[str, str] = Field(default_factory=dict)
    """Environments by name, as module:name or file.py:name. With several, each row names one in the column
    environment."""
    agent: str | AgentProgram | None = None
    """A function `async def agent(row, client) -> reward`, as module:name or file.py:name, or a program that uses the
    policy through OpenAI's chat protocol."""
    episodes: EpisodeSection = EpisodeSection()
    """Limits of completions with tools, environments or an agent."""

    @model_validator(mode="after")
    def _check_servers(self) -> RolloutSection:
        has_servers = bool(self.servers or self.registry or self.vllm_servers or self.own_servers)
        if self.type == "servers" and not has_servers:
            raise ValueError(
                "rollouts.type is servers, and none is named. Start some with `rollouts.own_servers=1` or "
                "`rollouts.vllm_servers=1`, name a folder where they leave their addresses, as in "
                "`rollouts.registry=runs/servers`, or their addresses, as in `rollouts.servers=[http://10.0.0.5:8100]`"
            )
        if self.own_servers and self.vllm_servers:
            raise ValueError(
                "rollouts.own_servers and rollouts.vllm_servers are both set, and a run starts one kind. Set "
                "`rollouts.own_servers=0` or `rollouts.vllm_servers=0`"
            )
        if self.type != "servers" and (asked := self.asked_of_servers()):
            start, without = "" if has_servers else " rollouts.own_servers=1", " ".join(self.without_servers())
            raise ValueError(
                f"rollouts.type is {self.type}, and {', '.join(f'rollouts.{key}' for key in asked)} is for "
                f"rollouts.type servers. Set `rollouts.type=servers{start}`, or go without: `{without}`"
            )
        for url in self.servers:
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"rollouts.servers names {url!r}. Write addresses, as in `rollouts.servers=[http://10.0.0.5:8100]`"
                )
        return self

    def sampling(self, seed: int) -> SamplingParams:
        """How completions are drawn in training."""
        names = {each.name for each in fields(SamplingParams)} - {"seed"}
        return SamplingParams(seed=seed, **self.model_dump(include=names))

    @property
    def has_episodes(self) -> bool:
        """Completions have turns."""
        return bool(self.tools or self.environments or self.agent)

    @model_validator(mode="after")
    def _check_agent(self) -> RolloutSection:
        if self.agent is not None and (self.tools or self.environments):
            other = "tools" if self.tools else "environments"
            raise ValueError(
                f"rollouts.agent and rollouts.{other} are both set, and an agent brings its own tools. Leave one out"
            )
        return self

    def asked_of_servers(self) -> list[str]:
        """The keys that are set here and mean something for rollouts.type servers alone."""
        return [key for key in ("servers", "registry", "own_servers", "vllm_servers", "staleness") if self._is_set(key)]

    def without_servers(self) -> list[str]:
        """What to type so that nothing is left in this section that asks for servers."""
        keys = [*self.asked_of_servers(), *(key for key in ("sleep", "tensor_parallel") if self._is_set(key))]
        keys += ["transfer"] if self.transfer == "nccl" else []
        defaults = {key: type(self).model_fields[key].default for key in keys}
        typed = {key: value if isinstance(value, str) else json.dumps(value) for key, value in defaults.items()}
        return [f"rollouts.{key}={value}" for key, value in typed.items()]

    def _is_set(self, key: str) -> bool:
        return self.model_dump(include={key})[key] != type(self).model_fields[key].default

    @model_validator(mode="after")
    def _check_transfer(self) -> RolloutSection:
        is_device = self.transfer == "nccl"
        wanted = f"rollouts.transfer is {self.transfer}" if is_device else "rollouts.sleep is true"
        if not is_device and not self.sleep:
            return self
        if self.type not in ("auto", "servers") or self.own_servers:
            raise ValueError(
                f"{wanted}, which is for vLLM servers. Set `rollouts.type=servers rollouts.own_servers=0 "
                f"rollouts.vllm_servers=1`, or go without: `rollouts.transfer=auto rollouts.sleep=false`"
            )
        if self.sleep and self.transfer == "nccl":
            raise ValueError(
                "rollouts.sleep is true and rollouts.transfer is nccl, which cannot connect two processes on one GPU. "
                "Set `rollouts.transfer=fetch`"
            )
        if self.sleep and self.staleness:
            raise ValueError(
                "rollouts.sleep is true, so that sampling and training take turns, and rollouts.staleness is 1, for "
                "which they overlap. Set `rollouts.sleep=false` or `rollouts.staleness=0`"
            )
        if self.sleep and self.type == "servers" and not self._is_beside_the_trainer():
            raise ValueError(
                f"{wanted}, which takes one vLLM server on the trainer's own GPU. Set `rollouts.servers=[] "
                f"rollouts.registry=null rollouts.vllm_servers=1 rollouts.tensor_parallel=1`, or name one address of "
                f"this machine in rollouts.servers"
            )
        return self

    def _is_beside_the_trainer(self) -> bool:
        """There is one server, and it is on this machine."""
        is_here = all(urlsplit(url).hostname in LOOPBACK for url in self.servers)
        is_one = self.vllm_servers + len(self.servers) == 1 and self.registry is None
        return is_one and is_here and self.tensor_parallel == 1

    @model_validator(mode="after")
    def _check_deltas(self) -> RolloutSection:
        is_url = self.weights_address is not None and self.weights_address.startswith(("http://", "https://"))
        if is_url and self.deltas is None:
            raise ValueError(
                f"rollouts.weights_address is the URL {self.weights_address}, which only rollouts.deltas can use. Set "
                f"`rollouts.deltas={{}}`, or give host:port where this process listens, as in "
                f"`rollouts.weights_address=10.0.0.5:8200`"
            )
        if is_url and self.weights_folder is None:
            raise ValueError(
                f"rollouts.weights_address is the URL {self.weights_address}, and rollouts.weights_folder is not set. "
                f"Name the folder whose files are found there, as in `rollouts.weights_folder=/mnt/bucket`"
            )
        if self.deltas is not None and (self.transfer == "nccl" or self.sleep):
            raise ValueError(
                "rollouts.deltas is set, which is for servers that fetch files, not for those on the trainer's GPUs. "
                "Set `rollouts.transfer=fetch rollouts.sleep=false`, or `rollouts.deltas=null`"
            )
        return self

    @model_validator(mode="after")
    def _check_lengths(self) -> RolloutSection:
        if self.min_completion_tokens > self.max_completion_tokens:
            raise ValueError(
                f"rollouts.min_completion_tokens is {self.min_completion_tokens}, more than "
                f"rollouts.max_completion_tokens, {self.max_completion_tokens}. Set "
                f"`rollouts.min_completion_tokens={self.max_completion_tokens}` or less, or "
                f"`rollouts.max_completion_tokens={self.min_completion_tokens}` or more"
            )
        return self
