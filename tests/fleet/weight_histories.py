"""Random histories of a trainer and its servers: whatever happens, who samples from what?

A history is a function of its seed. Versions are published, missed, announced late and twice; servers join, are killed
while they fetch and apply, and start again; bits flip and files vanish on either side; the trainer goes back to a
checkpoint, in the same process or in another. After every event, the weights of every server are compared with what was
published under the name that it gives them. At the end nothing breaks any more, and all servers must come to the newest
version by themselves.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from oncurve.fleet.serving.weight_update import WeightUpdate
from oncurve.fleet.weights import delta_copy, file_download, shards
from oncurve.fleet.weights.delta_store import DeltaStore
from oncurve.fleet.weights.weight_manifest import Manifest
from oncurve.fleet.weights.weight_stream import Shipment

SHAPES = {"wide": (24, 16), "tall": (40, 4), "vector": (16,), "other": (8, 8)}
FILE_BYTES = 512
"""So that a version has several files."""
TRIES = 4
"""Of a server to get the newest version, when nothing breaks any more; between them the trainer repairs it."""


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Outcome:
    """Of one history, or of many."""

    events: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    """How often the weights of a server were looked at."""
    wrong: int = 0
    """Of these, weights that are not those of the version that the server names."""
    repairs: int = 0
    """Servers that had to be repaired at the end, or had fallen behind."""
    stuck: int = 0
    """Servers that did not come to the newest version."""


class Weights(torch.nn.Module):
    """A model that is nothing but weights."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))


