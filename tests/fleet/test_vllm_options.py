"""Do the options of a recipe reach the vLLM servers that a run starts?"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from oncurve.fleet.servers.local_vllm import VllmServers
from oncurve.fleet.settings import ServerKeys

OPTIONS = ("--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.85", "--max-model-len", "4096")
STAND_IN = """#!/usr/bin/env python3
import json, os, sys, time
if sys.argv[1] == "-c":
    print("0.32.0")
    sys.exit()
place = "{folder}/" + sys.argv[sys.argv.index("--port") + 1]
with open(place + ".part", "w") as file:
    json.dump(sys.argv[1:], file)
os.rename(place + ".part", place + ".json")
time.sleep(60)
"""


@pytest.mark.proves("F63")
def test_tensor_parallel_memory_share_and_context_are_handed_to_every_server(tmp_path: Path) -> None:
    """The servers are a script that writes down what it was given."""
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(folder=tmp_path))
    python.chmod(0o755)
    logs = tmp_path / "logs"
    servers = VllmServers(
        "model",
        ServerKeys.model_construct(vllm_servers=2, vllm_python=str(python), vllm_options=OPTIONS, sleep=True),
        dtype="bfloat16",
        on_cpu=False,
        logs=logs,
    )
    try:
        files = [tmp_path / f"{port}.json" for port in servers.ports]
        deadline = time.monotonic() + 60
        while not all(file.is_file() for file in files) and time.monotonic() < deadline:
            time.sleep(0.02)
        given = [json.loads(file.read_text()) for file in files]
    finally:
        servers.close()
    assert all(words[-6:] == list(OPTIONS) for words in given)
    assert all("--enable-sleep-mode" in words for words in given)
    assert all(words[words.index("--dtype") + 1] == "bfloat16" for words in given)
