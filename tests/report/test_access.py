"""Does the gate in front of the dashboard let in whom it should, and nobody else?"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from oncurve.errors import ConfigError
from oncurve.report import dashboard_start as serving
from oncurve.report.dashboard_start import is_loopback, serve

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")

from oncurve.report.access import Gate  # noqa: E402


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret"})


def ask(gate: Gate, path: str = "/", **headers: str) -> Any:
    async def asking() -> Any:
        transport = httpx.ASGITransport(app=gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8420") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(asking())


@pytest.mark.parametrize("host", ["localhost:8420", "127.0.0.1", "[::1]:8420", "LOCALHOST"])
def test_this_machine_is_served(host: str) -> None:
    assert ask(Gate(inner, token=None, hosts=("localhost", "127.0.0.1", "::1")), Host=host).text == "secret"


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "evil.example:8420", "[::2]"])
def test_a_strangers_name_for_this_machine_is_not(host: str) -> None:
    answer = ask(Gate(inner, token=None, hosts=("localhost", "127.0.0.1", "::1")), Host=host)
    assert answer.status_code == 421
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic right"},
        {"Cookie": "oncurve_token=wrong"},
        {"Cookie": "oncurve_token="},
        {"Cookie": "other=right"},
    ],
)
def test_without_the_token_nothing_is_told(headers: dict[str, str]) -> None:
    answer = ask(Gate(inner, token="right", hosts=()), **headers)
    assert answer.status_code == 401
    assert "secret" not in answer.text


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer right"}, {"Cookie": "a=b; oncurve_token=right"}])
def test_with_the_token_everything_is(headers: dict[str, str]) -> None:
    answer = ask(Gate(inner, token="right", hosts=()), **headers)
    assert answer.text == "secret"
    assert answer.headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(
    ("path", "leads"), [("/run/a?token=right&x=1", "/run/a?x=1"), ("//evil.example/?token=right", "/evil.example/")]
)
def test_a_token_in_the_address_becomes_a_cookie_and_stays_on_this_server(path: str, leads: str) -> None:
    answer = ask(Gate(inner, token="right", hosts=()), "http://localhost:8420" + path)
    assert answer.status_code == 303
    assert answer.headers["location"] == leads
    assert "HttpOnly; Path=/; SameSite=strict" in answer.headers["set-cookie"]


def test_addresses_of_this_machine_are_known() -> None:
    assert is_loopback("127.0.0.5")
    assert is_loopback("::1")
    assert not is_loopback("192.168.0.1")
    assert not is_loopback("::")


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"starlette and uvicorn: pip install 'oncurve\[dashboard\]'"):
        serve([tmp_path], notify=print)


def test_a_port_that_is_taken_is_a_message(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot be served"):
            serve([tmp_path], port=taken.getsockname()[1], notify=lambda text: None)
