"""The protocol of a policy's backend, and the backend in which every process has all weights; files of its tensors."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from oncurve.algorithm.precision import SAFETENSORS_TYPES
from oncurve.core.errors import ConfigError
from oncurve.core.policy import OneDevice, WeightBackend
from oncurve.policy.distributed import Processes
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.sharding import Reader, Room, fill, is_cut, whole


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of some safetensors files by name, each read from the disk when it is asked for."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        """Raises SafetensorError or OSError for a file that cannot be read."""
        self._files: dict[str, Any] = {}
        for path in paths:
            file: Any = safe_open(str(path), "pt")
            self._files |= dict.fromkeys(file.keys(), file)  # closed with the last name of it

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def shape(self, name: str) -> torch.Size:
        """Without reading the tensor."""
        return torch.Size(self._files[name].get_slice(name).get_shape())

    def rows(self, name: str, rows: slice) -> Tensor:
        """Some rows of a tensor; nothing else of it is read."""
        if rows == slice(None):
            return self[name]
        return self._files[name].get_slice(name)[rows]

    def reader(self, name: str) -> Callable[[slice], Tensor]:
        """A function that reads the rows of one tensor."""
        return lambda rows: self.rows(name, rows)


@contextmanager
def tensor_writer(path: Path, described: Mapping[str, tuple[torch.dtype, torch.Size]]) -> Iterator[Callable[..., None]]:
    """A safetensors file whose tensors are given one after the other, in the order in which they were described.

    No more than one of them has to be in memory at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in described.items():
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)

        def write(tensor: Tensor) -> None:
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)

        yield write


def narrow_files(folder: Path, kind: torch.dtype) -> None:
    """Write the float32 weights of a saved model in another type, one tensor after the other, and say so in its
    configuration; adapters stay as they are."""
    for path in sorted(folder.glob("model*.safetensors")):
        files, narrower = TensorFiles([path]), path.with_suffix(".narrower")
        kinds = {name: files[name].dtype for name in files}
        kinds = {name: kind if dtype == torch.float32 else dtype for name, dtype in kinds.items()}
        with tensor_writer(narrower, {name: (kinds[name], files.shape(name)) for name in files}) as write:
            for name in files:
                write(files[name].to(kinds[name]))
        narrower.replace(path)
        config = folder / "config.json"
        settings = {**json.loads(config.read_text(encoding="utf-8")), "dtype": str(kind).removeprefix("torch.")}
        config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names of weights that transformers' Trainer leaves out of weight decay."""

Scorers = Mapping[int, nn.Module]
"""The pass over a batch as a module, by the id of the model that it passes through."""


class Backend(WeightBackend, Protocol):
    """The weights in training: where they are, and how they are read, written and moved.

    There are three: ``DataParallel`` here, ``Fsdp`` in fsdp.py, ``Zero`` (DeepSpeed) in deepspeed.py.
    """

    is_divided: bool
    """A process has a part of each weight only."""

    def full_tensor(self, tensor: Tensor, room: Room | None = None) -> Tensor:
        """All of a weight of which this process has a part, which all must call; other tensors as they are."""
        ...

    def full_shape(self, tensor: Tensor) -> torch.Size:
        """The shape of all of a weight."""
        ...

    def load_shard(self, tensor: Tensor, read: Reader) -> None:
        """Put values into a weight, or into this process's part of it."""
        ...

    def moments(self, room: Room) -> dict[str, Piece]:
        """The optimizer's moments, as ``<parameter>:<moment>``."""
        ...

    def load_moments(self, tensors: TensorFiles) -> None:
        """The same from the files of a checkpoint, whatever number of processes made it. Raises ValueError."""
        ...


@dataclass(frozen=True)
class Piece:
    """One tensor of a run, not put together yet."""

    num_bytes: int
    gather: Callable[[], Tensor]
    """All of it, for which all processes must ask."""
    identity: object
    """The same for the same tensor under another name."""
    is_copied: bool = False
    """On a CPU it is put together in memory of its own."""


