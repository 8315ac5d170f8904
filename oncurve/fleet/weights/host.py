"""HTTP host of weight files in the trainer, with a token, for servers that do not see its disk."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from oncurve.core.errors import ConfigError
from oncurve.fleet.weights.weight_manifest import Manifest

PIECE = 2**14
"""Bytes that one connection sends before it is another's turn."""


class Bandwidth:
    """A rate that all connections share, piece by piece: who is slow to take its piece keeps nobody waiting."""

    def __init__(self, mbit: float) -> None:
        self.rate = mbit * 1e6 / 8
        self._free_at = 0.0

    async def send(self, request: web.Request, path: Path) -> web.StreamResponse:
        """A file, or the range of it that is asked for."""
        size = path.stat().st_size
        try:
            begin, end, _ = request.http_range.indices(size)
        except ValueError:
            begin, end = 0, size
        is_part = "Range" in request.headers
        if is_part and begin >= size:
            return web.Response(status=416)
        answer = web.StreamResponse(status=206 if is_part else 200)
        answer.content_length = end - begin
        if is_part:
            answer.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        await answer.prepare(request)
        with path.open("rb") as file:
            file.seek(begin)
            while begin < end and (piece := file.read(min(PIECE, end - begin))):
                await self._wait(len(piece))
                await answer.write(piece)
                begin += len(piece)
        return answer

    async def _wait(self, size: int) -> None:
        """Until so many bytes may be sent."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + size / self.rate
        await asyncio.sleep(self._free_at - now)


class WeightHost:
    """Hands out the files of published versions and nothing else."""

    def __init__(
        self, published: Callable[[], list[Manifest]], *, address: str, token: str, limit: Bandwidth | None = None
    ) -> None:
        """``address`` is host:port, as servers reach it; port 0 takes a free one. ``limit`` is on all that it sends.

        Raises ConfigError for an address without a port, or without a token: whoever reaches it can read the weights.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"rollouts.weights_address is {address!r}; give host:port, such as 10.0.0.5:8200")
        self._limit = limit
        self._published, self.token, self._host, self._port = published, token, host, int(port)
        self._runner: web.AppRunner | None = None

    async def open(self) -> str:
        """Listen; the address to tell to servers."""
        app = web.Application()
        app.router.add_get("/{label}/{name}", self._give)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"rollouts.weights_address: cannot listen on {self._host}:{self._port}: {error}"
            ) from None
        port = self._runner.addresses[0][1]
        return f"http://{self._host}:{port}"

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _give(self, request: web.Request) -> web.StreamResponse:
        authorization = request.headers.get("Authorization", "")
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode()):
            return web.json_response({"error": "the token is missing or wrong"}, status=401)
        for manifest in self._published():
            path = Path(manifest.folder) / request.match_info["name"]
            if manifest.label == request.match_info["label"] and path.name in manifest.served_names and path.is_file():
                return await self._limit.send(request, path) if self._limit else web.FileResponse(path)
        return web.json_response({"error": "no such version or file; a newer one may have replaced it"}, status=404)
