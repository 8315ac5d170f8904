"""`oncurve` and `python -m oncurve`: the command, which may be interrupted while it is still being loaded."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from oncurve.cli.app import main as run  # lazy
    except KeyboardInterrupt:
        sys.stderr.write("oncurve: stopped\n")
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
