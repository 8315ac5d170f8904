"""Are weights in files what the policy has, in the servers' type, whole, and where they are quickly read?"""

from __future__ import annotations

import ast
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from served import FAST, LocalServer, Puppet, make_server_sampler, move

from oncurve.core.errors import SamplerError
from oncurve.core.records import SamplingParams
from oncurve.fleet import inside_vllm
from oncurve.fleet.servers import protocol
from oncurve.fleet.weights import shards, store
from oncurve.fleet.weights.fetch import Fetcher
from oncurve.fleet.weights.shards import write_weights
from oncurve.fleet.weights.store import WeightStore, free_bytes, is_memory
from oncurve.fleet.weights.weight_manifest import Manifest, describe_files
from oncurve.fleet.weights.weight_stream import Shipment, make_shipment
from oncurve.policy.trained_policy import TrainedPolicy

PARAMS = SamplingParams(max_completion_tokens=8)


@pytest.fixture
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    return make_policy()


def read(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        loaded = load_file(path)
        assert not found.keys() & loaded.keys(), "each weight is in one file"
        found |= loaded
    return found


@pytest.mark.parametrize("file_bytes", [2**25, 2**12, 1])
@pytest.mark.parametrize("matrix_type", [None, torch.bfloat16])
def test_files_hold_the_weights_in_the_type_that_was_asked_for(
    policy: TrainedPolicy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file_bytes: int,
    matrix_type: torch.dtype | None,
) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", file_bytes)
    shipment = make_shipment(policy, "run", 1, matrix_type=matrix_type)
    files, names = write_weights(shipment, tmp_path)
    expected, found = dict(shipment), read(tmp_path)
    assert set(found) == set(expected) == set(names)
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype
        assert torch.equal(found[name], weight)
    if matrix_type is not None:
        assert {weight.dtype for weight in found.values() if weight.dim() == 2} == {torch.bfloat16}
        assert {weight.dtype for weight in found.values() if weight.dim() == 1} == {torch.float32}
    assert (len(files) == 1) == (file_bytes == 2**25)
    for file in files:
        data = (tmp_path / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size, file.sha256)
    again, same_names = describe_files(tmp_path)
    assert sorted(again, key=str) == sorted(files, key=str)
    assert same_names == names


def test_every_type_of_weight_and_every_shape_comes_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "odd": torch.randn(3, 5, generator=generator).bfloat16(),
        "vector": torch.randn(7, generator=generator),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(4, 6, generator=generator).T,
        "whole": torch.arange(5),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(9, generator=generator).half(),
    }
    write_weights(Shipment("run:1:a", 1, weights), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert set(opened.keys()) == set(weights)
        for name, weight in weights.items():
            assert torch.equal(opened.get_tensor(name), weight)
    with pytest.raises(ValueError, match=r"strange is of the type torch\.complex64"):
        write_weights(Shipment("run:1:a", 1, {"strange": torch.zeros(2, dtype=torch.complex64)}), tmp_path)


def test_files_are_written_and_read_by_several_threads(
    policy: TrainedPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", 2**12)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    meeting, writers = threading.Barrier(2, timeout=20), set[str]()
    usual = shards.in_host_memory

    def slowly(weight: torch.Tensor) -> memoryview:
        if threading.current_thread().name not in writers and len(writers) < 2:
            writers.add(threading.current_thread().name)
            meeting.wait()  # passes only if another thread writes at the same time
        return usual(weight)

    monkeypatch.setattr(shards, "in_host_memory", slowly)
    write_weights(make_shipment(policy, "run", 1, matrix_type=None), tmp_path)
    assert len(writers) == 2


def message_of(policy: TrainedPolicy, folder: Path) -> dict[str, object]:
    shipment = make_shipment(policy, "run", 1, matrix_type=None)
    files, names = write_weights(shipment, folder)
    return Manifest(shipment.label, 1, files, names, str(folder)).message(address=None, token=None)


def test_one_damaged_file_of_many_is_found(
    policy: TrainedPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "FILE_BYTES", 2**12)
    message = message_of(policy, tmp_path)
    with Fetcher().fetch(message) as paths:
        assert len(paths) > 3
    data = bytearray(paths[2].read_bytes())
    data[-1] ^= 1
    paths[2].write_bytes(data)
    with pytest.raises(ValueError, match=f"{paths[2].name}: its content changed"), Fetcher().fetch(message):
        pass


def test_a_manifest_without_checksums_is_refused_with_a_word(policy: TrainedPolicy, tmp_path: Path) -> None:
    message = message_of(policy, tmp_path)
    for file in message["files"]:  # type: ignore[attr-defined]
        del file["sha256"]
    with pytest.raises(ValueError, match="the trainer is of another oncurve"), Fetcher().fetch(message):
        pass


def test_a_manifest_of_one_large_file_as_it_was_before_is_read(policy: TrainedPolicy, tmp_path: Path) -> None:
    local = LocalServer(policy)
    try:
        policy.model.save_pretrained(tmp_path)
        files, names = describe_files(tmp_path)
        local.server.update.stage(Manifest("old:1:a", 1, files, names, str(tmp_path)).message(address=None, token=None))
        assert local.server.update.is_staged
    finally:
        local.close()


def test_versions_go_to_memory_if_two_of_them_fit_and_are_flushed_on_a_disk_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    said: list[str] = []
    monkeypatch.setattr(store, "flush", flushed.append)
    monkeypatch.setattr(store, "is_memory", lambda folder: folder.is_relative_to(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()

    def write(folder: Path) -> store.Contents:
        (folder / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        return describe_files(folder)

    for free, is_in_memory in ((4000, True), (3999, False)):
        monkeypatch.setattr(store, "free_bytes", lambda folder, free=free: free)
        flushed.clear()
        said.clear()
        made = WeightStore(tmp_path / "disk", run=f"run{free}", memory=tmp_path / "memory", notify=said.append)
        folders = {Path(made.publish(n, write, size=1000, label=f"run:{n}:a").folder).parent.parent for n in range(3)}
        assert folders == {tmp_path / ("memory" if is_in_memory else "disk")}
        assert bool(flushed) != is_in_memory
        assert len(said) == (not is_in_memory)
        assert len(list(made.root.iterdir())) == 2
        assert made.root.stat().st_mode & 0o077 == 0 or not is_in_memory, "nobody else reads weights in shared memory"
        made.close()
        assert not made.root.exists()


def test_a_version_is_written_when_only_one_other_is_left(tmp_path: Path) -> None:
    made = WeightStore(tmp_path, run="run")
    seen: list[int] = []

    def write(folder: Path) -> store.Contents:
        seen.append(len([path for path in made.root.iterdir() if not path.name.startswith(".")]))
        (folder / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        return describe_files(folder)

    for version in range(4):
        made.publish(version, write, label=f"run:{version}:a")
    assert seen == [0, 1, 1, 1], "memory holds two versions at most"
    made.publish(3, write, label="run:3:a")
    assert len(seen) == 4, "what was written is not written again"
    made.close()


def test_what_is_memory_and_how_much_is_left_is_read_from_the_system(tmp_path: Path) -> None:
    mounts, facts, container = tmp_path / "mounts", tmp_path / "meminfo", tmp_path / "cgroup"
    place = tmp_path / "with space"
    place.mkdir()
    point = str(place.resolve()).replace(" ", "\\040")
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ntmpfs {point} tmpfs rw 0 0\n")
    assert is_memory(place / "below", mounts=mounts)
    assert not is_memory(tmp_path, mounts=mounts)
    assert not is_memory(tmp_path, mounts=tmp_path / "nowhere")
    facts.write_text("MemTotal: 999999999 kB\nMemAvailable: 2 kB\n")
    assert free_bytes(tmp_path, facts=facts, container=container) == 2048
    container.mkdir()
    (container / "memory.max").write_text("5000\n")
    (container / "memory.current").write_text("4000\n")
    assert free_bytes(tmp_path, facts=facts, container=container) == 1000
    (container / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path, facts=facts, container=container) == 2048


def test_vllm_gets_matrices_in_its_type_and_our_own_servers_all_digits(policy: TrainedPolicy, tmp_path: Path) -> None:
    puppets = [Puppet(), Puppet()]

    async def as_vllm(request: object) -> object:
        from aiohttp import web

        return web.json_response({"weight_version": puppets[0].label})

    puppets[0].behave[protocol.WEIGHT_INFO] = as_vllm
    try:
        for puppet, expected in zip(puppets, (torch.bfloat16, torch.float32), strict=True):
            sampler = make_server_sampler(
                PARAMS,
                urls=[puppet.url],
                weights_folder=tmp_path,
                deadlines=FAST,
                matrix_type=torch.bfloat16,
            )
            for version in range(2):
                move(policy)
                sampler.load_weights(policy, version)
            [folder] = tmp_path.glob("weights-*/*:1:*")
            matrices = {weight.dtype for weight in read(folder).values() if weight.dim() == 2}
            assert matrices == {expected}
            assert puppet.label.endswith(make_shipment(policy, "", 1, matrix_type=None).label.rpartition(":")[2])
            sampler.close()
    finally:
        for puppet in puppets:
            puppet.listener.close()


def test_weights_in_memory_go_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    """The leader of a server's group removes what the trainer cannot any more."""
    code = f"""
import os, sys, time
from pathlib import Path
from oncurve.fleet.servers import children
children.MEMORY = Path({str(tmp_path)!r})
(children.MEMORY / (children.own_prefix() + "run")).mkdir()
(children.MEMORY / "weights-{socket.gethostname()}-1-other").mkdir()
made = children.ChildServers(
    1, name="sleeper", logs=Path({str(tmp_path / "logs")!r}),
    command=lambda port: [sys.executable, "-c", "import time; time.sleep(600)"],
    environment=children.own_environment(1),
)
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    end = time.monotonic() + 20
    while (left := {path.name for path in tmp_path.glob("weights-*")}) != {f"weights-{socket.gethostname()}-1-other"}:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_a_disk_that_is_full_says_where_and_what_to_set(tmp_path: Path) -> None:
    made = WeightStore(tmp_path, run="run")

    def fail(folder: Path) -> store.Contents:
        raise OSError(28, "No space left on device")

    with pytest.raises(SamplerError, match=r"No space left.*rollouts\.weights_folder=FOLDER"):
        made.publish(0, fail, label="run:0:a")
    assert list(made.root.iterdir()) == []


def test_vllm_knows_every_word_by_which_a_version_is_announced() -> None:
    """Its part of this package is not imported here, and refuses a word that it does not know."""
    source = Path(inside_vllm.__file__).with_name("plugin.py").read_text(encoding="utf-8")
    [update] = [one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == "FileUpdate"]
    known = {
        one.target.id for one in update.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    manifest = Manifest("run:1:a", 1, (), (), "folder", {"scales": {}}, 0)
    announced = {*manifest.message(address=None, token=None), *manifest.message(address="http://here", token="secret")}
    assert announced <= known | {"chain"}
    assert "chain" in known


def test_the_part_inside_vllm_imports_names_that_there_are() -> None:
    """It is not imported here, so that a name that has moved would be missed only where vLLM starts."""
    folder = Path(inside_vllm.__file__).parent
    package = folder.parents[2]
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("oncurve."):
                source = package / f"{str(node.module).replace('.', '/')}.py"
                body = ast.parse(source.read_text(encoding="utf-8")).body
                known = {one.name for one in body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
                targets = [each for one in body if isinstance(one, ast.Assign) for each in one.targets]
                known |= {name.id for each in targets for name in ast.walk(each) if isinstance(name, ast.Name)}
                assert {alias.name for alias in node.names} <= known, f"{path.name}: {node.module}"
