"""Checkpoints on the disk: what a run needs to go on with the same bits, written and read.

Random numbers and the order of the data are functions of (seed, step). What is left: the trained weights, the moments
of the optimizer, a reference that moves, and a few numbers. Rollouts are not saved, since a step that is done again
gives the same ones; but for those of coming steps, which were sampled from weights that are gone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from oncurve.algorithm.precision import HALF
from oncurve.core.records import Group, Reward
from oncurve.observe.manifest import FileSum
from oncurve.policy.backend import Piece, TensorFiles, piece_of, trained_parameters
from oncurve.policy.distributed import ALONE, Processes
from oncurve.policy.model_folder import is_converted, load_model, write_around
from oncurve.policy.sharding import Room
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.checkpoint_manifest import publish, write_checkpoint_manifest
from oncurve.run_errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps, copied to the memory of the CPU: nothing in it changes while training goes on.

    Where there are several processes each has a share of the tensors, and all shares together are the run.
    """

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
    is_partial: bool = False
    """Other processes hold the other tensors."""
    ahead: Mapping[int, Sequence[Group]] = field(default_factory=dict)
    """Groups of steps that come later, which are sampled already."""
    owners: Mapping[str, int] | None = None
    """Which process has which weight of a whole model; None where process 0 has all of them."""


def is_trained_whole(model: nn.Module) -> bool:
    """Every weight of the model is trained."""
    return all(parameter.requires_grad for parameter in model.parameters())


def capture(
    policy: TrainedPolicy,
    *,
    step: int,
    state: Mapping[str, Any],
    facts: Mapping[str, Any],
    moves_reference: bool = False,
    room: Room | None = None,
) -> Snapshot:
    """A copy of everything that training changes: of all of it, or of this process's share where there are several.

    All processes must call it. Tensors are put together one after the other and kept by one process each, as many bytes
    by each as by the others: a process needs ``room`` for its share and one tensor besides.
    """
    room = room or SnapshotRoom()
    model = policy.trained_model
    is_whole = is_trained_whole(model)
    if step == 0:
        return Snapshot(step, state, facts, None, is_whole)
    moved = _reference(policy, room) if moves_reference else {}
    kinds = [_weights(policy, is_whole, room), policy.backend.moments(room), moved]
    owners = _divide(policy, kinds)
    weights, optimizer, reference = (_own_copies(kind, owners, policy.processes.rank, room) for kind in kinds)
    names = {name: owners[piece.identity] for name, piece in kinds[0].items()}
    return Snapshot(
        step,
        state,
        facts,
        weights,
        is_whole,
        optimizer,
        reference,
        is_partial=max(owners.values(), default=0) > 0,
        owners=names if is_whole and max(names.values()) > 0 else None,
    )


def _weights(policy: TrainedPolicy, is_whole: bool, room: Room) -> dict[str, Piece]:
    model = policy.trained_model
    tensors = model.state_dict(keep_vars=True) if is_whole else trained_parameters(model)
    return {name: piece_of(policy.backend, tensor, room) for name, tensor in tensors.items()}


def _reference(policy: TrainedPolicy, room: Room) -> dict[str, Piece]:
    if policy.reference is None:
        return {}
    weights = dict(policy.reference.named_parameters())
    return {name: piece_of(policy.backend, weights[name], room) for name in trained_parameters(policy.trained_model)}


def _divide(policy: TrainedPolicy, kinds: Sequence[Mapping[str, Piece]]) -> dict[object, int]:
    """Which process keeps which tensor: large ones first, each by the process that has least so far.

    Process 0 keeps an adapter, and weights that transformers names and cuts otherwise in files than in modules.
    """
    count = 1 if policy.adapter is not None else policy.processes.count
    loads, owners = [0] * count, dict[object, int]()
    sizes = {piece.identity: piece.num_bytes for kind in kinds for piece in kind.values()}
    names = {piece.identity: (index, name) for index, kind in enumerate(kinds) for name, piece in kind.items()}
    if is_converted(policy.model):
        owners = {piece.identity: 0 for piece in kinds[0].values()}
        loads[0] = sum(sizes[identity] for identity in owners)
    for identity in sorted(
        sizes, key=lambda identity: (-sizes[identity], names[identity])
    ):  # the same in every run and process
        if identity not in owners:
            owners[identity] = loads.index(min(loads))
            loads[owners[identity]] += sizes[identity]
    return owners


