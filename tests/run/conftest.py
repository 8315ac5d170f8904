"""Helpers of other folders, for the tests of this one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("invariance", "distributed")]
