"""Weights from server to server, so that the trainer's uplink carries each byte once."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from oncurve.fleet.weights.mirror import Mirror

BEGIN_SECONDS, WAIT_SECONDS = 3.0, 30.0
"""How long a server that does not have a file waits until it is told to fetch it, and then until it has it. Who asked
is told to ask again after that, before it takes this server for lost."""
LOOK_SECONDS = 0.05


async def give_to_other(mirror: Mirror, label: str, name: str) -> web.StreamResponse:
    """A file of the copy, or one that is being fetched for it, when it is there.

    Raises ValueError for a name that leads elsewhere.
    """
    begin = time.monotonic()
    while (path := mirror.find(label, name)) is None:
        waited = time.monotonic() - begin
        if waited > WAIT_SECONDS:
            return web.json_response({"error": "it is being fetched"}, status=503)
        if waited > BEGIN_SECONDS and not mirror.is_fetching:
            return web.json_response({"error": "no such version or file"}, status=404)
        await asyncio.sleep(LOOK_SECONDS)
    return web.FileResponse(path)
