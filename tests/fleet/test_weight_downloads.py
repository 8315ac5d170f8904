"""Do files of weights arrive whole, however they travel, and which ways lead to a version?"""

from __future__ import annotations

import hashlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from served import Listener

from oncurve.fleet.weights import delta_copy
from oncurve.fleet.weights.delta_copy import DeltaCopy, find_routes
from oncurve.fleet.weights.delta_store import DeltaStore
from oncurve.fleet.weights.file_download import PART, download
from oncurve.fleet.weights.host import Bandwidth
from oncurve.fleet.weights.weight_manifest import Link, WeightFile
from oncurve.fleet.weights.weight_stream import Shipment


def test_a_download_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    data = bytes(range(256)) * 400
    (tmp_path / "file").write_bytes(data)
    listener, asked = Listener(), list[str | None]()

    async def give(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers.get("Range"))
        begin = int((asked[-1] or "bytes=0-")[6:-1])
        answer = web.StreamResponse(status=206 if begin else 200)
        answer.content_length = len(data) - begin
        await answer.prepare(request)
        await answer.write(data[begin : begin + 40_000])
        if begin + 40_000 < len(data):
            assert request.transport is not None
            request.transport.close()
        return answer

    app = web.Application()
    app.router.add_get("/file", give)
    try:
        place = tmp_path / "here"
        url = f"{listener.listen(app)}/file"
        facts = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        download(url, None, place, facts)
        assert place.read_bytes() == data
        assert asked[0] is None
        assert asked[-1] not in (None, "bytes=0-")
        place.with_name(place.name + PART).write_bytes(data[:90_000])  # of a process that was killed
        asked.clear()
        download(url, None, place, facts)
        assert asked == ["bytes=90000-"]
        place.with_name(place.name + PART).write_bytes(b"?" + data[1:90_000])
        with pytest.raises(ValueError, match="SHA-256 differs"):
            download(url, None, place, facts)
        download(url, None, place, facts)
        assert place.read_bytes() == data, "what was wrong is not kept"
    finally:
        listener.close()


def test_a_limited_link_gives_files_and_ranges_of_them(tmp_path: Path) -> None:
    data = bytes(range(256)) * 200
    (tmp_path / "file").write_bytes(data)
    listener, limit = Listener(), Bandwidth(1e4)

    async def give(request: web.Request) -> web.StreamResponse:
        return await limit.send(request, tmp_path / "file")

    app = web.Application()
    app.router.add_get("/file", give)
    facts = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    try:
        url = f"{listener.listen(app)}/file"
        for begin in (0, 1, 20_000, len(data) - 1, len(data)):
            place = tmp_path / f"from{begin}"
            place.with_name(place.name + PART).write_bytes(data[:begin])
            download(url, None, place, facts)
            assert place.read_bytes() == data
    finally:
        listener.close()


def paths_of(copy: DeltaCopy, message: dict[str, Any]) -> list[Path]:
    with copy.updated(message) as paths:
        return paths


def test_ways_to_a_version_are_the_chain_from_what_is_here_or_whole_files() -> None:
    def file(size: int) -> tuple[WeightFile, ...]:
        return (WeightFile("f", size, ""),)

    a = Link("a", None, (), file(100))
    b, c, d = (Link(name, base, file(10), ()) for name, base in (("b", "a"), ("c", "b"), ("d", "c")))
    chain = [a, b, c, d]

    def ways(have: str | None, links: list[Link]) -> list[tuple[str | None, list[str], int]]:
        return [
            (way.whole.label if way.whole else None, [link.label for link in way.links], way.num_bytes)
            for way in find_routes(have, links)
        ]

    whole = ("a", ["b", "c", "d"], 130)
    assert ways("c", chain) == [(None, ["d"], 10), whole]
    assert ways("a", chain) == [(None, ["b", "c", "d"], 30), whole]
    assert ways("d", chain) == [(None, [], 0), whole]
    assert ways("elsewhere", chain) == ways(None, chain) == [whole]
    assert ways("a", [b, c]) == [(None, ["b", "c"], 20)], "a version before the chain"
    big = Link("b", "a", file(99), file(100))
    assert ways("a", [a, big, c]) == [(None, ["b", "c"], 109), ("b", ["c"], 110), ("a", ["b", "c"], 209)]
    assert ways(None, [b, c]) == [], "nothing to begin with"
    assert ways("a", [a, Link("x", "lost", file(1), ())]) == [], "the chain is broken"


def test_the_workers_of_a_server_fetch_each_file_once_and_have_one_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.delenv(delta_copy.COPY_VARIABLE, raising=False)
    (tmp_path / "temporary").mkdir()
    store = DeltaStore(tmp_path / "trainer", run="run")
    listener, asked = Listener(), list[str]()

    async def give(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.FileResponse(store.root / request.match_info["label"] / request.match_info["name"])

    app = web.Application()
    app.router.add_get("/{label}/{name}", give)
    workers = [DeltaCopy(group="1764000000") for _ in range(2)]
    assert DeltaCopy(group="1764000001").root != workers[0].root == workers[1].root
    weight = torch.randn(40, 40)
    try:
        address = listener.listen(app)
        for version in range(3):
            weight[version] += 1
            store.publish_shipment(Shipment("", version, {"weight": weight}, torch.bfloat16))
            message = store.published[-1].message(address=address, token=None)
            with ThreadPoolExecutor(len(workers)) as threads:
                found = list(threads.map(lambda worker, told=message: paths_of(worker, told), workers))
            assert found[0] == found[1]
            assert torch.equal(load_file(found[0][0])["weight"], weight.bfloat16())
    finally:
        listener.close()
        store.close()
    assert len(asked) == len(set(asked)) == 3, "one whole file and two differences"


def test_a_common_copy_is_not_put_into_a_folder_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(delta_copy.COPY_VARIABLE, raising=False)
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"{delta_copy.PREFIX}{os.getuid()}-x").symlink_to(tmp_path / "theirs")
    with pytest.raises(ValueError, match="belongs to another user; set ONCURVE_WEIGHTS_COPY"):
        DeltaCopy(group="x")


def test_a_copy_takes_no_names_that_lead_elsewhere(tmp_path: Path) -> None:
    copy = DeltaCopy(tmp_path / "copy")
    for label in ("..", "../x", ".partial", "fetched", ""):
        link = {"label": label, "base": None, "deltas": [], "whole": []}
        with pytest.raises(ValueError, match="is no name of a version"):
            paths_of(copy, {"label": label, "files": [], "names": [], "folder": str(tmp_path), "chain": [link]})
