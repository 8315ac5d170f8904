"""Runs whose rewards are hostile, slow, broken or without signal."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import fault_tools as tools
from fault_bench import VARIANTS, Bench, Report, Scenario, recover

HOSTILE = '''
import os, random, time

def reward(completion, answer):
    """Hangs, dies, allocates or raises for some completions, always the same ones."""
    way = sum(map(ord, completion)) % 12
    if way == 0:
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    if way == 1:
        os._exit(0)
    if way == 2:
        os.kill(os.getpid(), 11)
    if way == 3:
        return len(bytearray(10**11))
    if way == 4:
        raise RuntimeError("no reward today")
    return float(len(completion) % 2)

def constant(completion, answer):
    return 1.0
'''


def grading_scenarios(bench: Bench) -> Iterator[Scenario]:
    """Scenarios 10 to 14: graders, losses and groups that give nothing."""
    script = bench.folder / "graders.py"

    def custom(function: str) -> str:
        script.write_text(HOSTILE)
        return f"rewards=[{{type: custom, function: '{script}:{function}', isolate: true, timeout_seconds: 1.0}}]"

    def hostile() -> Report:
        words = (custom("reward"), "run.max_error_fraction=1.0")
        run, started = bench.run("hostile", VARIANTS[0], *words)
        codes = started.wait()
        groups = [json.loads(line) for path in (run / "rollouts").iterdir() for line in path.read_text().splitlines()]
        graded = [completion for group in groups for completion in group["completions"]]
        hostile_ones = [c for c in graded if sum(map(ord, c["text"])) % 12 < 5]
        paid = [c for c in hostile_ones if c["reward"] is not None]
        zero = [c for c in graded if c["error"] and (c["reward"] is not None or c["advantage"])]
        others = sum(c["reward"] is None for c in graded) - len(hostile_ones)
        left = tools.leftovers(bench.mark)
        passed = codes == [0] and bool(hostile_ones) and not paid and not zero and not left
        note = (
            f"{len(hostile_ones)} of {len(graded)} cannot be graded, and {others} more were graded together "
            f"with them; none counts as wrong"
        )
        return Report(
            "graders that hang, die, allocate", VARIANTS[0].name, num_left_over=len(left), has_passed=passed, note=note
        )

    yield "graders that hang, die, allocate", hostile

    def judge() -> Report:
        port = tools.free_port()
        server = os.fork()
        if server == 0:
            serve_rubbish(port)
        try:
            words = (
                f"rewards=[{{type: judge, base_url: 'http://127.0.0.1:{port}/v1', model: x, timeout_seconds: 5.0}}]",
                "run.max_error_fraction=1.0",
                "run.steps=2",
                "run.prompts_per_step=2",
                "evaluation.every_steps=0",
            )
            run, started = bench.run("judge", VARIANTS[0], *words)
            codes = started.wait()
        finally:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
        groups = [json.loads(line) for path in (run / "rollouts").iterdir() for line in path.read_text().splitlines()]
        graded = [completion for group in groups for completion in group["completions"]]
        bad = [c for c in graded if c["error"] and c["reward"] is not None]
        failed = sum(c["error"] is not None for c in graded)
        passed = codes == [0] and bool(graded) and not bad and 0 < failed < len(graded)
        note = f"{failed} of {len(graded)} ungraded after retries, exit codes {codes}"
        return Report("a judge that answers errors and rubbish", VARIANTS[0].name, has_passed=passed, note=note)

    yield "a judge that answers errors and rubbish", judge

    def not_finite(times: int) -> Callable[[], Report]:
        name = f"{times} losses that are not finite"

        def scenario() -> Report:
            run, started = bench.run(f"nan_{times}", VARIANTS[0], poison=times)
            codes = started.wait()
            if times >= 3:
                passed = codes == [7] and "Traceback" not in started.main.output
                stopped_after = tools.recorded_steps(run)
                seconds, _ = recover(bench, run, VARIANTS[0])
                steps = [row["step"] for row in tools.rows_of(run)]
                passed &= steps == list(range(bench.num_steps(VARIANTS[0]) + 1))
                note = f"exit codes {codes} in step {stopped_after + 1}, then resumed to the end"
                return Report(name, VARIANTS[0].name, recover_seconds=seconds, has_passed=passed, note=note)
            rows = tools.rows_of(run)
            counted = sum(row.get("policy/nonfinite_updates", 0.0) for row in rows)
            note = f"exit codes {codes}, counted {counted:g}"
            return Report(name, VARIANTS[0].name, has_passed=codes == [0] and counted == times, note=note)

        return scenario

    yield "1 losses that are not finite", not_finite(1)
    yield "99 losses that are not finite", not_finite(99)

    def no_signal() -> Report:
        run, started = bench.run("no_signal", VARIANTS[0], custom("constant"))
        codes = started.wait()
        skipped = [row.get("policy/skipped_updates") for row in tools.rows_of(run) if row["step"]]
        from safetensors.torch import load_file

        from oncurve.observe.run_model import EMBEDDED

        base, trained = (load_file(place / "model.safetensors") for place in (EMBEDDED, run / "model"))
        same = all(bool((base[name] == trained[name]).all()) for name in trained)
        passed = codes == [0] and set(skipped) == {1.0} and same
        return Report(
            "no signal in any group", VARIANTS[0].name, has_passed=passed, note="every update skipped, no weight moved"
        )

    yield "no signal in any group", no_signal

    def fresh() -> Report:
        """A step's completions come from its own weights, and every prompt comes once before any comes again."""
        run = bench.clean(VARIANTS[0])
        groups = [
            json.loads(line) for path in sorted((run / "rollouts").iterdir()) for line in path.read_text().splitlines()
        ]
        stale = [c for g in groups for c in g["completions"] if c["policy_version"] != g["step"] - 1]
        seen = [group["index"] for group in groups]
        passed = bool(groups) and not stale and len(set(seen)) == len(seen)
        note = f"{len(groups)} groups of the clean run, none stale, no prompt twice"
        return Report("stale or repeated samples", VARIANTS[0].name, has_passed=passed, note=note)

    yield "stale or repeated samples", fresh


def serve_rubbish(port: int) -> None:
    """A judge: errors, rubbish, and now and then a mark, in turn."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    numbers = iter(range(10**9))

    class Rubbish(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            word = re.search(r"VERDICT (\w+): N", asked)
            draw = random.Random(next(numbers) * 7919).random()
            code = 429 if draw < 0.25 else 500 if draw < 0.5 else 200
            said = "banana" if draw < 0.75 or word is None else f"Fine.\nVERDICT {word[1]}: 7"
            answer = {"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]}
            body = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    HTTPServer(("127.0.0.1", port), Rubbish).serve_forever()
