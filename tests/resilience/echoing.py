"""An environment whose turns take a moment and always go the same way."""

from __future__ import annotations

import time
from typing import Any


class Echoing:
    """Three turns, of which a process is most likely killed in one."""

    deterministic = True

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin."""
        self.turns, self.seed = 0, seed or 0
        return f" {self.seed % 7}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Hear a turn."""
        time.sleep(0.02)
        self.turns += 1
        return f"heard {len(action) % 9}", float(len(action) % 2), self.turns == 3, False, {}
