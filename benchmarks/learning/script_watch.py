"""What a script for TRL does beside its options and what it gets to see, written down under TRL and here alike.

`watch` puts itself around a trainer class; `differences` says what only TRL showed a script.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 2
OWN_FILES = {
    "ref",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "training_args.bin",
    "README.md",
    "training_args.json",
}
"""Files of transformers that another optimizer writes otherwise, which the page on scripts says, and TRL's copy of an
adapter for its KL."""


class Watched:
    """What was seen of a script."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {
            "arguments": [], "calls": 0, "events": {}, "optimizer_in_events": False, "signal": False, "attributes": [],
            "overrides": [], "logs": [], "steps": 0, "moved": False, "checkpoints": [], "files": [], "trainings": 0,
        }  # fmt: skip
        self.events: Counter[str] = Counter()
        self.outputs: set[str] = set()
        self.state: Any = None

    def finish(self) -> dict[str, Any]:
        """All of it, with what lies in the folder now."""
        seen = self.seen
        seen["events"] = dict(self.events)
        if self.state is not None:
            seen["steps"] = self.state.global_step
            for row in self.state.log_history:
                seen["signal"] |= row.get("frac_reward_zero_std", 1) < 1
                is_eval = any(key.startswith("eval_") for key in row)
                kind = "last" if "train_loss" in row else "eval" if is_eval else "row"
                if [kind, sorted(row)] not in seen["logs"]:
                    seen["logs"].append([kind, sorted(row)])
        for output in sorted(self.outputs):
            for checkpoint in sorted(Path(output).glob("checkpoint-*")):
                seen["checkpoints"].append([checkpoint.name, sorted(path.name for path in checkpoint.iterdir())])
        places = {path.parent for path in Path().rglob("*.safetensors") if "checkpoint" not in str(path)}
        runs = {path.parent for path in Path().rglob("metrics.jsonl")}
        places -= {place for place in places if any(run == place or run in place.parents for run in runs)}
        places = {place for place in places if place.name not in OWN_FILES}
        seen["files"] = sorted(  # without the time of day
            [re.sub(r"\d{6,}", "N", str(place)), sorted(path.name for path in place.iterdir())] for place in places
        )
        return seen

    def reward(self, function: Any) -> Any:
        """The same function, noting what it is called with."""
        if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
            return function

        @functools.wraps(function)
        def noted(*given: Any, **named: Any) -> Any:
            self.seen["calls"] += 1
            for name, value in named.items():
                kind = [name, type(value).__name__]
                if kind not in self.seen["arguments"]:
                    self.seen["arguments"].append(kind)
            return function(*given, **named)

        return noted


def watch(kind: type, shorten: Callable[[Any, Any], Any], found: Watched) -> None:
    """Put a short run and a watcher into a trainer class."""
    from transformers import TrainerCallback

    class Events(TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("on_"):
                return object.__getattribute__(self, name)

            def heard(args: Any, state: Any, control: Any, **more: Any) -> None:
                found.events[name] += 1
                found.seen["optimizer_in_events"] |= more.get("optimizer") is not None

            return heard

    own_init, own_train, own_set = kind.__init__, kind.train, kind.__setattr__
    names = list(inspect.signature(own_init).parameters)[1:]

    def init(self: Any, *given: Any, **named: Any) -> None:
        named = dict(zip(names, given, strict=False)) | named
        bodies = [vars(each) for each in type(self).__mro__[: type(self).__mro__.index(kind)]]
        found.seen["overrides"] += sorted({name for body in bodies for name in body if not name.startswith("__")})
        named = shorten(self, named)
        functions = named.get("reward_funcs")
        if functions is not None:
            named["reward_funcs"] = [
                found.reward(each) for each in (functions if isinstance(functions, (list, tuple)) else [functions])
            ]
        named["callbacks"] = [*(named.get("callbacks") or []), Events()]
        found.outputs.add(str(named["args"].output_dir or "."))
        own_init(self, **named)
        found.state = self.state

    def train(self: Any, *given: Any, **named: Any) -> Any:
        found.seen["trainings"] += 1
        before = _digest(self.model)
        done = own_train(self, *given, **named)
        found.seen["moved"] |= _digest(self.model) != before
        found.state = self.state
        return done

    def set_attribute(self: Any, name: str, value: Any) -> None:
        file = Path(sys._getframe(1).f_code.co_filename).resolve()
        if file.is_relative_to(Path.cwd()) and name not in found.seen["attributes"]:
            found.seen["attributes"].append(name)
        own_set(self, name, value)

    for name, value in (("__init__", init), ("train", train), ("__setattr__", set_attribute)):
        type.__setattr__(kind, name, functools.wraps(getattr(kind, name))(value))


def _digest(model: Any) -> str:
    made = hashlib.sha256()
    for name, part in sorted(dict(model.named_parameters()).items()):
        if part.requires_grad:
            made.update(name.encode() + part.detach().float().cpu().numpy().tobytes())
    return made.hexdigest()


def short_arguments(args: Any, data: Any) -> Any:
    """The same arguments for two short steps on a CPU."""
    short = copy.copy(args)
    short.max_steps, short.max_completion_length, short.bf16, short.fp16 = STEPS, 8, False, False
    short.gradient_accumulation_steps, short.num_iterations = 1, min(args.num_iterations or 1, 2)
    short.num_generations = min(args.num_generations or 8, 4)
    few = data is not None and hasattr(data, "__len__") and len(data) < 2
    short.per_device_train_batch_size = short.num_generations if few else 8 - 8 % short.num_generations
    short.per_device_eval_batch_size = short.num_generations
    short.report_to, short.push_to_hub, short.deepspeed, short.use_vllm = [], False, None, False
    short.optim = "adamw_torch" if "bit" in str(args.optim) else args.optim  # whose package is for GPUs
    for name in ("max_new_tokens", "max_tokens"):
        if isinstance(short.generation_kwargs, dict) and name in short.generation_kwargs:
            short.generation_kwargs = {**short.generation_kwargs, name: short.max_completion_length}
    short.save_strategy = "no" if str(args.save_strategy).lower().endswith("no") else "steps"
    short.save_steps, short.warmup_steps, short.logging_steps, short.logging_strategy = 500, 0, 1, "steps"
    return short


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What a script saw under TRL and did not see here, a line each; none where it could not tell the two apart."""
    lines = []
    asked, got = (dict(seen["arguments"]) for seen in (there, here))
    lines += [f"argument {name}: {kind}, here {got.get(name)}" for name, kind in asked.items() if got.get(name) != kind]
    events = {name: count for name, count in there["events"].items() if here["events"].get(name) != count}
    lines += [f"{name}: {count} times, here {here['events'].get(name, 0)}" for name, count in events.items()]
    for kind in ("row", "eval", "last"):
        theirs, ours = ({key for name, keys in seen["logs"] if name == kind for key in keys} for seen in (there, here))
        lines += [f"logs ({kind}): {key} is missing" for key in sorted(theirs - ours)]
    for what in ("checkpoints", "files"):
        ours = dict(here[what])
        for name, files in there[what]:
            missing = sorted(set(files) - set(ours.get(name, [])) - OWN_FILES)
            lines += [f"{name}: {file} is missing" for file in missing] if name in ours else [f"{what}: no {name}"]
    has_signal = there["signal"] and here["signal"]  # weight decay moves TRL's weights without one; a page says so
    for what in ("steps", *(("moved",) if has_signal else ()), "trainings", "optimizer_in_events"):
        if there[what] != here[what]:
            lines.append(f"{what}: {there[what]}, here {here[what]}")
    return lines
