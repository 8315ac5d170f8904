"""Public scripts for TRL through `oncurve trl`, unchanged, with models and data replaced from outside.

    python benchmarks/bench.py trl_scripts FOLDER --beside

FOLDER holds the scripts, which are not ours and not in this repository, and an index.json: a list of {"source":
"repository and path", "commit": "...", "file": "name.py", "arguments": [...], "characters": as counted at the
source, "beside": the folder that is copied beside it}. Each script runs in a process and an empty folder of its own,
without a network: models, data sets, packages that are not installed, services and the GPU are stand-ins
(trl_stand_ins.py), nothing is uploaded, and a run is cut to two short steps after what the script asks for was
translated whole. An entry of the index may also hold "columns" of the script's rows, "files" of rows that its
repository lacks, and an "environment"; PYTHONPATH may name a folder of more packages. For each the result says what
happened, and for every option that the script sets what became of it: taken (with the key and the value of the
recipe), idle, said in a message, or silent, of which there must be none. With --beside each runs under the installed
TRL too, without options that it no longer knows, and `only_trl_shows` says what rewards, callbacks, logs and files show
there and not here. With --keep results of scripts that are not in FOLDER stay in the output.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from record import Record
from script_box import Box
from script_watch import STEPS, Watched, differences, short_arguments, watch
from trl_stand_ins import UnslothUnderTrl, forget_older_names, model_here, replace_everything

RAN = "ran two steps"
MARK, SEEN = "ASKED ", "SEEN "
ENTRY = "TRL_SCRIPT_ENTRY"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", action="store_true", help="keep results of other scripts in the output")
    parser.add_argument("--only", help="run the scripts whose source holds this text")
    parser.add_argument("--limit-seconds", type=int, default=900, help="for each script")
    parser.add_argument("--beside", action="store_true", help="run each script under TRL too, and compare")


def bench(asked: argparse.Namespace, record: Record) -> None:
    index = json.loads((asked.folder / "index.json").read_text())
    index = [entry for entry in index if asked.only is None or asked.only in entry["source"]]
    if asked.keep:
        record.resume()
        mine = {entry["source"] for entry in index}
        record.rows = [row for row in record.rows if row["source"] not in mine]
    boxes = {library: Box(library) for library in (("oncurve", "trl") if asked.beside else ("oncurve",))}
    record.total = len(record.rows) + len(index)
    for entry in index:
        record.rows.append(judged(asked.folder.resolve(), entry, asked.limit_seconds, boxes))
        record.facts |= summary(record.rows)
        record.add(record.rows.pop())
    for box in boxes.values():
        box.close()


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """How many ended in which way, and options that were dropped silently."""
    counts = {kind: sum(r["outcome"] == kind for r in results) for kind in sorted({r["outcome"] for r in results})}
    silent = [f"{r['source']}: {name}" for r in results for name, fate in r["options"].items() if fate == "silent"]
    pairs = Counter(f"TRL: {r['under_trl']}; here: {r['outcome']}" for r in results if "under_trl" in r)
    return {"counts": counts, "beside_trl": dict(pairs.most_common()), "silent": silent}


def judged(folder: Path, entry: dict[str, Any], limit_seconds: int, boxes: dict[str, Box]) -> dict[str, Any]:
    """What happens to one script here and, if that is asked for, under TRL, and what only TRL shows it."""
    done, options, here = run_apart(boxes["oncurve"], folder, entry, limit_seconds)
    result = {"source": entry["source"], **({"commit": entry["commit"]} if "commit" in entry else {})}
    outcome, detail = ("took too long", "") if done is None else judge(done, here)
    result |= {"outcome": outcome, "detail": detail, "options": options}
    if here is not None:
        result["seen"] = {name: here[name] for name in ("attributes", "overrides", "steps", "calls")}
    if "trl" in boxes:
        other, _, there = run_apart(boxes["trl"], folder, entry, limit_seconds)
        result["under_trl"], said = ("took too long", "") if other is None else judge(other, there)
        if result["under_trl"] != RAN:
            result["trl_said"] = re.sub(r"/\S*/site-packages/", "", said)[:200]
        if here is not None and there is not None and outcome == result["under_trl"] == RAN:
            result["only_trl_shows"] = differences(there, here)
    return result


def run_apart(
    box: Box, folder: Path, entry: dict[str, Any], limit_seconds: int
) -> tuple[subprocess.CompletedProcess[str] | None, dict[str, str], dict[str, Any] | None]:
    """A script in a folder and a process of its own, without a network: how it ended, its options, what was seen."""
    script = folder / entry["file"]
    text = script.read_text(encoding="utf-8", errors="replace")
    if entry.get("characters") not in (None, len(text), len(text.rstrip("\n"))):
        raise SystemExit(f"{script}: {len(text)} characters, {entry['characters']} at the source")
    own = folder / entry["beside"] if "beside" in entry else None
    with tempfile.TemporaryDirectory(dir=box.root) as place:
        for path in [*folder.iterdir(), *(own.iterdir() if own else ())]:  # modules beside the script
            if path.name.startswith("_") and path.is_dir() and path.parent == folder:
                continue
            if path.is_file() and path.name != "index.json" and (path.suffix != ".json" or own):
                shutil.copy(path, place)
            elif path.is_dir() and own != path:
                shutil.copytree(path, Path(place) / path.name, dirs_exist_ok=True)
        file = str(script.relative_to(own)) if own and script.is_relative_to(own) else entry["file"]
        environment = {ENTRY: json.dumps(entry), **entry.get("environment", {})}
        done = box.run(Path(place), [file, *entry.get("arguments", [])], environment, limit_seconds)
    if done is None:
        return None, {}, None
    options: dict[str, str] = {}
    seen = None
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            options = json.loads(line.removeprefix(MARK))
        elif line.startswith(SEEN):
            seen = json.loads(line.removeprefix(SEEN))
    return done, options, seen


def judge(done: subprocess.CompletedProcess[str], seen: dict[str, Any] | None) -> tuple[str, str]:
    """The kind of end, and its words. A script that fails after its training has trained, and its words say so."""
    messages = [line for line in done.stderr.splitlines() if line.startswith("oncurve: ")]
    kind, words = "", ""
    if "Traceback" in done.stderr:
        block = done.stderr[done.stderr.rindex("Traceback") :]
        last = next((line for line in reversed(block.splitlines()) if line and line[0] != " "), "")
        is_message = last.startswith("oncurve.core.errors.")  # of Unsloth's stand-in under TRL
        is_ours = re.search(r"/oncurve/(?!trl/run_script)", block) is not None
        if is_ours and "the script raised" not in done.stderr and not is_message:
            return "traceback of ours", block[-1500:]
        kind, words = "the script's own error", last
        if words.startswith("oncurve: "):
            kind, words = kind, next((line for line in block.splitlines()[1:] if line and line[0] != " "), last)
    elif messages:
        kind, words = "stopped with a message", done.stderr[done.stderr.index("oncurve: ") :].strip()
    steps = 0 if seen is None else seen["steps"]
    if steps >= STEPS and seen is not None:
        return RAN, f"{steps} steps" + (f"; after that {words[:600]}" if kind else "")
    if kind:
        return kind, words
    return ("ended without training", f"exit {done.returncode}: {(done.stdout + done.stderr)[-200:]}")


def run_here(words: list[str], library: str) -> None:
    """One script with everything replaced; what it asks for and what it gets to see is printed."""
    from transformers import training_args

    found = Watched()
    if library == "trl":
        import trl
        from transformers import Trainer

        watched = trl.GRPOTrainer  # with all that it imports, before stand-ins are there
    entry = json.loads(os.environ.pop(ENTRY, "{}"))
    training_args.is_torch_bf16_gpu_available = lambda: True  # who asks for it has a GPU
    replace_everything(entry, "\n".join(path.read_text(errors="replace") for path in texts(words[0])))
    if library == "trl":
        sys.meta_path.insert(0, UnslothUnderTrl())
        forget_older_names(trl.GRPOConfig)
        Trainer.push_to_hub = lambda *_, **__: None
        watch(watched, shortened, found)
        take_tokenizer(watched)
    else:
        from oncurve.trl.grpo_trainer import GRPOTrainer

        GRPOTrainer.push_to_hub = lambda *_, **__: None
        watch(GRPOTrainer, shortened_with_fates, found)
        GRPOTrainer.own = dict(vars(GRPOTrainer))
    try:
        if library == "trl":
            from oncurve.trl.run_script import run_file

            run_file(Path(words[0]), words[1:])
        else:
            from oncurve.cli.app import main as command_line

            sys.argv = ["oncurve", "trl", *words]
            command_line()
    finally:
        sys.stdout.flush()
        os.write(1, f"\n{SEEN}{json.dumps(found.finish(), default=str)}\n".encode())


def take_tokenizer(kind: type) -> None:
    """Let a trainer of TRL take ``tokenizer`` where a script begins with Unsloth, whose trainer does."""
    own = kind.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        if "tokenizer" in named and "unsloth" in sys.modules:
            named.setdefault("processing_class", named.pop("tokenizer"))
            named.pop("tokenizer", None)
        own(self, *given, **named)

    type.__setattr__(kind, "__init__", functools.wraps(own)(init))


def texts(script: str) -> list[Path]:
    """The script, and the files beside it that it names."""
    own = Path(script).read_text(encoding="utf-8", errors="replace")
    named = set(re.findall(r"(?:from|import)\s+\.*([\w.]+)", own))
    ends = {name.rpartition(".")[2] for name in named}
    return [
        Path(script),
        *(path for path in sorted(Path().rglob("*.py")) if path.stem in ends and path != Path(script)),
    ]


def shortened(trainer: Any, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a trainer for two short steps of a small model."""
    from transformers import AutoTokenizer

    named = dict(named)
    args = named.get("args")
    if args is None:
        args = sys.modules["trl"].GRPOConfig("out")
    if named.get("processing_class") is None:
        named["processing_class"] = AutoTokenizer.from_pretrained("any")
    if isinstance(named.get("model"), str):
        named["model"] = str(model_here())
    named["args"] = short_arguments(args, named.get("train_dataset"))
    held = named.get("eval_dataset")
    if hasattr(held, "select"):
        named["eval_dataset"] = held.select(range(min(len(held), 4)))
    if vars(named["args"]).get("max_prompt_length"):
        named["args"].max_prompt_length *= 8  # tokens of the embedded model are short
    made = named["args"]
    made.generation_batch_size, made.steps_per_generation = made.per_device_train_batch_size, 1
    return named


