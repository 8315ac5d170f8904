"""How long until servers behind a slow link sample from new weights: all of them sent, or what changed?

    python benchmarks/weight_link.py --mbit 10

The link is the trainer's own limit on what it sends, on this machine's loopback address, so that several servers share
it. Servers are real ``oncurve serve`` processes with a random model; between two versions every weight moves by the
learning rate in a random direction, as AdamW would move it. ``stood`` is the time in which a server took no request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, describe_machine
from models import SHAPES, build

from oncurve.policy.model_folder import load_model
from oncurve.policy.policy import TrainedPolicy
from oncurve.rollouts.base import SamplingParams
from oncurve.rollouts.servers.children import ChildServers, own_environment, serve_command
from oncurve.rollouts.servers.host import Bandwidth
from oncurve.rollouts.servers.server_sampler import ServerSampler
from oncurve.settings import Deadlines, DeltaSettings, OptimizerSettings

CASES: dict[str, tuple[int, bool, DeltaSettings | None]] = {
    "all, one server": (1, False, None),
    "all, two servers": (2, False, None),
    "what changed, one server": (1, True, DeltaSettings(mbit=1e5)),
    "what changed, two servers": (2, True, DeltaSettings(mbit=1e5)),
    "what changed, two servers, relay": (2, True, DeltaSettings(mbit=1e5, relay=True)),
}
"""Servers, whether differences are sent, and how. The limit is set when the first version has arrived."""


@torch.no_grad()
def move(policy: TrainedPolicy, rate: float) -> None:
    """A step in a random direction."""
    for parameter in policy.model.parameters():
        parameter.add_(rate * torch.randn_like(parameter).sign())


def wait_for_all(sampler: ServerSampler, policy: TrainedPolicy, version: int, count: int) -> None:
    """Until every server has the version."""
    sampler.load_weights(policy, version)
    while len(sampler.pool.ready) < count:
        time.sleep(0.01)


def measure(name: str, model: Path, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One case: the first version at full speed, then those that are timed."""
    count, is_delta, settings = CASES[name]
    loaded, tokenizer = load_model(str(model))
    policy = TrainedPolicy(loaded, tokenizer, optimizer=OptimizerSettings())
    command = serve_command(str(model), settings=["policy.device=cpu"])
    servers = ChildServers(
        count, name="oncurve", logs=folder / "logs", command=command, environment=own_environment(count)
    )
    sampler = ServerSampler(
        SamplingParams(max_completion_tokens=8),
        urls=[],
        local=servers,
        weights_folder=folder / "weights",
        weights_address="127.0.0.1:0",
        deltas=settings,
        deadlines=Deadlines(push_seconds=1200.0, gone_seconds=1200.0),
    )
    rows = []
    try:
        wait_for_all(sampler, policy, 0, count)
        assert sampler._host is not None
        sampler._host._limit = Bandwidth(asked.mbit)
        for version in range(1, 1 + (asked.versions if is_delta else 1)):
            move(policy, asked.rate)
            begin = time.perf_counter()
            wait_for_all(sampler, policy, version, count)
            manifest = sampler._manifest
            assert manifest is not None
            last = sampler._deltas.last if sampler._deltas is not None else None
            rows.append(
                {
                    "seconds": time.perf_counter() - begin,
                    "publish_seconds": last.seconds if last is not None else None,
                    "stood_seconds": [server.stood_seconds for server in sampler.pool.servers],
                    "bytes": last.bytes if last is not None else sum(file.size for file in manifest.files),
                    "changed_fraction": last.changed_fraction if last is not None else None,
                }
            )
    finally:
        sampler.close()
    return {
        "case": name,
        "seconds": statistics.median(row["seconds"] for row in rows),
        "stood_seconds": statistics.median(max(row["stood_seconds"]) for row in rows),
        "bytes": statistics.median(row["bytes"] for row in rows),
        "versions": rows,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SHAPES), default="M")
    parser.add_argument("--mbit", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--output", type=Path, default=RESULTS / "weight_link.json")
    asked = parser.parse_args()
    found: dict[str, Any] = {"mbit": asked.mbit, "rate": asked.rate, "size": asked.size, "cases": []}
    with tempfile.TemporaryDirectory() as place:
        model = build(Path(place) / "model", SHAPES[asked.size], mean_tokens=None, max_length=512)
        for number, name in enumerate(asked.cases):
            case = measure(name, model, asked, Path(place) / str(number))
            found["cases"].append(case)
            asked.output.write_text(json.dumps({"machine": describe_machine(), **found}, indent=1) + "\n")
            print(
                f"{name:34}{case['bytes'] / 1e6:8.2f} MB {case['seconds']:8.2f} s, stood {case['stood_seconds']:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
