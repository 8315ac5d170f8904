"""Starting a dashboard: its socket, its token, and a server that never writes to the run."""

from __future__ import annotations

import importlib.util
import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from oncurve.errors import ConfigError
from oncurve.report.follow import find_runs

PORT = 8420
_TRIED_PORTS = 20
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names under which a machine speaks to itself."""


def serve(
    runs: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    token: str | None = None,
    usd_per_hour: float | None = None,
    notify: Callable[[str], None],
) -> None:
    """Serve the runs until Ctrl-C; ``notify`` is told the address.

    Where others could reach it, a token is asked for, a new one if none is given. ``port`` None takes the first free
    one from 8420 on.

    Raises ConfigError if the server is not installed, a path is no folder, or the address cannot be had.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the dashboard needs {' and '.join(missing)}: pip install 'oncurve[dashboard]'")
    found = find_runs(runs)
    is_local = is_loopback(host)
    if not is_local and not token:
        token = secrets.token_urlsafe(24)
    listening = _listen(host, port)
    shown = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/"
    notify(f"{len(found)} run{'' if len(found) == 1 else 's'} at {shown}{f'?token={token}' if token else ''}")
    if not is_local:
        notify(
            "Others can reach this address; only the token guards it, and nothing is encrypted: prefer an SSH tunnel."
        )
    notify("Ctrl-C ends it; the runs go on.")
    _run(listening, runs, token=token, host=host, usd_per_hour=usd_per_hour)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    if host.lower() in LOOPBACK:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int | None) -> socket.socket:
    """A bound socket. Raises ConfigError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = [port] if port is not None else list(range(PORT, PORT + _TRIED_PORTS))
    failure: OSError | None = None
    for one in ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, one))
            listening.listen(64)
        except OSError as error:
            listening.close()
            failure = error
            continue
        return listening
    raise ConfigError(
        f"--host {host} --port {ports[0]}: cannot be served ({failure}). Choose another --port or --host."
    )


def _run(
    listening: socket.socket, runs: Sequence[Path], *, token: str | None, host: str, usd_per_hour: float | None
) -> None:
    import uvicorn

    from oncurve.report.dashboard import be_quiet, make_app  # lazy
    from oncurve.report.viewer import Viewer  # lazy

    be_quiet()
    viewer = Viewer(runs, usd_per_hour=usd_per_hour)
    app = make_app(viewer, token=token, hosts=(*LOOPBACK, host))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5, lifespan="off")
    )
    viewer.is_closing = lambda: server.should_exit
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
