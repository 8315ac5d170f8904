"""Two plain torch processes and one buffer on a GPU: ``send`` fills it with weights, starts ``read`` and compares."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from oncurve.rollouts.servers.transfer.endpoints import IpcEnd
from oncurve.rollouts.servers.transfer.handles import from_plain
from oncurve.rollouts.servers.transfer.weight_stream import Shipment


def send() -> None:
    """Ship some weights chunk by chunk; the other process says the sum of each, which must be ours."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = {f"layer.{n}": torch.randn(2048, 2048, generator=generator, device="cuda") for n in range(4)}
    reader = subprocess.Popen(
        [sys.executable, __file__, "read"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    sums: dict[str, float] = {}
    for header in IpcEnd().chunks(Shipment("run:0:0", 0, weights)):
        reader.stdin.write(json.dumps(header) + "\n")
        reader.stdin.flush()
        answer = reader.stdout.readline()
        if not answer:
            sys.exit(f"the other process ended with {reader.wait()}")
        sums |= json.loads(answer)
    reader.stdin.close()
    reader.wait(20)
    expected = {name: float(weight.double().sum()) for name, weight in weights.items()}
    if sums != expected:
        sys.exit(f"the other process read {sums}, not {expected}")
    print(f"{len(sums)} weights read through plain handles")


def read() -> None:
    """Open each buffer that is named and print the sum of every weight in it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    for line in sys.stdin:
        header: dict[str, Any] = json.loads(line)
        [handle] = header["handles"].values()
        buffer = rebuild_cuda_tensor(*from_plain(handle))
        sums, place = {}, 0
        for name, shape, size in zip(header["names"], header["shapes"], header["tensor_sizes"], strict=True):
            weight = buffer[place : place + size].view(torch.float32).view(shape)
            sums[name], place = float(weight.double().sum()), place + size
        del buffer
        torch.cuda.synchronize()
        print(json.dumps(sums), flush=True)


if __name__ == "__main__":
    {"send": send, "read": read}[sys.argv[1]]()
