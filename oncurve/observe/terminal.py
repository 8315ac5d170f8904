"""The console of the commands, and silencing what other libraries print."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


LIBRARY_OPTIONS = {
    "TOKENIZERS_PARALLELISM": "false",
    "THP_MEM_ALLOC_ENABLE": "1",  # torch asks for large pages: far fewer page faults
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",  # shapes of products whose code is kept, half a megabyte each
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""What libraries are told through the environment, where it says nothing else."""


def console() -> Console:
    """Where people read."""
    from rich.console import Console

    return Console(soft_wrap=not sys.stdout.isatty())


def quiet_libraries() -> None:
    """Give libraries their options, and keep their progress bars and advice out of the display."""
    for name, value in LIBRARY_OPTIONS.items():
        os.environ.setdefault(name, value)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
