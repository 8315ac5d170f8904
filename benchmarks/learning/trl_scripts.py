"""Public scripts for TRL through `oncurve trl`, unchanged, with models and data replaced from outside.

    python benchmarks/learning/trl_scripts.py FOLDER --output benchmarks/results/trl_scripts.json

FOLDER holds the scripts, which are not ours and not in this repository, and an index.json: a list of {"source":
"repository and path", "commit": "...", "file": "name.py", "arguments": [...], "characters": as counted at the
source}. Modules that a script imports from beside it and that are not at hand are made up there. Each script runs in
a process and an empty folder of its own: every model is the embedded one, on the CPU, every data set is rows made up,
services that follow runs are stand-ins, nothing is uploaded, and a run is cut to two short steps after what the
script asks for was translated whole. For each the result says what happened, and for every option that the script
sets what became of it: taken (with the key and the value of the recipe), idle, said in a message, or silent, of which
there must be none. With --keep results of scripts that are not in FOLDER stay in the output.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

MARK = "ASKED "
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--keep", action="store_true", help="keep results of other scripts in the output")
    parser.add_argument("--only", help="run the scripts whose source holds this text")
    parser.add_argument("--limit-seconds", type=int, default=900, help="for each script")
    parser.add_argument("--one", nargs=argparse.REMAINDER, help="run one script in this process")
    asked = parser.parse_args()
    if asked.one is not None:
        run_here(asked.folder, asked.one)
        return
    index = json.loads((asked.folder / "index.json").read_text())
    index = [entry for entry in index if asked.only is None or asked.only in entry["source"]]
    results = []
    if asked.keep:
        mine = {entry["source"] for entry in index}
        before = json.loads(asked.output.read_text())["scripts"]
        results = [result for result in before if result["source"] not in mine]
    for entry in index:
        result = run_apart(asked.folder.resolve(), entry, asked.limit_seconds)
        results.append(result)
        sys.stdout.write(f"{entry['source']}: {result['outcome']}: {result['detail'][:150]}\n")
        sys.stdout.flush()
        if asked.output:
            asked.output.write_text(summary(results) + "\n")
    sys.stdout.write(summary(results)[:300] + "\n")


def summary(results: list[dict[str, Any]]) -> str:
    """Everything that was found so far, with counts, as JSON."""
    counts = {kind: sum(r["outcome"] == kind for r in results) for kind in sorted({r["outcome"] for r in results})}
    silent = [f"{r['source']}: {name}" for r in results for name, fate in r["options"].items() if fate == "silent"]
    return json.dumps({"counts": counts, "silent": silent, "scripts": results}, indent=1, ensure_ascii=False)


def run_apart(folder: Path, entry: dict[str, Any], limit_seconds: int = 900) -> dict[str, Any]:
    """What happens to one script."""
    script = folder / entry["file"]
    text = script.read_text(encoding="utf-8")
    if entry.get("characters") not in (None, len(text), len(text.rstrip("\n"))):
        raise SystemExit(f"{script}: {len(text)} characters, {entry['characters']} at the source")
    with tempfile.TemporaryDirectory() as place:
        own = folder / entry["beside"] if "beside" in entry else None
        for path in [*folder.iterdir(), *(own.iterdir() if own else ())]:  # modules beside the script
            if path.name.startswith("_") and path.is_dir():
                continue
            if path.is_file() and path.suffix != ".json":
                shutil.copy(path, place)
            elif path.is_dir():
                shutil.copytree(path, Path(place) / path.name)
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), ".", "--one", entry["file"]]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        try:
            done = subprocess.run(
                [*command, *entry.get("arguments", [])], stdin=subprocess.DEVNULL,
                cwd=place, env=environment, capture_output=True, text=True, timeout=limit_seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"source": entry["source"], "outcome": "took too long", "detail": "", "options": {}}
    options: dict[str, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            options = json.loads(line.removeprefix(MARK))
    outcome, detail = judge(done, options)
    commit = {"commit": entry["commit"]} if "commit" in entry else {}
    return {"source": entry["source"], **commit, "outcome": outcome, "detail": detail, "options": options}


def judge(done: subprocess.CompletedProcess[str], options: dict[str, str]) -> tuple[str, str]:
    """The kind of end, and its words."""
    steps = sum(line.startswith("step ") for line in done.stdout.splitlines())
    messages = [line for line in done.stderr.splitlines() if line.startswith("oncurve: ")]
    if "Traceback" in done.stderr:
        block = done.stderr[done.stderr.rindex("Traceback") :]
        last = next((line for line in reversed(block.splitlines()) if line and line[0] != " "), "")
        if "/oncurve/" in block and "the script raised" not in done.stderr:
            return "traceback of ours", block[-1500:]
        error = next((line for line in block.splitlines()[1:] if line and line[0] != " "), last)
        return "the script's own error", error
    if messages:
        return "stopped with a message", done.stderr[done.stderr.index("oncurve: ") :].strip()
    if done.returncode == 0 and steps >= 2:
        return "ran two steps", f"{steps} steps"
    return ("ended without training", f"exit {done.returncode}: {(done.stdout + done.stderr)[-200:]}")


def run_here(folder: Path, words: list[str]) -> None:
    """One script with everything replaced; what it asks for is printed."""
    import datasets
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from oncurve.cli.app import main as command_line
    from oncurve.observe.run_model import EMBEDDED
    from oncurve.trl.grpo_trainer import GRPOTrainer
    from oncurve.trl.settings import SETTINGS

    def tokenizer(*_: Any, **__: Any) -> Any:
        made = own_tokenizer(EMBEDDED)
        made.chat_template = CHAT
        return made

    own_tokenizer, own_model, own_config = (
        AutoTokenizer.from_pretrained, AutoModelForCausalLM.from_pretrained, AutoConfig.from_pretrained,
    )  # fmt: skip
    AutoTokenizer.from_pretrained = tokenizer

    def model_of(place: Any, *more: Any, **options: Any) -> Any:
        ours = str(place) == str(EMBEDDED)
        return own_model(place, *more, **options) if ours else own_model(EMBEDDED)

    def scorer(*_: Any, **__: Any) -> Any:
        config = own_config(EMBEDDED)
        config.num_labels = 1
        made = AutoModelForSequenceClassification.from_config(config)
        made.config._name_or_path = "scorer"
        return made

    for name in ("wandb", "weave", "swanlab"):
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __version__="0.1")
    own_to = nn.Module.to
    nn.Module.to = lambda self, *where, **more: (
        self if str(where[:1]).find("cuda") >= 0 else own_to(self, *where, **more)
    )
    nn.Module.cuda = lambda self, *_: self
    AutoModelForCausalLM.from_pretrained = model_of
    AutoModelForSequenceClassification.from_pretrained = scorer
    AutoConfig.from_pretrained = lambda _, **options: own_config(EMBEDDED, **options)
    for name in ("load_dataset", "load_from_disk"):
        setattr(datasets, name, lambda *_, split=None, **__: rows(split))
    GRPOTrainer.push_to_hub = lambda *_, **__: None
    own_init = GRPOTrainer.__init__

    def init(self: Any, model: Any, reward_funcs: Any = None, args: Any = None, *more: Any, **named: Any) -> None:
        from oncurve.trl import GRPOConfig

        args = args if args is not None else GRPOConfig("out")
        named.setdefault("processing_class", tokenizer()) if len(more) < 3 else None
        model = "embedded" if isinstance(model, str) else model
        sys.stdout.write("\n" + MARK + json.dumps(fates(model, reward_funcs, args, more, named)) + "\n")
        SETTINGS.processes = None
        short = copy.copy(args)
        short.max_steps, short.max_completion_length, short.use_cpu, short.bf16 = 2, 8, True, False
        short.gradient_accumulation_steps, short.steps_per_generation, short.generation_batch_size = 1, None, None
        short.num_generations = min(args.num_generations, 4)
        data = more[0] if more else named.get("train_dataset")
        few = data is not None and len(data) < 2
        short.per_device_train_batch_size = short.num_generations if few else 8
        if vars(short).get("max_prompt_length"):
            short.max_prompt_length *= 8  # tokens of the embedded model are short
        short.output_dir, short.report_to, short.push_to_hub = "out", "none", False
        short.deepspeed = short.save_steps = None
        short.save_strategy, short.save_steps, short.warmup_steps = "no", 500, 0
        own_init(self, model, reward_funcs, short, *more, **named)

    GRPOTrainer.__init__ = init
    sys.argv = ["oncurve", "trl", *words]
    command_line()


def rows(split: str | list[str] | None) -> Any:
    """Rows with the columns that data sets of this field have; all splits of them where none is named."""
    from datasets import Dataset, DatasetDict

    if isinstance(split, list):
        return [rows(each) for each in split]

    made = [
        {
            "prompt": f"How much is {n} + 1?", "question": f"How much is {n} + 1?", "problem": f"How much is {n} + 1?",
            "answer": f"{n} + 1 is {n + 1}.\n#### {n + 1}", "solution": f"\\boxed{{{n + 1}}}",
            "ground_truth": str(n + 1),
            "completion": str(n + 1), "labels": n % 2, "target": n, "nums": [n, 1], "text": "Some text.",
            "instruction": f"How much is {n} + 1?", "input": "", "output": str(n + 1), "answer_only": str(n + 1),
            "messages": [{"role": "user", "content": f"{n} + 1?"}], "language": "en", "context": "",
            "solutions": [str(n)], "message_tree_id": str(n // 3), "message_id": str(n),
            "parent_id": str(n - n % 3) if n % 3 else None,
            "role": "assistant" if n % 3 else "prompter", "ranking": n % 3,
        }
        for n in range(160)
    ]  # fmt: skip
    whole = Dataset.from_list(made)
    return whole if split else DatasetDict(dict.fromkeys(("train", "test", "validation"), whole))


def first_translation(recipe: Any, args: Any) -> Any:
    """The recipe of a script, for as many processes as its batch was written for; a text where it is refused."""
    from oncurve.errors import OncurveError
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
    from oncurve.convert.options import older, table
    from oncurve.errors import OncurveError
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
        own = {"model": "embedded", "evaluation.every_steps": found.evaluate_every_steps}
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


if __name__ == "__main__":
    main()
