"""Client of a chat model behind an OpenAI-compatible address, with retries and a budget."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from oncurve.core.errors import ConfigError

logger = logging.getLogger(__name__)

EndpointError = Literal["judge_unreachable", "judge_unreadable", "budget", "timeout"]
"""No answer, an answer that is none, no money or requests left, or no time left."""

MAX_REPLY_BYTES = 2**20
_MAX_PAUSE_SECONDS = 30.0
_RETRIED = (408, 409, 425, 429)


class EndpointFailure(Exception):
    """The reason why there is no reply."""

    def __init__(self, error: EndpointError, detail: str) -> None:
        super().__init__(detail)
        self.error: EndpointError = error


class _Temporary(Exception):
    """One attempt failed; another may not."""

    def __init__(self, error: EndpointError, detail: str, pause_seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.error: EndpointError = error
        self.pause_seconds = pause_seconds


@dataclass(frozen=True, slots=True)
class TokenPrice:
    """The price of a million tokens; both zero for a model of one's own."""

    prompt_usd: float = 0.0
    completion_usd: float = 0.0

    def usd(self, prompt_tokens: float, completion_tokens: float) -> float:
        """The price of one request."""
        return (prompt_tokens * self.prompt_usd + completion_tokens * self.completion_usd) / 1e6


class Budget:
    """Requests and money that may be spent, reserved before each request so that concurrent ones do not overrun it.

    A request reserves what it can cost at most; when its reply says how many tokens it took, the rest is given back,
    and all of it if the server refused. A request without a reply keeps its reservation, since it may have been billed.
    """

    def __init__(self, *, max_requests: int | None = None, max_usd: float | None = None) -> None:
        self.max_requests = max_requests
        self.max_usd = max_usd
        self.num_requests = 0
        self.spent_usd = 0.0
        self._lock = threading.Lock()

    def reserve(self, usd: float) -> None:
        """Takes one request and its price. Raises EndpointFailure "budget" if either is used up."""
        with self._lock:
            if self.max_requests is not None and self.num_requests >= self.max_requests:
                raise EndpointFailure("budget", f"all {self.max_requests} requests are used")
            if self.max_usd is not None and self.spent_usd + usd > self.max_usd:
                raise EndpointFailure("budget", f"{self.spent_usd:.4f} of {self.max_usd:g} USD are spent")
            self.num_requests += 1
            self.spent_usd += usd

    def correct(self, reserved_usd: float, usd: float) -> None:
        """Replaces a reservation by what was billed."""
        with self._lock:
            self.spent_usd += usd - reserved_usd


