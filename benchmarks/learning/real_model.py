"""What a pretrained model of 135M learns on a laptop: sums by GRPO, GSM8K by a supervised stage and GRPO.

    python benchmarks/bench.py real_model FOLDER --data GSM8K --detach        everything, in the background
    python benchmarks/bench.py real_model FOLDER --data GSM8K --stages sums trl
    python benchmarks/bench.py real_model FOLDER --data GSM8K --stages choose     then base sft grpo control
    python benchmarks/bench.py real_model FOLDER --report --output benchmarks/results/real_model.json

The model is SmolLM2-135M-Instruct of ``fetch_models.py``: weights of four bits turned into bfloat16, not the published
ones. GSM8K is a folder with gsm8k_train.jsonl and gsm8k_test.jsonl. Runs, evaluations and FOLDER/log.txt are written
into FOLDER. The same command goes on after a kill at any minute: what is finished is left alone, runs continue from
their newest checkpoint and evaluations from their last part; the comparison with TRL begins again. ``choose`` measures
learning rates and passes on rows held out of GSM8K's training set, and later stages take the best; without it they take
those of the recipe. ``--report`` writes what there is, and names what is not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

from fetch_models import PLACE, fetch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from record import read_result

from oncurve.observe.manifest import describe_run
from oncurve.observe.record import read_json, read_metrics, read_rows, write_json
from oncurve.stats import mcnemar_exact, paired_difference_interval

HERE = Path(__file__).resolve().parent
SUMS = str(HERE / "sums.yaml")
MODEL = "smollm2-135m"
SHARES = ("fraction", "low", "high", "successes", "total")
QUIET = ("evaluation.num_prompts=8",)
"""For runs whose model an evaluation of its own measures."""
HELD_OUT = 1024
"""Last rows of GSM8K's training set, on which settings are chosen."""
SUPERVISED_CHOICES = ((5e-5, 1), (1e-4, 1), (2e-4, 1), (2e-4, 2))
"""Learning rate and passes over the rows."""
GRPO_CHOICES = (5e-6, 1e-5, 2e-5)
"""Learning rates."""
COURSE = (
    "reward/mean", "group/zero_signal_fraction", "completion/mean_tokens", "completion/truncated_fraction",
    "policy/entropy", "time/step_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Study:
    """A folder of runs, and what was asked."""

    folder: Path
    name: str
    """Of the model, as fetch_models has it."""
    data: Path
    rows: int
    """Test rows of GSM8K that each model answers, from the first on."""
    seeds: tuple[int, ...]
    sft_steps: int
    grpo_steps: int
    trl_steps: int
    trl_settings: tuple[str, ...]
    trl_compute: str
    """Type in which oncurve computes beside TRL."""
    vllm_python: Path | None
    choices: tuple[tuple[float, int], ...]
    """Learning rates and passes of the supervised stage of which one is chosen."""
    grpo_choices: tuple[float, ...]
    """Learning rates of GRPO of which one is chosen."""
    choice_steps: int
    """Steps of GRPO with each learning rate of which one is chosen."""
    jobs: int
    """Runs at the same time, where they do not wait for each other."""
    more: tuple[str, ...]
    """Settings for every run on sums and on GSM8K, and for evaluations on GSM8K."""
    sft_more: tuple[str, ...]
    """Settings for supervised training on GSM8K."""
    grpo_more: tuple[str, ...]
    """Settings for GRPO on GSM8K."""

    @property
    def model(self) -> Path:
        return PLACE / self.name

    def gsm8k(self) -> tuple[str, ...]:
        """Settings that put the rows on this disk in the place of those on the hub."""
        train, test = self.data / "gsm8k_train.jsonl", self.data / "gsm8k_test.jsonl"
        return f"data.path={train}", f"evaluation.data.path={test}"

    def command(self, *words: object, python: Path | str = sys.executable) -> None:
        """A command whose output goes to the log; its last words are shown if it fails."""
        with (self.folder / "log.txt").open("a+", encoding="utf-8") as log:
            log.write(f"$ {' '.join(map(str, words))}\n")
            log.flush()
            done = subprocess.run([str(python), *map(str, words)], cwd=self.folder, stdout=log, stderr=log, check=False)
        if done.returncode:
            last = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-1500:]
            raise SystemExit(f"{' '.join(map(str, words))} ended with status {done.returncode}:\n{last}")

    def side_by_side(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of tasks of which ``jobs`` run at the same time."""
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(lambda task: task(), tasks))

    def chosen(self, stage: str) -> dict[str, Any] | None:
        """The settings that were best on held-out rows, if that was measured."""
        place = self.folder / "chosen.json"
        return read_json(place)[stage]["best"] if place.exists() else None

    def rate(self, stage: str) -> tuple[str, ...]:
        """The learning rate that was chosen for a stage, as a setting; none where the recipe's counts."""
        best = self.chosen(stage)
        return (f"optimizer.learning_rate={best['learning_rate']}",) if best else ()

    def oncurve(self, *words: object) -> None:
        self.command("-m", "oncurve", *words)

    def run(self, verb: str, recipe: str, name: str, *settings: str) -> Path:
        """A run that is finished when this returns: begun, continued, or there already."""
        place = self.folder / "runs" / name
        if phase_of(place) == "finished":
            return place
        if any((place / "checkpoints").glob("step_*")):
            self.oncurve("resume", place)
        else:
            shutil.rmtree(place, ignore_errors=True)
            self.oncurve(verb, recipe, f"run.name={name}", *settings)
        return place

    def evaluate(self, name: str, model: Path, *settings: str) -> Path:
        """Greedy answers of a model to the test rows of GSM8K."""
        place = self.folder / "evaluated" / name
        if not evaluation_of(place).exists():
            asked = (*self.more, f"evaluation.num_prompts={self.rows}", *settings)
            self.oncurve("evaluate", "gsm8k_small", *self.gsm8k(), *asked, "--model", model, "--output", place)
        return place


def phase_of(run: Path) -> str | None:
    status = run / "status.json"
    return read_json(status).get("phase") if status.exists() else None


def evaluation_of(place: Path) -> Path:
    return place / "evaluations" / "evaluation.json"


def sums(study: Study) -> None:
    """GRPO on sums with each seed, measured on all held-out sums before and after."""
    for seed in study.seeds:
        study.run("train", SUMS, f"sums-{seed}", f"model={study.model}", f"run.seed={seed}", *study.more)


def trl(study: Study) -> None:
    """The same sums, model and settings under oncurve and TRL: every seed computed alike, one in TRL's fastest way."""
    script = HERE.parent / "bench.py"
    kind = "" if study.trl_compute == "bfloat16" else f"_{study.trl_compute}"
    ways = [(f"alike{kind}", study.trl_settings[:1], study.seeds)]
    ways += [(f"fastest{kind}", study.trl_settings, study.seeds[:1])] if len(study.trl_settings) > 1 else []
    for name, settings, seeds in ways:
        found = beside_trl(study.folder, name)
        if found is None or len(found["runs"]) < 2 * len(seeds):
            study.command(
                script, "time_to_accuracy",
                "--recipe", SUMS, "--overrides", f"model={study.model}", "--compute", study.trl_compute,
                "--new-tokens", 16, "--accuracy", 2, "--problems", 99, "--every-steps", 2,
                "--max-steps", study.trl_steps, "--seeds", *seeds, "--trl", *settings,
                "--output", study.folder / "trl" / name,
            )  # fmt: skip


def beside_trl(folder: Path, name: str) -> dict[str, Any] | None:
    """What was measured beside TRL so far, computed alike or in TRL's fastest way, in bfloat16 or as the name says."""
    written = folder / "trl" / name / "time_to_accuracy.json"
    return read_result(written, rows="runs") if written.exists() else None


def base(study: Study) -> None:
    """The untrained model on GSM8K, without examples and with five."""
    shown = "data.few_shot=5"
    study.side_by_side([
        partial(study.evaluate, "base", study.model), partial(study.evaluate, "base-5-shots", study.model, shown)
    ])  # fmt: skip


def choose(study: Study) -> None:
    """Settings of both stages, measured on rows held out of the training set; the test is not read."""
    place = study.folder / "choose"
    if (study.folder / "chosen.json").exists():
        return
    lines = (study.data / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (place / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", lines[:-HELD_OUT]), ("test", lines[-HELD_OUT:])):
        (place / "data" / f"gsm8k_{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    inner = replace(study, folder=place, data=place / "data", rows=min(study.rows, HELD_OUT))
    one_pass = max(1, study.sft_steps * (len(lines) - HELD_OUT) // len(lines))

    def supervise(rate: float, passes: int) -> dict[str, Any]:
        name = f"sft-{rate:g}-{passes}"
        run = supervised(inner, name, one_pass * passes, f"optimizer.learning_rate={rate}")
        return {"learning_rate": rate, "passes": passes, **measured(evaluation_of(inner.evaluate(name, run / "model")))}

    def reinforce(rate: float) -> dict[str, Any]:
        name, few = f"grpo-{rate:g}", (f"optimizer.learning_rate={rate}", f"run.steps={study.choice_steps}")
        run = reinforced(inner, name, place / "runs" / warm, *few)
        found = evaluation_of(inner.evaluate(name, run / "model"))
        change = difference(answers_of(evaluation_of(place / "evaluated" / warm)), answers_of(found))
        return {"learning_rate": rate, **measured(found), "against_supervised": change}

    first = inner.side_by_side([partial(supervise, *choice) for choice in study.choices])
    best = max(first, key=lambda found: found["successes"])
    warm = f"sft-{best['learning_rate']:g}-{best['passes']}"
    second = inner.side_by_side([partial(reinforce, choice) for choice in study.grpo_choices])
    found = {"sft": {"best": best, "tried": first},
             "grpo": {"best": max(second, key=lambda found: found["successes"]), "tried": second}}  # fmt: skip
    write_json(study.folder / "chosen.json", {"rows": inner.rows, "grpo_steps": study.choice_steps, **found})


def sft(study: Study) -> None:
    """Stage one on GSM8K's training rows."""
    best = study.chosen("sft")
    run = supervised(study, "sft", study.sft_steps * (best["passes"] if best else 1), *study.rate("sft"))
    study.evaluate("sft", run / "model")


def supervised(study: Study, name: str, steps: int, *settings: str) -> Path:
    few = (f"model={study.model}", *study.gsm8k(), *QUIET, *study.more, *study.sft_more, "sft.epochs=null")
    return study.run("sft", "gsm8k_small/sft", name, *few, f"run.steps={steps}", *settings)


def grpo(study: Study) -> None:
    """Stage two from the supervised stage, with each seed."""

    def one(seed: int) -> None:
        few = (f"run.seed={seed}", f"run.steps={study.grpo_steps}", *study.rate("grpo"))
        run = reinforced(study, f"grpo-{seed}", study.folder / "runs" / "sft", *few)
        study.evaluate(f"grpo-{seed}", run / "model")

    study.side_by_side([partial(one, seed) for seed in study.seeds])


def reinforced(study: Study, name: str, first: Path, *settings: str) -> Path:
    few = (f"model={first}", *study.gsm8k(), *QUIET, *study.more, *study.grpo_more)
    return study.run("train", "gsm8k_small", name, *few, *settings)


def control(study: Study) -> None:
    """More supervised training from the supervised stage, for as many seconds of steps as GRPO had with seed 0."""
    spent, first = seconds_of(study.folder / "runs" / "grpo-0"), study.folder / "runs" / "sft"
    steps = max(1, round(spent / (seconds_of(first) / steps_done(first))))
    run = supervised(study, "control", steps, f"model={first}", "run.seed=1", *study.rate("sft"))
    study.evaluate("control", run / "model")


def kills(study: Study) -> None:
    """Ten steps on sums, once left alone and once killed twice at a random moment: the weights of both."""
    if (study.folder / "kills.json").exists():
        return
    few = (f"model={study.model}", *QUIET, "run.steps=10", "run.save_every_steps=1", "run.prompts_per_step=4",
           "evaluation.every_steps=0")  # fmt: skip
    whole = study.run("train", SUMS, "alone", *few)
    marks = seconds_of(whole)
    shutil.rmtree(study.folder / "runs" / "killed", ignore_errors=True)
    killed = [kill_after(study, few, marks, number) for number in range(2)]
    other = study.run("train", SUMS, "killed", *few)
    digests = [hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest() for run in (whole, other)]
    updates = sum(row.get("policy/gradient_norm", 0.0) > 0 for row in read_metrics(whole))
    write_json(
        study.folder / "kills.json",
        {"steps": 10, "updates": updates, "killed": killed, "same_weights": digests[0] == digests[1]},
    )


def kill_after(study: Study, settings: Sequence[str], seconds: float, number: int) -> dict[str, Any]:
    """Begin or continue the run and kill it at a random moment of its steps: when, and after which step."""
    run = study.folder / "runs" / "killed"
    before = steps_done(run)
    goes_on = any((run / "checkpoints").glob("step_*"))
    words = ["resume", str(run)] if goes_on else ["train", SUMS, "run.name=killed", *settings]
    with (study.folder / "log.txt").open("a", encoding="utf-8") as log:
        child = subprocess.Popen([sys.executable, "-m", "oncurve", *words], cwd=study.folder, stdout=log, stderr=log)
        while child.poll() is None and steps_done(run) <= before:
            time.sleep(0.05)
        wait = SystemRandom().uniform(0.0, 0.35 * seconds)
        try:
            child.wait(timeout=wait)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
    return {"kill": number + 1, "seconds_after_a_step": round(wait, 2), "steps_done": steps_done(run),
            "by_signal": child.returncode == -signal.SIGKILL}  # fmt: skip


def steps_done(run: Path) -> int:
    if not (run / "metrics.jsonl").exists():
        return 0
    return max((row["step"] for row in read_metrics(run)), default=0)


def texts(study: Study) -> None:
    """Greedy texts on 50 questions, by each engine: of the trained folder if there is one, of an adapter, and of its
    merger in the type of its base and in float32."""
    trained = study.folder / "runs" / "sums-0" / "model"
    few = (f"model={study.model}", "policy.lora.rank=16", "optimizer.learning_rate=1e-4", "run.steps=5", *QUIET)
    adapter = study.run("train", SUMS, "adapter", *few, "evaluation.every_steps=0") / "model"
    models = {"adapter": adapter} | ({"trained": trained} if trained.exists() else {})
    for name, options in (("merged", ()), ("merged32", ("--type", "float32"))):
        models[name] = study.folder / name
        if not (models[name] / "model.safetensors").exists():
            shutil.rmtree(models[name], ignore_errors=True)
            study.oncurve("merge", adapter, "--output", models[name], *options)
    place = study.folder / "texts"
    place.mkdir(exist_ok=True)
    asked = ("evaluation.num_prompts=50", "rollouts.max_completion_tokens=32", "policy.compute_type=float32")
    for name, model in models.items():
        own = place / f"{name}-oncurve"
        if not evaluation_of(own).exists():
            study.oncurve("evaluate", SUMS, *asked, "--model", model, "--output", own)
        rows = read_rows(evaluation_of(own).with_suffix(".jsonl"))
        written, read = [row["completion"] for row in rows], prompt_texts(model, [row["question"] for row in rows])
        for file, content in ((f"{name}-oncurve.json", written), ("prompts.json", read)):
            (place / file).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
        others = {"transformers": Path(sys.executable), "vllm": study.vllm_python if name != "adapter" else None}
        for engine, python in others.items():
            output = place / f"{name}-{engine}.json"
            if python is not None and not output.exists():
                words = (model, place / "prompts.json", "--engine", engine, "--tokens", 32, "--output", output)
                study.command(HERE / "greedy_texts.py", *words, python=python)


def prompt_texts(model: Path, questions: Sequence[str]) -> list[str]:
    """What the model reads, written by transformers from its own chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = [[{"role": "user", "content": question}] for question in questions]
    return [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in asked]


STAGES: dict[str, Callable[[Study], None]] = {
    "sums": sums, "trl": trl, "choose": choose, "base": base, "sft": sft, "grpo": grpo, "control": control,
    "kills": kills, "texts": texts,
}  # fmt: skip


def answers_of(evaluation: Path) -> list[dict[str, Any]]:
    """Every completion of an evaluation with its grade."""
    return read_rows(evaluation.with_suffix(".jsonl"))


def seconds_of(run: Path) -> float:
    """Seconds of all steps."""
    return sum(row.get("time/step_seconds", 0.0) for row in read_metrics(run))


def report(study: Study) -> dict[str, Any]:
    """Everything that was run so far, and the names of what was not."""
    folder = study.folder
    names = sorted(path.name for path in (folder / "runs").glob("*") if phase_of(path) == "finished")
    found: dict[str, Any] = {"model": f"{study.name} of fetch_models, from quantized weights", "test_rows": study.rows}
    found["runs"] = {name: run_record(folder / "runs" / name) for name in names}
    answers = {
        place.name: answers_of(evaluation_of(place))
        for place in sorted((folder / "evaluated").glob("*"))
        if evaluation_of(place).exists()
    }
    found["gsm8k"] = {name: measured(evaluation_of(folder / "evaluated" / name)) for name in answers}
    found["differences"] = {
        f"{first} to {second}": difference(answers[first], answers[second])
        for first, second in (("base", "base-5-shots"), ("base", "sft"), ("sft", "control"),
                              *((one, f"grpo-{seed}") for one in ("sft", "control") for seed in study.seeds))
        if first in answers and second in answers
    }  # fmt: skip
    found["chosen"] = read_json(folder / "chosen.json") if (folder / "chosen.json").exists() else None
    ways = sorted(path.name for path in (folder / "trl").glob("*"))
    found["trl"] = {name: there for name in ways if (there := beside_trl(folder, name))}
    found["kills"] = read_json(folder / "kills.json") if (folder / "kills.json").exists() else None
    found["same_texts"] = same_texts(folder / "texts")
    learned = {"sft", "control", *(f"grpo-{seed}" for seed in study.seeds)}
    wanted = {*(f"sums-{seed}" for seed in study.seeds), *learned, "alone", "adapter"}
    missing = (wanted - {*names}) | ({"base", "base-5-shots", *learned} - {*answers})
    found["not_run"] = sorted(missing)
    return {**found, "made_by": describe_run(["benchmarks/learning/real_model.py", "FOLDER", "--report"])}


def run_record(run: Path) -> dict[str, Any]:
    """The course of a run, its seconds and tokens, and the held-out answers before and after."""
    rows = [row for row in read_metrics(run) if row["step"]]
    made, record = read_json(run / "manifest.json"), {"steps": len(rows)}
    record |= {"commit": made["code"]["commit"], "started": made["started"]}
    record |= {"seconds": round(seconds_of(run), 1), "peak_gib": round(max(r["memory/process_gib"] for r in rows), 2)}
    if "memory/gpu_gib" in rows[0]:
        record["peak_gpu_gib"] = round(max(row["memory/gpu_gib"] for row in rows), 2)
    for part in ("sample", "grade", "train"):
        record[f"{part}_seconds"] = round(sum(row.get(f"time/{part}_seconds", 0.0) for row in rows), 1)
    for kind in ("sampled", "trained"):
        record[f"{kind}_tokens"] = int(sum(row.get(f"tokens/{kind}", 0) for row in rows))
    record["course"] = {key: [round(row[key], 4) for row in rows] for key in (*COURSE, "sft/loss") if key in rows[0]}
    during = [(row["step"], round(row["evaluation/correct_fraction"], 4)) for row in rows
              if "evaluation/correct_fraction" in row]  # fmt: skip
    sides = {name: run / "evaluations" / f"{name}.json" for name in ("base", "trained")}
    record |= {name: measured(path) for name, path in sides.items() if path.exists()}
    return {**record, "during": during}


def measured(path: Path) -> dict[str, Any]:
    found = read_json(path)
    shares = {key: round(found["correct"][key], 4) for key in SHARES}
    return {**shares, "any_format": round(found["any_format"]["fraction"], 4), "seconds": round(found["seconds"], 1)}


def difference(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The second model's share minus the first's on the same questions, Newcombe's interval, McNemar's p."""
    pairs = [(a["category"] == "correct", b["category"] == "correct") for a, b in zip(first, second, strict=True)]
    both, lost, won, neither = (pairs.count((a, b)) for a in (True, False) for b in (True, False))
    low, high = paired_difference_interval(both, lost, won, neither)
    p_value = round(mcnemar_exact(lost, won), 4)
    return {"change": round((won - lost) / len(pairs), 4), "low": round(low, 4), "high": round(high, 4), "p": p_value}


def same_texts(place: Path) -> dict[str, str] | None:
    """Of how many questions each engine wrote the text that transformers wrote; an adapter's is that of its merger."""
    read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(place.glob("*-*.json"))}
    against = {name: f"{'trained' if name.startswith('trained') else 'adapter'}-transformers" for name in read}
    return {
        name: f"{sum(a == b for a, b in zip(read[name], read[other], strict=True))} of {len(read[name])} as {other}"
        for name, other in against.items()
        if name != other and other in read
    } or None


def onto(old: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """A report with what an older one has and this one lacks."""
    parts = ("runs", "gsm8k", "differences", "trl", "same_texts")
    kept = {**old, **{key: value for key, value in found.items() if value}}
    kept |= {key: {**(old.get(key) or {}), **(found[key] or {})} for key in parts}
    kept["made_by_before"] = [*old.get("made_by_before", []), old["made_by"]]
    there = {*kept["runs"], *kept["gsm8k"], *(("alone",) if kept["kills"] else ())}
    return {**kept, "not_run": [name for name in found["not_run"] if name not in there]}


def draw(found: dict[str, Any], path: Path) -> None:
    """Reward, held-out accuracy and groups with a signal of the runs on sums; below, the same beside TRL."""
    from matplotlib.figure import Figure

    beside = {name: found["trl"][name]["runs"] for name in ("alike", "alike_float32") if name in found["trl"]}
    rows = 1 + len(beside)
    figure = Figure(figsize=(9.0, 3.4 * rows), dpi=90, layout="constrained", facecolor="white")
    (left, right), *below = figure.subplots(rows, 2, sharey=True, squeeze=False)
    for name, run in found["runs"].items():
        if name.startswith("sums-"):
            course = run["course"]
            steps = range(1, run["steps"] + 1)
            (line,) = left.plot(steps, course["reward/mean"], lw=1.3, label=f"seed {name[5:]}")
            left.plot(*zip(*run["during"], strict=True), "o", color=line.get_color(), ms=5)
            right.plot(steps, [1 - share for share in course["group/zero_signal_fraction"]], lw=1.3)
    left.set_title("reward; held-out answers as points", fontsize=10)
    right.set_title("groups with a signal", fontsize=10)
    for pair, (name, runs) in zip(below, beside.items(), strict=True):
        kind = "float32, one seed" if name.endswith("float32") else "bfloat16, three seeds"
        for axes, key, title in zip(pair, ("step", "seconds"), ("by step", "by second"), strict=True):
            for number, run in enumerate(runs):
                curve = [[point[part] for point in run["points"]] for part in (key, "correct_fraction")]
                color = "tab:blue" if run["system"] == "oncurve" else "tab:orange"
                label = run["system"] if run["system"] not in [one["system"] for one in runs[:number]] else None
                axes.plot(*curve, "o-", ms=4, lw=1.3, color=color, label=label)
            axes.set_title(f"the 99 test sums, {title} ({kind})", fontsize=10)
            axes.set_xlabel("seconds of training" if key == "seconds" else key)
            axes.legend(frameon=False, fontsize=8)
    left.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("step")
    for axes in figure.axes:
        axes.grid(color="#e9edf2")
    figure.savefig(path)


def rate_and_passes(text: str) -> tuple[float, int]:
    """A learning rate and a number of passes over the rows: ``2e-4:2``."""
    rate, passes = text.split(":")
    return float(rate), int(passes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=MODEL, help="of fetch_models; stages on GSM8K are made for the smallest")
    parser.add_argument("--data", type=Path, default=HERE.parents[2] / "shared" / "data", help="folder with GSM8K")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[name for name in STAGES if name != "choose"])
    parser.add_argument("--rows", type=int, default=1319, help="test rows of GSM8K that are asked")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sft-steps", type=int, default=467, help="of 16 rows; 467 are one pass")
    parser.add_argument("--grpo-steps", type=int, default=100)
    parser.add_argument("--trl-steps", type=int, default=40)
    parser.add_argument(
        "--trl-settings",
        nargs="+",
        metavar="TYPE:ROWS",
        default=["autocast:64", "bf16weights:64", "fp32:64"],
        help="the first is compared over all seeds; then the fastest of all, by its steps, over one",
    )
    parser.add_argument(
        "--trl-compute", choices=["bfloat16", "float32"], default="bfloat16", help="how oncurve computes beside TRL"
    )
    parser.add_argument("--vllm-python", type=Path, help="a Python that has vLLM; left out if there is none")
    parser.add_argument(
        "--choices", nargs="+", type=rate_and_passes, default=SUPERVISED_CHOICES, metavar="RATE:PASSES",
        help="of the supervised stage, for `choose`; one alone leaves only GRPO's rate to choose",
    )  # fmt: skip
    parser.add_argument("--grpo-choices", nargs="+", type=float, default=GRPO_CHOICES, metavar="RATE", help="of GRPO")
    parser.add_argument("--choice-steps", type=int, default=50, help="of GRPO with each learning rate")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time; more than 1 only on a large GPU")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for every run on sums and GSM8K")
    parser.add_argument("--sft-set", nargs="+", default=[], metavar="KEY=VALUE", help="for supervised runs on GSM8K")
    parser.add_argument("--grpo-set", nargs="+", default=[], metavar="KEY=VALUE", help="for GRPO on GSM8K")
    parser.add_argument("--detach", action="store_true", help="go on in the background, with the log in FOLDER")
    parser.add_argument("--report", action="store_true", help="run nothing and write what there is")
    parser.add_argument("--onto", type=Path, help="an older report, of which what this one lacks is kept")
    parser.add_argument("--draw", type=Path, help="a picture of the runs on sums")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.detach:
        again = [sys.executable, __file__, *(word for word in sys.argv[1:] if word != "--detach")]
        with (asked.folder / "log.txt").open("a") as log:
            child = subprocess.Popen(again, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        print(f"process {child.pid}; follow {asked.folder / 'log.txt'}")
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    study = Study(
        asked.folder.resolve(), asked.model, asked.data.resolve(), asked.rows, tuple(asked.seeds), asked.sft_steps,
        asked.grpo_steps, asked.trl_steps, tuple(asked.trl_settings), asked.trl_compute, asked.vllm_python,
        tuple(asked.choices), tuple(asked.grpo_choices), asked.choice_steps, asked.jobs,
        tuple(asked.set), tuple(asked.sft_set), tuple(asked.grpo_set),
    )  # fmt: skip
    if not asked.report:
        fetch([asked.model], PLACE)
        for name in asked.stages:
            STAGES[name](study)
    found = report(study)
    if asked.onto:
        found = onto(read_json(asked.onto), found)
    if asked.draw:
        draw(found, asked.draw)
    text = json.dumps(found, indent=1)
    if asked.output:
        asked.output.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
