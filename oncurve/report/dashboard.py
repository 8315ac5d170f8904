"""The web application of `oncurve dashboard`: a report with a stream of what is new in the run's folder."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from oncurve import __version__
from oncurve.errors import ConfigError, DataError
from oncurve.report.access import Gate
from oncurve.report.blocks import as_json, read_step
from oncurve.report.comparing import compare_runs, comparison_page
from oncurve.report.curves import glossary
from oncurve.report.examples import example_groups
from oncurve.report.follow import Row, fingerprint, read_news, step_list
from oncurve.report.page import render
from oncurve.report.viewer import Viewer
from oncurve.report.write import page_constants

POLL_SECONDS = 1.0
"""How often a run folder is looked at while somebody watches, and not at all otherwise."""
ALIVE_SECONDS = 5.0
"""A watcher is told so often that the server is there."""
LIST_SECONDS = 3.0
"""How often the list of runs asks for itself again."""
MAX_COMPARED = 12
"""Runs side by side, at most."""


def make_app(viewer: Viewer, *, token: str | None = None, hosts: Sequence[str] = ()) -> Any:
    """The dashboard as an ASGI application; ``token`` None serves whoever asks for one of the ``hosts``."""

    async def home(request: Request) -> Response:
        runs = await run_in_threadpool(viewer.runs)
        if len(runs) == 1 and len(viewer.paths) == 1 and next(iter(runs.values())) == viewer.paths[0]:
            return RedirectResponse(f"/run/{quote(next(iter(runs)), safe='')}")
        boot = {"kind": "runs", "every_seconds": LIST_SECONDS, "version": __version__}
        return HTMLResponse(render("Runs · oncurve", boot, live=True))

    async def listing(request: Request) -> Response:
        return _json({"runs": await run_in_threadpool(viewer.listed)})

    async def side_by_side(request: Request) -> Response:
        named = list(dict.fromkeys(request.query_params.getlist("run")))[:MAX_COMPARED]
        return HTMLResponse(await run_in_threadpool(_compared, viewer, named))

    async def page(request: Request) -> Response:
        name = request.path_params["name"]
        run = await run_in_threadpool(_find, viewer, name)
        boot = await run_in_threadpool(_boot, viewer, run, name)
        return HTMLResponse(render(f"{name} · oncurve", boot, live=True))

    async def events(request: Request) -> Response:
        run = await run_in_threadpool(_find, viewer, request.path_params["name"])
        return StreamingResponse(stream(viewer, run), media_type="text/event-stream")

    async def groups(request: Request) -> Response:
        run = await run_in_threadpool(_find, viewer, request.path_params["name"])
        return _json(await run_in_threadpool(_groups, run, request.path_params["step"]))

    routes = [
        Route("/", home),
        Route("/runs", listing),
        Route("/compare", side_by_side),
        Route("/run/{name}", page),
        Route("/run/{name}/events", events),
        Route("/run/{name}/groups/{step}", groups),
    ]
    app = Starlette(routes=routes, exception_handlers={DataError: _broken, ConfigError: _broken})
    return Gate(app, token=token, hosts=hosts)


async def stream(viewer: Viewer, run: Path) -> AsyncIterator[str]:
    """What is new in a run, as server-sent events, until the watcher is gone or the server ends.

    ``reset`` brings all rows of metrics, ``rows`` those that came since; ``overview`` and ``steps`` come when they have
    changed, ``problem`` when a file cannot be read, ``alive`` now and then.
    """
    yield "retry: 1000\n\n"
    said: dict[str, str] = {}
    sent: list[Row] = []
    seen: Any = None
    alive = time.monotonic()
    while not viewer.is_closing():
        told: list[str] = []
        try:
            if (now := fingerprint(run)[0]) != seen:
                is_reset, rows = await run_in_threadpool(read_news, run, sent)
                if rows or (is_reset and sent):
                    keys = {key for row in rows for key in row}
                    told.append(_event("reset" if is_reset else "rows", {"rows": rows, "glossary": glossary(keys)}))
                seen, sent = now, rows if is_reset else sent + rows
            current = {
                "steps": await run_in_threadpool(step_list, run),
                "overview": await run_in_threadpool(viewer.overview, run),
                "problem": {},
            }
        except DataError as error:
            current = {"problem": {"text": str(error)}}
        for kind, value in current.items():
            if said.get(kind) != (text := as_json(_lasting(value))) and (value or kind in said):
                said[kind] = text
                told.append(_event(kind, value))
        if told or time.monotonic() - alive >= ALIVE_SECONDS:
            alive = time.monotonic()
            yield "".join([*told, _event("alive", {})])
        waited = time.monotonic() + POLL_SECONDS
        while time.monotonic() < waited and not viewer.is_closing():
            await asyncio.sleep(0.2)


def _lasting(value: dict[str, Any]) -> dict[str, Any]:
    """What is compared to see whether there is news: everything but the clock."""
    if "state" not in value:
        return value
    return {**value, "state": {key: item for key, item in value["state"].items() if key != "age_seconds"}}


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {as_json(value)}\n\n"


def _find(viewer: Viewer, name: str) -> Path:
    """The folder of a run; a name that no run has never becomes a path."""
    run = viewer.runs().get(name)
    if run is None:
        raise DataError(f"there is no run named {name} here (any more).")
    return run


def _boot(viewer: Viewer, run: Path, name: str) -> dict[str, Any]:
    return {
        "kind": "run",
        "mode": "live",
        "base": f"/run/{quote(name, safe='')}",
        "home": None if viewer.paths == [run] else "/",
        "version": __version__,
        "overview": viewer.overview(run),
        **step_list(run),
        **page_constants([]),
    }


def _compared(viewer: Viewer, names: Sequence[str]) -> str:
    """The page of some runs side by side."""
    found = [_find(viewer, name) for name in names]
    return "".join(comparison_page(compare_runs(found, usd_per_hour=viewer.usd_per_hour), home="/"))


def _groups(run: Path, step: str) -> dict[str, Any]:
    if step == "examples":
        return {"groups": example_groups(run), "tokens": None}
    if not step.isascii() or not step.isdecimal() or len(step) > 9:
        raise DataError(f"{step!r} is no step.")
    found, tokens = read_step(run, int(step))
    return {"groups": found, "tokens": tokens if any(tokens) else None}


def _json(value: Any) -> Response:
    return Response(as_json(value), media_type="application/json")


def _broken(request: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error).encode("utf-8", "replace").decode(), status_code=404)


def be_quiet() -> None:
    """Leave the processor to the run, where both share a machine."""
    if hasattr(os, "nice"):
        os.nice(10)
