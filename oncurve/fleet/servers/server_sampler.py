"""The sampler over rollout servers: weights in, groups out, as with any other."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from oncurve.algorithm.precision import seed_of
from oncurve.core.errors import ConfigError, SamplerError
from oncurve.core.records import USUAL_ROWS, Group, SamplingParams
from oncurve.core.sampler import SamplingRequest, end_token_ids, make_group
from oncurve.fleet.servers.adapter_proof import measure
from oncurve.fleet.servers.children import ChildServers
from oncurve.fleet.servers.local_vllm import VllmServers
from oncurve.fleet.servers.nccl_group import GroupPush
from oncurve.fleet.servers.pending_group import PendingGroup
from oncurve.fleet.servers.protocol import GeneratedCompletion
from oncurve.fleet.servers.registry import registered
from oncurve.fleet.servers.server_pool import ServerPool
from oncurve.fleet.servers.server_turns import ServerTurns
from oncurve.fleet.settings import DeltaSettings, ServerKeys
from oncurve.fleet.weights.delta_store import DeltaStore
from oncurve.fleet.weights.endpoints import give_back_cache
from oncurve.fleet.weights.fallback import Copies
from oncurve.fleet.weights.host import Bandwidth, WeightHost
from oncurve.fleet.weights.store import Contents, WeightStore
from oncurve.fleet.weights.weight_manifest import Manifest, describe_files
from oncurve.fleet.weights.weight_stream import Shipment
from oncurve.model.lora_weights import LoraWeights
from oncurve.model.same_model import why_another
from oncurve.sample.event_loop import EventLoopThread
from oncurve.sample.published_policy import PublishedPolicy
from oncurve.version_spans import VersionSpans

MOST_PROOFS = 8
"""Versions whose adapters can be proven: those that servers may still be given."""


class ServerSampler:
    """Samples from rollout servers, each of which may die, stop, or come back at any time.

    Weights are published as files that servers fetch. A step is sampled from its own weights alone: prompts of a
    server that is lost go to others, and what a server gives that has other weights is not taken.
    """

    _loop: EventLoopThread | None = None
    _policy: PublishedPolicy | None = None
    _manifest: Manifest | None = None

    def __init__(
        self,
        params: SamplingParams,
        section: ServerKeys,
        *,
        weights_folder: Path,
        memory_folder: Path | None = None,
        matrix_type: torch.dtype | None = None,
        token: str | None = None,
        local: ChildServers | None = None,
        push: GroupPush | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """The servers of a recipe's section ``rollouts``, and the ``local`` ones that were started for this sampler and
        end with it.

        Weights are put into ``memory_folder``, if it is there and has room, otherwise into ``weights_folder``, with
        matrices of ``matrix_type`` for vLLM servers, None for full width. ``push`` brings them without files.
        """
        deltas, weights_address = section.deltas, section.weights_address
        self.params, self.notify, self._local = params, notify, local
        self.on_group: Callable[[Group], None] | None = None
        self._store = (WeightStore if deltas is None else partial(DeltaStore, anchor_every=deltas.anchor_every))(
            weights_folder,
            run=secrets.token_hex(4),
            keep=2 if section.staleness < 2 else 4,  # versions that wait until those before them are not needed
            memory=memory_folder,
            notify=self._say,
        )
        self._prepared: dict[int, Future[Manifest]] = {}  # by version
        self._coder = ThreadPoolExecutor(1, thread_name_prefix="codes-weights")
        self._paused_seconds, self._num_late = 0.0, 0
        self._push, self._sleep, self._matrix_type = push, section.sleep, matrix_type
        self._merges = section.adapter == "merged"
        self._copies = Copies(self._store, trains_meanwhile=push is not None and section.staleness > 0)
        for part in (push, local):
            if part is not None:
                part.notify = self._say
        is_url = weights_address is not None and weights_address.startswith(("http://", "https://"))
        self._host = self._make_host(weights_address, token, deltas) if weights_address and not is_url else None
        token = token if self._host is None else self._host.token
        self.pool = ServerPool(
            [*section.servers, *(local.urls if local is not None else ())],
            find=partial(registered, Path(section.registry)) if section.registry is not None else tuple,
            deadlines=section.deadlines,
            max_rows=USUAL_ROWS if section.max_rows == "auto" else section.max_rows,
            token=token,
            restart=local.restart if local is not None else None,
            push=push,
            files=self._copies.files,
            address=f"{weights_address.rstrip('/')}/{self._store.name}" if weights_address and is_url else None,
            repair=self._store.renew,
            notify=self._say,
        )
        self.pool.in_flight = section.in_flight

    def _make_host(self, address: str, token: str | None, deltas: DeltaSettings | None) -> WeightHost:
        limit = Bandwidth(deltas.mbit) if deltas is not None and deltas.mbit is not None else None
        token = token or secrets.token_hex(16)
        return WeightHost(lambda: self._store.published, address=address, token=token, limit=limit)

    def _say(self, text: str) -> None:
        self.notify(text)

    def prepare(self, policy: PublishedPolicy, version: int) -> bool:
        """Put these weights into files that nobody is told of yet: ``load_weights`` comes later, with the same, and
        does not read the policy, from which the store may take a copy and work on that in another thread.

        False where weights are not sent as files: then nothing was copied.
        """
        if self._loop is None or (self._push is not None and self._thin(policy) is None):
            return False
        begin = time.perf_counter()
        self._store.dither = seed_of(policy.model)
        with self._explained(version):
            if self._thin(policy) is None:
                self._prepared[version] = self._coder.submit(self._store.take(self._shipment(policy, version)))
            else:
                self._prepared[version] = Future()
                self._prepared[version].set_result(self._write(policy, version))
        self._paused_seconds += time.perf_counter() - begin
        return True

    def _published(self, policy: PublishedPolicy, version: int) -> Manifest:
        """The weights in files: those that were prepared, or now."""
        prepared = self._prepared.pop(version, None)
        self._store.dither = seed_of(policy.model)
        with self._explained(version):
            if prepared is not None:
                return prepared.result()
            begin = time.perf_counter()
            manifest = self._write(policy, version)
            self._paused_seconds += time.perf_counter() - begin
            return manifest

    @contextmanager
    def _explained(self, version: int) -> Iterator[None]:
        """Weights that cannot be published, as an error for the user."""
        try:
            yield
        except (ValueError, MemoryError) as error:
            raise SamplerError(
                f"weights of step {version} cannot be published for the rollout servers: "
                f"{str(error) or type(error).__name__}. `oncurve resume` goes on from the last checkpoint; with "
                f"rollouts.deltas=null all weights are sent instead of what changed"
            ) from error

    def load_weights(self, policy: PublishedPolicy, version: int) -> None:
        """Publish the weights and wait until servers have them.

        Raises SamplerError if none takes them in time.
        """
        if self._loop is None:
            self._check_apart(policy)
            self.pool.why_another = partial(why_another, policy.model.config)
            self._loop = EventLoopThread("rollout-servers")
            self._loop.call(self._open())
        if self._sleep:
            give_back_cache()
        if self._push is not None and self._thin(policy) is None:
            self._hand_over(policy, version)
            return
        manifest = self._published(policy, version)
        if manifest is not self._manifest or not self.pool.ready:
            self._loop.call(self.pool.publish(manifest))
        self._policy, self._manifest = policy, manifest

    def _hand_over(self, policy: PublishedPolicy, version: int) -> None:
        """Weights from the GPU to servers that can take them so; the others fetch files, which are written for them."""
        assert self._loop is not None
        shipment = self._store.shipment(policy, version, matrix_type=self._matrix_type)
        with self._copies.still():
            if self._manifest is None or self._manifest.label != shipment.label:
                self._policy, self._manifest = policy, self._copies.offer(shipment)
            elif self.pool.ready:
                return
            self._loop.call(self.pool.publish(self._manifest, shipment))

    def _wake(self) -> None:
        """Servers that gave their memory back get the weights once more."""
        assert self._manifest is not None
        assert self._loop is not None
        give_back_cache()
        self._loop.call(self.pool.publish(self._manifest))

    def _check_apart(self, policy: PublishedPolicy) -> None:
        """Raises ConfigError for an adapter that servers cannot apply beside their base."""
        why = None if self._merges else policy.why_not_apart()
        if why is not None:
            raise ConfigError(
                f"rollout servers cannot apply this adapter beside their base: {why}; sample with rollouts.type="
                f"engine; or say `rollouts.adapter=merged`: whole weights are sent then, in the servers' type, rounded "
                f"as policy.rounding says"
            )

    def _thin(self, policy: PublishedPolicy) -> LoraWeights | None:
        """The adapter, where servers apply it beside their base."""
        return None if self._merges else policy.adapter_weights()

    def _write(self, policy: PublishedPolicy, version: int) -> Manifest:
        """An adapter alone where one is trained, whole weights otherwise."""
        thin = self._thin(policy)
        if thin is None:
            return self._store.publish_shipment(self._shipment(policy, version))

        def write_thin(folder: Path) -> Contents:
            thin.save(folder)
            return describe_files(folder)

        manifest = self._store.publish(version, write_thin, size=thin.num_bytes, adapter=thin.facts())
        self._prove(policy, manifest.label)
        return manifest

    def _shipment(self, policy: PublishedPolicy, version: int) -> Shipment:
        return self._store.shipment(policy, version, matrix_type=self._file_type())

    def _prove(self, policy: PublishedPolicy, label: str) -> None:
        """Measure what a version's adapter changes, for servers to show that they have all of it.

        Where the policy is in parts, its whole copy in the machine's memory is slow: there the first adapter that
        changes enough to tell is proven, and no later one.
        """
        is_slow = policy.model.device.type == "cpu" and policy.device.type != "cpu"
        known = [server.adapter for server in self.pool.servers if server.adapter is not None]
        if not (is_slow and any(share.is_known for share in known)):
            self.pool.proofs[label] = measure(policy)
        for old in list(self.pool.proofs)[:-MOST_PROOFS]:
            del self.pool.proofs[old]

    def _file_type(self) -> torch.dtype | None:
        """Type of matrices in files: that of vLLM, if nobody else reads them. ``oncurve serve`` samples the same tokens
        as the trainer would, for which it needs all their digits."""
        seen = [server for server in self.pool.servers if server.label]
        are_vllm = bool(seen) or isinstance(self._local, VllmServers)
        return self._matrix_type if are_vllm and not any(server.takes_keys for server in seen) else None

    async def _open(self) -> None:
        if self._host is not None:
            self.pool.address = await self._host.open()
        await self.pool.open()

    async def _shut(self) -> None:
        await self.pool.close()
        if self._host is not None:
            await self._host.close()

    def sample(self, request: SamplingRequest) -> list[Group]:
        """One group per prompt, all of the weights that were loaded last.

        Raises SamplerError if no server is left for too long, or if one says that a request is wrong.
        """
        if self._policy is None or self._manifest is None or self._loop is None:
            raise SamplerError("the servers have no weights yet; call load_weights before sample")
        prompts = request.prompts
        if not prompts:
            return []
        if self._sleep and self.pool.asleep:
            self._wake()
        is_measuring = request.params is not None
        params, manifest, policy = request.params or self.params, self._manifest, self._policy
        end_ids = end_token_ids(policy.model, policy.tokenizer)
        jobs = [
            PendingGroup(
                manifest.label,
                prompt.prompt_ids,
                keys,
                params,
                end_ids,
                0 if is_measuring else request.step,
                self.pool.versions,
                manifest.version,
            )
            for prompt, keys in zip(prompts, request.stream_keys(params.seed).tolist(), strict=True)
        ]
        groups: dict[int, Group] = {}

        def finish(index: int) -> None:
            groups[index] = make_group(
                prompts[index],
                [
                    (completion.token_ids, completion.logprobs, completion.finish_reason)
                    for completion in jobs[index].completions
                ],
                tokenizer=policy.tokenizer,
                end_ids=end_ids,
                version=manifest.version,
            )
            if (labels := jobs[index].labels) is not None:
                groups[index] = _by_token(groups[index], jobs[index].completions, labels)
            if self.on_group is not None:
                self.on_group(groups[index])

        self._num_late = sum(server.state in ("stale", "syncing") for server in self.pool.servers)
        with self._copies.still():
            self._loop.call(self.pool.sample(jobs, finish))
        if self._sleep and not is_measuring:  # measurements sample again, and nothing trains between them
            self._loop.call(self.pool.rest())
        return [groups[index] for index in range(len(prompts))]

    def weight_metrics(self) -> dict[str, float]:
        """For what servers and trainer waited since this was last asked, and what was sent of the newest weights where
        that is not all of them."""
        if self._loop is None or self._manifest is None:
            return {}
        have = [server for server in self.pool.servers if server.label == self._manifest.label]
        paused_seconds, self._paused_seconds = self._paused_seconds, 0.0
        metrics = {
            "speed/server_idle_fraction": self._loop.call(self.pool.idle_fraction()),
            "weights/held_seconds": paused_seconds,
            "weights/stood_seconds": max((server.stood_seconds for server in have), default=0.0),
        }
        shares = [server.adapter for server in have if server.adapter is not None and server.adapter.is_known]
        if shares:
            metrics["mismatch/adapter_fraction"] = min(share.fraction for share in shares)
        if sent := self._store.metrics():
            metrics |= sent
            metrics["weights/sync_seconds"] = max((server.sync_seconds for server in have), default=0.0)
            metrics["weights/late_servers"] = float(self._num_late)
        return metrics

    def turns(self, params: SamplingParams, *, step: int, post: Callable[[Callable[[], None]], None]) -> ServerTurns:
        """Turns of the weights that were loaded last."""
        if self._policy is None or self._manifest is None or self._loop is None:
            raise SamplerError("the servers have no weights yet; call load_weights before sample")
        stack = ExitStack()
        stack.enter_context(self._copies.still())
        end_ids = end_token_ids(self._policy.model, self._policy.tokenizer)
        weights = self._manifest
        return ServerTurns(self._loop, self.pool, params, weights=weights, end_ids=end_ids, post=post, stack=stack)

    def close(self) -> None:
        """Let go of the servers, and remove the published weights."""
        self._coder.shutdown(cancel_futures=True)
        if self._loop is not None:
            self._loop.call(self._shut())
            self._loop.close()
            self._loop = None
        if self._local is not None:
            self._local.close()
        self._store.close()


def _by_token(group: Group, sampled: Sequence[GeneratedCompletion], labels: Mapping[str, int]) -> Group:
    """The group with the versions of its completions, token by token where there are several."""
    dated = []
    for completion, generated in zip(group.completions, sampled, strict=True):
        spans = VersionSpans()
        spans.add(0, generated.dated(labels))
        dated.append(replace(completion, **spans.facts(completion.policy_version)))
    return replace(group, completions=tuple(dated))
