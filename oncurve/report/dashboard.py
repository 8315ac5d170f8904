"""Dashboard: the list of runs and the page of each, written again when files of a run have changed."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from oncurve import __version__
from oncurve.constants import LOOPBACK
from oncurve.core.errors import ConfigError, DataError
from oncurve.observe.record import METRICS
from oncurve.report.comparing import OWN_KEYS, compare_runs, comparison_page
from oncurve.report.overview import modified, state
from oncurve.report.page import TEXT_BUDGET, TOKEN_BUDGET, as_json, render
from oncurve.report.seeds import SEED, recipes_block
from oncurve.report.write import Reading, read_run, report_page
from oncurve.wording import counted

PORT = 8420
COOKIE = "oncurve_token"
HEADERS = {
    "x-content-type-options": "nosniff", "x-frame-options": "DENY", "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}  # fmt: skip
WATCHED = (METRICS, "status.json", "config.yaml", "comparison.json", "log.txt", "evaluations")
"""Files of a run that change when there is anything new to say about it."""
ASK_SECONDS = 2.0
"""An open page asks so often whether it is up to date."""
MAX_SHARE = 0.1
"""Largest share of one processor for writing a page again."""
MAX_CACHED = 16
MAX_COMPARED = 20
PART_OF_A_REPORT = 4
"""A page holds this fraction of the completions that a report may hold, since it is written more than once."""


def find_runs(paths: Sequence[Path]) -> dict[str, Path]:
    """Run folders by name: the given ones, and those inside a given folder that is none itself, newest first.

    Raises ConfigError for a path that is no folder.
    """
    runs: dict[str, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path}: there is no such folder. Name run folders, or a folder that holds some.")
        inside = [path] if (path / METRICS).is_file() else [file.parent for file in path.glob(f"*/{METRICS}")]
        for run in sorted(inside, key=lambda folder: (-modified(folder / "recipe.yaml"), folder.name)):
            name = plain = run.resolve().name
            number = 1
            while name in runs and runs[name] != run:
                number += 1
                name = f"{plain}-{number}"
            runs[name] = run
    return runs


@dataclass(frozen=True, slots=True)
class Made:
    """A page made of a run's folder: from which state of it, when, and in how many seconds."""

    value: Any
    stamp: str
    made: float
    seconds: float


class Site:
    """The pages of a dashboard. Folders are only read."""

    def __init__(self, paths: Sequence[Path], *, usd_per_hour: float | None = None) -> None:
        """``paths`` are run folders, or folders with runs in them, also ones that appear later."""
        self.paths, self.usd_per_hour = list(paths), usd_per_hour
        self._cached: dict[tuple[str, Path], Made] = {}
        self._lock = threading.Lock()

    def runs(self) -> dict[str, Path]:
        """Run folders by name, as they are now."""
        return find_runs([path for path in self.paths if path.is_dir()])

    def is_single_run(self) -> bool:
        """Whether the dashboard was started for a single run, which needs no list."""
        return len(self.paths) == 1 and list(self.runs().values()) == self.paths

    def find(self, name: str) -> Path:
        """The folder of a run; a name that no run has never becomes a path. Raises DataError for such a name."""
        run = self.runs().get(name)
        if run is None:
            raise DataError(f"there is no run named {name} here (any more).")
        return run

    def run_page(self, name: str) -> Made:
        """The page of a run and its stamp. Raises DataError where a file of the run is broken."""
        run = self.find(name)
        read = self._read(run)
        home = None if self.is_single_run() else "/"
        pages = {str(path.resolve()): f"/run/{quote(other, safe='')}" for other, path in self.runs().items()}

        def make() -> bytes:
            live = {"stamp": read.stamp, "home": home, "every_seconds": ASK_SECONDS, "pages": pages}
            parts, _ = report_page(
                run, read=read.value, live=live,
                text_budget=TEXT_BUDGET // PART_OF_A_REPORT, token_budget=TOKEN_BUDGET // PART_OF_A_REPORT,
            )  # fmt: skip
            return "".join(parts).encode()

        return self._keep("page", run, read.stamp, make)

    def listed(self) -> list[dict[str, Any]]:
        """The runs in a few numbers each."""
        rows = []
        for name, run in self.runs().items():
            try:
                entry = _entry(self._read(run).value)
            except DataError as error:
                entry = {"problem": str(error), "state": state(run)}
            rows.append({"name": name, "href": f"/run/{quote(name, safe='')}", **entry})
        return rows

    def _read(self, run: Path) -> Made:
        return self._keep("numbers", run, _stamp(run), lambda: read_run(run, usd_per_hour=self.usd_per_hour))

    def compared(self, names: Sequence[str]) -> str:
        """The page of some runs side by side. Raises DataError or ConfigError for names that are none, or too few."""
        if len(names) > MAX_COMPARED:
            raise ConfigError(f"{len(names)} runs are too many for one page. Choose at most {MAX_COMPARED}.")
        runs = [self.find(name) for name in dict.fromkeys(names)]
        compared = compare_runs(runs, usd_per_hour=self.usd_per_hour)
        return "".join(comparison_page(compared, home="/", recipes=recipes_block(compared)))

    def _keep(self, kind: str, run: Path, stamp: str, make: Callable[[], Any]) -> Made:
        """The result of ``make``; the last one while nothing has changed, or only a moment ago."""
        with self._lock:
            last, started = self._cached.get((kind, run)), time.monotonic()
            if last and (last.stamp == stamp or started - last.made < last.seconds / MAX_SHARE):
                return last
            value, made = make(), time.monotonic()
            self._cached.pop((kind, run), None)
            self._cached[kind, run] = Made(value, stamp, made, made - started)
            pages = [key for key in self._cached if key[0] == "page"]
            for key in pages[:-MAX_CACHED]:
                del self._cached[key]
            return self._cached[kind, run]


