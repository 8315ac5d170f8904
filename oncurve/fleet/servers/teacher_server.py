"""Teacher behind a server: log-probabilities of given tokens, and the check that it reads the same tokens."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import aiohttp
from transformers import PreTrainedTokenizerBase

from oncurve.core.errors import ConfigError, SamplerError
from oncurve.fleet.servers import protocol
from oncurve.fleet.servers.client import Backoff, ServerClient, ServerFailed, ServerLost
from oncurve.fleet.settings import Deadlines
from oncurve.sample.event_loop import EventLoopThread

Answer = TypeVar("Answer")
AT_ONCE = 32
"""Requests that are open together; the server puts them into batches."""
CHECKED, IN_A_TEXT = 4096, 64
"""Tokens of the vocabulary that are compared, and how many of them stand in one text."""


class TeacherServer:
    """A model behind ``oncurve serve`` or vLLM that scores tokens."""

    def __init__(self, url: str, *, token: str | None = None, deadlines: Deadlines | None = None) -> None:
        """``token`` is the secret that the server was started with."""
        self.url, self.token, self.deadlines = url, token, deadlines or Deadlines()
        self._loop = EventLoopThread("teacher")

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, student: str) -> None:
        """Raises ConfigError where the server reads texts made of the student's tokens as other tokens."""
        size = len(tokenizer)
        ids = range(0, size, max(1, size // CHECKED))
        spellings = [str(tokenizer.decode([token])) for token in ids if token not in tokenizer.all_special_ids]
        texts = ["".join(spellings[start : start + IN_A_TEXT]) for start in range(0, len(spellings), IN_A_TEXT)]
        for text, theirs in zip(texts, self._loop.call(self._tokenize(texts)), strict=True):
            own: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            if own != theirs:
                index = next((at for at, pair in enumerate(zip(own, theirs, strict=False)) if pair[0] != pair[1]), 0)
                raise ConfigError(
                    f"algorithm.teacher is {self.url}, whose tokenizer is not that of {student!r}: "
                    f"{tokenizer.decode(own[index : index + 1])!r} is {theirs[index : index + 1]} there and "
                    f"{own[index : index + 1]} here. Serve a model of the same family, or learn its completions with "
                    f"oncurve sft"
                )

    def logprobs(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """log p of the tokens of each completion behind its prompt, at temperature 1.

        Raises SamplerError if the server gives no answer for ``gone_seconds``, or refuses.
        """
        return self._loop.call(self._score(rows))

    def close(self) -> None:
        """End the thread that talks to the server."""
        self._loop.close()

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE))

    def _client(self, session: aiohttp.ClientSession) -> ServerClient:
        return ServerClient(self.url, session, token=self.token, connect_seconds=self.deadlines.connect_seconds)

    async def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        async with self._session() as session:
            client = self._client(session)
            return [await self._insist(lambda text=text: client.tokenize(text, within=60.0)) for text in texts]

    async def _score(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        async with self._session() as session:
            client, open_requests = self._client(session), asyncio.Semaphore(AT_ONCE)

            async def score(prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
                ids = [*prompt, *completion]
                body = protocol.score_body(ids, request_id=secrets.token_hex(8))
                within = self.deadlines.answer_seconds(len(completion))
                read = partial(protocol.read_scores, token_ids=ids)
                try:
                    async with open_requests:
                        scores = await self._insist(lambda: client.generate(body, within=within, read=read))
                except (ValueError, KeyError, TypeError) as error:
                    raise SamplerError(f"teacher {self.url}: {error}") from None
                return scores[len(prompt) - 1 :]

            return list(await asyncio.gather(*(score(*row) for row in rows)))

    async def _insist(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Ask again until the server answers. Raises SamplerError after ``gone_seconds`` without it."""
        until, pauses = time.monotonic() + self.deadlines.gone_seconds, Backoff()
        while True:
            try:
                return await ask()
            except (ServerLost, ServerFailed) as error:
                if time.monotonic() > until:
                    raise SamplerError(
                        f"algorithm.teacher: {error}, for {self.deadlines.gone_seconds:g} s. Start the server again "
                        f"and resume the run"
                    ) from None
                await asyncio.sleep(pauses.next())


def connect_teacher(url: str, tokenizer: PreTrainedTokenizerBase, student: str, deadlines: Deadlines) -> TeacherServer:
    """The teacher behind a server, once it is known to read the same tokens as the student."""
    teacher = TeacherServer(url, token=os.environ.get(protocol.TOKEN_VARIABLE), deadlines=deadlines)
    try:
        teacher.check_tokenizer(tokenizer, student)
    except BaseException:
        teacher.close()
        raise
    return teacher
