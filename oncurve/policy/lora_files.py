"""The files of an adapter against the adapter that peft made of them: nothing missing, nothing left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.model.lora_weights import PREFIX
from oncurve.observe.model_files import ModelFiles
from oncurve.policy.passport import check_numbers, listed, stored_tensors
from oncurve.run_errors import CheckpointError
from oncurve.wording import counted

if TYPE_CHECKING:
    from peft import PeftModel


def changed_base(model: PreTrainedModel, files: ModelFiles) -> list[str]:
    """Weights of the base that an adapter's files hold as a whole, as peft does with a resized embedding; those that
    are the base's own are left out."""
    known = model.state_dict()
    inside = {name: name.removeprefix(PREFIX) for name in files.tensors if name.removeprefix(PREFIX) in known}
    return [name for name, tensor in stored_tensors(files, inside) if not _is_same(tensor, known[inside[name]])]


def check_adapter(peft_model: PeftModel, files: ModelFiles, changed: Sequence[str]) -> None:
    """Every tensor of an adapter's files is in the model, and every matrix of the adapter comes from them.

    Raises CheckpointError otherwise, for numbers that are none, and for weights of the base that were ``changed``.
    """
    from peft import get_peft_model_state_dict

    made: Mapping[str, Tensor] = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    base = {f"{PREFIX}{name}" for name in peft_model.get_base_model().state_dict()}
    absent = sorted(made.keys() - files.tensors.keys())
    left = sorted(files.tensors.keys() - made.keys() - base)
    if (absent or left) and files.tensors:  # peft may rename them, as those of experts
        absent, left = _by_numbers(made, files, absent, left)
    folder, changed = files.folder, [name for name in changed if name not in made]
    if absent:
        raise CheckpointError(
            f"{folder}: {len(absent)} of the {counted(len(made), 'tensor')} that adapter_config.json describes are in "
            f"no file, such as {listed(absent)}{f'; the files hold {listed(left)} instead' if left else ''}. Save the "
            f"adapter again with peft, or correct adapter_config.json (target_modules, use_dora)"
        )
    if left:
        raise CheckpointError(
            f"{folder}: no layer takes {counted(len(left), 'tensor')} of its files, such as {listed(left)}: it would "
            f"be another adapter than the one that was saved. Correct its adapter_config.json (target_modules, "
            f"layers_to_transform, modules_to_save)"
        )
    if changed:
        raise CheckpointError(
            f"{folder}: beside the adapter its files hold {listed(changed)}, with other numbers than the base, and "
            f"they would not be saved with the adapter. Merge it into its base with peft, and name the merged model"
        )
    check_numbers(str(folder), made.items())


def _by_numbers(
    made: Mapping[str, Tensor], files: ModelFiles, absent: list[str], left: list[str]
) -> tuple[list[str], list[str]]:
    """The names of either side whose numbers the other side does not have under any name."""
    stored = dict(stored_tensors(files, left))
    if len(stored) < len(left):
        return absent, left
    size = sum(tensor.numel() for tensor in stored.values())
    if absent and left and size == sum(made[name].numel() for name in absent):
        ours, theirs = (torch.cat([part.flatten().float().cpu() for part in parts]).sort().values
                        for parts in ([made[name] for name in absent], stored.values()))  # fmt: skip
        if torch.equal(ours, theirs):
            return [], []
    return absent, left


def _is_same(stored: Tensor, own: Tensor) -> bool:
    return stored.shape == own.shape and torch.equal(stored.to(own.dtype), own.cpu())
