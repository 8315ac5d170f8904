"""Lines of Python by room, of the tests and of the benchmarks, at some commits side by side.

python tests/architecture/lines.py             the newest commit
python tests/architecture/lines.py 8c83a67 HEAD
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git(*words: str, given: str = "") -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, input=given.encode(), capture_output=True, check=True).stdout


def lines_at(commit: str) -> Counter[str]:
    """Lines by room of the package, and those of tests and benchmarks."""
    names = [name for name in git("ls-tree", "-r", "--name-only", commit).decode().splitlines() if name.endswith(".py")]
    stored = git("cat-file", "--batch", given="".join(f"{commit}:{name}\n" for name in names))
    found: Counter[str] = Counter()
    for name in names:
        head, _, stored = stored.partition(b"\n")
        size = int(head.split()[-1])
        count = stored[:size].count(b"\n")
        stored = stored[size + 1 :]
        parts = name.split("/")
        if parts[0] == "oncurve":
            found["oncurve"] += count
            found[f"  {parts[1] if len(parts) > 2 else 'top level'}"] += count
        elif parts[0] in ("tests", "benchmarks", "examples"):
            found[parts[0]] += count
    return found


def main() -> None:
    commits = sys.argv[1:] or ["HEAD"]
    counts = [lines_at(commit) for commit in commits]
    rooms = sorted({name for one in counts for name in one if name.startswith(" ")})
    print(f"{'':14}" + "".join(f"{commit[:12]:>14}" for commit in commits))
    for name in ["oncurve", *rooms, "tests", "benchmarks", "examples"]:
        print(f"{name:14}" + "".join(f"{one[name]:>14,}" for one in counts))


if __name__ == "__main__":
    main()
