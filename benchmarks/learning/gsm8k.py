"""GSM8K with Qwen2.5-Coder-0.5B-Instruct: the cells of the study, and what is measured of each trained model.

    python benchmarks/bench.py study gsm8k --seeds 0 1 --threads 2 --detach
    python benchmarks/bench.py study gsm8k --seeds 0 --cells base --threads 2
    python benchmarks/bench.py study gsm8k --seeds 0 --cells float32 LoRA --threads 2

Rows are those of `gsm8k_train.jsonl`, `gsm8k_test.jsonl` and `math500.jsonl` in the folder of the variable
ONCURVE_BENCHMARK_DATA, or in shared/data beside the repository. The weights come from `bench.py fetch_models`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from fetch_models import PLACE
from real_model import answers_of, difference, evaluation_of, run_record
from record import ROOT
from study import Cell, Runs, Study, oncurve, shares

DATA = Path(os.environ.get("ONCURVE_BENCHMARK_DATA", ROOT.parent / "shared" / "data"))
MODEL = PLACE / "qwen2.5-coder-0.5b-instruct"
TOKENS = "rollouts.max_completion_tokens=400"
TRAINING = (
    f"model={MODEL}", f"data.path={DATA / 'gsm8k_train.jsonl'}", f"evaluation.data.path={DATA / 'gsm8k_test.jsonl'}",
    "evaluation.num_prompts=8", TOKENS,
)  # fmt: skip
"""Rows of this disk in the place of the hub's. What a model learned is measured by ``measured``."""
CONTROL = ("run.save_every_steps=20", "sft.epochs=null", "run.steps={updates}", *TRAINING)
TEXTS = 50
"""Problems whose texts are compared with those of transformers."""
GREEDY = ("evaluation.samples=1", "evaluation.temperature=0", "evaluation.top_p=1")
"""MATH-500 is published with four samples of each problem, which would take four times as long."""
TESTS = {"gsm8k": "gsm8k_test.jsonl", "math500": "math500.jsonl"}
IN_TYPES = {
    "float32": ("policy.compute_type=float32",),
    "dither": ("policy={compute_type: bfloat16, rounding: dither}",),
    "nearest": ("policy={compute_type: bfloat16, rounding: nearest}",),
}


def evaluated(runs: Runs, model: Path, name: str, test: str) -> Path:
    """The evaluation of a model on all problems of a test, greedy; made if it is not there."""
    place = runs.folder / "evaluations" / f"{name}-{test}"
    if not evaluation_of(place).is_file():
        words = ("--benchmark", test, "--output", str(place), *_asked(test))
        oncurve(runs.folder, runs.threads, "evaluate", str(model), *words, *runs.overrides)
    return place


def _asked(test: str) -> tuple[str, ...]:
    return f"data.path={DATA / TESTS[test]}", TOKENS, *GREEDY


def measured(runs: Runs, model: Path, name: str) -> dict[str, Any]:
    """Base and model on all problems of both tests, greedy, and the change on the same problems."""
    found: dict[str, Any] = {}
    for test in TESTS:
        places = {"base": evaluated(runs, MODEL, "base", test), "trained": evaluated(runs, model, name, test)}
        answers = (answers_of(evaluation_of(place)) for place in places.values())
        found[test] = {side: shares(place, "evaluation") for side, place in places.items()} | difference(*answers)
    tested, other = (found[test] for test in TESTS)
    return {**tested, "transfer": other}


def before_training(runs: Runs) -> dict[str, Any]:
    """The base on both tests, and how many of the first problems transformers' generate answers with the same text."""
    places = {test: evaluated(runs, MODEL, "base", test) for test in TESTS}
    texts = {test: beside_transformers(runs.folder, MODEL, place, test) for test, place in places.items()}
    return {test: {"base": shares(place, "evaluation"), **texts[test]} for test, place in places.items()}


def beside_transformers(folder: Path, model: Path, evaluation: Path, test: str) -> dict[str, Any]:
    """The first problems of an evaluation answered by transformers' generate in float32: how many texts are the same,
    and how many characters of the others agree."""
    from oncurve.policy.model_folder import load_tokenizer  # lazy
    from oncurve.recipe.load import load_config  # lazy
    from oncurve.run.measuring import find_benchmark  # lazy
    from oncurve.run.rendered import benchmark_rows, make_prompts  # lazy

    config = load_config(find_benchmark(test), [*_asked(test), f"model={json.dumps(str(model))}"])
    rendered = make_prompts(config, load_tokenizer(str(model))[1], context_tokens=None, rows=benchmark_rows(config))
    asked, written = evaluation / "prompts.json", evaluation / "transformers.json"
    asked.write_text(json.dumps([prompt.text for prompt in rendered.test[:TEXTS]]), encoding="utf-8")
    if not written.is_file():
        script, tokens = Path(__file__).with_name("greedy_texts.py"), TOKENS.partition("=")[2]
        words = ("--engine", "transformers", "--tokens", tokens, "--rows", "16", "--output", str(written))
        subprocess.run([sys.executable, str(script), str(model), str(asked), *words], cwd=folder, check=True)
    own = [row["completion"] for row in answers_of(evaluation_of(evaluation))[:TEXTS]]
    pairs = list(zip(own, json.loads(written.read_text(encoding="utf-8")), strict=True))
    agreeing = [
        sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False)))
        for pair in pairs
        if pair[0] != pair[1]
    ]
    return {"as_transformers": {"same": len(pairs) - len(agreeing), "of": len(pairs), "others_agree_for": agreeing}}


def course(run: Path) -> dict[str, Any]:
    """The course of a run, its seconds and tokens; the driver reads the seconds of its steps by their name."""
    record = run_record(run)
    return {**record, "grpo_seconds": record["seconds"]}


def study() -> Study:
    """All weights in three types, LoRA, best of n by the reward, and supervised training for as many seconds."""
    cells = [Cell(name, words, recipe="gsm8k_qwen") for name, words in IN_TYPES.items()]
    cells[0] = replace(cells[0], control="gsm8k_qwen/sft")
    cells[2] = replace(cells[2], seeds=1)
    cells.append(Cell("LoRA", ("policy.compute_type=float32",), recipe="gsm8k_qwen/lora", seeds=1))
    cells.insert(0, Cell("base", seeds=1, figures=before_training))
    best = ("policy.compute_type=float32", "algorithm.type=rft", "optimizer.learning_rate=1e-5")
    cells.append(Cell("best of 8", best, recipe="gsm8k_qwen", seeds=1))
    about = (
        "GRPO on GSM8K with a model of 0.5B, beside supervised training and best of n; on GSM8K's test and MATH-500."
    )
    return Study(
        about, tuple(cells), (course,), TRAINING, control_settings=CONTROL, measure=measured,
        facts={"model": "Qwen2.5-Coder-0.5B-Instruct from weights of 5 to 8 bits"},
    )  # fmt: skip
