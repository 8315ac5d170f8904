"""New weights for a vLLM server on the trainer's own GPU: it is told where they are in that GPU's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from oncurve.errors import SamplerError
from oncurve.rollouts.servers.client import ServerFailed, ServerLost
from oncurve.rollouts.servers.rollout_server import RolloutServer
from oncurve.rollouts.servers.transfer.endpoints import SharedEnd
from oncurve.rollouts.servers.transfer.nccl_group import HERE
from oncurve.rollouts.servers.transfer.side_thread import aside
from oncurve.rollouts.servers.transfer.weight_stream import Shipment

MAX_FAILURES = 3


class DirectPush:
    """Weights go through a buffer of the GPU that the trainer and one server share."""

    way = "ipc"

    def __init__(
        self,
        end: SharedEnd,
        *,
        push_seconds: float = 300.0,
    ) -> None:
        self._end, self._seconds = end, push_seconds
        self._failures = 0
        self.notify: Callable[[str], None] = lambda text: None
        """Where a person is told what became of it."""

    def candidates(self, servers: Sequence[RolloutServer]) -> list[RolloutServer]:
        """The one server, once it has the weights before; none while there are several."""
        fit = [one for one in servers if one.state in ("ready", "asleep") and not one.takes_keys]
        is_fit = len(servers) == 1 and all(one.declined is None and urlsplit(one.url).hostname in HERE for one in fit)
        return fit if is_fit and self._failures < MAX_FAILURES else []

    async def hand_over(self, members: Sequence[RolloutServer], shipment: Shipment) -> None:
        """Give it a version. If it does not get it, it fetches it as a file or is started again."""
        [server] = members
        try:
            await server.halt(f"takes {shipment.label}")
            await server.client.choose_way(self.way, {"packed": True}, within=self._seconds)
            await server.client.begin(within=self._seconds)
        except (ServerFailed, SamplerError) as error:
            await server.release(f"cannot read this GPU: {error}")
            server.declined = str(error)
            self.notify(f"rollout server {server.url} gets weights as files: {error}")
            return
        except ServerLost as error:
            server.lose(str(error))
            return
        try:
            await self._send(server, shipment)
            await server.adopt(shipment.label)
        except ServerLost as error:
            server.lose(str(error))
        except (ServerFailed, RuntimeError, ValueError, TimeoutError) as error:
            server.poison(str(error))
        self._failures = 0 if server.state == "syncing" else self._failures + 1
        if self._failures == MAX_FAILURES:
            self.notify(f"weights did not arrive over ipc {MAX_FAILURES} times in a row; from now on they are fetched")

    async def _send(self, server: RolloutServer, shipment: Shipment) -> None:
        """Part after part: the buffer is filled again when the server has read it."""
        parts = self._end.chunks(shipment)
        while True:
            part = await asyncio.wait_for(aside(lambda: next(parts, None), name="fills-buffer"), self._seconds)
            if part is None:
                return
            await server.client.send_update(part, within=self._seconds)

    def close(self) -> None:
        """Nothing is kept between two versions."""
