"""HTTP application of `oncurve serve`, with the routes of vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import secrets
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from oncurve.agents.conversation_frames import Frames
from oncurve.constants import MAX_BODY
from oncurve.core.errors import ConfigError, SamplerError
from oncurve.core.sampler import PolicyView
from oncurve.fleet.servers import protocol
from oncurve.fleet.servers.registry import register
from oncurve.fleet.serving.chat_routes import ChatRoutes
from oncurve.fleet.serving.sampling import Paused, Sampling
from oncurve.fleet.serving.weight_update import WeightUpdate
from oncurve.model.lora_weights import AnotherModel
from oncurve.model.same_model import described_config

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SamplingServer:
    """A model behind the routes of the contract. Weights change between an UPDATE, which stages, and a FINISH."""

    def __init__(
        self,
        policy: PolicyView,
        *,
        max_rows: int | None = None,
        context_tokens: int,
        token: str | None = None,
        cuda_graphs: bool = True,
        frames: Frames | None = None,
    ) -> None:
        """``frames`` say how conversations are written down; without them there are no chat routes."""
        self.sampling = Sampling(policy, max_rows=max_rows, cuda_graphs=cuda_graphs)
        self.context_tokens, self.token = context_tokens, token
        self.update = WeightUpdate(policy.model)
        self.instance = secrets.token_hex(8)
        self.is_draining = False
        self.chats = None
        if frames is not None:
            self.chats = ChatRoutes(policy, self.sampling, frames, context_tokens=context_tokens)
        self._control = asyncio.Lock()
        self._is_updating = False

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        app.router.add_get(protocol.HEALTH, self.health)
        app.router.add_get(protocol.WEIGHT_INFO, self.weight_info)
        app.router.add_post(protocol.GENERATE, self.generate)
        app.router.add_post(protocol.TOKENIZE, self.tokenize)
        app.router.add_post(protocol.PAUSE, self.pause)
        app.router.add_post(protocol.RESUME, self.resume)
        app.router.add_post(protocol.INIT, self.init)
        app.router.add_post(protocol.START, self.start)
        app.router.add_post(protocol.UPDATE, self.stage)
        app.router.add_post(protocol.FINISH, self.finish)
        if self.chats is not None:
            self.chats.add_to(app.router)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Show callers without the token only whether the server is well. Their mistakes become answers."""
        authorization = request.headers.get("Authorization", "").encode()
        is_known = hmac.compare_digest(authorization, f"Bearer {self.token}".encode())
        if self.token and not is_known and request.path != protocol.HEALTH:
            return _say("the token is missing or wrong", 401)
        try:
            return await handler(request)
        except (ValueError, KeyError, TypeError) as error:
            return _say(str(error) or type(error).__name__, 400)

    async def health(self, request: web.Request) -> web.Response:
        """Whether the thread that samples lives."""
        return (
            web.json_response({}) if self.sampling.is_alive else _say("sampling has died; start the server again", 500)
        )

    async def weight_info(self, request: web.Request) -> web.Response:
        """Which weights, since which start, and how much there is to do."""
        model = {"model": described_config(self.update.model.config)} if protocol.WITH_MODEL in request.query else {}
        return web.json_response(
            {
                **model,
                "weight_version": self.sampling.label,
                "takes_keys": True,
                "instance": self.instance,
                "is_draining": self.is_draining,
                "running": self.sampling.num_running,
            }
        )

    async def generate(self, request: web.Request) -> web.Response:
        """Completions of one prompt, or its own log-probabilities; a caller that goes away ends them."""
        generate_request = protocol.read_request(await _json(request))
        generate_request.check_lengths(self.context_tokens)
        if self.is_draining:
            return _say("the server is ending", 503)
        if generate_request.is_scored and generate_request.without_adapter:
            async with self._control:
                scores = await asyncio.to_thread(self.sampling.score_base, generate_request.token_ids)
            return web.json_response(
                protocol.scores_body(generate_request.request_id, generate_request.token_ids, scores)
            )
        if generate_request.is_scored:
            scores = await asyncio.to_thread(self.sampling.score, generate_request.token_ids)
            return web.json_response(
                protocol.scores_body(generate_request.request_id, generate_request.token_ids, scores)
            )
        try:
            work = self.sampling.submit(generate_request)
        except Paused:
            return _say("the server is paused", 503)
        try:
            sampled = await asyncio.wrap_future(work.future)
        except asyncio.CancelledError:
            self.sampling.drop(work)
            raise
        except SamplerError as error:
            return _say(str(error), 500)
        return web.json_response(protocol.response_body(generate_request.request_id, sampled))

    async def tokenize(self, request: web.Request) -> web.Response:
        """The tokens of a text."""
        body = await _json(request)
        special = bool(body.get("add_special_tokens", True))
        ids = self.sampling.policy.tokenizer(str(body["prompt"]), add_special_tokens=special)["input_ids"]
        return web.json_response({"tokens": ids, "count": len(ids)})

    async def pause(self, request: web.Request) -> web.Response:
        """Take no requests; mode abort cuts off those that run, wait lets them end. With mode keep they stand
        still, and requests that come wait for their turn."""
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"mode {mode} is not offered; use abort, wait or keep")
        async with self._control:
            if mode == "keep":
                await asyncio.to_thread(self.sampling.freeze)
            else:
                await asyncio.to_thread(self.sampling.pause, abort=mode == "abort")
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        """Take requests again."""
        async with self._control:
            self.sampling.resume()
        return web.json_response({"status": "resumed"})

    async def init(self, request: web.Request) -> web.Response:
        """Nothing has to be set up to read files."""
        return web.json_response({})

    async def start(self, request: web.Request) -> web.Response:
        """Begin an update; one that was left in its middle is forgotten."""
        async with self._control:
            self._is_updating = True
        return web.json_response({})

    async def stage(self, request: web.Request) -> web.Response:
        """Fetch and check weights. If they are not good, the model and the version stay what they are."""
        message = (await _json(request))["update_info"]
        async with self._control:
            if not self._is_updating:
                return _say("no update was started", 500)
            try:
                await asyncio.to_thread(self.update.stage, message)
            except ValueError as error:
                self._is_updating = False
                status = 409 if isinstance(error, AnotherModel) else 500  # which no further attempt would change
                return _say(f"{error}. The server keeps the weights {self.sampling.label}", status)
        return web.json_response({})

    async def finish(self, request: web.Request) -> web.Response:
        """Let the staged weights take the place of the old ones, under their name."""
        label = str((await _json(request))["weight_version"])
        async with self._control:
            if not self.update.is_staged or self.update.label != label:
                return _say(f"no weights {label} were sent. The server keeps {self.sampling.label}", 500)
            try:
                await asyncio.to_thread(self.sampling.change, self.update.apply, label)
            except SamplerError as error:
                return _say(str(error), 500)
            self._is_updating = False
        return web.json_response({})


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.text())
    except ValueError as error:
        raise ValueError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("the body must be an object")
    return body


