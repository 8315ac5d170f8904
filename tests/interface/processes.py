"""Programs of a user as processes of their own, and the processes that they leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from nursery import Nursery


def run_programs(nursery: Nursery, arguments: Sequence[object], *, count: int = 1) -> subprocess.CompletedProcess[str]:
    """A Python program with its arguments; as ``count`` processes that train together."""
    together = ["-m", "torch.distributed.run", f"--nproc-per-node={count}", "--standalone"] if count > 1 else []
    return nursery.run_python(*together, *arguments)
