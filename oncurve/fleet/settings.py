"""The part of a recipe's section ``rollouts`` about rollout servers."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.constants import LOOPBACK
from oncurve.sample.settings import SamplingKeys
from oncurve.section import CountsWith, Harmless, NonNegative, Section, typed

SLOWEST_TOKENS_PER_SECOND = 10.0
"""Speed of one completion on a busy server; a slower one is given up, unless the recipe says otherwise."""


class DeltaSettings(Section):
    """Weights as differences from the version before."""

    anchor_every: Harmless[PositiveInt] = 20
    """Versions after which one is written whole as well, for servers that join."""
    mbit: Harmless[PositiveFloat | None] = None
    """Megabits per second that the trainer sends over rollouts.weights_address, to all servers together; None: no
    limit."""


class Deadlines(Section):
    """Timeouts of rollout servers, in seconds."""

    connect_seconds: Harmless[PositiveFloat] = 5.0
    """To open a connection."""
    request_seconds: Harmless[PositiveFloat | None] = None
    """For the completions of one prompt; None: 600, or longer for rollouts.max_completion_tokens at 10 per second."""
    push_seconds: Harmless[PositiveFloat] = 300.0
    """For each part of a weight transfer: fetching, loading."""
    silent_seconds: Harmless[PositiveFloat] = 10.0
    """Without a heartbeat, before a server is dropped and its prompts go to others."""
    gone_seconds: Harmless[PositiveFloat] = 900.0
    """Without any server, before the run saves and stops: time enough to load and compile a large model."""

    @property
    def heartbeat_seconds(self) -> float:
        """Between two questions to a server that is well."""
        return self.silent_seconds / 4

    def answer_seconds(self, max_tokens: int) -> float:
        """Time limit of a request for completions of at most so many tokens."""
        return self.request_seconds or max(600.0, max_tokens / SLOWEST_TOKENS_PER_SECOND)


_FOR_SERVERS = CountsWith("type", ("servers", "auto"))


class ServerKeys(SamplingKeys):
    """Sampling in this process or on rollout servers."""

    servers: Harmless[tuple[str, ...]] = ()
    """servers: their addresses, such as [http://10.0.0.5:8100]."""
    registry: Harmless[str | None] = None
    """servers: a folder in which servers register, also during the run."""
    own_servers: NonNegative = 0
    """servers: number of `oncurve serve` processes to start on this machine."""
    vllm_servers: NonNegative = 0
    """servers: number of vLLM servers to start on this machine."""
    tensor_parallel: Annotated[PositiveInt, _FOR_SERVERS] = 1
    """servers: GPUs per vLLM server."""
    vllm_python: Harmless[str | None] = None
    """servers: Python of the vLLM environment; None reads ONCURVE_VLLM_PYTHON."""
    vllm_options: Annotated[tuple[str, ...], _FOR_SERVERS] = ()
    """servers: further options of vLLM, such as [--gpu-memory-utilization, "0.8"]."""
    transfer: Harmless[Literal["auto", "fetch", "nccl"]] = "auto"
    """servers: how new weights reach them. fetch: files with checksums. nccl: broadcast from the trainer's GPU to
    vLLM servers. auto: nccl for vLLM servers of this run on other GPUs, if this process has the same vLLM; otherwise
    fetch."""
    adapter: Annotated[Literal["apart", "merged"], _FOR_SERVERS] = "apart"
    """servers: how they apply a LoRA adapter. apart: beside the base, of which nothing is sent. merged: as whole
    weights in the servers' type, rounded as policy.rounding says; for adapters that servers cannot apply apart."""
    sleep: bool = False
    """servers: the one vLLM server shares the trainer's GPU and frees its memory during training."""
    weights_folder: Annotated[Harmless[str | None], _FOR_SERVERS] = None
    """servers: where new weights are written. None: this machine's memory for servers that the run starts, if two
    versions fit; otherwise run.folder."""
    weights_address: Annotated[Harmless[str | None], _FOR_SERVERS] = None
    """servers: host:port from which servers without access to that folder download weights; with rollouts.deltas also
    a URL, such as that of an object store with the content of rollouts.weights_folder."""
    deltas: Annotated[DeltaSettings | None, _FOR_SERVERS] = None
    """servers: with {}, send only what changed, in bfloat16, for slow links; null sends all weights."""
    staleness: Annotated[int, Field(ge=0, le=8)] = 0
    """Steps that sampling may be ahead of training: the weights of a completion are at most so many steps old."""
    in_flight: bool = False
    """servers: with staleness, new weights reach servers at once, under rows that run; their keys and values stay."""
    deadlines: Deadlines = Deadlines()
    """servers: timeouts."""

    @model_validator(mode="after")
    def _check_servers(self) -> ServerKeys:
        has_servers = bool(self.servers or self.registry or self.vllm_servers or self.own_servers)
        if self.type == "servers" and not has_servers:
            raise ValueError(
                "rollouts.type is servers, and none is named. Start some with `rollouts.own_servers=1` or "
                "`rollouts.vllm_servers=1`, name a folder where they leave their addresses, as in "
                "`rollouts.registry=runs/servers`, or their addresses, as in `rollouts.servers=[http://10.0.0.5:8100]`"
            )
        names = {word.partition("=")[0].replace("_", "-") for word in self.vllm_options}
        if conflicting := names & {"--tensor-parallel-size", "-tp", "--data-parallel-size", "--pipeline-parallel-size"}:
            raise ValueError(
                f"rollouts.vllm_options has {conflicting.pop()}, which the run must know to give each server its GPUs. "
                f"Write `rollouts.tensor_parallel=N` for the GPUs of each server, and `rollouts.vllm_servers=N` "
                "for how many"
            )
        if self.in_flight and not self.staleness:
            raise ValueError(
                "rollouts.in_flight is true, and rollouts.staleness is 0, with which nothing is under way when weights "
                "change. Set `rollouts.staleness=2`, or `rollouts.in_flight=false`"
            )
        if self.in_flight and self.transfer == "nccl":
            raise ValueError(
                "rollouts.in_flight is true, for which weights go as files, and rollouts.transfer is nccl. Set "
                "`rollouts.transfer=fetch`, or `rollouts.in_flight=false`"
            )
        if self.own_servers and self.vllm_servers:
            raise ValueError(
                "rollouts.own_servers and rollouts.vllm_servers are both set, and a run starts one kind. Set "
                "`rollouts.own_servers=0` or `rollouts.vllm_servers=0`"
            )
        if self.type != "servers" and (keys := self.keys_for_servers()):
            start, without = "" if has_servers else " rollouts.own_servers=1", " ".join(self.without_servers())
            raise ValueError(
                f"rollouts.type is {self.type}, and {', '.join(f'rollouts.{key}' for key in keys)} is for "
                f"rollouts.type servers. Set `rollouts.type=servers{start}`, or go without: `{without}`"
            )
        for url in self.servers:
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"rollouts.servers names {url!r}. Write addresses, as in `rollouts.servers=[http://10.0.0.5:8100]`"
                )
        return self

    @property
    def weights_leave_from(self) -> Literal["device", "cpu"] | None:
        """The place of all weights in the process that sends them; None: every process samples from its own."""
        if self.type != "servers":
            return None
        return "device" if self.transfer == "nccl" else "cpu"

    def in_process(self) -> Self:
        """The same section for one process that samples by itself; another kind of sampler stays."""
        if self.type not in ("auto", "servers"):
            return self
        return self.model_copy(update={"type": "engine", "own_servers": 0, "vllm_servers": 0})

    def keys_for_servers(self) -> list[str]:
        """The keys that are set here and mean something for rollouts.type servers alone."""
        return [key for key in ("servers", "registry", "own_servers", "vllm_servers", "in_flight") if self._is_set(key)]

    def without_servers(self) -> list[str]:
        """The settings to type so that nothing in this section asks for servers."""
        keys = [*self.keys_for_servers(), *(key for key in ("sleep", "tensor_parallel") if self._is_set(key))]
        keys += ["transfer"] if self.transfer == "nccl" else []
        return [f"rollouts.{key}={typed(type(self).model_fields[key].default)}" for key in keys]

    def _is_set(self, key: str) -> bool:
        return self.model_dump(include={key})[key] != type(self).model_fields[key].default

    @model_validator(mode="after")
    def _check_transfer(self) -> ServerKeys:
        is_device = self.transfer == "nccl"
        setting = f"rollouts.transfer is {self.transfer}" if is_device else "rollouts.sleep is true"
        if not is_device and not self.sleep:
            return self
        if self.type not in ("auto", "servers") or self.own_servers:
            raise ValueError(
                f"{setting}, which is for vLLM servers. Set `rollouts.type=servers rollouts.own_servers=0 "
                f"rollouts.vllm_servers=1`, or go without: `rollouts.transfer=auto rollouts.sleep=false`"
            )
        if self.sleep and self.transfer == "nccl":
            raise ValueError(
                "rollouts.sleep is true and rollouts.transfer is nccl, which cannot connect two processes on one GPU. "
                "Set `rollouts.transfer=fetch`"
            )
        if self.sleep and self.staleness:
            raise ValueError(
                "rollouts.sleep is true, so that sampling and training take turns, and rollouts.staleness is "
                f"{self.staleness}, for which they overlap. Set `rollouts.sleep=false` or `rollouts.staleness=0`"
            )
        if self.sleep and self.type == "servers" and not self._is_beside_the_trainer():
            raise ValueError(
                f"{setting}, which takes one vLLM server on the trainer's own GPU. Set `rollouts.servers=[] "
                f"rollouts.registry=null rollouts.vllm_servers=1 rollouts.tensor_parallel=1`, or name one address of "
                f"this machine in rollouts.servers"
            )
        return self

    def _is_beside_the_trainer(self) -> bool:
        """There is one server, and it is on this machine."""
        is_here = all(urlsplit(url).hostname in LOOPBACK for url in self.servers)
        is_single = self.vllm_servers + len(self.servers) == 1 and self.registry is None
        return is_single and is_here and self.tensor_parallel == 1

    @model_validator(mode="after")
    def _check_deltas(self) -> ServerKeys:
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
