"""Where are programs run that nobody trusts?"""

from oncurve.rewards.sandbox.failures import SandboxDied, SandboxUnavailable
from oncurve.rewards.sandbox.limits import Limits
from oncurve.rewards.sandbox.pool import SandboxPool
from oncurve.rewards.sandbox.tiers import IsolationReport, TierReport, choose_isolation, describe_isolation

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
