"""Seconds and bytes of handing new weights to a rollout server, part by part.

A random model (the sizes of ``models.py``; M has 36 million weights) is given to one server on this machine, version
after version, each with other weights. What the trainer does is timed in its functions (copies to the machine's memory,
checksums, writing, flushing; in threads these seconds add up to more than have passed), what the server does by its
answers: ``/update_weights`` reads and checks, ``/finish_weight_update`` loads. Nothing is sampled.

    python benchmarks/publish.py --size M --server serve --label after
    python benchmarks/publish.py --size M --server vllm --dtype bfloat16 --label after     # ONCURVE_VLLM_PYTHON

With another checkout first on PYTHONPATH its code is measured, also one from before files were written in threads.
``--folder`` puts the files elsewhere than the product would, such as into /dev/shm or onto a disk.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from machine import RESULTS, describe_machine
from models import SHAPES, build

import oncurve
from oncurve.policy.model_folder import load_model
from oncurve.policy.policy import TrainedPolicy
from oncurve.rollouts.base import SamplingParams
from oncurve.rollouts.servers import server_sampler as sampling
from oncurve.rollouts.servers import store
from oncurve.rollouts.servers.children import ChildServers, own_environment, serve_command
from oncurve.rollouts.servers.client import ServerClient
from oncurve.rollouts.servers.local_vllm import VllmServers
from oncurve.rollouts.servers.server_sampler import ServerSampler
from oncurve.settings import OptimizerSettings

WARM_UP = 2
"""Versions that are not counted: the first waits for the server to start."""
T = TypeVar("T")


class Clock:
    """Seconds by part, added up over all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, part: str, seconds: float) -> None:
        with self._lock:
            self.seconds[part] += seconds

    def timed(self, part: str, function: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any, **kwargs: Any) -> T:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.add(part, time.perf_counter() - begin)

        return call

    def awaited(self, part: str, function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        async def call(*args: Any, **kwargs: Any) -> T:
            begin = time.perf_counter()
            try:
                return await function(*args, **kwargs)
            finally:
                self.add(part, time.perf_counter() - begin)

        return call

    def hashes(self, real: Any) -> SimpleNamespace:
        """hashlib with a SHA-256 whose updates are timed."""

        class Sum:
            def __init__(self) -> None:
                self._sum = real.sha256()
                self.hexdigest = self._sum.hexdigest
                self.update = timed("checksum", self._sum.update)

        timed = self.timed
        return SimpleNamespace(sha256=Sum)


def watch_trainer(clock: Clock, policy: TrainedPolicy) -> None:
    """Time the parts of writing a version, in this checkout or in an older one."""
    store._flush = clock.timed("flush", store._flush)
    sampling.make_shipment = clock.timed("fingerprint", sampling.make_shipment)
    try:
        from oncurve.rollouts.servers import shards
    except ImportError:  # one file, written by transformers and read again for its checksum
        store.describe_files = clock.timed("checksum", store.describe_files)
        policy.model.save_pretrained = clock.timed("copy and write", policy.model.save_pretrained)
        return
    shards.in_host_memory = clock.timed("copy", shards.in_host_memory)
    shards.write_all = clock.timed("write", shards.write_all)
    shards.hashlib = clock.hashes(shards.hashlib)


def watch_server(clock: Clock) -> None:
    """Time what a server is asked while it takes a version."""
    parts = {"pause": "pause", "start_update": "begin", "send_update": "read and check", "finish_update": "load"}
    for name, part in {**parts, "resume": "resume"}.items():
        setattr(ServerClient, name, clock.awaited(part, vars(ServerClient)[name]))


@contextmanager
def server_of(kind: str, model: Path, dtype: str, logs: Path) -> Iterator[ChildServers]:
    """One server with the model, in a process of its own."""
    if kind == "vllm":
        made: ChildServers = VllmServers(str(model), 1, python=None, dtype=dtype, on_cpu=True, logs=logs)
    else:
        settings = ["policy.device=cpu", f"policy.compute_type={dtype}"]
        command, environment = serve_command(str(model), settings=settings), own_environment(1)
        made = ChildServers(1, name="oncurve", logs=logs, command=command, environment=environment)
    yield made  # the sampler ends it


def make_sampler(servers: ChildServers, folder: Path | None, spare: Path, dtype: str) -> ServerSampler:
    """A sampler as the product would make it for such servers; an older checkout knows fewer words."""
    words: dict[str, Any] = {"urls": [], "local": servers, "weights_folder": folder or spare}
    known = inspect.signature(ServerSampler).parameters
    if "memory_folder" in known and folder is None:
        words["memory_folder"] = store.memory_folder()
    if "matrix_type" in known:
        words["matrix_type"] = None if dtype == "float32" else torch.bfloat16
    return ServerSampler(SamplingParams(max_completion_tokens=8), **words)


@torch.no_grad()
def move(policy: TrainedPolicy) -> None:
    """Other weights, as if it had trained."""
    for parameter in policy.model.parameters():
        parameter.mul_(1.001)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The medians over all versions, and every version."""
    model_folder = build(folder / "model", SHAPES[args.size], mean_tokens=None, max_length=512)
    model, tokenizer = load_model(str(model_folder))
    policy = TrainedPolicy(model, tokenizer, optimizer=OptimizerSettings())
    clock, rows = Clock(), []
    watch_trainer(clock, policy)
    watch_server(clock)
    with server_of(args.server, model_folder, args.dtype, folder / "logs") as servers:
        sampler = make_sampler(servers, args.folder, folder / "weights", args.dtype)
        sampler._write = clock.timed("trainer, all", sampler._write)
        try:
            for version in range(WARM_UP + args.versions):
                move(policy)
                clock.seconds.clear()
                begin = time.perf_counter()
                sampler.load_weights(policy, version)
                total = time.perf_counter() - begin
                manifest = sampler._manifest
                assert manifest is not None
                files = [file.size for file in manifest.files]
                row = {"seconds": total, **clock.seconds}
                rows.append({"bytes": sum(files), "files": len(files), "folder": manifest.folder, "parts": row})
        finally:
            sampler.close()
    counted = rows[WARM_UP:]
    names = dict.fromkeys(name for row in counted for name in row["parts"])
    medians = {name: statistics.median(row["parts"].get(name, 0.0) for row in counted) for name in names}
    return {"bytes": counted[-1]["bytes"], "files": counted[-1]["files"], "median": medians, "versions": rows}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="M")
    parser.add_argument("--server", choices=["serve", "vllm"], default="serve")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of the server's arithmetic"
    )
    parser.add_argument("--versions", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where the files are put; default: where the product puts them")
    parser.add_argument("--label", default="now", help="part of the name of the result")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = measure(args, Path(place))
    said = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    record = {"machine": describe_machine(), "code": str(Path(oncurve.__file__).parent), "asked": said, **found}
    print(f"{found['bytes'] / 1e6:.1f} MB in {found['files']} files, median of {args.versions} versions:")
    for name, seconds in found["median"].items():
        print(f"  {name:16}{seconds * 1000:10.1f} ms")
    output = args.output or RESULTS / f"publish-{args.size}-{args.server}-{args.dtype}-{args.label}.json"
    output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
