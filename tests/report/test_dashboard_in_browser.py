"""Does a dashboard follow a run as it goes, through restarts of either side, without touching it?"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import write_step

from oncurve.observe.record import RunFolder

MakeRun = Callable[..., Path]
OpenPage = Callable[..., Any]
RUN = (  # a shell that starts the tests in the background lets them ignore Ctrl-C, and what they start too
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from oncurve.cli.app import main; main()"
)
COMMAND = [sys.executable, "-c", RUN, "dashboard"]


class Server:
    """A dashboard in a process of its own."""

    def __init__(self, *arguments: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments, "--port", str(self.port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said = self.process.stdout.readline()  # type: ignore[union-attr]
        self.address = f"http://127.0.0.1:{self.port}"
        for _ in range(200):
            if status_of(self.address) is not None:
                return
            time.sleep(0.05)
        raise AssertionError(f"no dashboard: {self.process.communicate(timeout=5)}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=10)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def status_of(address: str) -> int | None:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*arguments: str | Path, port: int | None = None) -> Server:
        started.append(Server(*map(str, arguments), port=port))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def test_new_steps_arrive_while_the_page_is_open(made_run: MakeRun, open_page: OpenPage, serve: Any) -> None:
    run = made_run(steps=4)
    page = open_page(serve(run).address)
    page.wait_for_selector("text=step 4 of 8")
    page.wait_for_selector("text=Step 4, group 1")
    with RunFolder(run, resume_step=4) as folder:
        write_step(folder, 5, keeps=False)
        folder.write_status(5, "sample")
        page.wait_for_selector("text=step 5 of 8")
        page.wait_for_selector("text=running · sample")
        write_step(folder, 6)
        page.wait_for_selector("text=step 6 of 8")
        page.wait_for_selector('select[aria-label="step"] option[value="6"]', state="attached")
    page.wait_for_selector("text=stopped")
    assert "Step 4, group 1" in page.inner_text(".detail")  # nobody's view is taken away
    page.click('button[aria-label="next step"]')
    page.wait_for_selector("text=step 6 place 0 sample 0")


def test_the_page_comes_back_when_the_server_does(made_run: MakeRun, open_page: OpenPage, serve: Any) -> None:
    run = made_run(steps=4)
    server = serve(run)
    page = open_page(server.address)
    page.wait_for_selector("nav >> text=live")
    page.evaluate("window.isTheSamePage = true")
    server.stop()
    page.wait_for_selector("text=connection lost")
    with RunFolder(run, resume_step=4) as folder:
        write_step(folder, 5)
    serve(run, port=server.port)
    page.wait_for_selector("nav >> text=live")
    page.wait_for_selector("text=step 5 of 8")
    assert page.evaluate("window.isTheSamePage") is True


def test_a_resumed_run_replaces_what_it_does_again(made_run: MakeRun, open_page: OpenPage, serve: Any) -> None:
    run = made_run(steps=6, metrics={"reward/mean": 0.111})
    page = open_page(serve(run).address)
    page.wait_for_selector("text=step 6 of 8")
    page.wait_for_selector(".tiles >> text=0.111")
    page.wait_for_selector("text=Step 6, group 1")
    with RunFolder(run, resume_step=4) as folder:
        page.wait_for_selector("text=Step 4, group 1")  # the completions that were looked at are gone
        for step in (5, 6, 7):
            write_step(folder, step, metrics={"reward/mean": 0.777})
    page.wait_for_selector("text=step 7 of 8")
    page.wait_for_selector(".tiles >> text=0.777")
    page.focus("#curves svg")
    for _ in range(2):
        page.keyboard.press("ArrowLeft")  # from the last step, 7, to 6
    assert "0.777" in page.inner_text("#curves .legend")
    assert "step 6" in page.inner_text("#curves .legend")


def test_several_runs_are_listed_and_new_ones_appear(
    made_run: MakeRun, open_page: OpenPage, serve: Any, tmp_path: Path
) -> None:
    made_run("first")
    page = open_page(serve(tmp_path / "runs").address)
    page.wait_for_selector("text=first")
    made_run("second <img src=x onerror=alert(1)>")
    page.wait_for_selector("text=second <img")
    page.click("text=first")
    page.wait_for_selector("text=step 8 of 8")
    page.click("text=← runs")
    page.wait_for_selector("text=second <img")


def test_watching_writes_nothing(made_run: MakeRun, open_page: OpenPage, serve: Any) -> None:
    run = made_run()
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}
    page = open_page(serve(run).address)
    page.wait_for_selector("text=Step 8, group 1")
    page.wait_for_timeout(1500)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")} == before


def test_a_broken_file_is_told_and_the_page_stays(made_run: MakeRun, open_page: OpenPage, serve: Any) -> None:
    run = made_run(steps=4)
    page = open_page(serve(run).address)
    page.wait_for_selector("text=step 4 of 8")
    good = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(good + b"not json\n")
    page.wait_for_selector(".notice >> text=is not a JSON object")
    (run / "metrics.jsonl").write_bytes(good)
    page.wait_for_selector(".notice", state="detached")
    assert "step 4 of 8" in page.inner_text("header.top")


def test_a_phone_can_read_it(made_run: MakeRun, open_page: OpenPage, serve: Any) -> None:
    page = open_page(serve(made_run()).address, viewport={"width": 390, "height": 844}, has_touch=True)
    page.wait_for_selector("text=Step 8, group 1")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    small = """() => [...document.querySelectorAll('button:not(.sort), select')]
        .filter((one) => one.offsetHeight && one.offsetHeight < 32).map((one) => one.outerHTML)"""
    assert page.evaluate(small) == []  # a finger needs room


def test_hostile_completions_stay_text_live_too(made_run: MakeRun, open_page: OpenPage, serve: Any) -> None:
    text = "</script><img src=x onerror=window.hacked=1>\u2028\x00"
    page = open_page(serve(made_run(text=text, prompt=text)).address)
    page.wait_for_selector(".completion .text")
    assert page.evaluate("document.querySelector('.completion .text').textContent") == text
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


def test_others_need_the_token_that_was_printed(made_run: MakeRun, serve: Any, open_page: OpenPage) -> None:
    server = serve(made_run(), "--host", "0.0.0.0")
    token = server.said.split("?token=")[1].strip()
    assert len(token) > 20
    for path in ("/", "/runs", "/run/made", "/run/made/events", "/run/made/groups/8", "/?token=wrong"):
        assert status_of(server.address + path) == 401
    page = open_page(f"{server.address}/?token={token}")
    page.wait_for_selector("text=Step 8, group 1")
    assert token not in page.url


def test_a_token_may_come_from_the_environment(made_run: MakeRun, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCURVE_DASHBOARD_TOKEN", "quite-a-secret")
    server = serve(made_run())
    assert status_of(server.address) == 401
    asked = urllib.request.Request(server.address, headers={"Authorization": "Bearer quite-a-secret"})
    with urllib.request.urlopen(asked, timeout=5) as answer:
        assert answer.status == 200


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_it_while_somebody_watches(made_run: MakeRun, open_page: OpenPage, serve: Any) -> None:
    server = serve(made_run())
    open_page(server.address).wait_for_selector("nav >> text=live")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=8) == 130
    assert "Traceback" not in server.process.stderr.read()  # type: ignore[union-attr]


def test_runs_are_compared_from_the_list(made_run: MakeRun, open_page: OpenPage, serve: Any, tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        made_run(name)
    page = open_page(serve(tmp_path / "runs").address)
    page.check('input[aria-label="compare first"]')
    page.wait_for_selector("text=choose another run")
    page.check('input[aria-label="compare third"]')
    page.wait_for_timeout(3500)  # the list is renewed, and the choice stays
    assert page.is_checked('input[aria-label="compare first"]')
    page.click("text=Compare 2 runs")
    page.wait_for_selector("text=test problems solved, after")
    assert page.locator("#table th.num").all_inner_texts() == ["first", "third"]
    page.click("text=← runs")
    page.wait_for_selector('input[aria-label="compare second"]')


def test_a_comparison_of_nothing_or_of_strangers_is_told(made_run: MakeRun, serve: Any, tmp_path: Path) -> None:
    made_run("first")
    made_run("second")
    address = serve(tmp_path / "runs").address
    for query in ("", "?run=first", "?run=first&run=first", "?run=first&run=../../etc"):
        assert status_of(f"{address}/compare{query}") == 404


def test_a_card_says_why_a_run_stopped_and_what_the_doctor_counts(
    made_run: MakeRun, open_page: OpenPage, serve: Any, tmp_path: Path
) -> None:
    made_run("whole")
    run = made_run("halted", metrics={"reward/error_fraction": 0.3})
    with RunFolder(run, resume_step=8) as folder:
        folder.write_status(8, "stopped")
        folder.log("stopped: grading failed for 20 of 64 completions")
    page = open_page(serve(tmp_path / "runs").address)
    page.wait_for_selector("text=grading failed for 20 of 64 completions")
    card = page.locator(".run-card", has_text="halted")
    assert "1 severe" in card.inner_text()
    assert "embedded · now" in card.inner_text()
    card.locator("a").click()
    page.wait_for_selector("header.top >> text=grading failed for 20 of 64")
