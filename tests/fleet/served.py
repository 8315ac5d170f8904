"""Rollout servers for tests, inside the test's own process: a real one, and one that does as it is told."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from aiohttp import web

from oncurve.core.records import Group, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.fleet.servers import protocol
from oncurve.fleet.servers.server_sampler import ServerSampler
from oncurve.fleet.serving.http_app import SamplingServer
from oncurve.fleet.settings import Deadlines, ServerKeys
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.event_loop import EventLoopThread

FAST = Deadlines(connect_seconds=1.0, request_seconds=20.0, push_seconds=5.0, silent_seconds=1.0, gone_seconds=5.0)


def move(policy: TrainedPolicy) -> None:
    """Other weights, as if it had trained."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)


class Listener:
    """An application that answers from a thread of its own; it can go away and come back under the same address."""

    def __init__(self) -> None:
        self.loop = EventLoopThread("listener")
        self.port = 0

    def listen(self, app: web.Application) -> str:
        self.loop.call(self._listen(app))
        return f"http://127.0.0.1:{self.port}"

    async def _listen(self, app: web.Application) -> None:
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self.runner.addresses[0][1]

    def go_away(self) -> None:
        self.loop.call(self.runner.cleanup())

    def close(self) -> None:
        self.go_away()
        self.loop.close()


class LocalServer:
    """What ``oncurve serve`` runs, around a model of its own."""

    def __init__(self, policy: TrainedPolicy, *, max_rows: int = 64, token: str | None = None) -> None:
        own = TrainedPolicy(
            copy.deepcopy(policy.model),
            policy.tokenizer,
            optimizer=OptimizerSettings(),
            compute_type=policy.compute_type,
        )
        self.listener = Listener()
        self.server = SamplingServer(own, max_rows=max_rows, context_tokens=256, token=token)
        self.url = self.listener.listen(self.server.app())

    def close(self) -> None:
        self.listener.close()
        self.server.sampling.close()


class ThroughServers:
    """A sampler whose completions come over HTTP from servers that are started with the first weights it is given."""

    open: ClassVar[list[ThroughServers]] = []

    def __init__(self, params: SamplingParams, *, count: int = 2) -> None:
        self.params, self.folder, self.count = params, Path(tempfile.mkdtemp(prefix="oncurve-test-")), count
        self.servers: list[LocalServer] = []
        self.sampler: ServerSampler | None = None
        ThroughServers.open.append(self)

    def load_weights(self, policy: TrainedPolicy, version: int) -> None:
        if self.sampler is None:
            self.servers = [LocalServer(policy) for _ in range(self.count)]
            urls = [server.url for server in self.servers]
            self.sampler = make_server_sampler(self.params, urls=urls, weights_folder=self.folder, deadlines=FAST)
        self.sampler.load_weights(policy, version)

    def sample(self, request: SamplingRequest) -> list[Group]:
        sampler = self.sampler or make_server_sampler(
            self.params, urls=["http://127.0.0.1:9"], weights_folder=self.folder
        )
        return sampler.sample(request)

    def close(self) -> None:
        if self.sampler is not None:
            self.sampler.close()
        for server in self.servers:
            server.close()
        self.servers = []
        if self.folder.exists():
            assert list(self.folder.iterdir()) == [], "the published weights are removed"
            self.folder.rmdir()

    @classmethod
    def close_all(cls) -> None:
        while cls.open:
            cls.open.pop().close()


class Puppet:
    """A server without a model. Each token says which version it is of, and every route can be told to misbehave."""

    def __init__(self, label: str = "default") -> None:
        self.label, self.instance = label, "first"
        self.is_paused = self.is_updating = False
        self.staged: str | None = None
        self.asked: list[dict[str, Any]] = []
        """Bodies of the requests for completions."""
        self.calls: list[str] = []
        self.behave: dict[str, Callable[[web.Request], Any]] = {}
        """By route: what to do instead; a coroutine function that gives None goes on as usual."""
        self.listener = Listener()
        self.url = self.listener.listen(self.app())

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._obey])
        app.router.add_get(protocol.HEALTH, self._fine)
        app.router.add_get(protocol.WEIGHT_INFO, self._info)
        app.router.add_post(protocol.GENERATE, self._generate)
        for route in (protocol.INIT, protocol.START):
            app.router.add_post(route, self._fine)
        app.router.add_post(protocol.PAUSE, self._pause)
        app.router.add_post(protocol.RESUME, self._resume)
        app.router.add_post(protocol.UPDATE, self._update)
        app.router.add_post(protocol.FINISH, self._finish)
        app.router.add_post(protocol.CALL_WORKERS, self._tell_model)
        return app

    @web.middleware
    async def _obey(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        if request.path in self.behave:
            answer = await self.behave[request.path](request)
            if answer is not None:
                return answer
        return await handler(request)

    async def _fine(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label, "takes_keys": True, "instance": self.instance})

    async def _tell_model(self, request: web.Request) -> web.Response:
        return web.json_response({"results": [None]})

    async def _pause(self, request: web.Request) -> web.Response:
        self.is_paused = True
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.Response:
        self.is_paused = False
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        self.staged = (await request.json())["update_info"]["label"]
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        assert self.staged is not None
        self.label, self.staged = self.staged, None
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        assert not self.is_paused
        body = await request.json()
        self.asked.append(body)
        return self.answer(body)

    def answer(
        self, body: dict[str, Any], *, label: str | None = None, reasons: list[str] | None = None
    ) -> web.Response:
        """Completions of three tokens for every place that is asked for."""
        count = body["sampling_params"]["n"]
        label = label or self.label
        version = int(label.split(":")[1]) if ":" in label else 0
        sampled = [
            protocol.GeneratedCompletion([version + 1] * 3, [-1.0] * 3, reason, (label,))  # type: ignore[arg-type]
            for reason in reasons or ["stop"] * count
        ]
        return web.json_response(protocol.response_body(body["request_id"], sampled))

    def start_again(self) -> None:
        """As a process that was killed and started with the base weights."""
        self.label, self.instance = "default", self.instance + "'"
        self.is_paused = False

    def close(self) -> None:
        self.listener.close()


def fail(status: int) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": "as told"}, status=status)

    return answer


class Gate:
    """Holds requests back until it is opened, and says when one has come."""

    def __init__(self, listener: Listener) -> None:
        self._loop = listener.loop
        self._came, self._opened = self._loop.call(self._make())

    async def _make(self) -> tuple[asyncio.Event, asyncio.Event]:
        return asyncio.Event(), asyncio.Event()

    async def __call__(self, request: web.Request) -> None:
        self._came.set()
        await self._opened.wait()

    def wait_until_reached(self) -> None:
        self._loop.call(asyncio.wait_for(self._came.wait(), 10))

    def open(self) -> None:
        self._loop.call(self._open())

    async def _open(self) -> None:
        self._opened.set()


def make_server_sampler(params: SamplingParams, *, urls: Sequence[str] = (), **options: Any) -> ServerSampler:
    """A sampler over some addresses; keys of the section ``rollouts`` among the options go into that section."""
    keys = {name: options.pop(name) for name in ServerKeys.model_fields.keys() & options.keys() - {"weights_folder"}}
    return ServerSampler(params, ServerKeys.model_construct(servers=tuple(urls), **keys), **options)