def _entry(read: Reading) -> dict[str, Any]:
    """A run in a few numbers, for a list: its state is of the same moment, and its test is of the trained model."""
    facts = read.facts
    severities = [finding["severity"] for finding in facts["findings"]]
    measured = [evaluation for evaluation in facts["evaluation"]["measured"] if evaluation["name"] != "base"]
    tested = [evaluation["shares"]["correct"]["fraction"] for evaluation in measured if evaluation["shares"]]
    earned = [evaluation["mean_reward"]["value"] for evaluation in measured if evaluation["mean_reward"]]
    is_supervised = bool(read.config.get("sft"))
    curve = "sft/loss" if is_supervised else "reward/mean"  # every demonstration has a reward of 1
    values, last = read.table.curve(curve), read.table.last(curve)
    return {
        "state": facts["state"],
        "steps_done": facts["steps_done"],
        "steps_planned": facts["steps_planned"],
        "model": str(read.config.get("model") or ""),
        "recipe": recipe_of(read.config),
        "severe": severities.count("severe"),
        "warnings": severities.count("warning"),
        "tested": tested[-1] if tested else None,
        "test_reward": earned[-1] if earned else None,
        "reward": None if is_supervised else last,
        "loss": last if is_supervised else None,
        "curve": values[:: max(1, len(values) // 80)],
    }


def recipe_of(config: Mapping[str, Any]) -> str:
    """The same for runs whose recipes differ in name, folder and seed alone; empty without a recipe."""
    if not config:
        return ""
    own = {key.removeprefix("run.") for key in (*OWN_KEYS, SEED)}
    run = {key: value for key, value in (config.get("run") or {}).items() if key not in own}
    return hashlib.sha256(json.dumps({**config, "run": run}, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _stamp(run: Path) -> str:
    """Something that changes when there is anything new to say about a run."""
    now = {key: value for key, value in state(run).items() if key != "age_seconds"}
    files = [modified(run / name) for name in WATCHED]
    return hashlib.sha256(json.dumps([now, files], default=str).encode()).hexdigest()[:16]


class Server(ThreadingHTTPServer):
    """The site on a socket; with ``token`` None, whoever asks for one of the ``hosts`` is let in."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], site: Site, *, token: str | None, hosts: Sequence[str]) -> None:
        self.site, self.token, self.hosts = site, token, hosts
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler)


class Handler(BaseHTTPRequestHandler):
    """One request.

    With a token, the cookie or the header ``Authorization: Bearer`` must hold it, and ``?token=`` once sets the cookie.
    Without, a request must be addressed to one of the server's hosts: a stranger's page could otherwise have its own
    name point to this machine and read the dashboard through the visitor's browser.
    """

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Answer with a page, or say why not."""
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        if self._is_let_in(query):
            try:
                self._answer(*self._located(unquote(url.path), query))
            except (DataError, ConfigError) as error:
                self._answer(404, str(error), "text/plain")

    def _is_let_in(self, query: dict[str, list[str]]) -> bool:
        if self.server.token is None:
            host_header = self.headers.get("host", "")
            host = host_header[1:].partition("]")[0] if host_header.startswith("[") else host_header.partition(":")[0]
            if host.lower() not in {name.lower() for name in self.server.hosts}:
                self._answer(421, "This dashboard answers on this machine only, under localhost.", "text/plain")
                return False
            return True
        token = self.server.token
        if _equal(query.get("token", [""])[0], token):
            cookie = f"{COOKIE}={token}; HttpOnly; Path=/; SameSite=strict"
            path = "/" + urlsplit(self.path).path.lstrip("/")  # two slashes would name another server
            self._answer(303, "", "text/plain", {"location": path, "set-cookie": cookie})
            return False
        kind, _, bearer = self.headers.get("authorization", "").partition(" ")
        cookie = SimpleCookie(self.headers.get("cookie", "")).get(COOKIE)
        if (kind.lower() == "bearer" and _equal(bearer, token)) or (cookie and _equal(cookie.value, token)):
            return True
        self._answer(401, "A token is needed: open the address that `oncurve dashboard` printed.", "text/plain")
        return False

    def _located(self, path: str, query: dict[str, list[str]]) -> tuple[int, str | bytes, str, dict[str, str]]:
        """Status, body, type and further headers of what is at a path."""
        site = self.server.site
        if path.startswith("/run/"):
            page = site.run_page(path.removeprefix("/run/"))
            return (200, page.stamp, "text/plain", {}) if "stamp" in query else (200, page.value, "text/html", {})
        match path:
            case "/" if site.is_single_run():
                return 303, "", "text/plain", {"location": f"/run/{quote(next(iter(site.runs())), safe='')}"}
            case "/":
                boot = {"kind": "runs", "every_seconds": ASK_SECONDS, "version": __version__}
                return 200, render("Runs · oncurve", boot, live=True), "text/html", {}
            case "/runs":
                return 200, as_json({"runs": site.listed()}), "application/json", {}
            case "/compare":
                return 200, site.compared(query.get("run", [])), "text/html", {}
        raise DataError(f"there is nothing at {path}.")

    def _answer(self, status: int, body: str | bytes, kind: str, more: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else body.encode("utf-8", "replace")
        self.send_response(status)
        fields = {"content-type": f"{kind}; charset=utf-8", "content-length": str(len(data)), **HEADERS}
        for name, value in {**fields, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the visitor has left
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not shown."""


def _equal(provided: str, token: str) -> bool:
    return secrets.compare_digest(provided.encode("utf-8", "replace"), token.encode())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    try:
        return host.lower() in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(
    paths: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    token: str | None = None,
    usd_per_hour: float | None = None,
    notify: Callable[[str], None],
) -> None:
    """Serve the runs until Ctrl-C; ``notify`` is given the address.

    Where others could reach it, a token is asked for, a new one if none is given. ``port`` None takes the first free
    one from 8420 on.

    Raises ConfigError if a path is no folder, or the address cannot be had.
    """
    runs = find_runs(paths)
    if not is_loopback(host) and not token:
        token = secrets.token_urlsafe(24)
    with _listening(host, port, Site(paths, usd_per_hour=usd_per_hour), token) as server:
        address = f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}/"
        notify(f"{counted(len(runs), 'run')} at {address}{f'?token={token}' if token else ''}")
        if not is_loopback(host):
            notify("Only the token guards this address, and nothing is encrypted: prefer an SSH tunnel.")
        notify("Ctrl-C ends it; the runs continue.")
        os.nice(10)  # the run may share the machine
        server.serve_forever(poll_interval=0.2)


def _listening(host: str, port: int | None, site: Site, token: str | None) -> Server:
    """A server on its socket. Raises ConfigError if the address cannot be had."""
    failure: OSError | None = None
    for candidate in [port] if port is not None else range(PORT, PORT + 20):
        try:
            return Server((host, candidate), site, token=token, hosts=(*LOOPBACK, host))
        except OSError as error:
            failure = error
    raise ConfigError(f"--host {host}: no port can be served ({failure}). Choose another --port or --host.")