def piece_of(backend: Backend, tensor: Tensor, room: Room) -> Piece:
    """A weight, or a moment of torch's optimizer."""
    size = backend.full_shape(tensor).numel() * tensor.element_size()
    return Piece(size, partial(backend.full_tensor, tensor, room), id(tensor), is_cut(tensor))


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that training moves, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class DataParallel(OneDevice):
    """Every process has all weights, and gradients are added up before an update; what a checkpoint holds of them."""

    is_divided = False

    def __init__(
        self, model: PreTrainedModel, scorers: Scorers, settings: OptimizerSettings, processes: Processes
    ) -> None:
        self.model, self.settings = model, settings
        groups = self._groups()
        optimizer = make_optimizer(model, groups, settings) if any(groups) else None  # only sampled from
        super().__init__(model, optimizer, scorers, max_gradient_norm=settings.max_gradient_norm, processes=processes)

    def full_tensor(self, tensor: Tensor, room: Room | None = None) -> Tensor:
        """The tensor."""
        return whole(tensor.detach(), room)

    def full_shape(self, tensor: Tensor) -> torch.Size:
        """Its shape."""
        return tensor.shape

    def load_shard(self, tensor: Tensor, read: Reader) -> None:
        """Put values into a weight."""
        fill(tensor, read)

    def _groups(self) -> Sequence[list[nn.Parameter]]:
        """The trained weights, those apart with which torch does not compute in one call; no list is empty."""
        trained = list(trained_parameters(self.model).values())
        return [trained] if trained else []

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The moments and counters of torch's optimizer, or this process's parts, as ``<parameter>:<moment>``."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {
            f"{names[id(parameter)]}:{key}": value
            if isinstance(value, Tensor)
            else torch.tensor(value, dtype=torch.float64)
            for parameter, moments in self.optimizer.state.items()
            for key, value in moments.items()
            if isinstance(value, (Tensor, int, float))
        }

    def moments(self, room: Room) -> dict[str, Piece]:
        """The optimizer's moments."""
        return {name: piece_of(self, tensor, room) for name, tensor in self.optimizer_tensors().items()}

    def load_moments(self, tensors: TensorFiles) -> None:
        """The same from files. Raises ValueError for moments of a weight that is not trained."""
        moments: dict[str, dict[str, str]] = {}
        for key in tensors:
            name, _, moment = key.rpartition(":")
            moments.setdefault(name, {})[moment] = key
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        loaded = []
        several = isinstance(self.optimizer, MuonWithAdamW)
        for part in self.optimizer.parts if several else [self.optimizer]:
            described = part.state_dict()
            state = {
                number: {moment: _own_part(parameter, tensors, key) for moment, key in moments.pop(name).items()}
                for group, numbered in zip(part.param_groups, described["param_groups"], strict=True)
                for parameter, number in zip(group["params"], numbered["params"], strict=True)
                if (name := names[id(parameter)]) in moments
            }
            loaded.append((part, {"state": state, "param_groups": described["param_groups"]}))
        if moments:
            raise ValueError(f"the optimizer has no weight {sorted(moments)[0]}")
        for part, state in loaded:
            part.load_state_dict(state)


def _own_part(parameter: Tensor, tensors: TensorFiles, key: str) -> Tensor:
    """A moment, or this process's part of it where it has a part of the weight."""
    if not is_cut(parameter) or tensors.shape(key) != parameter.shape:
        return tensors[key]
    part = torch.empty_like(parameter, dtype=tensors.rows(key, slice(0, 0)).dtype, requires_grad=False)
    fill(part, tensors.reader(key))
    return part


class MuonWithAdamW:
    """Muon for the matrices of the layers and AdamW for all other weights, used like one of torch's optimizers."""

    def __init__(
        self,
        model: nn.Module,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        settings: OptimizerSettings,
    ) -> None:
        """Muon's updates are scaled to be as large as AdamW's (arXiv:2502.16982), so that both take one rate."""
        muon = partial(torch.optim.Muon, **settings.muon_options, adjust_lr_fn="match_rms_adamw")
        parts = (muon(matrices) if matrices else None, make_adamw(model, [others], settings) if others else None)
        self.parts: list[torch.optim.Optimizer] = [part for part in parts if part is not None]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """The moments of both, by weight."""
        return {weight: moments for part in self.parts for weight, moments in part.state.items()}

    def step(self) -> None:
        """Move all weights."""
        for part in self.parts:
            part.step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


def make_optimizer(
    model: PreTrainedModel, trained: Sequence[Sequence[nn.Parameter]], settings: OptimizerSettings
) -> torch.optim.Optimizer | MuonWithAdamW:
    """The optimizer of a recipe over the trained weights; groups are computed with apart.

    Raises ConfigError where 8 bits are asked for and bitsandbytes is not installed.
    """
    if settings.type != "muon":
        return make_adamw(model, trained, settings)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    vocabulary = {id(weight) for end in ends if end is not None for weight in end.parameters()}
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for weight in (weight for group in trained for weight in group):
        kinds[weight.ndim == 2 and id(weight) not in vocabulary].append(weight)
    return MuonWithAdamW(model, kinds[True], kinds[False], settings)


def decayed(
    model: nn.Module, trained: Sequence[Sequence[nn.Parameter]], settings: OptimizerSettings
) -> list[tuple[list[nn.Parameter], float]]:
    """Groups of weights with the decay of each: none for biases and the weights of norms, as in transformers."""
    if not settings.weight_decay:
        return [(list(group), 0.0) for group in trained]
    names = set(get_parameter_names(model, [nn.LayerNorm], NOT_DECAYED))
    decays = {id(weight) for name, weight in model.named_parameters(remove_duplicate=False) if name in names}
    kinds = [
        ([weight for weight in group if (id(weight) in decays) is kind], settings.weight_decay if kind else 0.0)
        for group in trained
        for kind in (True, False)
    ]
    return [(group, decay) for group, decay in kinds if group]


def make_adamw(
    model: nn.Module, trained: Sequence[Sequence[nn.Parameter]], settings: OptimizerSettings
) -> torch.optim.Optimizer:
    """AdamW over the trained weights, its moments in the weights' type or in 8 bits; groups are computed with apart.

    Raises ConfigError where 8 bits are asked for and bitsandbytes is not installed.
    """
    groups = [{"params": group, "weight_decay": decay} for group, decay in decayed(model, trained, settings)]
    if settings.type != "adamw_8bit":
        return torch.optim.AdamW(groups, **settings.adam_options, fused=True)
    try:
        optimizer = importlib.import_module("bitsandbytes.optim").AdamW8bit
    except ImportError:
        raise ConfigError(
            "optimizer.type is adamw_8bit, which needs bitsandbytes, and it is not installed. "
            "Run `pip install bitsandbytes`, or set optimizer.type to adamw"
        ) from None
    return optimizer(groups, **settings.adam_options)
