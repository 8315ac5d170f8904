"""Does training with weights in parts do on a GPU what it does with whole ones? On one that is not there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import parts_on_device
import pytest
from safetensors.torch import load_file, save_file

from oncurve.observe.run_model import EMBEDDED

if TYPE_CHECKING:
    from pretend_gpu import PretendGpu

KINDS = {
    "bfloat16": ("compute_type: auto", 0.1, "cuda"),
    "float32": ("compute_type: float32", 0.0, "cuda"),
    "parts in the CPU's memory": ("offload: true", 0.1, "cpu"),
    "activations there as well": ("offload: true, gradient_checkpointing: true, offload_activations: true", 0.0, "cpu"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_packed_and_the_training_pass_gives_the_fixed_log_probabilities(
    kind: str, pretend_gpu: PretendGpu
) -> None:
    policy, kl_coef, place = KINDS[kind]
    found = pretend_gpu(parts_on_device.update, policy, kl_coef)
    assert found["packed"], "padded rows compute every prompt once for each completion"
    assert found["road"] == "packed rows through the model's modules"
    assert found["places"] == {place}
    assert found["gradients"]
    assert found["gaps"] == [0.0] * len(found["gaps"]) != []


def test_a_model_that_is_only_sampled_from_is_kept_in_half_width(pretend_gpu: PretendGpu, tmp_path: Path) -> None:
    """Two bytes a weight and four of the embedding; sampling adds the head and attention's matrices in their order."""
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    weights = {name: weight.bfloat16() for name, weight in load_file(EMBEDDED / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = pretend_gpu(parts_on_device.served, str(tmp_path))
    assert found["loaded"] < 2.2
    assert found["sampling"] < 3.6
