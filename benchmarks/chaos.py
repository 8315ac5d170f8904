"""How soon is the death of a rollout server noticed, and is every completion still right?

Servers sample for a pool while they are killed, stopped, cut off and replaced, one fault after another. Each
step has other weights. Every completion is compared with that of the engine in this process, token by token and
log-probability by log-probability; where rounding drew another token, with the model itself. One from other weights, or
one for another place, would be seen.

    python benchmarks/chaos.py --output benchmarks/results/chaos.json
    python benchmarks/chaos.py --vllm vllm-env/bin/python        with servers of vLLM

Reported for each fault: seconds until the pool knows, seconds until the step that it met is complete, seconds from the
repair until the server samples again with the right weights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from machine import RESULTS, describe_machine
from transformers.utils import logging as transformers_logging

from oncurve.data.prompts import render_prompts
from oncurve.observe.run_model import EMBEDDED
from oncurve.policy.model_folder import load_model
from oncurve.policy.policy import TrainedPolicy
from oncurve.records import Completion, Prompt
from oncurve.rollouts.base import SamplingParams
from oncurve.rollouts.engine.engine import InProcessEngine
from oncurve.rollouts.servers.local_vllm import VllmServers
from oncurve.rollouts.servers.registry import register
from oncurve.rollouts.servers.server_sampler import ServerSampler
from oncurve.settings import Deadlines, OptimizerSettings
from oncurve.tasks.word_problems import word_problems

COMMAND = [sys.executable, "-c", "from oncurve.cli.app import main; main()"]
transformers_logging.disable_progress_bar()
PARAMS = SamplingParams(max_completion_tokens=200, min_completion_tokens=100, seed=1)
"""Long completions, so that a fault meets them."""
GROUP = 4
REFUSED_SECONDS = 3.0
"""How long nobody is there, at least: on top comes what a start takes."""


@dataclass
class Fault:
    """What one fault did."""

    what: str
    detect_seconds: float | None
    step_seconds: float
    """From the fault to the end of the step that it met."""
    ready_seconds: float | None
    """From the repair, a new process included, until the server samples again; None where there is none."""


class Servers:
    """Processes of ``oncurve serve``, each on a port that it gets again when it is started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, port: int = 0) -> str:
        log = self.folder / f"server_{len(list(self.folder.glob('server_*')))}.txt"
        words = ["serve", "embedded", "--port", str(port), "--registry", str(self.folder / "registry")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            process = subprocess.Popen([*COMMAND, *words], stdout=file, stderr=file, env=environment)
        while not (found := re.search(r"serving on (\S+)", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(f"a server did not start: {log.read_text()}")
            time.sleep(0.02)
        self.processes[found[1]] = process
        return found[1]

    def again(self, url: str) -> None:
        """Start a server that ended again, with the base's weights, under its old address."""
        self.start(int(url.rsplit(":", 1)[1]))

    def signal(self, url: str, number: int) -> None:
        self.processes[url].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[url].wait()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class VllmProcesses:
    """The same for vLLM's servers, which come back by themselves."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder, self.python = folder, python
        self.crews: list[VllmServers] = []

    def start(self, count: int = 1) -> str:
        """So many servers; those that come later leave their address where the pool looks."""
        crew = VllmServers(
            str(EMBEDDED), count, python=self.python, dtype="float32", on_cpu=True, logs=self.folder, notify=print
        )
        if self.crews:
            register(self.folder / "registry", crew.urls[0])
        self.crews.append(crew)
        return crew.urls[0]

    @property
    def urls(self) -> list[str]:
        return [url for crew in self.crews for url in crew.urls]

    def again(self, url: str) -> None:
        """Nothing: whoever started it watches over it."""

    def signal(self, url: str, number: int) -> None:
        crew = next(crew for crew in self.crews if url in crew.urls)
        os.killpg(crew.process_of(url).pid, number)

    def close(self) -> None:
        for crew in self.crews:
            crew.close()


class Stage:
    """A sampler on servers, and a thread that asks it for one step after another, each with other weights."""

    def __init__(self, sampler: ServerSampler, prompts: list[Prompt], policy: TrainedPolicy, *, check: bool) -> None:
        self.sampler, self.prompts, self.policy, self.check = sampler, prompts, policy, check
        self.step = -1
        self.completions = self.tokens = self.wrong = self.drawn_otherwise = 0
        self.largest_difference = 0.0
        self.ended: dict[int, float] = {}
        self._stop = threading.Event()
        self._engine = InProcessEngine(PARAMS)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        step = 0
        while not self._stop.is_set():
            with torch.no_grad():
                for parameter in self.policy.model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            self.sampler.load_weights(self.policy, version=step)
            self.step = step
            groups = self.sampler.sample(self.prompts, GROUP, step=step)
            self.ended[step] = time.perf_counter()
            self._compare(step, [one for group in groups for one in group.completions])
            step += 1

    def _compare(self, step: int, found: list[Completion]) -> None:
        assert len(found) == len(self.prompts) * GROUP
        self.completions += len(found)
        self.tokens += sum(len(one.token_ids) for one in found)
        own: list[Completion | None] = [None] * len(found)
        if self.check:
            self._engine.load_weights(self.policy, version=step)
            groups = self._engine.sample(self.prompts, GROUP, step=step)
            own = [one for group in groups for one in group.completions]
        for one, other in zip(found, own, strict=True):
            is_same = other is not None and other.token_ids == one.token_ids
            self.drawn_otherwise += self.check and not is_same
            expected = other.sampler_logprobs if other is not None and is_same else self._teacher_forced(one)
            pairs = zip(one.sampler_logprobs, expected, strict=True)
            difference = max(abs(ours - theirs) for ours, theirs in pairs)
            self.largest_difference = max(self.largest_difference, difference)
            self.wrong += one.policy_version != step or difference > 1e-3

    @torch.no_grad()
    def _teacher_forced(self, one: Completion) -> list[float]:
        ids = torch.tensor([[*one.prompt_ids, *one.token_ids]])
        logits = self.policy.model(ids).logits[0, len(one.prompt_ids) - 1 : -1]
        return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0].tolist()

    def until(self, is_so: Callable[[], bool], *, seconds: float = 240.0) -> float:
        """Wait; the seconds that it took."""
        started = time.perf_counter()
        while not is_so():
            if time.perf_counter() - started > seconds:
                raise SystemExit(f"it did not come to that within {seconds:g} s: {self.states()}")
            if not self._thread.is_alive():
                raise SystemExit("sampling has ended: see above")
            time.sleep(0.002)
        return time.perf_counter() - started

    def since(self, moment: float, is_so: Callable[[], bool]) -> float:
        """Wait; the seconds since a moment."""
        self.until(is_so)
        return time.perf_counter() - moment

    def states(self) -> dict[str, str]:
        return {server.url: server.state for server in self.sampler.pool.servers}

    def sampling_on(self, url: str) -> None:
        """Wait until a server has something to sample."""
        server = next(one for one in self.sampler.pool.servers if one.url == url)
        self.until(lambda: server.state == "ready" and server.outstanding_rows > 0)

    def end_of_step(self, step: int, since: float) -> float:
        self.until(lambda: step in self.ended)
        return self.ended[step] - since

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def left(stage: Stage, url: str) -> Callable[[], bool]:
    return lambda: stage.states()[url] == "down"


def back(stage: Stage, url: str) -> Callable[[], bool]:
    return lambda: stage.states().get(url) == "ready"


def strike(stage: Stage, servers: Servers | VllmProcesses, url: str, number: int) -> tuple[float, float]:
    """Signal a server; seconds until the pool counts it as lost, and until the step that it met is complete."""
    step, struck = stage.step, time.perf_counter()
    servers.signal(url, number)
    detect = stage.since(struck, left(stage, url))
    return detect, stage.end_of_step(step + (step in stage.ended), struck)


def again(stage: Stage, servers: Servers | VllmProcesses, url: str) -> float:
    """Start a server again, or wait until it was; seconds until it samples."""
    started = time.perf_counter()
    servers.again(url)
    stage.until(back(stage, url))
    return time.perf_counter() - started


def faults(stage: Stage, servers: Servers | VllmProcesses, urls: list[str], stopped_seconds: float) -> Iterator[Fault]:
    """Everything that can happen to servers."""
    first, second = urls
    stage.sampling_on(first)
    struck = strike(stage, servers, first, signal.SIGKILL)
    yield Fault("killed while it samples, started again with the base weights", *struck, again(stage, servers, first))
    stage.until(lambda: stage.states()[first] == "syncing")
    struck = strike(stage, servers, first, signal.SIGKILL)
    yield Fault("killed while it takes weights, started again", *struck, again(stage, servers, first))
    stage.sampling_on(second)
    stopped = time.perf_counter()
    struck = strike(stage, servers, second, signal.SIGSTOP)
    time.sleep(max(0.0, stopped_seconds - (time.perf_counter() - stopped)))
    servers.signal(second, signal.SIGCONT)
    yield Fault(
        f"stopped while it samples, let go on after {stopped_seconds:g} s or more",
        *struck,
        stage.until(back(stage, second)),
    )
    started = time.perf_counter()
    third = servers.start()
    stage.until(back(stage, third))
    yield Fault("a third one joins", None, 0.0, time.perf_counter() - started)
    yield from all_gone(stage, servers, [first, second, third])
    if isinstance(servers, Servers):  # vLLM ends at once when it is told to go, as if it were killed
        stage.sampling_on(first)
        step, struck_at = stage.step, time.perf_counter()
        servers.signal(first, signal.SIGTERM)
        detect = stage.since(struck_at, lambda: stage.states()[first] != "ready")
        yield Fault("told to go (SIGTERM): ends what it has", detect, stage.end_of_step(step, struck_at), None)


def all_gone(stage: Stage, servers: Servers | VllmProcesses, urls: list[str]) -> Iterator[Fault]:
    """Nobody listens for a while; then they come back one by one."""
    stage.sampling_on(urls[1])
    step, struck = stage.step, time.perf_counter()
    for url in urls:
        servers.signal(url, signal.SIGKILL)
    detect = stage.since(struck, lambda: set(stage.states().values()) == {"down"})
    time.sleep(REFUSED_SECONDS)
    ready = again(stage, servers, urls[0])
    refused = time.perf_counter() - struck
    yield Fault(
        f"all killed: nobody samples for {refused:.0f} s, then one does", detect, stage.end_of_step(step, struck), ready
    )
    again(stage, servers, urls[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", help="python of an environment with vLLM")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--silent", type=float, default=4.0, help="seconds of silence until a server counts as lost")
    parser.add_argument("--stopped", type=float, default=15.0, help="seconds for which one is stopped, at least")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model("embedded")
    policy = TrainedPolicy(model, tokenizer, optimizer=OptimizerSettings())
    rows = [{"question": one.question, "answer": one.answer} for one in word_problems("test", asked.prompts, seed=5)]
    prompts, _ = render_prompts(rows, tokenizer, template="think_answer")  # type: ignore[arg-type]
    deadlines = Deadlines(silent_seconds=asked.silent, gone_seconds=300.0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        servers = VllmProcesses(folder, asked.vllm) if asked.vllm else Servers(folder)
        if isinstance(servers, VllmProcesses):
            servers.start(2)
            urls = servers.urls
        else:
            urls = [servers.start(), servers.start()]
        # under a minimum vLLM's log-probabilities are those of what is left without the end token, ours those of all
        sampler = ServerSampler(
            replace(PARAMS, min_completion_tokens=0) if asked.vllm else PARAMS,
            urls=urls,
            registry=folder / "registry",
            weights_folder=folder,
            deadlines=deadlines,
            notify=lambda text: print(f"    {text}", flush=True),
        )
        stage = Stage(sampler, prompts, policy, check=not asked.vllm)
        found_faults: list[Fault] = []
        try:
            stage.until(lambda: list(stage.states().values()).count("ready") == 2, seconds=300.0)
            for fault in faults(stage, servers, urls, asked.stopped):
                found_faults.append(fault)
                print(json.dumps(asdict(fault)), flush=True)
        finally:
            stage.close()
            sampler.close()
            servers.close()
    found = {
        "servers": "vllm" if asked.vllm else "oncurve serve",
        "machine": describe_machine(),
        "silent_seconds": deadlines.silent_seconds,
        "steps": len(stage.ended),
        "completions": stage.completions,
        "tokens": stage.tokens,
        "wrong_completions": stage.wrong,
        "drawn_otherwise_by_rounding": None if asked.vllm else stage.drawn_otherwise,
        "largest_logprob_difference": stage.largest_difference,
        "attempts": dict(sampler.pool.counts),
        "faults": [asdict(fault) for fault in found_faults],
    }
    print(json.dumps({key: found[key] for key in found if key not in ("machine", "faults")}))
    if asked.output:
        (asked.output if asked.output.is_absolute() else RESULTS / asked.output.name).write_text(
            json.dumps(found, indent=2) + "\n"
        )
    raise SystemExit(1 if stage.wrong else 0)


if __name__ == "__main__":
    main()
