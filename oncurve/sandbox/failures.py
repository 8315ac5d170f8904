"""Failures of a sandbox that are not the program's fault."""

from __future__ import annotations

from oncurve.core.errors import RewardError


class SandboxUnavailable(RewardError):
    """This machine offers no isolation that the user accepts; the message says what to install."""


class SandboxDied(RuntimeError):
    """A sandbox did not start, ended by itself or no longer answers; it has to be replaced."""
