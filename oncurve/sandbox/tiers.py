"""Levels of isolation that this machine offers, and the choice among them."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from dataclasses import dataclass

from oncurve.sandbox import probe
from oncurve.sandbox.failures import SandboxUnavailable
from oncurve.sandbox.inside import landlock
from oncurve.sandbox.inside.syscalls import MACHINES
from oncurve.sandbox.startup import TierName

STRENGTH: tuple[TierName, ...] = ("bubblewrap", "landlock")
"""From the strongest to the weakest."""

_PROTECTION: dict[TierName, str] = {
    "bubblewrap": "own namespaces, no network, read-only root with little in it, private /tmp, filtered system calls",
    "landlock": "no file but the libraries can be opened, none written, filtered system calls; the names of files and "
    "the number of processes stay visible, and there is no /tmp",
}
_INSTALL = (
    "Install bubblewrap 0.7 or newer (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap; "
    "Arch: pacman -S bubblewrap; without root: conda install -c conda-forge bubblewrap)"
)
_NAMESPACES = (
    "bubblewrap needs user namespaces. Ubuntu 23.10 and newer: give bwrap an AppArmor profile with `userns,`, or set "
    "kernel.apparmor_restrict_unprivileged_userns=0. Docker: its default seccomp profile refuses them; start the "
    "container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined, or accept landlock"
)
_LANDLOCK = "Landlock needs Linux 5.13 or newer with landlock in the list of active security modules (lsm=)"


@dataclass(frozen=True, slots=True)
class TierReport:
    """The abilities of one kind of isolation here."""

    name: TierName
    works: bool
    protection: str
    """The things that it keeps from a program, and those that it does not."""
    problem: str = ""
    """The reason why it does not work; "" if it does."""
    remedy: str = ""
    """Package to install or setting to change; "" if it works."""


@dataclass(frozen=True, slots=True)
class IsolationReport:
    """Every kind of isolation, the strongest first."""

    tiers: tuple[TierReport, ...]

    @property
    def strongest(self) -> TierName | None:
        """The strongest one that works; None if none does."""
        return next((tier.name for tier in self.tiers if tier.works), None)

    @property
    def text(self) -> str:
        """The report for a person, a line or two per kind."""
        lines = [f"strongest isolation for programs: {self.strongest or 'none'}"]
        for tier in self.tiers:
            lines.append(f"  {tier.name}: {'works' if tier.works else 'does not work: ' + tier.problem}")
            lines.append(f"    {tier.protection if tier.works else tier.remedy}")
        return "\n".join(lines)


def describe_isolation() -> IsolationReport:
    """Tries every kind of isolation with a program that attempts to get out; takes about a second, once."""
    return IsolationReport(tuple(_report(name) for name in STRENGTH))


def choose_isolation(allow: TierName = "bubblewrap") -> TierName:
    """The strongest isolation that works, if it is at least as strong as the allowed one.

    Raises SandboxUnavailable with what to install.
    """
    accepted = STRENGTH[: STRENGTH.index(allow) + 1]
    reports = [_report(name) for name in accepted]
    for report in reports:
        if report.works:
            return report.name
    reasons = "; ".join(f"{report.name}: {report.problem}. {report.remedy}" for report in reports)
    message = f"programs cannot be isolated on this machine, so none is run. {reasons}."
    if allow == "bubblewrap" and _report("landlock").works:
        message += (
            f' The weaker isolation "landlock" works here ({_PROTECTION["landlock"]}): isolation: landlock in the '
            f'reward, or allow="landlock", accepts it.'
        )
    raise SandboxUnavailable(message)


@functools.cache
def _report(name: TierName) -> TierReport:
    problem, remedy = _missing(name) or ("", "")
    if not problem:
        problem = probe.problem_with(name) or ""
        remedy = (_NAMESPACES if name == "bubblewrap" else _LANDLOCK) if problem else ""
    return TierReport(name=name, works=not problem, protection=_PROTECTION[name], problem=problem, remedy=remedy)


def _missing(name: TierName) -> tuple[str, str] | None:
    """A requirement that the isolation lacks, and what to do; None if nothing is known to be missing."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, this is {sys.platform}", "Run the training in a Linux machine or virtual machine"
    machine = os.uname().machine
    if machine not in MACHINES:
        known = " and ".join(MACHINES)
        return f"there is no table of system calls for {machine}", f"Use a machine with {known}"
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        return "the command bwrap is not on the PATH", _INSTALL
    if name == "landlock" and landlock.version() < 1:
        return "this kernel has no Landlock, or it is switched off", _LANDLOCK
    return None
