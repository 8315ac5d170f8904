"""A server that writes down every call, in a process of its own: vLLM's routes, without vLLM and without a model.

``python recorder.py PORT``. It joins groups over gloo where vLLM would over NCCL. ``POST /behave`` tells it to fail.
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web

from oncurve.fleet.servers import protocol

PATIENCE = timedelta(seconds=60)
STAMP = 7
NCCL = [2, 27, 5]
"""What this server says it has, unless it is told another."""


def make_group(address: str, port: int, rank: int, size: int) -> dist.ProcessGroupGloo:
    """A group over gloo that meets like vLLM's; blocks until all are there."""
    store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=PATIENCE)
    return dist.ProcessGroupGloo(store, rank, size, PATIENCE)


def broadcast(group: dist.ProcessGroupGloo, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


class Recorder:
    """What vLLM answers, and a list of what it was asked."""

    def __init__(self) -> None:
        self.label, self.calls, self.behave = "default", [], {}
        self.sums: dict[str, float] = {}
        self.group: dist.ProcessGroupGloo | None = None

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._record], client_max_size=2**26)
        app.router.add_get("/recorded", self._tell)
        app.router.add_post("/behave", self._obey)
        app.router.add_get(protocol.HEALTH, self._fine)
        app.router.add_get(protocol.WEIGHT_INFO, self._info)
        app.router.add_get(protocol.WORLD_SIZE, self._size)
        for route in (protocol.PAUSE, protocol.RESUME, protocol.START, protocol.SLEEP, protocol.WAKE):
            app.router.add_post(route, self._fine)
        app.router.add_post(protocol.INIT, self._init)
        app.router.add_post(protocol.UPDATE, self._update)
        app.router.add_post(protocol.FINISH, self._finish)
        app.router.add_post(protocol.GENERATE, self._generate)
        app.router.add_post(protocol.CALL_WORKERS, self._tell_model)
        return app

    @web.middleware
    async def _record(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method == "POST" and request.path != "/behave":
            body = await request.json() if request.can_read_body else None
            if request.path not in (protocol.GENERATE, protocol.CALL_WORKERS):
                self.calls.append([request.path_qs, body])
            match self.behave.get(request.path):
                case "die":
                    os._exit(1)
                case "hang":
                    await asyncio.sleep(3600)
                case "fail":
                    return web.json_response({"error": "as told"}, status=500)
        return await handler(request)

    async def _tell(self, request: web.Request) -> web.Response:
        told = {"calls": self.calls, "sums": self.sums, "label": self.label}
        self.calls = []
        return web.json_response(told)

    async def _obey(self, request: web.Request) -> web.Response:
        self.behave = await request.json()
        return web.json_response({})

    async def _fine(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _tell_model(self, request: web.Request) -> web.Response:
        return web.json_response({"results": [self.behave.get("model")]})

    async def _init(self, request: web.Request) -> web.Response:
        told = (await request.json())["init_info"]
        if told.get("way") == "same_nccl" and told["settings"]["version"] != self.behave.get("nccl", NCCL):
            return web.json_response({"error": "this server has another NCCL"}, status=500)
        if told.get("way") == "nccl":
            place = told["settings"]
            facts = (place["master_address"], place["master_port"], place["rank_offset"], place["world_size"])
            self.group = await asyncio.to_thread(make_group, *facts)
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        told = (await request.json())["update_info"]
        if "shapes" in told and "handles" not in told:
            await asyncio.to_thread(self._receive, told)
        return web.json_response({})

    def _receive(self, told: dict[str, Any]) -> None:
        assert self.group is not None
        self.sums = {}
        for name, dtype, shape in zip(told["names"], told["dtype_names"], told["shapes"], strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, weight)
            self.sums[name] = float(weight.double().sum())

    async def _finish(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["weight_version"]
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        count = body["sampling_params"]["n"]
        sampled = [protocol.GeneratedCompletion([STAMP] * 3, [-1.0] * 3, "stop", (self.label,)) for _ in range(count)]
        return web.json_response(protocol.response_body(body["request_id"], sampled))


if __name__ == "__main__":
    web.run_app(Recorder().app(), host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
