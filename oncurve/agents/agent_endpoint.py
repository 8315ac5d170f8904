"""The address under which agents reach the policy: a chat server on this machine, for the time of a run.

A session is named by a key, in the path (``/session/KEY/v1``) or as the API key. Requests are handed to the thread that
samples, and wait for what it gives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from aiohttp import web

from oncurve.agents.agent_session import ChatAnswer
from oncurve.agents.chat_answers import events, headers, models, whole_answer
from oncurve.agents.chat_request import ChatError, ChatRequest, read_body
from oncurve.constants import MAX_BODY
from oncurve.sample.event_loop import EventLoopThread

PATHS = ("/v1", "/session/{key}/v1")
Reply = ChatAnswer | ChatError
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AnswersChats(Protocol):
    """Answers the requests of a session; both methods are called in the endpoint's thread."""

    def chat(self, request: ChatRequest, give: Callable[[Reply], None]) -> Callable[[], None]:
        """Have a request answered through ``give``. Calling what comes back says that nobody waits any more."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        ...


class AgentEndpoint:
    """Listens on the loopback address, in a thread of its own."""

    def __init__(self) -> None:
        self._open: dict[str, AnswersChats] = {}
        self._loop = EventLoopThread("oncurve-agents")
        self._runner: web.AppRunner | None = None
        self.url: str = self._loop.call(self._listen())
        """Its address, without a path."""

    def add(self, key: str, session: AnswersChats) -> str:
        """Answer a session; the base URL for its agent."""
        self._open[key] = session
        return f"{self.url}/session/{key}/v1"

    def remove(self, key: str) -> None:
        """The session is over."""
        self._open.pop(key, None)

    def close(self) -> None:
        """Listen no more."""
        if self._runner is not None:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.call(self._runner.cleanup())
        self._loop.close()

    async def _listen(self) -> str:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[in_openai_form])
        for path in PATHS:
            app.router.add_post(f"{path}/chat/completions", self._chat)
            app.router.add_get(f"{path}/models", self._models)
        runner = self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(models())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        api_key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        session = self._open.get(request.match_info.get("key", api_key))
        if session is None:
            raise ChatError(
                "no episode has this key, or it is over. Use the base URL and the API key that the agent was given",
                status=401,
                code="invalid_api_key",
            )
        chat_request = read_body(await request.text())
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Reply] = loop.create_future()

        def give(answer: Reply) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(_settle, waiting, answer)

        forget = session.chat(chat_request, give)
        try:
            answer = await waiting
        except asyncio.CancelledError:
            forget()
            raise
        if isinstance(answer, ChatError):
            raise answer
        return await send(request, chat_request, answer, session.decode)


def _settle(waiting: asyncio.Future[Reply], answer: Reply) -> None:
    if not waiting.done():
        waiting.set_result(answer)


async def send(
    request: web.Request, chat_request: ChatRequest, answer: ChatAnswer, decode: Callable[[Sequence[int]], str]
) -> web.StreamResponse:
    """An answer, whole or as a stream. A turn is sampled before its stream begins."""
    if not chat_request.is_stream:
        return web.json_response(whole_answer(chat_request, answer, decode), headers=headers(chat_request))
    stream = web.StreamResponse(headers=stream_headers(chat_request))
    await stream.prepare(request)
    for event in events(chat_request, answer, decode):
        await stream.write(event)
    await stream.write_eof()
    return stream


def stream_headers(request: ChatRequest) -> dict[str, str]:
    """The response headers of a request, sent before its stream."""
    return {"Content-Type": "text/event-stream", **headers(request)}


@web.middleware
async def in_openai_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in OpenAI's form."""
    try:
        return await handler(request)
    except ChatError as error:
        return chat_error(error)
    except web.HTTPException as error:
        return chat_error(ChatError(f"{request.method} {request.path}: {error.reason}", status=error.status))


def chat_error(error: ChatError) -> web.Response:
    """An error in OpenAI's form. Clients need not try again what cannot succeed."""
    fields: dict[str, Any] = {"x-should-retry": "false"}
    return web.json_response(error.body(), status=error.status, headers=fields)
