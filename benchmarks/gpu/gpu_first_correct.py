"""Stage A of a first hour on a GPU: whether everything that users do runs there and gives what a CPU gives."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_first_probe import HERE, ROOT, Answer, Setting, call, judged

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "peft", "accelerate", "numpy", "datasets", "pyarrow", "pydantic",
    "huggingface_hub", "jsonschema", "jaxtyping", "beartype", "typer", "rich", "matplotlib", "aiohttp",
    "pytest", "pytest-timeout", "pytest-xdist", "hypothesis",
)  # fmt: skip
MODULES = (
    "oncurve.cli.app", "oncurve.run.session", "oncurve.run.builder", "oncurve.sample.engine",
    "oncurve.report.write",
    "oncurve.rewards.mathematics", "oncurve.rewards.json_schema", "datasets", "peft",
)  # fmt: skip
ARGUMENTS = {
    "_flash_attention_forward": ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale"),
    "_flash_attention_backward": ("logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "scale"),
    "_scaled_dot_product_efficient_attention": ("attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),
}
"""Arguments of torch's operators that are relied on."""
LEARNED = 0.7
"""Correct after ten steps; on a CPU all of ten seeds have more, from 26 % before."""


def versions(setting: Setting) -> Answer:
    """What is installed, what the device is, and whether operators have the arguments that they are given."""
    import torch

    missing = []
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    schemas = {name: str(getattr(torch.ops.aten, name).default._schema) for name in ARGUMENTS}
    lacking = [f"{name}: {word}" for name, words in ARGUMENTS.items() for word in words
               if not re.search(rf"\b{word}\b", schemas[name])]  # fmt: skip
    figures: dict[str, Any] = {
        "python": sys.version.split()[0],
        "packages": {name: installed(name) for name in PACKAGES},
        "schemas": schemas,
        "mm_gives_sums": "dtype" in torch.ops.aten.mm.overloads(),
        "cuda": torch.version.cuda,
        "nvidia_smi": output_of("nvidia-smi"),
        "pretended": torch.version.cuda is None and torch.cuda.is_available(),
    }
    has_device = setting.device == "cpu" or torch.cuda.is_available()
    if has_device and setting.device != "cpu" and not figures["pretended"]:
        found = torch.cuda.get_device_properties(0)
        figures |= {"gpu": found.name, "memory_gib": found.total_memory / 2**30, "sm": f"{found.major}.{found.minor}",
                    "nccl": str(torch.cuda.nccl.version()), "processors": found.multi_processor_count}  # fmt: skip
    wrong = missing + lacking + ([] if has_device else ["torch sees no CUDA device"])
    said = "; ".join(wrong) or f"{figures.get('gpu', setting.device)}, torch {torch.__version__}"
    return judged(not wrong, said, **figures)


