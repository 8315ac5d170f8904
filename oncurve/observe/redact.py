"""Redaction of tokens and keys from recipes, command lines and messages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[hidden]"
_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{16,}"  # the hub
    r"|sk-[A-Za-z0-9_-]{16,}"  # endpoints for chat
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|xox[abpr]-[A-Za-z0-9-]{10,}"
    r"|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{12,}=*"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"  # user:password@host
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_NAMES = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SHORTEST = 8
"""Shorter values of such variables are words like "true", and would be hidden everywhere."""


def secret_values(environment: Mapping[str, str] | None = None) -> list[str]:
    """Values of the environment variables whose names say that they are secret, longest first."""
    variables = os.environ if environment is None else environment
    values = {value for name, value in variables.items() if _NAMES.search(name) and len(value) >= _SHORTEST}
    return sorted((value for value in values if not os.path.exists(value)), key=lambda value: (-len(value), value))


def redact(text: str, *, environment: Mapping[str, str] | None = None) -> str:
    """A text without what looks like a key and without the secret values of the environment.

    >>> redact("hub_token: hf_abcdefghijklmnopqrstuvwx", environment={})
    'hub_token: [hidden]'
    """
    for value in secret_values(environment):
        text = text.replace(value, HIDDEN)
    return _SHAPES.sub(HIDDEN, text)


def redact_tree(value: Any, *, environment: Mapping[str, str] | None = None) -> Any:
    """The same for every text inside mappings and lists."""
    if isinstance(value, str):
        return redact(value, environment=environment)
    if isinstance(value, Mapping):
        return {key: redact_tree(item, environment=environment) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(item, environment=environment) for item in value]
    return value
