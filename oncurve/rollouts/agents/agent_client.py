"""Clients that agents are given: those of the ``openai`` package, or small ones with its call where it is missing."""

from __future__ import annotations

import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

DONE = "data: [DONE]"


class ChatRefused(Exception):
    """The server gave an error for an answer."""


class Fields(dict[str, Any]):
    """An object of an answer, whose fields are attributes too; those that are not there are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def make_client(base_url: str, api_key: str, *, is_async: bool) -> Any:
    """A client whose ``chat.completions.create`` reaches the policy, past any proxy of this machine."""
    if importlib.util.find_spec("openai") is None:
        return _Client(base_url, api_key, is_async=is_async)
    openai = importlib.import_module("openai")
    if is_async:
        plain = openai.DefaultAsyncHttpxClient(trust_env=False)
        return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, http_client=plain)
    alone = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=base_url, api_key=api_key, timeout=None, http_client=alone)


class _Client:
    """``chat.completions.create``, and nothing else."""

    def __init__(self, base_url: str, api_key: str, *, is_async: bool) -> None:
        self.base_url, self.api_key, self._is_async = base_url, api_key, is_async
        self.chat = self.completions = self

    def create(self, **body: Any) -> Any:
        """An answer, or with ``stream=True`` an iterator over its parts; to be awaited by an async agent."""
        if self._is_async:
            return self._create_async(body)
        return self._parts(body) if body.get("stream") else _read("".join(self._lines(body)))

    def close(self) -> Any:
        """Nothing is held."""
        return _nothing() if self._is_async else None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}

    def _lines(self, body: dict[str, Any]) -> Iterator[str]:
        asked = urllib.request.Request(f"{self.base_url}/chat/completions", json.dumps(body).encode(), self._headers())
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(asked) as answer:
                for line in answer:
                    yield line.decode()
        except urllib.error.HTTPError as error:
            raise ChatRefused(_message(error.read().decode())) from None

    def _parts(self, body: dict[str, Any]) -> Iterator[Fields]:
        return (_read(line.removeprefix("data: ")) for line in self._lines(body) if _is_part(line))

    async def _create_async(self, body: dict[str, Any]) -> Any:
        parts = self._parts_async(body)
        if body.get("stream"):
            return parts
        return await anext(parts)

    async def _parts_async(self, body: dict[str, Any]) -> AsyncIterator[Fields]:
        import aiohttp

        url, forever = f"{self.base_url}/chat/completions", aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=forever) as session,
            session.post(url, data=json.dumps(body), headers=self._headers()) as answer,
        ):
            if answer.status != 200:
                raise ChatRefused(_message(await answer.text()))
            if not body.get("stream"):
                yield _read(await answer.text())
                return
            async for line in answer.content:
                if _is_part(text := line.decode()):
                    yield _read(text.removeprefix("data: "))


async def _nothing() -> None:
    """Nothing."""


def _is_part(line: str) -> bool:
    return line.startswith("data: ") and not line.startswith(DONE)


def _read(text: str) -> Fields:
    made: Fields = json.loads(text, object_hook=Fields)
    return made


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]
