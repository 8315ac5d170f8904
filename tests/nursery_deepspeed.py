"""What a process under DeepSpeed imports, loads and asks of its machine before it trains."""

from __future__ import annotations

import functools

import cpuinfo
import nursery_oncurve  # noqa: F401

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # it starts a Python of its own each time
cpuinfo.get_cpu_info()

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401 - its optimizers import torch's compiler
from deepspeed.ops.op_builder import CPUAdamBuilder, ShareMemCommBuilder  # noqa: E402

for builder in (CPUAdamBuilder, ShareMemCommBuilder):
    builder().load()
