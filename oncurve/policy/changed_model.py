"""The comparison of a model that a program passed with the files that it names."""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from torch import nn

from oncurve.observe.run_model import locate
from oncurve.policy.passport import files_of, stored_tensors
from oncurve.run_errors import CheckpointError
from oncurve.wording import counted


def changed_in_memory(model: nn.Module, name: str) -> str | None:
    """A warning of weights that are not those of the files, on which an adapter of this model will be put later.

    None where all that can be compared are the same: weights by their names in the files of a folder or of the hub's
    cache, and of few bits none.
    """
    weights = {key.replace(".base_layer.", "."): value for key, value in model.named_parameters()}
    try:
        files = files_of(locate(name))
        names = [key for key in files.tensors if key in weights] if files is not None else []
        changed = (
            [key for key, stored in stored_tensors(files, names) if _differ(weights[key], stored)] if files else []
        )
    except (OSError, SafetensorError, CheckpointError):
        return None
    if not changed:
        return None
    are = "is" if len(changed) == 1 else "are"
    return (
        f"warning: {counted(len(changed), 'weight')} of the model that was passed {are} not as in the files of {name}, "
        f"such as {changed[0]}. The adapter is trained on the model in memory; loaded on those files it is another "
        f"model. Write the model with save_pretrained(FOLDER), and train the one from there"
    )


def _differ(weight: torch.Tensor, stored: torch.Tensor) -> bool:
    if weight.is_meta or not (weight.is_floating_point() and stored.is_floating_point()):
        return False
    if weight.shape != stored.shape:
        return True
    here = weight.detach().cpu()
    return not torch.equal(here.to(stored.dtype), stored)
