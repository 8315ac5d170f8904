"""TRL's published examples of tools and environments, unmodified: each script trains two steps.

    python benchmarks/foreign_scripts.py FOLDER --output benchmarks/results/foreign_scripts.json

FOLDER holds the scripts, which are not ours and not in this repository, and an index.json: a list of {"source":
"repository and path", "file": "name.py", "arguments": [...]}. `trl` in them is oncurve; the networks behind them are
the stand-ins of benchmarks/foreign_stand_ins.py; every model is the embedded one with TRL's chat template of Qwen2.5,
and a run is cut to two short steps on the CPU. That model has never seen a tool, so what it writes is replaced: two
calls of the tools that its prompt tells of, with arguments after their schemas, and then words. For each script the
result says how many steps were trained, how many calls were answered, with what errors, and what the episodes earned.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_episodes import CALL, END, ForcedTurns, replaced, speaking_model

MARK = "FOUND "
CALLS = 2
"""Turns with a call in each episode."""


def argument(schema: dict[str, Any], number: int) -> Any:
    """A value after a schema: one of those that its description names in quotes, if it does."""
    if schema.get("type") in ("integer", "number"):
        return 1 + number % 9
    named = re.findall(r"['\"](\w+)['\"]", schema.get("description", ""))
    return named[number % len(named)] if named else ["slate", "crane", "SELECT * FROM interactions"][number % 3]


def said(text: str, place: int) -> str:
    """The next turn of an episode: a call of a tool of the prompt, or its last words."""
    told = text.count("<tool_response>\n")
    if told >= CALLS:
        return "Now I know: *yes*"
    tools = [json.loads(line) for line in text.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()]
    function = tools[(place + told) % len(tools)]["function"]
    given = function["parameters"].get("properties", {})
    arguments = {name: argument(schema, place + told) for name, schema in given.items()}
    return CALL % (function["name"], json.dumps(arguments))


def calling_turns(engine: Any, *_: Any, **__: Any) -> ForcedTurns:
    """Turns of the engine that call tools."""
    tokenizer = engine._policy.tokenizer

    def say(token_ids: Sequence[int], place: int) -> list[int]:
        text = said(tokenizer.decode(list(token_ids)), place) + END
        return list(tokenizer.encode(text, add_special_tokens=False))

    return ForcedTurns(say)


def run_here(script: Path, words: list[str]) -> None:
    """One script, with everything replaced that is not its own."""
    from foreign_stand_ins import put_in_place

    from oncurve.rollouts.engine.engine import InProcessEngine
    from oncurve.trl import GRPOConfig, GRPOTrainer
    from oncurve.trl.names import trl_resolved

    put_in_place()
    model, own_init, own_train = speaking_model(Path("model")), GRPOTrainer.__init__, GRPOTrainer.train
    seen: list[dict[str, Any]] = []

    def init(self: Any, model_name: Any = None, reward_funcs: Any = None, args: Any = None, **named: Any) -> None:
        named.pop("model", None)
        short = copy.copy(args if args is not None else GRPOConfig("out"))
        short.max_steps, short.num_generations, short.per_device_train_batch_size = 2, 4, 8
        short.gradient_accumulation_steps, short.steps_per_generation, short.generation_batch_size = 1, None, None
        short.use_cpu, short.bf16, short.use_vllm, short.max_completion_length = True, False, False, 400
        short.output_dir, short.report_to, short.save_strategy, short.gradient_checkpointing = (
            "out",
            "none",
            "no",
            False,
        )
        own_init(self, model, reward_funcs, short, **named)

    def train(self: Any, *_: Any, **__: Any) -> None:
        for step in self._watched(self.oncurve.steps()):
            calls = [call for group in step.groups for one in group.completions for call in one.calls]
            answers = Counter(call.error or "answered" for call in calls)
            first = next((call.answer for call in calls if call.error), "")
            failed = {
                one.failure: one.failure_detail for group in step.groups for one in group.completions if one.failure
            }
            seen.append({"calls": dict(answers), "error": first[:200], "failed": failed, "metrics": step.metrics})

    with (
        replaced(GRPOTrainer, "__init__", init),
        replaced(GRPOTrainer, "train", train),
        replaced(InProcessEngine, "turns", calling_turns),
        trl_resolved(),
    ):
        assert own_train is not None
        sys.argv = [script.name, *words]
        runpy.run_path(str(script), run_name="__main__")
    calls: Counter[str] = Counter()
    for step in seen:
        calls.update(step["calls"])
    found = {
        "steps": len(seen),
        "turns": round(sum(step["metrics"]["episode/turns"] for step in seen) / len(seen), 2),
        "calls": dict(calls),
        "failed_fraction": max(step["metrics"]["episode/failed_fraction"] for step in seen),
        "reward_mean": round(sum(step["metrics"]["reward/mean"] for step in seen) / len(seen), 4),
    }
    errors = next((step["error"] for step in seen if step["error"]), "")
    failed = {kind: detail[:200] for step in seen for kind, detail in step["failed"].items()}
    found |= ({"first_error": errors} if errors else {}) | ({"failures": failed} if failed else {})
    sys.stdout.write("\n" + MARK + json.dumps(found) + "\n")


def run_apart(folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """What becomes of one script, in a process and an empty folder of its own."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), str(folder), "--one", entry["file"]]
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [*command, *entry.get("arguments", [])],
            cwd=place, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        return {"source": entry["source"], "steps": 0, "problem": (done.stdout + done.stderr).strip()[-500:]}
    return {"source": entry["source"], **json.loads(lines[-1].removeprefix(MARK))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", nargs=argparse.REMAINDER, help="run one script in this process")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.one:
        run_here(folder / arguments.one[0], arguments.one[1:])
        return
    results = []
    for entry in json.loads((folder / "index.json").read_text(encoding="utf-8")):
        results.append(run_apart(folder, entry))
        sys.stdout.write(json.dumps(results[-1]) + "\n")
        sys.stdout.flush()
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
