"""The pictures of README.md and docs/watching.md: the terminal, a report, the dashboard and a comparison.

The report is that of the first run in README.md, whose command the picture holds. The others show two recipes of the
embedded model over three seeds each. A run that is in the folder already is not made again. Needs
Chromium and playwright.

    python benchmarks/bench.py pictures            # a few minutes on two cores, then the pictures
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from oncurve.constants import LOOPBACK
from oncurve.report.dashboard import Server, Site

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
RECIPE = [
    "train", "word_problems", "run.steps=12", "run.prompts_per_step=8", "run.rollouts_every_steps=4",
    "evaluation.num_prompts=100", "evaluation.num_prompts_during=50", "evaluation.every_steps=4",
]  # fmt: skip
RATES = {"usual": "1e-4", "low": "1e-5"}
"""Name and learning rate of the two recipes."""
SEEDS = (0, 1, 2)
FRAME = re.compile(r"\r(?:\x1b\[2K\x1b\[1A)*\x1b\[2K")
"""What a terminal is told before the live lines are drawn again."""


def oncurve(*words: str) -> list[str]:
    """A command of this package in a process of its own."""
    return [sys.executable, "-m", "oncurve", *words]


def first_command() -> str:
    """The command of README.md that trains the run called "first"."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return " ".join(
        re.findall(r"^oncurve (train (?:.+\\\n)*.*run\.name=first(?:.*\\\n)*.*)$", text, re.MULTILINE)[0]
        .replace("\\", "")
        .split()
    )


def train(runs: Path) -> None:
    """The runs that are not there yet; what the first prints to its terminal is kept beside them."""
    for name, rate in RATES.items():
        for seed in SEEDS:
            if (runs / f"{name}-seed{seed}" / "comparison.json").is_file():
                continue
            own = [f"run.name={name}-seed{seed}", f"run.seed={seed}", f"optimizer.learning_rate={rate}"]
            command = oncurve(*RECIPE, f"run.folder={runs}", *own)
            if (name, seed) == ("usual", 0):
                (runs / "terminal.txt").write_bytes(recorded(command))
            else:
                subprocess.run(command, check=True)


def recorded(command: list[str]) -> bytes:
    """What a command prints to a terminal of 100 columns."""
    shown: list[bytes] = []

    def read(terminal: int) -> bytes:
        shown.append(os.read(terminal, 4096))
        return shown[-1]

    os.environ["COLUMNS"] = "100"
    pty.spawn(command, read)
    return b"".join(shown)


def terminal_page(printed: str) -> str:
    """What a terminal shows in the middle of the run, as a page: its first lines and the live ones."""
    begin, *frames = FRAME.split(printed)
    frame = [one for one in frames if "step 9/12" in one][-1]
    head = begin.partition("\x1b[?25l")[0].replace("\r\n", "\n")
    drawn = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    drawn.print(Text.from_ansi(head + frame.replace("\r\n", "\n")), soft_wrap=True)
    body = drawn.export_html(
        theme=MONOKAI, inline_styles=True, code_format="<pre style='font: 14px/1.5 monospace'>{code}</pre>"
    )
    return f"<body style='background: #15171c; color: #e4e6ea; margin: 16px'>{body}</body>"


def shoot(
    browser: Any, address: str, picture: str, *, width: int = 1280, height: int, keys: str = "", command: str = ""
) -> None:
    """A picture of a page, after some keys were pressed; it holds the ``command`` of what it shows."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(address)
    if not address.endswith("terminal.html"):
        page.wait_for_selector("html[data-ready=yes]")
    for key in keys:
        page.keyboard.press(key)
    page.wait_for_timeout(500)
    page.screenshot(path=PICTURES / picture)
    told = PngInfo()
    told.add_text("command", command)
    shot = Image.open(PICTURES / picture).convert("RGB").quantize(128)
    shot.save(PICTURES / picture, optimize=True, pnginfo=told if command else None)
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "pictures")
    runs: Path = parser.parse_args().runs.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    train(runs)
    first = runs / "first"
    if not (first / "comparison.json").is_file():
        subprocess.run(oncurve(*first_command().split(), f"run.folder={runs}"), check=True)
    subprocess.run(oncurve("report", str(first)), check=True, stdout=subprocess.DEVNULL)
    names = [runs / f"{name}-seed{seed}" for name in RATES for seed in SEEDS]
    subprocess.run(oncurve("report", str(names[0])), check=True, stdout=subprocess.DEVNULL)
    compared = oncurve("compare", *map(str, names), "--output", str(runs / "compared.html"))
    subprocess.run(compared, check=True, stdout=subprocess.DEVNULL)
    printed = (runs / "terminal.txt").read_bytes().decode()  # its line ends are those of a terminal
    (runs / "terminal.html").write_text(terminal_page(printed), encoding="utf-8")
    program = next(filter(None, map(shutil.which, BROWSERS)))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=[] if os.geteuid() else ["--no-sandbox"])
        report = f"{names[0].as_uri()}/report.html"
        shoot(browser, f"{first.as_uri()}/report.html", "report.png", height=1000, command=first_command())
        shoot(browser, f"{report}#step=12", "completions.png", height=900, keys="c")
        shoot(browser, f"{runs.as_uri()}/compared.html", "compare.png", height=1240)
        shoot(browser, f"{runs.as_uri()}/terminal.html", "terminal.png", width=1000, height=200)
        with Server(("127.0.0.1", 0), Site([runs]), token=None, hosts=LOOPBACK) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            shoot(browser, f"http://127.0.0.1:{server.server_port}/#group=recipe", "dashboard.png", height=400)
            server.shutdown()
        browser.close()


if __name__ == "__main__":
    main()