class ChatEndpoint:
    """``POST <base_url>/chat/completions`` with retries; may be called from several threads.

    429, 5xx, timeouts, lost connections and bodies that are no reply are tried again after a pause that doubles, with
    jitter, and is at least what Retry-After asks for. Redirects are not followed: they would carry the key elsewhere.
    The key comes from the environment variable ``api_key_env`` and appears in no message. HTTPS goes through the proxy
    that the environment names.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        timeout_seconds: float = 60.0,
        retries: int = 4,
        retry_seconds: float = 1.0,
        max_reply_tokens: int = 512,
        price: TokenPrice | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.url = _checked_url(base_url)
        self.model = model
        self.timeout_seconds = timeout_seconds
        self.retries = retries
        self.retry_seconds = retry_seconds
        self.max_reply_tokens = max_reply_tokens
        self.price = price or TokenPrice()
        self.budget = budget or Budget()
        self._key = _key_from(api_key_env)
        self._certificates = ssl.create_default_context()
        self._random = random.Random()  # pauses only: no result depends on it
        if self._key and self.url.scheme == "http" and self.url.hostname not in ("localhost", "127.0.0.1", "::1"):
            logger.warning("the key in %s is sent to %s unencrypted", api_key_env, self.url.hostname)

    def ask(self, messages: Sequence[Mapping[str, str]], *, until: float, stop: threading.Event) -> str:
        """The content of the reply.

        Waits for the network, at the latest until ``until`` on the monotonic clock; unblocked early by ``stop``.

        Raises EndpointFailure.
        """
        limit = {"max_tokens": self.max_reply_tokens}
        body = json.dumps({"model": self.model, "messages": list(messages), "temperature": 0, **limit}).encode("ascii")
        pause = self.retry_seconds
        for attempts_left in range(self.retries, -1, -1):
            if stop.is_set() or time.monotonic() >= until:
                raise EndpointFailure("timeout", "no time left to ask")
            try:
                return self._content(body, until)
            except _Temporary as error:
                wait = max(error.pause_seconds, pause * self._random.uniform(0.5, 1.0))
                if attempts_left == 0:
                    raise EndpointFailure(error.error, self._clean(f"{error} ({self.retries + 1} attempts)")) from None
                if time.monotonic() + wait >= until:
                    raise EndpointFailure("timeout", self._clean(f"no time left to try again after: {error}")) from None
                stop.wait(wait)
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        raise AssertionError("the loop returns or raises")

    def _content(self, body: bytes, until: float) -> str:
        reserved = self.price.usd(len(body), self.max_reply_tokens)  # a token is at least a byte
        self.budget.reserve(reserved)
        status, pause, text = self._post(body, min(self.timeout_seconds, until - time.monotonic()))
        if status != 200:
            self.budget.correct(reserved, 0.0)
        if status in _RETRIED or status >= 500:
            raise _Temporary("judge_unreachable", f"status {status}: {text[:200]}", pause)
        if status != 200:
            raise EndpointFailure("judge_unreachable", self._clean(f"status {status}: {text[:200]}"))
        try:
            reply = json.loads(text)
            choice = reply["choices"][0]
            content = choice["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise _Temporary("judge_unreadable", f"no chat completion: {text[:100]}") from None
        usage = reply.get("usage")
        if isinstance(usage, dict) and all(_is_count(usage.get(k)) for k in ("prompt_tokens", "completion_tokens")):
            self.budget.correct(reserved, self.price.usd(usage["prompt_tokens"], usage["completion_tokens"]))
        if not isinstance(content, str) or choice.get("finish_reason") == "length":
            raise EndpointFailure("judge_unreadable", "the reply is empty or was cut off; raise max_reply_tokens")
        return content

    def _post(self, body: bytes, seconds: float) -> tuple[int, float, str]:
        """Status, seconds to wait as Retry-After says, and body; all of it within so many seconds."""
        import httpx  # here, since every recipe is read with this module

        try:
            return asyncio.run(asyncio.wait_for(self._posted(httpx, body), max(seconds, 0.001)))
        except TimeoutError:
            raise _Temporary("timeout", f"no reply within {seconds:.1f} s") from None
        except (OSError, httpx.HTTPError, ValueError) as error:
            raise _Temporary("judge_unreachable", f"{type(error).__name__}: {error}") from None

    async def _posted(self, httpx: ModuleType, body: bytes) -> tuple[int, float, str]:
        is_secure, text = self.url.scheme == "https", bytearray()
        options: dict[str, Any] = {"timeout": None, "trust_env": False, "verify": is_secure and self._certificates}
        async with (
            httpx.AsyncClient(**options, proxy=self._proxy()) as client,
            client.stream("POST", self.url.geturl(), content=body, headers=self._headers()) as response,
        ):
            async for part in response.aiter_bytes():
                text += part
                if len(text) >= MAX_REPLY_BYTES:
                    break
        pause = response.headers.get("Retry-After", "")
        seconds = min(float(pause), 600.0) if pause.isdecimal() else 0.0
        return response.status_code, seconds, text[:MAX_REPLY_BYTES].decode("utf-8", "replace")

    def _proxy(self) -> str | None:
        """The environment's for https, as for any other program; a server without encryption is nearby."""
        host = self.url.hostname or ""
        if self.url.scheme != "https" or urllib.request.proxy_bypass(host):
            return None
        return urllib.request.getproxies().get("https")

    def _headers(self) -> dict[str, str]:
        plain = {"Accept": "application/json", "Accept-Encoding": "identity"}  # the limit on a reply is on its bytes
        headers = {"Content-Type": "application/json", "Connection": "close", **plain}
        return {**headers, "Authorization": f"Bearer {self._key}"} if self._key else headers

    def _clean(self, text: str) -> str:
        """One line without the key."""
        text = text.replace(self._key, "***") if self._key else text
        return " ".join(ascii(text)[1:-1].split())[:300]


def _checked_url(base_url: str) -> urllib.parse.SplitResult:
    url = urllib.parse.urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
        raise ConfigError(f"rewards: judge.base_url is {base_url!r}; write one such as http://localhost:8000/v1.")
    if url.username or url.password:
        raise ConfigError("rewards: judge.base_url holds a password; name an environment variable in api_key_env.")
    return url._replace(path=(url.path.rstrip("/") or "/v1") + "/chat/completions")


def _key_from(variable: str | None) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise ConfigError(f"rewards: judge.api_key_env is {variable!r}, but that variable holds no key. Set it.")
    return key


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
