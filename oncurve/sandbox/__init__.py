"""Sandboxes for untrusted programs."""

from oncurve.sandbox.failures import SandboxDied, SandboxUnavailable
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.pool import SandboxPool
from oncurve.sandbox.tiers import IsolationReport, TierReport, choose_isolation, describe_isolation

__all__ = [
    "IsolationReport",
    "Limits",
    "SandboxDied",
    "SandboxPool",
    "SandboxUnavailable",
    "TierReport",
    "choose_isolation",
    "describe_isolation",
]