def _say(text: str, status: int) -> web.Response:
    return web.json_response({"error": text}, status=status)


def check_host(host: str, token: str | None) -> None:
    """Raises ConfigError for an address that other machines reach, without a token."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost" and not token:
        raise ConfigError(
            f"--host {host}: other machines reach this, and whoever does can replace the model. Set "
            f"{protocol.TOKEN_VARIABLE} to a secret of yours, here and where the trainer runs, or leave --host out"
        )


async def serve(
    server: SamplingServer,
    *,
    host: str,
    port: int,
    registry: Path | None = None,
    notify: Callable[[str], None] = lambda text: None,
    grace_seconds: float = 30.0,
) -> None:
    """Answer until SIGTERM or SIGINT; then let what runs end, for ``grace_seconds`` at most.

    Raises ConfigError if it cannot listen there.
    """
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port") from None
    url = f"http://{host}:{runner.addresses[0][1]}"
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    entry = register(registry, url) if registry is not None else None
    notify(f"serving on {url}")
    await ended.wait()
    if entry is not None:
        entry.unlink(missing_ok=True)
    server.is_draining = True
    if server.chats is not None:
        server.chats.is_draining = True
    notify("ending: nothing new is taken")
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        await asyncio.wait_for(_until_idle(server), grace_seconds)
    await runner.cleanup()


async def _until_idle(server: SamplingServer) -> None:
    while server.sampling.num_running:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.1)  # answers that are on their way
