"""Does an open dashboard follow its runs, search and sort them? The tests wait for what they want, not for seconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import CONFIG, write_step

from oncurve.constants import LOOPBACK
from oncurve.observe.record import RunFolder
from oncurve.report import dashboard
from oncurve.report.dashboard import Server, Site

MakeRun = Callable[..., Path]
OpenPage = Callable[..., Any]
RUN = (  # a shell that starts the tests in the background lets them ignore Ctrl-C, and what they start too
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from oncurve.cli.app import main; main()"
)


class Running:
    """A dashboard in a thread."""

    def __init__(self, *paths: Path, port: int = 0) -> None:
        self.server = Server(("127.0.0.1", port), Site(paths), token=None, hosts=LOOPBACK)
        self.port = self.server.server_address[1]
        self.address = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    monkeypatch.setattr(dashboard, "ASK_SECONDS", 0.2)
    started: list[Running] = []

    def starting(*paths: Path, port: int = 0) -> Running:
        started.append(Running(*paths, port=port))
        return started[-1]

    yield starting
    for one in started:
        one.stop()


def test_new_steps_arrive_while_the_page_is_open_and_the_view_stays(
    made_run: MakeRun, open_page: OpenPage, start: Any
) -> None:
    run = made_run(steps=4)
    page = open_page(start(run).address)
    page.wait_for_selector("text=step 4 of 8")
    page.click('button[aria-label="previous step"]')
    page.wait_for_selector("text=Step 2, group 3")
    with RunFolder(run, resume_step=4) as folder:
        write_step(folder, 5)
        folder.write_status(5, "sample")
        page.wait_for_selector("text=step 5 of 8")
        page.wait_for_selector("text=running · sample")
        page.wait_for_selector("text=Step 2, group 3")  # nobody's view is taken away
        page.wait_for_selector('select[aria-label="step"] option[value="5"]', state="attached")
    page.wait_for_selector("text=stopped")


def test_the_page_comes_back_when_the_server_does(made_run: MakeRun, open_page: OpenPage, start: Any) -> None:
    run = made_run(steps=4)
    server = start(run)
    page = open_page(server.address)
    page.wait_for_selector("nav >> text=live")
    server.stop()
    page.wait_for_selector("text=connection lost")
    with RunFolder(run, resume_step=4) as folder:
        write_step(folder, 5)
    start(run, port=server.port)
    page.wait_for_selector("nav >> text=live")
    page.wait_for_selector("text=step 5 of 8")


def test_a_broken_file_is_said_and_the_page_stays(made_run: MakeRun, open_page: OpenPage, start: Any) -> None:
    run = made_run(steps=4)
    page = open_page(start(run).address)
    page.wait_for_selector("text=step 4 of 8")
    good = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(good + b"not json\n")
    page.wait_for_selector(".notice >> text=is not a JSON object")
    assert "step 4 of 8" in page.inner_text("header.top")
    (run / "metrics.jsonl").write_bytes(good)
    page.wait_for_selector(".notice", state="detached")


def test_runs_are_searched_filtered_and_sorted_and_new_ones_appear(
    made_run: MakeRun, open_page: OpenPage, start: Any, tmp_path: Path
) -> None:
    made_run("apple")
    with RunFolder(made_run("banana", steps=4, right=(True, False, False, False)), resume_step=4) as folder:
        folder.write_status(4, "stopped")
    page = open_page(start(tmp_path / "runs").address)
    page.wait_for_selector("text=banana")
    made_run("cherry <img src=x onerror=alert(1)>")
    page.wait_for_selector("text=cherry <img")
    names = "() => [...document.querySelectorAll('.runs .name')].map((one) => one.textContent[0]).join('')"
    page.click("th >> text=run")
    page.wait_for_function(f"({names})() === 'abc'")
    page.click("th >> text=run")
    page.wait_for_function(f"({names})() === 'cba'")
    page.click("th >> text=test")
    page.wait_for_function(f"({names})()[2] === 'b'")  # the worst last
    page.fill('input[aria-label="search"]', "err")
    page.wait_for_function(f"({names})() === 'c'")
    page.fill('input[aria-label="search"]', "")
    page.select_option('select[aria-label="state"]', "stopped")
    page.wait_for_function(f"({names})() === 'b'")
    page.select_option('select[aria-label="state"]', "")
    page.click("text=apple")
    page.wait_for_selector("text=step 8 of 8")
    page.click("text=← runs")
    page.wait_for_selector("text=banana")


def test_runs_are_compared_from_the_list(made_run: MakeRun, open_page: OpenPage, start: Any, tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        made_run(name)
    page = open_page(start(tmp_path / "runs").address)
    page.select_option('select[aria-label="group"]', "recipe")
    page.check('.recipe:has-text("3 runs") input')
    page.wait_for_selector("text=Compare 3 runs")
    page.click("text=clear")
    page.select_option('select[aria-label="group"]', "")
    page.wait_for_selector(".recipe", state="detached")
    page.check('input[aria-label="compare first"]')
    page.wait_for_selector("text=choose another run")
    page.check('input[aria-label="compare third"]')
    made_run("fourth")
    page.wait_for_selector("text=fourth")  # the list is renewed, and the choice stays
    assert page.is_checked('input[aria-label="compare first"]')
    page.click("text=Compare 2 runs")
    page.wait_for_selector("#table th.num")
    assert page.locator("#table th.num").all_inner_texts() == ["first", "third"]
    page.click("text=← runs")
    page.wait_for_selector('input[aria-label="compare second"]')


def test_a_phone_can_read_it(made_run: MakeRun, open_page: OpenPage, start: Any) -> None:
    page = open_page(start(made_run()).address, viewport={"width": 390, "height": 844}, has_touch=True)
    page.wait_for_selector("text=Step 8, group 3")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    small = """() => [...document.querySelectorAll('button:not(.sort), select')]
        .filter((one) => one.offsetHeight && one.offsetHeight < 32).map((one) => one.outerHTML)"""
    assert page.evaluate(small) == []  # a finger needs room
    long = made_run("long-" * 12, config={**CONFIG, "model": "m" * 60})
    page = open_page(start(long, made_run("other")).address, viewport={"width": 390, "height": 844}, has_touch=True)
    page.wait_for_selector("text=other")
    slides = "[...document.querySelectorAll('*')].filter((one) => one.scrollWidth > one.clientWidth && one.clientWidth)"
    assert page.evaluate(f"{slides}.map((one) => one.outerHTML.slice(0, 80))") == []


def test_hostile_completions_stay_text(made_run: MakeRun, open_page: OpenPage, start: Any) -> None:
    text = "</script><img src=x onerror=window.hacked=1>\u2028\x00"
    page = open_page(start(made_run(text=text, prompt=text)).address)
    page.wait_for_selector(".completion .text")
    assert page.evaluate("document.querySelector('.completion .text').textContent") == text
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_the_command_asks_for_its_token_and_ends_at_ctrl_c_while_somebody_watches(
    made_run: MakeRun, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCURVE_DASHBOARD_TOKEN", "quite-a-secret")
    command = [sys.executable, "-c", RUN, "dashboard", str(made_run()), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        [address] = re.findall(r"http\S+", process.stdout.readline())  # type: ignore[union-attr]
        assert address.endswith("?token=quite-a-secret")
        page = open_page(address)
        page.wait_for_selector("text=Step 8, group 3")
        assert "secret" not in page.url
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in said
    finally:
        process.kill()
        process.communicate()
