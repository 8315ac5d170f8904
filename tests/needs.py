"""Marks of tests that need what a machine may lack."""

from __future__ import annotations

import os

import pytest

from oncurve.fleet.servers.vllm_version import PYTHON_VARIABLE

NEEDS_VLLM = pytest.mark.skipif(
    not os.environ.get(PYTHON_VARIABLE),
    reason=f"{PYTHON_VARIABLE} names no python with vLLM: make engines, which make test-all uses",
)
