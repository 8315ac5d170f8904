"""How large is the report of a long run, how long does it take to write, and how soon can a browser show it?

    python benchmarks/report_size.py --steps 1000 --completions 128

Makes the folder of a run whose every step was kept, writes its report with the command, opens it from disk in a
headless Chromium without a network, and goes to another step. Fails above 30 MB or 3 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

import oncurve
from oncurve.observe.manifest import describe_run
from oncurve.observe.record import RunFolder
from oncurve.observe.tokens import TokenRecord
from oncurve.records import Completion, Group, Prompt, Reward

RESULTS = Path(__file__).resolve().parent / "results"
MAX_BYTES, MAX_SECONDS = 30_000_000, 3.0
GROUP_SIZE = 8
LOGPROBS_OF_PROMPTS = 8
"""The default of run.logprobs_of_prompts."""
REPORT = "import sys; from oncurve.cli.app import main; sys.argv = ['oncurve', 'report', sys.argv[1]]; main()"
NAMES = ("Anna", "Ben", "Carla", "Deniz", "Emma", "Farid", "Greta", "Hugo", "Iris", "Jonas", "Kim", "Lena")
THINGS = ("apples", "marbles", "pages", "coins", "stamps", "melons", "tickets", "shells", "cakes", "books")
VERBS = ("buys", "finds", "sells", "loses", "gives away", "gets", "bakes", "collects", "drops", "wins")


def worked(random_numbers: random.Random) -> str:
    """A worked solution of some 120 to 180 tokens: numbers that nobody can guess in sentences that return."""
    lines = []
    total = random_numbers.randrange(10, 900)
    for _ in range(random_numbers.randrange(4, 8)):
        change = random_numbers.randrange(2, 400)
        who, what, verb = (random_numbers.choice(words) for words in (NAMES, THINGS, VERBS))
        lines.append(f"{who} {verb} {change} {what}, so {total} + {change} = {total + change}.")
        total += change
    return " ".join(lines) + f"</think> <answer> {total} </answer>"


def groups(step: int, prompts: int, tokenizer: Tokenizer) -> Iterator[tuple[Group, list[Reward], list[float]]]:
    """The groups of a step, their rewards and advantages."""
    for place in range(prompts):
        numbers = random.Random(1_000_003 * step + place)
        prompt = Prompt(f"User: {worked(numbers)[:160]} How many?\nAssistant: <think>", (1,), numbers.randrange(8192))
        texts = [worked(numbers) for _ in range(GROUP_SIZE)]
        completions = tuple(
            Completion(
                (1,),
                tuple(ids := encoded.ids),
                text,
                tuple(-numbers.expovariate(6.0) for _ in ids),
                "stop",
                step - 1,
                index,
            )
            for index, (text, encoded) in enumerate(zip(texts, tokenizer.encode_batch(texts), strict=True))
        )
        right = [float(numbers.random() < step / 2000 + 0.3) for _ in completions]
        rewards = [Reward(value, {"correct": value, "format": 1.0}, detail="answer '1'") for value in right]
        mean = statistics.fmean(right)
        yield Group(prompt, completions), rewards, [value - mean for value in right]


def make_run(path: Path, steps: int, prompts: int) -> None:
    """The folder of the run; its metrics are those of the demo's keys with made-up values."""
    tokenizer = Tokenizer.from_file(str(Path(oncurve.__file__).parent / "assets" / "base_model" / "tokenizer.json"))
    keys = [f"{group}/number_{number}" for group in ("policy", "mismatch", "time", "memory") for number in range(10)]
    with RunFolder(path) as folder:
        folder.write_start("model: made-up\n", {"run": {"steps": steps}}, describe_run())
        for step in range(1, steps + 1):
            made = list(groups(step, prompts, tokenizer))
            tokens = TokenRecord(tokenizer, num_groups=LOGPROBS_OF_PROMPTS)
            folder.write_rollouts(
                step, [g for g, _, _ in made], [r for _, r, _ in made], [a for *_, a in made], tokens=tokens
            )
            numbers = random.Random(step)
            row = {key: numbers.random() for key in keys}
            row |= {"reward/mean": numbers.gauss(step / 2000 + 0.3, 0.03), "policy/gradient_norm": numbers.random()}
            row |= {"completion/mean_tokens": 150 + numbers.random(), "time/step_seconds": 10.0, "reward/std": 0.4}
            folder.write_metrics(step, row)


def open_page(page_file: Path, program: str) -> dict[str, float]:
    """Seconds until the page is drawn, and until another step's completions are."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=[] if os.geteuid() else ["--no-sandbox"])
        page = browser.new_context(offline=True).new_page()
        page.set_default_timeout(60_000)
        started = time.perf_counter()
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        ready = time.perf_counter() - started
        page.wait_for_selector(".completion")
        shown = time.perf_counter() - started
        at = page.evaluate("document.querySelector('select[aria-label=\"step\"]').options[10].value")
        started = time.perf_counter()
        page.select_option('select[aria-label="step"]', at)
        page.wait_for_selector(f"text=Step {at}, group 1")
        switched = time.perf_counter() - started
        version = browser.version
        browser.close()
    return {"curves_seconds": ready, "open_seconds": shown, "switch_seconds": switched, "chromium": version}


def measure(run: Path, program: str, repeats: int) -> dict[str, Any]:
    """Write the report and open it, so many times."""
    written, opened = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", REPORT, str(run)], check=True, capture_output=True)
        written.append(time.perf_counter() - started)
        opened.append(open_page(run / "report.html", program))
    boot = (run / "report.html").read_text(encoding="utf-8").split('id="boot">', 1)[1].split("</script>", 1)[0]
    told = json.loads(boot)
    return {
        "report_bytes": (run / "report.html").stat().st_size,
        "rollouts_bytes": sum(file.stat().st_size for file in (run / "rollouts").glob("*.jsonl")),
        "steps_recorded": told["recorded"],
        "steps_shown": len(told["steps"]),
        "steps_with_logprobs": len(told["token_steps"]),
        "write_seconds": [round(seconds, 3) for seconds in written],
        **{key: [round(one[key], 3) for one in opened] for key in ("curves_seconds", "open_seconds", "switch_seconds")},
        "chromium": opened[0]["chromium"],
    }


def main() -> int:
    """Measure, write the result, and judge it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--completions", type=int, default=128, help="per step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--run", type=Path, help="where the run is, or goes; a temporary folder if not given")
    chosen = parser.parse_args()
    if chosen.chromium is None:
        parser.error("there is no chromium on the path; name one with --chromium")
    with TemporaryDirectory() as folder:
        run = chosen.run or Path(folder) / "long-run"
        if not (run / "metrics.jsonl").is_file():
            make_run(run, chosen.steps, chosen.completions // GROUP_SIZE)
        result = measure(run, chosen.chromium, chosen.repeats)
    result = {"steps": chosen.steps, "completions": chosen.steps * chosen.completions, **result}
    is_good = result["report_bytes"] < MAX_BYTES and max(result["open_seconds"]) < MAX_SECONDS
    whole = {"run": describe_run(load_average=round(os.getloadavg()[0], 2)), "is_good": is_good, **result}
    (RESULTS / "report_size.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
