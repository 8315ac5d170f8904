"""Reading the YAML tables of this folder with the fast C parser, where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_table(path: Path) -> Any:
    """What a YAML file holds. Raises OSError, UnicodeDecodeError and yaml.YAMLError."""
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