def _own_copies(pieces: Mapping[str, Piece], owners: Mapping[object, int], rank: int, room: Room) -> dict[str, Tensor]:
    """Copies in CPU memory; a tensor under two names stays one, as with a head that is the embedding's matrix."""
    made: dict[object, Tensor] = {}
    for piece in {piece.identity: piece for piece in pieces.values()}.values():
        tensor = piece.gather().detach()
        if owners[piece.identity] == rank:
            is_apart = piece.is_copied and tensor.device.type == "cpu"
            made[piece.identity] = tensor if is_apart else room(tensor.shape, tensor.dtype).copy_(tensor)
        del tensor  # before the next one is put together
    return {name: made[piece.identity] for name, piece in pieces.items() if piece.identity in made}


@dataclass
class SnapshotRoom:
    """CPU memory for a snapshot that the heap has no part in, so that a freed one leaves no gaps there.

    Beyond ``bytes_left`` it is a file without a name in ``folder``, whose pages the system writes out when it needs
    them; if the disk has no room either, it is memory all the same.
    """

    bytes_left: float = math.inf
    folder: Path | None = None

    def __call__(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Room for a tensor of this shape; its numbers are not set."""
        size = shape.numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        self.bytes_left -= size
        numbers = self._in_file(size, dtype) if self.bytes_left < 0 else None
        return (torch.frombuffer(mmap.mmap(-1, size), dtype=dtype) if numbers is None else numbers).view(shape)

    def _in_file(self, size: int, dtype: torch.dtype) -> Tensor | None:
        """Torch keeps the mapping and no descriptor, of which a process has only so many."""
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, and a signal later
                return torch.from_file(file.name, shared=True, size=size // dtype.itemsize, dtype=dtype)
        except OSError as error:
            log.info("a snapshot is kept in memory that is short: %s", error)
            return None


T = TypeVar("T")

WEIGHTS, OPTIMIZER, REFERENCE, TRAINED, STATE = "model", "optimizer", "reference", "trained", "state.json"
"""Names of the files; those of tensors without what comes behind them."""
AHEAD = "ahead_{:06d}.parquet"
"""Name of the file with the groups of a step that has not come yet."""
FAILURES = (OSError, ValueError, RuntimeError, SafetensorError)
"""Exceptions of a full disk, a lost process or a library while a checkpoint is written."""


def write(snapshot: Snapshot, policy: TrainedPolicy, root: Path) -> Path | None:
    """Write a checkpoint under a temporary name, flush it, seal it with a manifest, and give it its name.

    All processes call it, each in one thread of its own. Each writes its share; process 0 seals when all have written
    theirs, and gets the folder. From ``policy`` only the configuration is taken.

    Raises CheckpointError if one of them cannot write; whatever was there before is then still there.
    """
    processes = policy.processes
    if not processes.is_main and not snapshot.is_partial:
        return None
    folder = root / f"step_{snapshot.step:06d}"
    partial_folder = root / f".{folder.name}.partial-{os.getpid()}"
    together = processes if snapshot.is_partial else ALONE
    try:
        partial_folder = _by_all(together, lambda: _begin(snapshot, policy, partial_folder))[0]
        sums = _by_all(together, lambda: _write_share(snapshot, policy, partial_folder))
        if not processes.is_main:
            return None
        kind = "base" if snapshot.weights is None else "whole" if snapshot.is_whole else "trained"
        written = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        facts = {**snapshot.facts, "step": snapshot.step, "weights": kind, "written": written}
        write_checkpoint_manifest(
            partial_folder, facts, {name: checksum for share in sums for name, checksum in share.items()}
        )
        publish(partial_folder, folder)
    except FAILURES as error:
        if processes.is_main:
            shutil.rmtree(partial_folder, ignore_errors=True)
        raise CheckpointError(
            f"{folder}: the checkpoint cannot be written: {' '.join(str(error).split())}. Older ones are untouched"
        ) from error
    return folder


def _by_all(processes: Processes, call: Callable[[], T]) -> list[T]:
    """Call it in every process. Raises OSError in all of them if it fails in one."""
    result: T | None = None
    failed: Exception | None = None
    try:
        result = call()
    except FAILURES as error:
        if processes.count == 1:
            raise
        failed = error
    answers = processes.gather_beside((result, None if failed is None else str(failed)))
    for rank, (_, problem) in enumerate(answers):
        if problem is not None:
            raise OSError(f"process {rank}: {problem}") from failed
    return [value for value, _ in answers]  # type: ignore[misc]


def _begin(snapshot: Snapshot, policy: TrainedPolicy, folder: Path) -> Path:
    """Process 0 makes the folder, under a name with its own number, and writes all but the shares into it."""
    if policy.processes.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write_rest(snapshot, policy, folder)
    return folder


def _write_share(snapshot: Snapshot, policy: TrainedPolicy, folder: Path) -> dict[str, dict[str, Any]]:
    """Write the tensors that this process has, and give the sizes and sums of their files."""
    written: dict[str, dict[str, Any]] = {}
    weights = None if snapshot.is_whole and snapshot.owners is None else snapshot.weights  # see _write_rest
    parts = {
        WEIGHTS if snapshot.is_whole else TRAINED: weights,
        OPTIMIZER: snapshot.optimizer if snapshot.weights is not None else None,
        REFERENCE: snapshot.reference or None,
    }
    for stem, tensors in parts.items():
        if tensors or (tensors is not None and not snapshot.is_partial):
            path = folder / _file_name(snapshot, policy.processes, stem, policy.processes.rank)
            save_file(_once(tensors), path, metadata={"format": "pt"})
            written[path.name] = FileSum.of(path, flush=True).entry()
    return written


def _file_name(snapshot: Snapshot, processes: Processes, stem: str, rank: int) -> str:
    """As transformers names the parts of a model in several files."""
    own = "" if not snapshot.is_partial else f"-{rank + 1:05d}-of-{processes.count:05d}"
    return f"{stem}{own}.safetensors"


def _once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under the first of its names."""
    seen: dict[int, str] = {}
    return {name: tensor for name, tensor in tensors.items() if seen.setdefault(id(tensor), name) == name}


def _write_rest(snapshot: Snapshot, policy: TrainedPolicy, folder: Path) -> None:
    """Write process 0's files beside the shares: small ones, and those that make the folder an ordinary model."""
    text = json.dumps(to_plain(snapshot.state), sort_keys=True, indent=1, allow_nan=False)
    (folder / STATE).write_text(text + "\n", encoding="utf-8")
    for step, groups in snapshot.ahead.items():
        none = [[Reward(None, error="not graded yet") for _ in group.completions] for group in groups]
        from oncurve.observe.step_record import write_step  # lazy

        write_step(folder / AHEAD.format(step), groups, none, [[math.nan for _ in graded] for graded in none])
    if snapshot.weights is None:
        return
    if snapshot.is_whole:
        if snapshot.owners is None:
            policy.model.save_pretrained(folder, state_dict=dict(snapshot.weights))
        else:
            names = {
                name: _file_name(snapshot, policy.processes, WEIGHTS, who) for name, who in snapshot.owners.items()
            }
            write_around(policy.model, folder, names)
        policy.tokenizer.save_pretrained(folder)
    elif policy.adapter is not None:  # for everybody else's tools; it is small
        policy.adapter.save_pretrained(folder, state_dict=dict(snapshot.weights))
        policy.tokenizer.save_pretrained(folder)


def read_ahead(folder: Path) -> dict[int, list[Group]]:
    """The groups of coming steps that a verified checkpoint holds. Raises DataError if they cannot be read."""
    files = {int(path.stem.removeprefix("ahead_")): path for path in folder.glob("ahead_*.parquet")}
    from oncurve.observe.step_record import read_groups  # lazy

    return {step: list(read_groups(path).groups) for step, path in sorted(files.items())}


def restore(policy: TrainedPolicy, folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Put the tensors of a verified checkpoint into a policy made from the same recipe; gives back the small things.

    Whatever number of processes wrote it, each process reads its own parts only.

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
            _fill_whole(policy, folder)
        else:
            _fill(policy, trained_parameters(model), _files(folder, TRAINED))
        policy.backend.load_moments(_files(folder, OPTIMIZER))
        if policy.reference is not None and (files := _files(folder, REFERENCE)):
            weights = dict(policy.reference.named_parameters())
            _fill(policy, {name: weights[name] for name in files}, files)
    except (*FAILURES, KeyError) as error:
        raise CheckpointError(
            f"{folder}: does not fit the recipe's model: {' '.join(str(error).split())[:400]}. "
            f"Resume with the recipe that the run had"
        ) from None
    policy.publish()
    policy.num_updates = int(state["num_updates"])
    policy.num_scheduled = int(state["num_scheduled"])
    if policy.loss_scale is not None and (scale := state.get("loss_scale")):
        policy.loss_scale.value, policy.loss_scale.num_finite = float(scale["value"]), int(scale["num_finite"])
    return state


def _files(folder: Path, stem: str) -> TensorFiles:
    """The tensors of one kind, in one file or in those of several processes."""
    return TensorFiles([*folder.glob(f"{stem}.safetensors"), *sorted(folder.glob(f"{stem}-*-of-*.safetensors"))])


def _fill_whole(policy: TrainedPolicy, folder: Path) -> None:
    targets = policy.trained_model.state_dict(keep_vars=True)
    if is_converted(policy.model):  # only transformers knows how
        saved, _ = load_model(str(folder))
        tensors = saved.state_dict()
        _fill(policy, targets, {name: tensors[name] for name in _once(targets)})
    else:
        _fill(policy, targets, _files(folder, WEIGHTS))


def _fill(policy: TrainedPolicy, targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Each target from the tensor of one of its names; of files only the rows that this process has."""
    names: dict[int, list[str]] = {}
    for name, target in targets.items():
        names.setdefault(id(target), []).append(name)
    missing = [same[0] for same in names.values() if not any(name in tensors for name in same)]
    if strange := sorted([*missing, *(tensors.keys() - targets.keys())]):
        raise ValueError(f"only one of them has {strange[0]}")
    for same in names.values():
        name = next(name for name in same if name in tensors)
        target, files = targets[name], tensors if isinstance(tensors, TensorFiles) else None
        there = tensors[name].shape if files is None else files.shape(name)
        if (here := policy.backend.full_shape(target)) != there:
            raise ValueError(f"{name} has shape {tuple(here)} here and {tuple(there)} there")
        policy.backend.load_shard(target, tensors[name].__getitem__ if files is None else files.reader(name))


def checksum(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    in_full_precision: bool = False,
    whole: Callable[[Tensor], Tensor] | None = None,
) -> str | None:
    """SHA-256 over names, types, shapes and bytes, in the order of the names; None over nothing.

    With ``in_full_precision``, numbers in half width count as the same ones in float32. ``whole`` puts together a
    tensor of which this process has a part, one at a time.
    """
    digest, is_empty = hashlib.sha256(), True
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        is_empty = False
        tensor = (tensor if whole is None else whole(tensor)).detach().to("cpu")
        tensor = tensor.float() if in_full_precision and tensor.dtype in HALF else tensor
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
    """The value that ``to_plain`` was given, with lists in place of tuples."""
    if isinstance(value, Mapping):
        return float(value["number"]) if value.keys() == {"number"} else {k: from_plain(v) for k, v in value.items()}
    return [from_plain(item) for item in value] if isinstance(value, list) else value
