"""Access to a dashboard: open to this machine, by token from elsewhere."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, urlencode

COOKIE = "oncurve_token"
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names under which a machine speaks to itself."""

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Gate:
    """In front of the dashboard. It looks at every request before anything is read for it.

    With a token: the cookie or the header ``Authorization: Bearer`` must hold it; ``?token=`` once sets the cookie.
    Without: the request must be addressed to one of the ``hosts``, or else a page of a stranger could have its own name
    point to this machine and read the dashboard through the visitor's browser.
    """

    def __init__(self, app: Any, *, token: str | None, hosts: Sequence[str]) -> None:
        """``hosts`` is only looked at without a token."""
        self.app, self._token, self._hosts = app, token, {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if self._token is None:
            if _host(headers.get(b"host", "")) not in self._hosts:
                await _answer(send, 421, "This dashboard answers on this machine only, under localhost.")
                return
        elif self._is_right(query.get("token", "")):
            rest = urlencode({name: value for name, value in query.items() if name != "token"})
            place = scope["path"].replace("\n", "").replace("\r", "") + (f"?{rest}" if rest else "")
            cookie = f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            # two slashes at the start would name another server
            location = ("/" + place.lstrip("/")).encode("ascii", "ignore")
            await _answer(send, 303, "", ((b"location", location), (b"set-cookie", cookie.encode("ascii"))))
            return
        elif not (self._is_right(_cookie(headers.get(b"cookie", ""))) or self._is_right(_bearer(headers))):
            await _answer(send, 401, "A token is needed: open the address that `oncurve dashboard` printed.")
            return
        await self.app(scope, receive, _with_headers(send))

    def _is_right(self, given: str) -> bool:
        return self._token is not None and secrets.compare_digest(
            given.encode("utf-8", "replace"), self._token.encode()
        )


def new_token() -> str:
    """Something nobody guesses."""
    return secrets.token_urlsafe(24)


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _bearer(headers: dict[bytes, str]) -> str:
    kind, _, value = headers.get(b"authorization", "").partition(" ")
    return value if kind.lower() == "bearer" else ""


def _with_headers(send: Send) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *HEADERS]}
        await send(message)

    return sending


async def _answer(send: Send, status: int, text: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    own = ((b"content-type", b"text/plain; charset=utf-8"), *HEADERS, *headers)
    await send({"type": "http.response.start", "status": status, "headers": list(own)})
    await send({"type": "http.response.body", "body": text.encode()})