def shortened_with_fates(trainer: Any, named: dict[str, Any]) -> dict[str, Any]:
    """The same, and a line that says what became of every option."""
    from oncurve.trl import GRPOConfig
    from oncurve.trl.settings import SETTINGS

    args = named.get("args") or GRPOConfig("out")
    short = shortened(trainer, {**named, "args": args})
    more = {**named, "processing_class": short["processing_class"]}
    model = str(model_here()) if isinstance(named.get("model"), str) else named.get("model")
    if model is not None:
        sys.stdout.write("\n" + MARK + json.dumps(fates(model, named.get("reward_funcs"), args, (), more)) + "\n")
    SETTINGS.processes = None
    made = short["args"]
    made.generation_batch_size, made.steps_per_generation = None, None
    return {**short, "model": model}


def first_translation(recipe: Any, args: Any) -> Any:
    """The recipe of a script, for as many processes as its batch was written for; a text where it is refused."""
    from oncurve.core.errors import OncurveError
    from oncurve.trl.settings import SETTINGS

    refused = ""
    for SETTINGS.processes in (1, 2, 4, 8, 16):
        try:
            return recipe(args)
        except OncurveError as error:
            refused = f"refused: {str(error)[:200]}"
    return refused


def fates(model: Any, reward_funcs: Any, args: Any, more: tuple[Any, ...], named: dict[str, Any]) -> dict[str, str]:
    """Every option that the script sets, and what became of it in the recipe that it asks for."""
    from oncurve.core.errors import OncurveError
    from oncurve.trl.options import older, table
    from oncurve.trl.translation import TrainerArguments, translate

    names = ("train_dataset", "eval_dataset", "processing_class", "reward_processing_classes", "callbacks")
    given = dict(zip(names, more, strict=False)) | named

    def recipe(configuration: Any) -> tuple[dict[str, Any], list[Any]]:
        asked = TrainerArguments(
            model=model,
            reward_funcs=reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs],
            args=configuration,
            train_dataset=given.get("train_dataset"),
            eval_dataset=given.get("eval_dataset"),
            processing_class=given.get("processing_class"),
            peft_config=given.get("peft_config"),
        )
        found = translate(asked)
        own = {
            "rewards.weight": [weight for _, weight in found.rewards],
            "model": "embedded",
            "evaluation.every_steps": found.evaluate_every_steps,
        }
        return {**found.draft.values, **own}, list(found.draft.notes)  # every model was replaced with that

    first = first_translation(recipe, args)
    if isinstance(first, str):
        return dict.fromkeys(args.options(), first)
    values, notes = first
    found: dict[str, str] = {}
    for name, value in args.options().items():
        said = [note for note in notes if note.option == name or name in (note.option, note.what)]
        option = table().get(name)
        if said:
            found[name] = f"{'idle' if said[0].kind == 'nothing' else 'said'}: {said[0].why[:120]}"
            continue
        key = option.to if option is not None else older()[name].to
        if option is not None and option.fate == "direct":
            same = values.get(str(key), value) == value
            found[name] = f"taken: {key} = {values.get(str(key), 'its default')}" if same else "silent"
            continue
        without = copy.copy(args)
        if option is None:
            delattr(without, name)
        else:
            setattr(without, name, option.default)
        try:
            before, _ = recipe(without)
        except OncurveError:
            before = {}
        changed = [key for key in values if values[key] != before.get(key)] + [
            key for key in before if key not in values
        ]
        if name in ("chat_template_kwargs",):
            changed = ["the prompts themselves"]
        found[name] = f"taken: {', '.join(f'{key} = {values.get(key)}' for key in changed)}" if changed else "silent"
        if not changed and option is not None and (key in values or value in (None, [], False)):
            found[name] = f"taken: {key} = {values.get(str(key))}"
    return found