class Server:
    """One server: a copy in a folder, and a model that samples from what was applied last."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.start()

    def start(self) -> None:
        """As a new process, with the weights of the base."""
        self.model = Weights()
        self.update = WeightUpdate(cast(PreTrainedModel, self.model))
        self.update.fetcher._copy = delta_copy.DeltaCopy(self.root)
        self.label: str | None = None

    def take(self, message: dict[str, Any]) -> None:
        """Raises ValueError for what cannot be had."""
        self.update.stage(message)
        self.update.apply()
        self.label = self.update.label

    def found(self) -> bytes:
        """The bytes that it samples from."""
        return as_bytes(dict(self.model.named_parameters()))


def as_bytes(weights: dict[str, Any]) -> bytes:
    """In the width of a model, which holds every number of a narrower type."""
    return b"".join(weights[name].detach().float().numpy().tobytes() for name in sorted(weights))


class History:
    """One history."""

    def __init__(self, seed: int, folder: Path, host: Host) -> None:
        self.random, self.folder, self.host = Random(seed), folder, host
        self.generator = torch.Generator().manual_seed(seed)
        self.out = Outcome()
        self.truth: dict[str, bytes] = {}
        self.weights = {name: torch.randn(shape, generator=self.generator) for name, shape in SHAPES.items()}
        self.version, self.runs = 0, 0
        self.messages: list[dict[str, Any]] = []
        self.checkpoints: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.store: DeltaStore | None = None
        self.servers: list[Server] = []
        host.history = self
        self.new_trainer()
        for _ in range(self.random.randint(1, 3)):
            self.join()
        self.publish()

    def play(self, events: int) -> Outcome:
        """Everything that happens, and what came of it."""
        choices: list[tuple[int, Callable[[], None]]] = [
            (8, self.publish), (10, self.sync), (2, self.late), (1, self.join), (2, self.kill), (2, self.restart),
            (2, self.flip), (1, self.vanish), (1, self.swap), (1, self.go_back), (1, self.save),
        ]  # fmt: skip
        weights, does = zip(*choices, strict=True)
        for _ in range(events):
            [event] = self.random.choices(does, weights)
            self.out.events[event.__name__] += 1
            event()
            self.look()
        self.settle()
        return self.out

    def look(self) -> None:
        """What every server samples from."""
        for server in self.servers:
            if server.label is not None:
                self.out.samples += 1
                self.out.wrong += server.found() != self.truth[server.label]

    def settle(self) -> None:
        """Nothing breaks any more: every server must come to the newest version, as the pool would bring it there."""
        self.host.cuts = False
        for server in self.servers:
            was_behind = server.label != self.manifest.label
            for _ in range(TRIES):
                try:
                    server.take(self.message())
                    break
                except ValueError:
                    assert self.store is not None
                    self.manifest = self.store.renew(self.manifest.label) or self.manifest
            self.out.repairs += was_behind
            self.out.stuck += server.label != self.manifest.label
        self.look()
        self.host.cuts = True

    # What happens

    def publish(self) -> None:
        """A step of training, sometimes one that moves nothing, or everything."""
        scale = self.random.choice([0.0, 1e-4, 1e-3, 1e-2, 10.0])
        for name, weight in self.weights.items():
            if self.random.random() < 0.8:
                self.weights[name] = weight + scale * torch.randn(weight.shape, generator=self.generator)
        self.version += 1
        self._publish()

    def _publish(self) -> None:
        assert self.store is not None
        shipment = Shipment("", self.version, dict(self.weights), torch.bfloat16)
        self.manifest: Manifest = self.store.publish_shipment(shipment)
        sent = as_bytes(dict(shipment))
        assert self.truth.setdefault(self.manifest.label, sent) == sent
        self.messages.append(self.message())

    def message(self) -> dict[str, Any]:
        """What a server is told: the folder or an address."""
        if self.random.random() < 0.4:
            return self.manifest.message(address=None, token=None)
        return self.manifest.message(address=f"{self.host.url}/store", token="t")

    def sync(self) -> None:
        """A server hears of the newest version; where it cannot have it, the trainer repairs it some time."""
        try:
            self.random.choice(self.servers).take(self.message())
        except ValueError:
            self.out.events["refused"] += 1
            if self.random.random() < 0.5 and self.store is not None:
                self.manifest = self.store.renew(self.manifest.label) or self.manifest

    def late(self) -> None:
        """A server hears of an older version, or of the same once more."""
        try:
            self.random.choice(self.servers).take(self.random.choice(self.messages[-4:]))
        except ValueError:
            self.out.events["refused"] += 1

    def join(self) -> None:
        if len(self.servers) < 4:
            self.servers.append(Server(self.folder / f"server{len(self.servers)}"))

    def restart(self) -> None:
        server = self.random.choice(self.servers)
        if self.random.random() < 0.5:
            shutil.rmtree(server.root, ignore_errors=True)
        server.start()

    def kill(self) -> None:
        """A server ends in the middle of fetching or applying, and is started again over what it left."""
        server = self.random.choice(self.servers)
        with Deadly(self.random, after=self.random.randrange(12)):
            try:
                server.take(self.message())
            except ValueError:
                self.out.events["refused"] += 1
            except Killed:
                self.out.events["killed"] += 1
                server.start()

    def _files(self) -> list[Path]:
        roots = [server.root for server in self.servers]
        if self.store is not None:
            roots.append(self.store.root)
        chosen = self.random.choice(roots)
        return sorted(path for path in chosen.rglob("*") if path.is_file() and path.name != ".lock")

    def flip(self) -> None:
        """A bit flips in a file of the trainer, or of a server."""
        if files := self._files():
            path = self.random.choice(files)
            data = bytearray(path.read_bytes())
            if data:
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
                path.write_bytes(data)

    def vanish(self) -> None:
        """A file is lost, or cut off."""
        if files := self._files():
            path = self.random.choice(files)
            if self.random.random() < 0.5:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[: self.random.randrange(200)])

    def swap(self) -> None:
        """Two files change places."""
        files = self._files()
        if len(files) > 1:
            one, other = self.random.sample(files, 2)
            first, second = one.read_bytes(), other.read_bytes()
            one.write_bytes(second)
            other.write_bytes(first)

    def save(self) -> None:
        self.checkpoints.append((self.version, dict(self.weights)))

    def go_back(self) -> None:
        """To a checkpoint, in another process or in this one."""
        self.version, saved = self.random.choice(self.checkpoints or [(self.version, self.weights)])
        self.weights = dict(saved)
        if self.random.random() < 0.5:
            self.new_trainer()
        self._publish()

    def new_trainer(self) -> None:
        """Another trainer; the one before it has ended in order or was killed."""
        if self.store is not None and self.random.random() < 0.5:
            self.store.close()
        self.runs += 1
        every = self.random.choice([2, 3, 6, 50])
        self.store = DeltaStore(self.folder / "trainer", run=f"run{self.runs}", anchor_every=every)


class Deadly:
    """Ends the process of a server at one of the places where it has begun something; files stay half written."""

    def __init__(self, random: Random, *, after: int) -> None:
        self.random, self.left, self.lock = random, after, threading.Lock()
        self.kept = (delta_copy.fetch_file, delta_copy._build, delta_copy.DeltaCopy._tidy)

    def __enter__(self) -> None:
        real_fetch, real_build, real_tidy = self.kept

        def fetch_one(message: Any, label: str, file: Any, folder: Path) -> Path:
            if self.is_over():
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{file.name}{file_download.PART}").write_bytes(bytes(self.random.randrange(300)))
                raise Killed
            return real_fetch(message, label, file, folder)

        def build(start: Path, steps: list[Path], place: Path, file: Any) -> None:
            if self.is_over():
                place.write_bytes(bytes(self.random.randrange(300)))
                raise Killed
            real_build(start, steps, place, file)

        def tidy(own: delta_copy.DeltaCopy, *args: Any) -> None:
            if self.is_over():
                raise Killed
            real_tidy(own, *args)

        delta_copy.fetch_file, delta_copy._build, delta_copy.DeltaCopy._tidy = fetch_one, build, tidy  # type: ignore[assignment]

    def __exit__(self, *args: object) -> None:
        delta_copy.fetch_file, delta_copy._build, delta_copy.DeltaCopy._tidy = self.kept  # type: ignore[method-assign]

    def is_over(self) -> bool:
        with self.lock:
            self.left -= 1
            return self.left < 0


class Host:
    """The files of the current history over HTTP; connections are cut, and some answers begin at the beginning."""

    def __init__(self) -> None:
        self.history: History | None = None
        self.cuts = True
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.random = Random(0)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = self.find(request.path.split("/")[1:])
        try:
            data = b"" if path is None else path.read_bytes()
        except OSError:
            path = None
        if path is None:
            request.send_error(404)
            return
        begin, asked = 0, request.headers.get("Range")
        if asked and self.random.random() < 0.7:
            begin = int(asked.removeprefix("bytes=").rstrip("-"))
            if begin >= len(data):
                request.send_error(416)
                return
        sent = data[begin:]
        request.send_response(206 if begin else 200)
        request.send_header("Content-Length", str(len(sent)))
        request.end_headers()
        if self.cuts and self.random.random() < 0.2:
            sent = sent[: self.random.randrange(len(sent) + 1)]
        request.wfile.write(sent)

    def find(self, words: list[str]) -> Path | None:
        history = self.history
        if history is None or history.store is None:
            return None
        path = history.store.root / words[1] / words[2]
        return path if path.is_file() else None

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def play(seeds: range, folder: Path, *, events: int = 16) -> Outcome:
    """Many histories, one after another."""
    total, host = Outcome(), Host()
    kept = shards.FILE_BYTES
    shards.FILE_BYTES = FILE_BYTES
    try:
        for seed in seeds:
            place = folder / f"history{seed}"
            out = History(seed, place, host).play(events)
            total.events += out.events
            for name in ("samples", "wrong", "repairs", "stuck"):
                setattr(total, name, getattr(total, name) + getattr(out, name))
            if out.wrong or out.stuck:
                total.events[f"seed {seed}"] += 1
            shutil.rmtree(place, ignore_errors=True)
    finally:
        shards.FILE_BYTES = kept
        host.close()
    return total
