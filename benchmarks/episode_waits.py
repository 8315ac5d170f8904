"""What it costs that tools take time: 64 rows whose tool takes 200 ms against an instant one, and one that hangs.

    python benchmarks/episode_waits.py --output benchmarks/results/episode_waits.json

The model is a base that calls the calculator: --model, or without one what `oncurve coldstart --task calculator` makes,
in some minutes. Rows leave the batch while their tool works, so that 64 tools that wait do so at the same time. The
last part has one call that never ends: when the other 63 rows were done, and when the call was given up. Run it on an
idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROWS = 64
CANDIDATES = 4 * ROWS
"""Problems of which those are taken whose episode calls the tool; a base does not always."""
SLOW_SECONDS = 0.2
LIMIT_SECONDS = 10.0


def tool(seconds: float, hangs: Callable[[], bool]) -> Callable[[str], str]:
    """A calculator that takes its time."""
    forever = threading.Event()

    def calculator(expression: str) -> str:
        """
        Works out an arithmetic expression.

        Args:
            expression: Numbers and signs.
        """
        from oncurve.rollouts.episodes.calculator import evaluate

        if hangs():
            forever.wait(4 * LIMIT_SECONDS)
        if seconds:
            time.sleep(seconds)
        return evaluate(expression)

    return calculator


def make_sampler(model: Path, function: Callable[..., Any]) -> Any:
    """The engine with episodes in which a function is the tool."""
    from oncurve.policy.model_folder import load_model
    from oncurve.policy.policy import TrainedPolicy
    from oncurve.rollouts.base import SamplingParams
    from oncurve.rollouts.engine.engine import InProcessEngine
    from oncurve.rollouts.episodes.dialects import TagDialect
    from oncurve.rollouts.episodes.episode import EpisodeLimits
    from oncurve.rollouts.episodes.episode_sampler import EpisodeSampler
    from oncurve.rollouts.episodes.episode_setup import EpisodeSetup
    from oncurve.rollouts.episodes.tools import tools_of
    from oncurve.settings import OptimizerSettings

    network, tokenizer = load_model(str(model))
    params = SamplingParams(max_completion_tokens=48)
    setup = EpisodeSetup(
        tools=tools_of([function]),
        kinds={},
        make_dialect=lambda tokenizer: TagDialect(tokenizer),
        rerender=lambda tokenizer, prompt, words: (prompt.text, prompt.prompt_ids),
        limits=EpisodeLimits(max_turns=2, max_answer_tokens=24, tool_seconds=LIMIT_SECONDS),
    )
    sampler = EpisodeSampler(InProcessEngine(params), params, setup)
    sampler.load_weights(TrainedPolicy(network, tokenizer, optimizer=OptimizerSettings(learning_rate=1e-4)), version=0)
    return sampler, tokenizer


def one_call(sampler: Any, prompts: list[Any]) -> tuple[float, list[float], int]:
    """Seconds of a call of sample, when each row was done, and how many tools were called."""
    ended: list[float] = []
    started = time.perf_counter()
    sampler.on_group = lambda group: ended.append(time.perf_counter() - started)
    groups = sampler.sample(prompts, 1, step=0)
    calls = sum(len(one.calls) for group in groups for one in group.completions)
    return time.perf_counter() - started, sorted(ended), calls


def made_base(folder: Path) -> Path:
    """A base that calls the calculator."""
    command = [sys.executable, "-m", "oncurve", "coldstart", "--task", "calculator", "--output", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def calling_prompts(sampler: Any, prompts: list[Any]) -> list[Any]:
    """The prompts whose episode calls the tool in step 0, as many as there are rows."""
    groups = sampler.sample(prompts, 1, step=0)
    found = [prompt for prompt, group in zip(prompts, groups, strict=True) if group.completions[0].calls]
    if len(found) < ROWS:
        raise SystemExit(
            f"{len(found)} of {len(prompts)} rows called the tool; take a base that was trained for longer"
        )
    return found[:ROWS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        text = json.dumps(measured(arguments.model or made_base(Path(place) / "base"), arguments.repeats), indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


def measured(model: Path, repeats: int) -> dict[str, Any]:
    """Each part in turn."""
    from machine import describe_machine

    from oncurve.records import Prompt
    from oncurve.tasks.calculator_problems import PROMPT, calculator_problems

    found: dict[str, Any] = {"rows": ROWS, "tool_seconds": SLOW_SECONDS}
    texts = [PROMPT.format(question=problem.question) for problem in calculator_problems("train", CANDIDATES)]
    sampler, tokenizer = make_sampler(model, tool(0.0, lambda: False))
    made = [Prompt(text, tuple(tokenizer.encode(text)), place) for place, text in enumerate(texts)]
    prompts = calling_prompts(sampler, made)
    sampler.close()
    first = iter([True])
    for name, function in (
        ("instant", tool(0.0, lambda: False)),
        ("slow", tool(SLOW_SECONDS, lambda: False)),
        ("one_hangs", tool(0.0, lambda: next(first, False))),
    ):
        sampler, _ = make_sampler(model, function)
        if name == "one_hangs":
            _, ended, calls = one_call(sampler, prompts)
            found[name] = {"others_done_seconds": ended[-2], "given_up_seconds": ended[-1], "calls": calls}
        else:
            runs = [one_call(sampler, prompts) for _ in range(repeats + 1)][1:]
            found[name] = {"seconds": median(run[0] for run in runs), "calls": runs[0][2]}
        sampler.close()
    found["ratio"] = found["slow"]["seconds"] / found["instant"]["seconds"]
    return found | {"run": describe_machine()}


if __name__ == "__main__":
    main()