def installed(package: str) -> str | None:
    """The version of a package; None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def output_of(*words: str) -> str | None:
    """What a program prints; None where it is not there."""
    if shutil.which(words[0]) is None:
        return None
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def marked_tests(setting: Setting) -> Answer:
    """The tests marked "gpu"; a tiny setting takes those of one file."""
    record = setting.folder / "tests.xml"
    chosen = ["tests/policy/test_recipes_on_a_gpu.py", "-k", "reference"] if setting.tiny else ["tests"]
    workers = [] if setting.tiny or importlib.util.find_spec("xdist") is None else ["-n", "4", "--dist", "worksteal"]
    code, printed, _ = call(
        ["python", "-m", "pytest", "-m", "gpu", "-o", "filterwarnings=default", "-p", "no:cacheprovider", "--timeout",
         "200", f"--junitxml={record}", f"--basetemp={setting.folder / 'tmp'}", *workers, *chosen], setting,
    )  # fmt: skip
    if not record.is_file():
        return judged(False, f"pytest ended with {code}: {printed.strip().splitlines()[-1:]}")
    suite = next(ElementTree.parse(record).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    names: dict[str, str] = {}
    for case in suite.iter("testcase"):
        for kind in ("failure", "error", "skipped"):
            if (part := case.find(kind)) is not None:
                names[f"{case.get('classname')}::{case.get('name')}"] = f"{kind}: {(part.get('message') or '')[:300]}"
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    said = f"{passed} passed, {counts['failures'] + counts['errors']} failed, {counts['skipped']} skipped"
    warned = re.findall(r"^\S*Warning: .*", printed, flags=re.MULTILINE)
    return judged(code == 0 and passed > 0, said, counts=counts, not_passed=names, warnings=warned)


def train_words(setting: Setting, name: str, *overrides: str) -> list[str]:
    """The command that trains a small run of this item."""
    size = ["run.prompts_per_step=8", "evaluation.num_prompts=32"]
    if setting.tiny:
        size = ["run.prompts_per_step=2", "evaluation.num_prompts=2", "evaluation.num_prompts_during=2",
                "rollouts.max_completion_tokens=64", "data.levels=[1]", "data.limit=96"]  # fmt: skip
    place = [f"run.folder={setting.folder / 'runs'}", f"run.name={name}", f"policy.device={setting.device}"]
    shutil.rmtree(setting.folder / "runs" / name, ignore_errors=True)
    return ["python", "-m", "oncurve", "train", "word_problems", *size, *place, *overrides]


def trains(setting: Setting) -> Answer:
    """The recipe of word problems with overrides, through the command, and what its run left."""
    steps = 2 if setting.tiny else 3
    overrides = [f"run.steps={steps}", "evaluation.every_steps=0", *setting.options.get("overrides", [])]
    code, printed, seconds = call(train_words(setting, "run", *overrides), setting)
    if code != 0:
        return judged(False, f"the command ended with {code}: {last_line(printed)}")
    return judged_run(setting.folder / "runs" / "run", printed, steps, seconds)


def judged_run(run: Path, printed: str, steps: int, seconds: float) -> Answer:
    """Every step is there, with finite numbers; a model, a comparison and a report were written."""
    rows = {row["step"]: row for row in metrics_of(run)}
    trained = [rows[step] for step in range(1, steps + 1) if step in rows]
    wrong = [f"step {row['step']}: {key} is {value}" for row in trained for key, value in row.items()
             if isinstance(value, float) and not math.isfinite(value)]  # fmt: skip
    wrong += [f"no {name}" for name in ("report.html", "comparison.json", "model") if not (run / name).exists()]
    wrong += [f"{steps - len(trained)} steps are missing"] if len(trained) != steps else []
    moved = sum(row.get("policy/gradient_norm", 0) > 0 for row in trained)
    wrong += [] if moved else ["no step moved the weights"]
    last = trained[-1] if trained else {}
    warnings = sorted(set(re.findall(r"^.*(?:[Ww]arning|slower|is not used).*$", printed, flags=re.MULTILINE)))
    seconds_of = {key: last.get(f"time/{key}_seconds") for key in ("sample", "train", "step")}
    said = "; ".join(wrong[:3]) or (
        f"{steps} steps, the last took {last.get('time/step_seconds', 0):.2f} s, "
        f"mismatch/kl {last.get('mismatch/kl', 0):.1e}"
    )
    return judged(not wrong, said, rows=trained, seconds=seconds_of, whole_command=seconds, warnings=warnings)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The rows of a run; none before it wrote any."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def last_line(printed: str) -> str:
    """The last line with something on it."""
    return next((line.strip() for line in reversed(printed.splitlines()) if line.strip()), "")[:300]


def resumes(setting: Setting) -> Answer:
    """A run that is killed after its second step and resumed, beside one that is not killed."""
    steps = 4
    shared = [f"run.steps={steps}", "evaluation.every_steps=0", "run.save_every_steps=1"]
    code, printed, _ = call(train_words(setting, "whole", *shared), setting)
    if code != 0:
        return judged(False, f"the run that should not be killed ended with {code}: {last_line(printed)}")
    run = setting.folder / "runs" / "killed"
    before = killed(train_words(setting, "killed", *shared), run, after=2)
    if len(before) > steps:
        return judged(False, "the run had ended before it could be killed")
    code, printed, _ = call(["python", "-m", "oncurve", "resume", str(run)], setting)
    if code != 0:
        return judged(False, f"oncurve resume ended with {code}: {last_line(printed)}")
    whole, after = metrics_of(setting.folder / "runs" / "whole"), metrics_of(run)
    wrong = [] if [row["step"] for row in after] == list(range(steps + 1)) else ["steps are missing or there twice"]
    keys = ("reward/mean", "tokens/sampled", "policy/gradient_norm", "mismatch/kl")
    gaps = {
        f"{key} at step {a['step']}": abs(a[key] - b[key])
        for a, b in zip(whole, after, strict=False) for key in keys if key in a and key in b
    }  # fmt: skip
    same = all(gap == 0 for gap in gaps.values())
    said = "; ".join(wrong) or (
        f"killed with {len(before)} rows, all {steps} steps there, "
        + (
            "equal to the run that was not killed"
            if same
            else f"the largest gap to the other: {max(gaps.values()):.3g}"
        )
    )
    return judged(not wrong, said, gaps=gaps, same=same)


def killed(words: list[str], run: Path, *, after: int) -> list[dict[str, Any]]:
    """Start a command and kill it once its run has saved so many steps; the rows that it left."""
    process = subprocess.Popen([sys.executable, *words[1:]], cwd=ROOT, start_new_session=True)
    saved = run / "checkpoints" / f"step_{after:06d}" / "manifest.json"
    while process.poll() is None and not any((saved.exists(), len(metrics_of(run)) > after + 1)):
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return metrics_of(run)


def learns(setting: Setting) -> Answer:
    """Ten steps of the demo; a tiny setting only takes its first steps."""
    steps = 2 if setting.tiny else 10
    words = train_words(setting, "run", f"run.steps={steps}")
    if not setting.tiny:
        words = [word for word in words if not word.startswith(("run.prompts_per_step", "evaluation."))]
        words += ["evaluation.num_prompts=500", "evaluation.every_steps=2"]
    code, printed, seconds = call(words, setting)
    if code != 0:
        return judged(False, f"the command ended with {code}: {last_line(printed)}")
    rows = metrics_of(setting.folder / "runs" / "run")
    curve = {row["step"]: row["evaluation/correct_fraction"] for row in rows if "evaluation/correct_fraction" in row}
    figures = {"curve": curve, "rewards": [row.get("reward/mean") for row in rows[1:]], "whole_command": seconds}
    if setting.tiny:
        return judged(len(rows) == steps + 1, f"{steps} steps; too few to learn", **figures)
    reached = next((step for step, value in curve.items() if value >= 0.8), None)
    last = curve[max(curve)]
    said = f"{curve[0]:.1%} correct before, {last:.1%} after {steps} steps, 80 % " + (
        f"by step {reached}" if reached is not None else "not reached"
    )
    return judged(last >= LEARNED, said, **figures)


def samples_as_a_cpu(setting: Setting) -> Answer:
    """Greedy completions of the device and of the CPU, and what the trainer makes of sampled ones."""
    import gpu_first_agreement

    return gpu_first_agreement.compare(setting)


def sanitized(setting: Setting) -> Answer:
    """A recorded decode step and a packed backward pass of a tiny model under NVIDIA's checker of memory."""
    beside = Path("/usr/local/cuda/bin/compute-sanitizer")
    program = shutil.which("compute-sanitizer") or (str(beside) if beside.is_file() else None)
    script = ["python", str(HERE / "gpu_first_agreement.py"), setting.device]
    if program is None:
        code, printed, _ = call(script, setting)
        if code != 0:
            return judged(False, f"already without the checker: {last_line(printed)}")
        return Answer("absent", "no compute-sanitizer here; the passes that it would check run")
    code, printed, _ = call([program, "--error-exitcode", "9", sys.executable, *script[1:]], setting)
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", printed)
    if not errors:
        return Answer("absent", f"compute-sanitizer cannot run here: {last_line(printed)}", {"exit_code": code})
    return judged(code == 0 and errors[-1] == "0", f"{errors[-1]} errors", exit_code=code)
