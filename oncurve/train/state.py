"""What does a run have to remember to go on with the same bits, and how is it written and read?

Random numbers and the order of the data are functions of (seed, step). What is left: the trained weights, the moments
of the optimizer, a reference that moves, and a few numbers. Rollouts are not saved: a step is done again from its
beginning, and gives the same rollouts.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from oncurve.errors import CheckpointError
from oncurve.products import HALF
from oncurve.train.checkpoint import load_model
from oncurve.train.distributed import fill
from oncurve.train.policy import Policy
from oncurve.train.sealed import publish, seal

OPTIMIZER, REFERENCE, TRAINED, STATE = (
    "optimizer.safetensors",
    "reference.safetensors",
    "trained.safetensors",
    "state.json",
)


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps, copied to the memory of the CPU: nothing in it changes while training goes on."""

    step: int
    """Steps done."""
    state: Mapping[str, Any]
    """The small things, as plain data."""
    facts: Mapping[str, Any]
    """For the manifest: what the run is, so that another one is not taken for it."""
    weights: Mapping[str, Tensor] | None
    """By the names of the model's own state; None before the first step, when they are those of the base."""
    is_whole: bool
    """All weights are trained, so that the folder is an ordinary checkpoint; otherwise only the trained ones."""
    optimizer: Mapping[str, Tensor] = field(default_factory=dict)
    """``<parameter>:<moment>``."""
    reference: Mapping[str, Tensor] = field(default_factory=dict)
    """The weights of a reference that moves; empty if it stands still."""


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that training moves, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def is_trained_whole(model: nn.Module) -> bool:
    """Every weight of the model is trained."""
    return all(parameter.requires_grad for parameter in model.parameters())


def capture(
    policy: Policy,
    *,
    step: int,
    state: Mapping[str, Any],
    facts: Mapping[str, Any],
    moves_reference: bool = False,
) -> Snapshot:
    """A copy of everything that training changes. It takes as much CPU memory as the checkpoint takes disk.

    All processes must call it: where each has a part of the weights, the parts are put together.
    """
    model = policy.trained_model
    trained, is_whole = trained_parameters(model), is_trained_whole(model)
    if step == 0:
        return Snapshot(step, state, facts, None, is_whole)
    reference = {}
    if moves_reference and policy.reference is not None:
        weights = dict(policy.reference.named_parameters())
        reference = _copied(policy, {name: weights[name] for name in trained})
    return Snapshot(
        step,
        state,
        facts,
        weights=_copied(policy, model.state_dict(keep_vars=True) if is_whole else trained),
        is_whole=is_whole,
        optimizer=_copied(policy, optimizer_tensors(policy)),
        reference=reference,
    )


def optimizer_tensors(policy: Policy) -> dict[str, Tensor]:
    """The moments and counters of the optimizer as ``<parameter>:<moment>``."""
    if policy.zero is not None:
        return policy.zero.moments(trained_parameters(policy.trained_model))
    names = {id(parameter): name for name, parameter in policy.trained_model.named_parameters()}
    return {
        f"{names[id(parameter)]}:{key}": value
        for parameter, moments in policy.optimizer.state.items()
        for key, value in moments.items()
        if isinstance(value, Tensor)
    }


