"""Mutated recipes, data files and run folders, which must give a clear message or a working result.

Each case takes something that works, changes it at random, and gives it to the code that reads it. The only outcomes
allowed are that it works, or an OncurveError: any other exception, an empty message, or a file outside of the case's
own folder is a fault of this project and ends the program. A case is a function of its number.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from oncurve.core.errors import OncurveError
from oncurve.data.datasets import load_rows
from oncurve.data.prompts import render_prompts
from oncurve.observe.columns import read_columns
from oncurve.observe.record import RunFolder, lock_run, read_manifest, read_rollouts
from oncurve.observe.summary import summarize
from oncurve.policy.deepspeed_settings import read_settings, resolve
from oncurve.policy.environment import read_rank_info
from oncurve.policy.settings import OptimizerSettings
from oncurve.recipe.files import described_recipes, find_recipe
from oncurve.recipe.load import load_config
from oncurve.run.checkpoint_manifest import newest_good, quarantine, sweep, write_checkpoint_manifest
from oncurve.run.identity import recorded
from oncurve.run.resume import config_differences, requested_config

WEIRD: tuple[Any, ...] = (
    None, "", " ", 0, -1, 1, 2**63, 1e308, 0.5, True, [], {}, [[]], {"": None}, "../../etc/passwd", "/", "a\0b",
    "\ud800", "é" * 300, "nan", "1e999", "~", "${HOME}", "hf_" + "a" * 30, [None] * 50, {"type": "nobody"}, "{", "0x10",
)  # fmt: skip
BYTES = (
    b"\0",
    b"\xff\xfe",
    b"\n",
    b"{",
    b"}",
    b'"',
    b"\t- ",
    b": ",
    b"&a *a",
    b"!!python/object:os.system x",
    b"1e999",
)
VARIABLES = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID",
    "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip
LAUNCHED = (
    "", "0", "1", "2", "8", "-1", "two", "1e3", "²", "node[01-04,7]", "node[", "[]", "a,b", "localhost", "29500",
)  # fmt: skip
Case = Callable[[random.Random, Path], None]


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    """Cut, flip, insert, repeat or move some bytes."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5, 20))):
        place = draw.randrange(len(changed) + 1)
        match draw.randrange(6):
            case 0:
                del changed[place:]
            case 1 if place < len(changed):
                changed[place] ^= 1 << draw.randrange(8)
            case 2:
                changed[place:place] = draw.choice(BYTES)
            case 3:
                changed[place:place] = changed[place : place + draw.randrange(1, 200)]
            case 4:
                del changed[place : place + draw.randrange(1, 100)]
            case _:
                changed[place:place] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 8)))
    return bytes(changed)


def change_tree(tree: Any, draw: random.Random) -> Any:
    """Replace, remove, rename or add something somewhere in nested mappings and lists."""
    if draw.random() < 0.25 or not isinstance(tree, (dict, list)) or not tree:
        return draw.choice(WEIRD)
    if isinstance(tree, list):
        place = draw.randrange(len(tree))
        return [*tree[:place], change_tree(tree[place], draw), *tree[place + 1 :]]
    key = draw.choice(list(tree))
    match draw.randrange(5):
        case 0:
            return {name: value for name, value in tree.items() if name != key}
        case 1:
            return {(name + "s" if name == key else name): value for name, value in tree.items()}
        case 2:
            return {**tree, draw.choice(("extra", "", "type", "..", "a.b")): draw.choice(WEIRD)}
        case _:
            return {**tree, key: change_tree(tree[key], draw)}


def some_recipe(draw: random.Random) -> Path:
    return find_recipe(draw.choice([name for name, _ in described_recipes()]))


def recipe_bytes(draw: random.Random, folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_bytes(change_bytes(some_recipe(draw).read_bytes(), draw))
    load_config(path)


def recipe_tree(draw: random.Random, folder: Path) -> None:
    resolved = load_config(some_recipe(draw)).model_dump(mode="json")
    for _ in range(draw.choice((1, 1, 2, 4))):
        resolved = change_tree(resolved, draw)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(resolved, allow_unicode=False), encoding="utf-8", errors="backslashreplace")
    load_config(path)


def overrides(draw: random.Random, folder: Path) -> None:
    names = [
        "run.steps",
        "algorithm.group_size",
        "rewards.0.weight",
        "data.path",
        "model",
        "x",
        "",
        "run",
        "data.columns.a",
    ]
    words = []
    for _ in range(draw.randrange(1, 4)):
        value = draw.choice(WEIRD)
        text = json.dumps(value) if draw.random() < 0.7 else str(value)
        words.append(draw.choice((f"{draw.choice(names)}={text}", text, f"={text}", draw.choice(names))))
    load_config(some_recipe(draw), words)


def data_file(draw: random.Random, folder: Path, tokenizer: Any) -> None:
    rows = [{"question": f"{number}+1?", "answer": str(number + 1), "level": number} for number in range(6)]
    if draw.random() < 0.5:
        rows = [change_tree(row, draw) if draw.random() < 0.4 else row for row in rows]
    path = folder / "data.jsonl"
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(change_bytes(content, draw) if draw.random() < 0.7 else content)
    found = load_rows(draw.choice(("jsonl", "gsm8k", "math")), path=path)
    render_prompts(found, tokenizer, template=draw.choice(("r1_zero", "boxed", "question_only")))


