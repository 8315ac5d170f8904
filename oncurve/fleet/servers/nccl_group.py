"""New weights for several vLLM servers together, in a group with the trainer that is made anew when one is lost.

A collective has fixed members and waits for each of them without a deadline. So there is one here for each step; who is
not there when the others begin is not a member, and gets the weights as files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import urlsplit

from oncurve.constants import LOOPBACK
from oncurve.core.errors import SamplerError
from oncurve.fleet.servers.children import free_ports
from oncurve.fleet.servers.client import ServerFailed, ServerLost
from oncurve.fleet.servers.protocol import SAME_NCCL
from oncurve.fleet.servers.rollout_server import RolloutServer
from oncurve.fleet.weights.endpoints import NcclEnd, packing
from oncurve.fleet.weights.side_thread import aside
from oncurve.fleet.weights.weight_stream import Shipment
from oncurve.wording import counted

MAX_FAILURES = 3
"""So many versions in a row that did not arrive end the attempts: the fault is not that of one server."""
_ERRORS = (ServerLost, ServerFailed, SamplerError)


class GroupPush:
    """Weights go from the trainer's GPU to those of all members at once.

    Waits, at most ``push_seconds`` for each step, for the members that it holds; unblocked by the first that fails.
    """

    transfer = "nccl"

    def __init__(
        self, end: Callable[[], NcclEnd] = NcclEnd, *, address: str | None = None, push_seconds: float = 300.0
    ) -> None:
        """``end`` makes the trainer's place in a group, a new one for each; ``address`` is where servers on other
        machines reach this one, without which only those of this machine are members."""
        self._make_end, self._address = end, address
        self._seconds = push_seconds
        self._end: NcclEnd | None = None
        self._members: list[tuple[str, int]] = []
        """Address and life of each."""
        self._failures = 0
        self.notify: Callable[[str], None] = lambda text: None
        """Takes the message about the outcome."""

    def candidates(self, servers: Sequence[RolloutServer]) -> list[RolloutServer]:
        """The servers that can be in the next group: they have the weights before, and are like the others."""
        if self._failures >= MAX_FAILURES:
            return []
        return [
            server
            for server in servers
            if server.state == "ready"
            and not server.takes_keys
            and server.declined is None
            and (self._address is not None or urlsplit(server.url).hostname in LOOPBACK)
        ]

    async def hand_over(self, members: Sequence[RolloutServer], shipment: Shipment) -> None:
        """Give them a version. Who does not get it is told so, and fetches it as a file or is started again."""
        try:
            has_arrived = await self._form(members) and await self._send(members, shipment)
        except BaseException:  # whoever is in the middle of something cannot be in step again
            self.close()
            raise
        self._failures = 0 if has_arrived else self._failures + bool(members)
        if self._failures == MAX_FAILURES:
            self.notify(
                f"weights did not arrive over {self.transfer} {MAX_FAILURES} times in a row; from now on they are "
                "fetched"
            )

    def close(self) -> None:
        """Let go of the group, without waiting for it."""
        end, self._end, self._members = self._end, None, []
        if end is not None:
            aside(end.leave, name="leaves-group")

    async def _form(self, members: Sequence[RolloutServer]) -> bool:
        """The group has these members; whether it could be made."""
        identities = [(server.url, server.life) for server in members]
        if self._end is not None and identities == self._members:
            return True
        self.close()
        sizes = await _for_all(members, lambda server: server.client.num_workers(within=self._seconds))
        if lost := _failed(sizes):
            await self._give_up(members, lost, "it could not be asked for its GPUs")
            return False
        end = self._make_end()
        if lost := await self._unlike(members, end.version()):
            await self._decline(members, lost)
            return False
        address, port = self._address or "127.0.0.1", free_ports(1)[0]
        settings = packing() | {"master_address": address, "master_port": port, "world_size": 1 + sum(sizes)}  # type: ignore[arg-type]
        offsets = [1 + sum(sizes[:index]) for index in range(len(members))]  # type: ignore[arg-type]
        joins = [
            asyncio.ensure_future(
                server.client.choose_transfer(self.transfer, settings | {"rank_offset": offset}, within=self._seconds)
            )
            for server, offset in zip(members, offsets, strict=True)
        ]
        own = aside(lambda: end.join(address, port, 1 + sum(sizes)), name="joins-group")  # type: ignore[arg-type]
        if await self._all_done([*joins, own]):
            self._end, self._members = end, identities
            self.notify(f"weights go over {self.transfer} to {counted(len(members), 'server')}")
            return True
        await self._dissolve(end, members, joins, own)
        return False

    async def _unlike(
        self, members: Sequence[RolloutServer], version: list[int | str] | None
    ) -> dict[int, BaseException]:
        """The members with another NCCL than the trainer's: those of different versions wait for each other in vain."""
        if version is None:
            return {}
        settings = {"version": version}
        return _failed(
            await _for_all(
                members, lambda server: server.client.choose_transfer(SAME_NCCL, settings, within=self._seconds)
            )
        )

    async def _decline(self, members: Sequence[RolloutServer], unlike: dict[int, BaseException]) -> None:
        """Send files from now on to a server that cannot be a member; the others meet at the next version."""
        for index, server in enumerate(members):
            error = unlike.get(index)
            if isinstance(error, ServerLost):
                server.lose(str(error))
            elif error is not None:
                server.declined = str(error)
                self.notify(f"rollout server {server.url} gets weights as files: {error}")

    async def _send(self, members: Sequence[RolloutServer], shipment: Shipment) -> bool:
        """All weights to all members; whether all of them have them."""
        assert self._end is not None
        end = self._end

        async def begin(server: RolloutServer) -> None:
            await server.pause(f"takes {shipment.label}")
            await server.client.begin(within=self._seconds)

        if lost := _failed(await _for_all(members, begin)):
            self.close()
            await self._give_up(members, lost, "another member of its group failed")
            return False
        header = shipment.header()
        takes = [asyncio.ensure_future(server.client.send_update(header, within=self._seconds)) for server in members]
        own = aside(lambda: end.send(shipment), name="sends-weights")
        if not await self._all_done([*takes, own]):
            self.close()
            await self._break(members, takes, own)
            return False
        done = await _for_all(members, lambda server: server.adopt(shipment.label))
        for server, error in zip(members, done, strict=True):
            if isinstance(error, BaseException):
                server.lose(str(error))
        return all(server.state == "syncing" for server in members)

    async def _all_done(self, parts: Sequence[asyncio.Future[Any]]) -> bool:
        """Wait for all, or for the first that fails, or for the deadline."""
        done, waiting = await asyncio.wait(parts, timeout=self._seconds, return_when=asyncio.FIRST_EXCEPTION)
        return not waiting and all(part.exception() is None for part in done)

    async def _dissolve(
        self,
        end: NcclEnd,
        members: Sequence[RolloutServer],
        joins: Sequence[asyncio.Future[Any]],
        own: asyncio.Future[Any],
    ) -> None:
        """A group that did not come about. Who answered goes on with files; who waits for the others cannot be told."""
        aside(end.leave, name="leaves-group")
        await self._settle(joins, own)
        why = _why(own)
        for server, join in zip(members, joins, strict=True):
            match _outcome(join):
                case ServerFailed() | SamplerError() as error:
                    self.notify(f"rollout server {server.url} is left out of the group: {error}")
                    await server.release(f"could not join the group: {error}")
                    server.declined = str(error)
                case ServerLost() as error if type(error) is ServerLost:
                    server.lose(str(error))
                case None:
                    await server.release(f"the group did not come about{why}")
                case _:
                    server.mark_corrupt(f"It waits for a group that did not come about{why}")

    async def _break(
        self, members: Sequence[RolloutServer], takes: Sequence[asyncio.Future[Any]], own: asyncio.Future[Any]
    ) -> None:
        """Weights that did not arrive everywhere: nobody knows how many of them did."""
        await self._settle(takes, own)
        why = _why(own)
        for server, take in zip(members, takes, strict=True):
            match _outcome(take):
                case ServerLost() as error if type(error) is ServerLost:
                    server.lose(str(error))
                case error:
                    server.mark_corrupt(
                        f"The weights did not arrive everywhere{why}{'' if error is None else f': {error}'}"
                    )

    async def _settle(self, parts: Sequence[asyncio.Future[Any]], own: asyncio.Future[Any]) -> None:
        """Give those a moment that fail as well, and end the waiting for the others."""
        await asyncio.wait([*parts, own], timeout=1.0)
        for part in parts:
            part.cancel()
        await asyncio.wait(parts)
        if not own.done():
            own.cancel()

    async def _give_up(self, members: Sequence[RolloutServer], lost: dict[int, BaseException], why: str) -> None:
        """Nothing was sent: who lives goes on with files."""
        for index, server in enumerate(members):
            error = lost.get(index)
            if isinstance(error, ServerLost):
                server.lose(str(error))
            else:
                await server.release(why if error is None else str(error))


async def _for_all(
    members: Sequence[RolloutServer], work: Callable[[RolloutServer], Coroutine[Any, Any, Any]]
) -> list[Any | BaseException]:
    """Do something with all at once; what came of each. Raises what is not a server's failure."""
    results = await asyncio.gather(*(work(server) for server in members), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, _ERRORS):
            raise result
    return results


def _failed(results: Sequence[Any]) -> dict[int, BaseException]:
    return {index: result for index, result in enumerate(results) if isinstance(result, BaseException)}


def _outcome(part: asyncio.Future[Any]) -> BaseException | None:
    """The outcome of a request; CancelledError where it had no answer."""
    return asyncio.CancelledError() if part.cancelled() else part.exception()


def _why(own: asyncio.Future[Any]) -> str:
    """The error on the trainer's side, if it is known."""
    error = _outcome(own)
    return "" if error is None or isinstance(error, asyncio.CancelledError) else f" (here: {error})"
