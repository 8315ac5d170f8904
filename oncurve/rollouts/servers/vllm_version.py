"""Is the vLLM of an environment one that this package can talk to?"""

from __future__ import annotations

import re
import subprocess

from oncurve.errors import ConfigError

OLDEST = (0, 32)
PATIENCE_SECONDS = 60.0
_TELL = """
from importlib import metadata
print(metadata.version(metadata.packages_distributions()["vllm"][0]))
"""
"""Without importing vLLM, which takes long. The CPU build has another name than the package."""


def check_version(python: str) -> None:
    """Raises ConfigError unless the environment of a python has vLLM, and one that reports the weights of a token."""
    done = subprocess.run([python, "-c", _TELL], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    said = done.stdout.strip()
    numbers = re.match(r"(\d+)\.(\d+)", said)
    if numbers is None:
        raise ConfigError(
            f"rollouts.vllm_python: {python} has no vLLM ({done.stderr.strip()[-200:] or 'it names no version'}). "
            f"docs/servers.md says how to make an environment with it"
        )
    if (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise ConfigError(
            f"rollouts.vllm_python: {python} has vLLM {said}, which cannot say from which weights a completion comes. "
            f"Install vLLM {'.'.join(map(str, OLDEST))} or newer there"
        )
