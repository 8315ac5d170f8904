"""The vLLM of an environment: whether this package can talk to it, and whether it is that of this process."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from importlib import metadata

from oncurve.core.errors import ConfigError

PYTHON_VARIABLE = "ONCURVE_VLLM_PYTHON"
OLDEST = (0, 32)
PATIENCE_SECONDS = 60.0
_TELL = """
from importlib import metadata
print(metadata.version(metadata.packages_distributions()["vllm"][0]))
"""
"""Without importing vLLM, which takes long. The CPU build has another name than the package."""


def check_version(python: str) -> str:
    """The version of vLLM in the environment of a python.

    Raises ConfigError unless there is one, and one that reports the weights of a token.
    """
    done = subprocess.run([python, "-c", _TELL], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    output = done.stdout.strip()
    numbers = re.match(r"(\d+)\.(\d+)", output)
    if numbers is None:
        raise ConfigError(
            f"rollouts.vllm_python: {python} has no vLLM ({done.stderr.strip()[-200:] or 'it names no version'}). "
            f"docs/servers.md says how to make an environment with it"
        )
    if (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ConfigError(
            f"rollouts.vllm_python: {python} has vLLM {output}, which cannot say from which weights a completion "
            f"comes. Install vLLM {'.'.join(map(str, OLDEST))} or newer there"
        )
    return output


def own_version() -> str | None:
    """The version of vLLM that this process could import; None where there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:  # the CPU build has another name
        return None


def why_not_alike(python: str) -> str | None:
    """The reason why this process and a python's servers cannot exchange weights over NCCL; None if they can.

    Their versions of NCCL are compared when they meet.
    """
    own, theirs = own_version(), check_version(python)
    if own is None:
        return "this process has no vLLM, which nccl needs (`pip install 'oncurve[vllm]'`)"
    if _release(own) != _release(theirs):
        return f"this process has vLLM {own}, and the servers have {theirs}; nccl needs the same on both sides"
    return None


def _release(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]