def _copied(policy: Policy, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in CPU memory; a tensor under two names stays one, as with a head that is the embedding's matrix."""
    made: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in made:
            made[id(tensor)] = _apart(policy.whole(tensor).detach())
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


def _apart(tensor: Tensor) -> Tensor:
    """A copy in CPU memory that the heap has no part in, so that a freed snapshot leaves no gaps there."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    room = mmap.mmap(-1, tensor.numel() * tensor.element_size())
    return torch.frombuffer(room, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def write(snapshot: Snapshot, policy: Policy, root: Path, *, rank: int = 0) -> Path | None:
    """Write a checkpoint under a temporary name, flush it, seal it with a manifest, and give it its name.

    Rank 0 writes; the others have nothing to do and get None. From ``policy`` only the configuration is taken.

    Raises CheckpointError if it cannot be written; whatever was there before is then still there.
    """
    if rank != 0:
        return None
    folder = root / f"step_{snapshot.step:06d}"
    partial = root / f".{folder.name}.partial-{os.getpid()}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_files(snapshot, policy, partial)
        kind = "base" if snapshot.weights is None else "whole" if snapshot.is_whole else "trained"
        written = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        seal(partial, {**snapshot.facts, "step": snapshot.step, "weights": kind, "written": written})
        publish(partial, folder)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"{folder}: the checkpoint cannot be written: {' '.join(str(error).split())}. Older ones are untouched"
        ) from error
    return folder


def _write_files(snapshot: Snapshot, policy: Policy, folder: Path) -> None:
    text = json.dumps(to_plain(snapshot.state), sort_keys=True, indent=1, allow_nan=False)
    (folder / STATE).write_text(text + "\n", encoding="utf-8")
    if snapshot.weights is None:
        return
    save_file(dict(snapshot.optimizer), folder / OPTIMIZER)
    if snapshot.reference:
        save_file(dict(snapshot.reference), folder / REFERENCE)
    if snapshot.is_whole:
        policy.model.save_pretrained(folder, state_dict=dict(snapshot.weights))
        policy.tokenizer.save_pretrained(folder)
        return
    save_file(dict(snapshot.weights), folder / TRAINED)
    if policy.adapter is not None:  # for everybody else's tools; it is small
        policy.adapter.save_pretrained(folder, state_dict=dict(snapshot.weights))
        policy.tokenizer.save_pretrained(folder)


def restore(policy: Policy, folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Put the tensors of a verified checkpoint into a policy made from the same recipe; gives back the small things.

    Raises CheckpointError if they do not fit.
    """
    kind = manifest["weights"]
    state = from_plain(json.loads((folder / STATE).read_text(encoding="utf-8")))
    if kind == "base":
        return state
    try:
        model = policy.trained_model
        if (kind == "whole") != is_trained_whole(model):
            raise ValueError("it was made by a run that trains other weights")
        if kind == "whole":
            saved, _ = load_model(str(folder))
            _copy_into(policy, model.state_dict(keep_vars=True), saved.state_dict())
        else:
            _copy_into(policy, trained_parameters(model), load_file(folder / TRAINED))
        _load_optimizer(policy, load_file(folder / OPTIMIZER))
        if (folder / REFERENCE).is_file() and policy.reference is not None:
            tensors = load_file(folder / REFERENCE)
            weights = dict(policy.reference.named_parameters())
            _copy_into(policy, {name: weights[name] for name in tensors}, tensors)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: does not fit the recipe's model: {' '.join(str(error).split())[:400]}. "
            f"Resume with the recipe that the run had"
        ) from None
    policy.publish()
    policy.num_updates = int(state["num_updates"])
    return state


def _copy_into(policy: Policy, targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    if targets.keys() != tensors.keys():
        raise ValueError(f"only one of them has {sorted(targets.keys() ^ tensors.keys())[0]}")
    for name, target in targets.items():
        if policy.shape(target) != tensors[name].shape:
            here, there = tuple(policy.shape(target)), tuple(tensors[name].shape)
            raise ValueError(f"{name} has shape {here} here and {there} there")
        policy.fill(target, tensors[name])


def _load_optimizer(policy: Policy, tensors: Mapping[str, Tensor]) -> None:
    if policy.zero is not None:
        policy.zero.load_moments(trained_parameters(policy.trained_model), tensors)
        return
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, moment = key.rpartition(":")
        moments.setdefault(name, {})[moment] = value
    names = {id(parameter): name for name, parameter in policy.trained_model.named_parameters()}
    described = policy.optimizer.state_dict()
    state = {
        place: {key: _like(parameter, value) for key, value in moments.pop(name).items()}
        for group, numbered in zip(policy.optimizer.param_groups, described["param_groups"], strict=True)
        for parameter, place in zip(group["params"], numbered["params"], strict=True)
        if (name := names[id(parameter)]) in moments
    }
    if moments:
        raise ValueError(f"the optimizer has no weight {sorted(moments)[0]}")
    policy.optimizer.load_state_dict({"state": state, "param_groups": described["param_groups"]})


def _like(parameter: Tensor, moment: Tensor) -> Tensor:
    """A moment, or this process's part of it where it has a part of the weight."""
    if moment.shape != parameter.shape:
        return moment
    part = torch.zeros_like(parameter, dtype=moment.dtype, requires_grad=False)
    fill(part, moment)
    return part


def checksum(tensors: Iterable[tuple[str, Tensor]], *, widened: bool = False) -> str | None:
    """SHA-256 over names, types, shapes and bytes, in the order of the names; None over nothing.

    With ``widened``, numbers in half width count as the same ones in float32.
    """
    digest, is_empty = hashlib.sha256(), True
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        is_empty = False
        tensor = tensor.detach().to("cpu")
        tensor = tensor.float() if widened and tensor.dtype in HALF else tensor
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.contiguous().reshape(-1)
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
    return None if is_empty else digest.hexdigest()


def to_plain(value: Any) -> Any:
    """Strict JSON: a number that is not finite becomes {"number": "inf"}, so that it comes back as what it was."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(value: Any) -> Any:
    """What ``to_plain`` was given, with lists in place of tuples."""
    if isinstance(value, Mapping):
        return float(value["number"]) if value.keys() == {"number"} else {k: from_plain(v) for k, v in value.items()}
    return [from_plain(item) for item in value] if isinstance(value, list) else value
