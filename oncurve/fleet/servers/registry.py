"""Discovery of servers that start later, through a shared folder."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path


def register(folder: Path, url: str) -> Path:
    """Leave the address of a server in the folder; its file, to be removed when the server ends."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{socket.gethostname()}-{os.getpid()}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"url": url, "pid": os.getpid(), "since": time.time()}), encoding="utf-8")
    partial.rename(path)
    return path


def registered(folder: Path) -> list[str]:
    """The addresses in the folder. A file that cannot be read is left for the next time."""
    urls: list[str] = []
    for path in sorted(folder.glob("*.json")):
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(entry, dict) and str(entry.get("url", "")).startswith(("http://", "https://")):
            urls.append(entry["url"])
    return urls
