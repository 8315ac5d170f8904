"""HTTP host of weight files in the trainer, with a token, for servers that do not see its disk."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from oncurve.errors import ConfigError
from oncurve.rollouts.servers.bandwidth import Bandwidth
from oncurve.rollouts.servers.weight_manifest import Manifest


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
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            return web.json_response({"error": "the token is missing or wrong"}, status=401)
        for manifest in self._published():
            path = Path(manifest.folder) / request.match_info["name"]
            if manifest.label == request.match_info["label"] and path.name in manifest.given and path.is_file():
                return await self._limit.send(request, path) if self._limit else web.FileResponse(path)
        return web.json_response({"error": "no such version or file; a newer one may have replaced it"}, status=404)
