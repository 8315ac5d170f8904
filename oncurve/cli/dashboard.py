"""Command `dashboard`: runs in a browser while they train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from oncurve.cli.arguments import Host
from oncurve.cli.report import Price

TOKEN = "ONCURVE_DASHBOARD_TOKEN"
"""The environment variable with the token of a dashboard that others can reach."""


def dashboard(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders, or folders that contain runs.")] = None,
    host: Host = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port (default: the first free one from 8420).")
    ] = None,
    usd_per_hour: Price = None,
) -> None:
    """Watch runs live in a browser. The dashboard only reads the run folders.

    Where others can reach it, a token guards it: that of ONCURVE_DASHBOARD_TOKEN, or a new one.

    Example: `oncurve dashboard runs`
    """
    from oncurve.report.dashboard import serve  # lazy

    serve(
        runs or [Path("runs")],
        host=host,
        port=port,
        token=os.environ.get(TOKEN) or None,
        usd_per_hour=usd_per_hour,
        notify=lambda text: typer.echo(text, err=False),
    )
