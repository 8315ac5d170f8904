"""Command `serve`: rollouts for a trainer in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oncurve.cli.arguments import Host
from oncurve.observe.terminal import console, loading_libraries, quiet_libraries


def serve(
    model: Annotated[
        str, typer.Argument(help="The model that is being trained: a folder, a Hugging Face Hub name, or `embedded`.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8100,
    host: Host = "127.0.0.1",
    registry: Annotated[Path | None, typer.Option(help="Shared folder in which trainers discover servers.")] = None,
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="Completions generated at a time (default: as memory allows).")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="A recipe setting, such as policy.device=cpu; repeat for several.")
    ] = None,
) -> None:
    """Serve rollouts to a trainer on another machine or in another process, with the weights it sends.

    Trainer and servers read their shared token from ONCURVE_SERVER_TOKEN.

    Example: `oncurve serve embedded --port 8101`
    """
    quiet_libraries()
    from oncurve.extensions import extension  # lazy

    with loading_libraries():
        serve_model = extension("serve")
    serve_model(
        model, host=host, port=port, registry=registry, max_rows=max_rows, overrides=overrides or (), console=console()
    )
