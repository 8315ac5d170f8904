"""What the tests of pages share: run folders, and a browser where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import headless
from made_runs import make_run


@pytest.fixture
def made_run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run folder: ``made_run("name", steps=8, text="...")``."""
    return lambda name="made", **options: make_run(tmp_path / "runs" / name, **options)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless Chromium of this machine."""
    with headless() as browser:
        yield browser


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page and waits until it is drawn; any error of its scripts, and any dialog, fails the test."""
    contexts: list[Any] = []
    trouble: list[str] = []

    def opened(address: str, *, offline: bool = False, is_ready: bool = True, **options: Any) -> Any:
        context = (
            chromium.new_context(viewport={"width": 1280, "height": 900}, offline=offline)
            if not options
            else chromium.new_context(offline=offline, **options)
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: trouble.append(f"script: {error}"))
        page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(address)
        if is_ready:
            page.wait_for_selector("html[data-ready=yes]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert trouble == []