def deepspeed_file(draw: random.Random, folder: Path) -> None:
    """The file of policy.deepspeed up to where DeepSpeed itself would read it."""
    tree: Any = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
    }
    for _ in range(draw.choice((0, 1, 2, 4))):
        tree = change_tree(tree, draw)
    content = json.dumps(tree).encode()
    path = folder / "deepspeed.json"
    path.write_bytes(change_bytes(content, draw) if draw.random() < 0.3 else content)
    settings = read_settings(str(path), offload=draw.random() < 0.5)
    json.dumps(resolve(settings, OptimizerSettings(), hidden_size=64, half=True, world_size=2))


def launcher_environment(draw: random.Random, folder: Path) -> None:
    """What a launcher may leave in the environment."""
    read_rank_info({name: draw.choice(LAUNCHED) for name in VARIABLES if draw.random() < 0.7})


def make_run(folder: Path) -> Path:
    """A run folder with two checkpoints, as it stands on a disk."""
    run = folder / "run"
    config = load_config(find_recipe("word_problems"))
    with RunFolder(run) as made:
        made.write_start("model: embedded\n", config.model_dump(mode="json"), {"command": "oncurve train"})
        for step in range(5):
            made.write_metrics(step, {"reward/mean": 0.1 * step, "time/step_seconds": 1.0})
        made.write_evaluation("base", [{"index": 0}], {"step": 0})
    for step in (2, 4):
        place = run / "checkpoints" / f"step_{step:06d}"
        place.mkdir(parents=True)
        (place / "state.json").write_text('{"num_updates": 4}\n')
        (place / "model.safetensors").write_bytes(bytes(range(200)))
        write_checkpoint_manifest(place, {"step": step, "config": recorded(config), "world_size": 1})
    return run


def run_folder(draw: random.Random, folder: Path) -> None:
    run = make_run(folder)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    for path in draw.sample(files, draw.randrange(1, 4)):
        match draw.randrange(8):
            case 0:
                path.unlink()
            case 1:
                path.unlink()
                path.mkdir()
            case 2 if path.suffix == ".json":
                path.write_text(json.dumps(change_tree(json.loads(path.read_text()), draw)))
            case 3:
                path.write_bytes(b"")
            case _:
                path.write_bytes(change_bytes(path.read_bytes(), draw))
    readers: list[Callable[[], object]] = [
        lambda: summarize(read_columns(run), manifest=read_manifest(run), title="run"),
        lambda: read_rollouts(run, 1),
        lambda: go_on(run),
    ]
    problems: list[OncurveError] = []
    for read in readers:
        try:
            read()
        except OncurveError as error:
            problems.append(error)
    if problems:
        raise problems[-1]


def go_on(run: Path) -> None:
    """Everything that `oncurve resume` does before it loads the model."""
    with lock_run(run) as lock:
        root = run / "checkpoints"
        sweep(root)
        _, manifest = newest_good(root, strict=False, warn=lambda text: None)
        config = requested_config(run, manifest, [], warn=lambda text: None)
        config_differences(manifest["config"], config)
        quarantine(root, after=int(manifest["step"]))
        RunFolder(run, resume_step=int(manifest["step"]), lock=lock).close()


def run_case(number: int, tokenizer: Any) -> tuple[str, bool]:
    """The kind of a case and whether what it changed still worked; anything but an OncurveError passes through."""
    kinds: tuple[Case, ...] = (
        recipe_bytes,
        recipe_tree,
        overrides,
        lambda draw, folder: data_file(draw, folder, tokenizer),
        run_folder,
        deepspeed_file,
        launcher_environment,
    )
    names = (
        "recipe bytes",
        "recipe tree",
        "overrides",
        "data file",
        "run folder",
        "DeepSpeed file",
        "launcher environment",
    )
    kind = number % len(kinds)
    with tempfile.TemporaryDirectory() as scratch:
        inside = Path(scratch) / "inside"
        inside.mkdir()
        works = True
        try:
            kinds[kind](random.Random(number), inside)
        except OncurveError as error:
            works = False
            if len(str(error).strip()) < 10 or "Traceback" in str(error):
                raise AssertionError(f"case {number}: the message says nothing: {error!r}") from error
        strangers = [path.name for path in Path(scratch).iterdir() if path.name != "inside"]
        if strangers:
            raise AssertionError(f"case {number}: wrote outside of its folder: {strangers}")
    return names[kind], works


def run_cases(count: int, tokenizer: Any, *, first: int = 0) -> dict[str, dict[str, int]]:
    """How many cases of each kind worked and how many ended with a message."""
    counts: dict[str, Counter[str]] = {}
    for number in range(first, first + count):
        kind, works = run_case(number, tokenizer)
        counts.setdefault(kind, Counter())["worked" if works else "message"] += 1
    return {kind: dict(found) for kind, found in counts.items()}
