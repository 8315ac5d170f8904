"""Access to a dashboard: open to this machine, by token from elsewhere."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

COOKIE = "oncurve_token"
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Gate:
    """In front of the dashboard. It looks at every request before anything is read for it.

    With a token: the cookie or the header ``Authorization: Bearer`` must hold it; ``?token=`` once sets the cookie.
    Without: the request must be addressed to one of the ``hosts``, or else a page of a stranger could have its own name
    point to this machine and read the dashboard through the visitor's browser.
    """

    def __init__(self, app: Any, *, token: str | None, hosts: Sequence[str]) -> None:
        """``hosts`` is only looked at without a token."""
        self.app, self._token, self._hosts = app, token, {host.lower() for host in hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"]).update(HEADERS)
            await send(message)

        answer = self._answer(Request(scope)) if scope["type"] == "http" else None
        await (answer or self.app)(scope, receive, sending)

    def _answer(self, request: Request) -> Response | None:
        """What is said in the place of the dashboard; None lets the request in."""
        if self._token is None:
            if _host(request.headers.get("host", "")) in self._hosts:
                return None
            return PlainTextResponse("This dashboard answers on this machine only, under localhost.", 421)
        if self._is_right(request.query_params.get("token", "")):
            rest = request.url.remove_query_params("token").query
            # two slashes at the start would name another server
            place = "/" + request.scope["path"].lstrip("/") + (f"?{rest}" if rest else "")
            answer = RedirectResponse(place, 303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        if self._is_right(request.cookies.get(COOKIE, "")) or (kind.lower() == "bearer" and self._is_right(value)):
            return None
        return PlainTextResponse("A token is needed: open the address that `oncurve dashboard` printed.", 401)

    def _is_right(self, given: str) -> bool:
        return self._token is not None and secrets.compare_digest(
            given.encode("utf-8", "replace"), self._token.encode()
        )


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()
