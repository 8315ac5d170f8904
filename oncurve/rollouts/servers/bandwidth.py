"""Files over HTTP, at no more than so many bytes a second for all who fetch."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from aiohttp import web

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
