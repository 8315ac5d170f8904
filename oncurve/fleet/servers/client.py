"""Client of one rollout server. Every call has a deadline, and every failure names the server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from oncurve.core.errors import SamplerError
from oncurve.fleet.servers import protocol
from oncurve.model.lora_weights import SAYS_ANOTHER

LONG = 2**16
"""Characters of an answer, some hundred for a token, from which on reading it would hold up other requests."""
T = TypeVar("T")
_MAX_EXCERPT = 400
"""Characters of a server's answer that are shown in a message."""


class ServerLost(Exception):
    """There is no connection, or no answer in time: the server may be dead, stopped, or cut off."""


class ServerSlow(ServerLost):
    """It did not answer in time; whether it lives is another question."""


class ServerFailed(Exception):
    """It answered that it could not do it, with a status of 500 or more."""


@dataclass(frozen=True, slots=True)
class Report:
    """A server's report of its state."""

    label: str
    """The version of the weights that it samples from; "default" for those that it was started with."""
    takes_keys: bool
    """It is one of ours, and draws tokens from the random streams that it is given."""
    instance: str | None
    """Another one after each start; None where servers do not tell (vLLM)."""
    is_draining: bool
    """It ends what it has begun and takes nothing new."""


class ServerClient:
    """The routes of one server."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, token: str | None, connect_seconds: float) -> None:
        self.url = url.rstrip("/")
        self.connect_seconds = connect_seconds
        self._session = session
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def report(self, *, within: float) -> Report:
        """Whether it is well, and which weights it has."""
        await self._call("GET", protocol.HEALTH, within=within)
        answer = await self._call("GET", protocol.WEIGHT_INFO, within=within)
        return Report(
            label=str(answer.get("weight_version")),
            takes_keys=bool(answer.get("takes_keys")),
            instance=answer.get("instance"),
            is_draining=bool(answer.get("is_draining")),
        )

    async def model_config(self, *, within: float, takes_keys: bool) -> Mapping[str, Any]:
        """The configuration of its model; empty if it does not tell."""
        if takes_keys:
            answer = await self._call("GET", f"{protocol.WEIGHT_INFO}?{protocol.WITH_MODEL}=1", within=within)
            return answer.get("model") or {}
        body = {"method": "tell_model"}
        return (await self._call("POST", protocol.CALL_WORKERS, within=within, body=body))["results"][0] or {}

    async def generate(self, body: Mapping[str, Any], *, within: float, read: Callable[[Any], T]) -> T:
        """Completions of one prompt, as ``read`` takes them from the answer. A long one is read in another thread."""
        text = await self._text("POST", protocol.GENERATE, within=within, body=body)
        if len(text) < LONG:
            return read(self._parsed(protocol.GENERATE, text))
        return await asyncio.to_thread(lambda: read(self._parsed(protocol.GENERATE, text)))

    async def tokenize(self, text: str, *, within: float) -> list[int]:
        """The tokens of a text, without those that a tokenizer puts around it."""
        body = {"prompt": text, "add_special_tokens": False}
        return [
            int(token) for token in (await self._call("POST", protocol.TOKENIZE, within=within, body=body))["tokens"]
        ]

    async def pause(self, *, within: float, keeps: bool = False) -> None:
        """End what it still samples for nobody, forget the cached prompts, begin nothing; or, with ``keeps``, let
        everything stand still."""
        mode = "mode=keep&clear_cache=false" if keeps else "mode=abort&clear_cache=true"
        await self._call("POST", f"{protocol.PAUSE}?{mode}", within=within)

    async def resume(self, *, within: float) -> None:
        """Sample again."""
        await self._call("POST", protocol.RESUME, within=within)

    async def sleep(self, level: int, *, within: float) -> None:
        """Give memory back: with level 1 weights go to the machine's memory, with 2 they are dropped."""
        await self._call("POST", f"{protocol.SLEEP}?level={level}", within=within)

    async def wake(self, tag: str, *, within: float) -> None:
        """Take memory again, for ``weights`` or for the ``kv_cache``."""
        await self._call("POST", f"{protocol.WAKE}?tags={tag}", within=within)

    async def is_sleeping(self, *, within: float) -> bool:
        """It gave memory back, or somebody paused it."""
        return bool((await self._call("GET", protocol.IS_SLEEPING, within=within))["is_sleeping"])

    async def num_workers(self, *, within: float) -> int:
        """Over how many GPUs it is spread."""
        return int((await self._call("GET", protocol.WORLD_SIZE, within=within))["world_size"])

    async def choose_transfer(self, transfer: str, settings: Mapping[str, Any], *, within: float) -> None:
        """Agree on how weights come from now on. Members of a group answer when all have met."""
        await self._call(
            "POST", protocol.INIT, within=within, body={"init_info": {"way": transfer, "settings": settings}}
        )

    async def start_update(self, *, within: float) -> None:
        """Begin to take new weights as files; an update that somebody left in its middle is given up first."""
        await self._call("POST", protocol.INIT, within=within, body={"init_info": {}})
        await self.begin(within=within)

    async def begin(self, *, within: float) -> None:
        """Begin to take new weights in the way that was agreed on.

        An update that is refused ends the session that it belongs to, so nothing is sent to that purpose.
        """
        try:
            await self._call("POST", protocol.START, within=within)
        except ServerFailed:
            try:
                await self._call("POST", protocol.UPDATE, within=within, body={"update_info": {"give_up": True}})
            except ServerFailed:
                await self._call("POST", protocol.START, within=within)
            else:
                raise

    async def send_update(self, message: Mapping[str, Any], *, within: float) -> None:
        """Tell it where the weights are; it fetches and checks them, and its model stays as it is."""
        await self._call("POST", protocol.UPDATE, within=within, body={"update_info": dict(message)})

    async def finish_update(self, label: str, *, within: float) -> None:
        """Let the new weights take the place of the old ones."""
        await self._call("POST", protocol.FINISH, within=within, body={"weight_version": label})

    async def _call(self, method: str, route: str, *, within: float, body: Mapping[str, Any] | None = None) -> Any:
        return self._parsed(route, await self._text(method, route, within=within, body=body))

    def _parsed(self, route: str, text: str) -> Any:
        try:
            return json.loads(text) if text.strip() else {}
        except ValueError:
            raise ServerFailed(f"{self.url}{route} answers no JSON: {text[:_MAX_EXCERPT]!r}") from None

    async def _text(self, method: str, route: str, *, within: float, body: Mapping[str, Any] | None) -> str:
        """The answer to one request.

        Raises ServerLost, ServerSlow, ServerFailed; SamplerError if the server says that the request is wrong.
        """
        limit = aiohttp.ClientTimeout(total=within, sock_connect=min(within, self.connect_seconds))
        try:
            async with self._session.request(
                method, self.url + route, json=body, headers=self._headers, timeout=limit
            ) as response:
                text = await response.text()
        except TimeoutError:
            raise ServerSlow(f"{self.url} gave no answer to {route.split('?')[0]} within {within:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{self.url} is lost: {_text_of(error)}") from None
        is_final = SAYS_ANOTHER in text and route in (protocol.UPDATE, protocol.FINISH)  # vLLM has one status for all
        if (response.status >= 500 or response.status == 429) and not is_final:
            raise ServerFailed(f"{self.url}{route} answers {response.status}: {text[:_MAX_EXCERPT]}")
        if response.status >= 400:
            raise SamplerError(self._refusal(route, response.status, text))
        return text

    def _refusal(self, route: str, status: int, text: str) -> str:
        """A status in the four hundreds, explained to the user."""
        refusal = f"rollout server {self.url}{route} refuses with {status}: {text[:_MAX_EXCERPT]}"
        if status in (401, 403):
            return f"{refusal}. Set {protocol.TOKEN_VARIABLE} to the token that the server was started with"
        if status == 404:
            return (
                f"{refusal}. It lacks this route: start it with `oncurve serve`, or vLLM with --enable-scale-out, "
                f"--weight-transfer-config and VLLM_SERVER_DEV_MODE=1 as docs/servers.md says"
            )
        return refusal


def _text_of(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Backoff:
    """Ever longer pauses between attempts, each a random share of its limit, so that clients do not come together."""

    def __init__(self, *, first: float = 0.2, longest: float = 5.0) -> None:
        self.first, self.longest = first, longest
        self._limit = first
        self._random = random.Random()

    def next(self) -> float:
        """Seconds until the next attempt."""
        pause = self._limit * (0.5 + self._random.random() / 2)
        self._limit = min(2 * self._limit, self.longest)
        return pause

    def reset(self) -> None:
        """An attempt succeeded."""
        self._limit = self.first
