"""What is sent of a model without files, and how do its files and the address of its memory follow?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from served import move

from oncurve.core.errors import ConfigError
from oncurve.fleet.weights.endpoints import check_device
from oncurve.fleet.weights.fallback import Copies
from oncurve.fleet.weights.store import WeightStore
from oncurve.fleet.weights.weight_stream import make_shipment
from oncurve.policy.trained_policy import TrainedPolicy


@pytest.fixture
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    return make_policy()


def test_what_is_sent_is_what_a_checkpoint_holds(policy: TrainedPolicy, tmp_path: Path) -> None:
    policy.model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = dict(make_shipment(policy, "run", 3, matrix_type=None))
    assert set(sent) == set(saved)
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    narrow = dict(make_shipment(policy, "run", 3, matrix_type=torch.bfloat16))
    for weight in narrow.values():
        assert weight.dtype == (torch.float32 if weight.dim() < 2 else torch.bfloat16)


def test_a_label_changes_with_the_weights_and_with_nothing_else(policy: TrainedPolicy) -> None:
    def label() -> str:
        return make_shipment(policy, "run", 3, matrix_type=None).label

    before = label()
    assert label() == before
    with torch.no_grad():
        next(policy.model.parameters()).flatten()[0] += 1e-3
    assert label() != before


@pytest.mark.parametrize("trains_meanwhile", [False, True])
def test_files_for_a_late_server_are_of_the_weights_before_they_were_trained_on(
    trains_meanwhile: bool, policy: TrainedPolicy, tmp_path: Path
) -> None:
    copies = Copies(WeightStore(tmp_path, run="run"), trains_meanwhile=trains_meanwhile)
    shipment = make_shipment(policy, "run", 0, matrix_type=None)
    before = {name: weight.clone() for name, weight in shipment}
    copies.offer(shipment)
    move(policy)
    found = copies.files(shipment.label)
    if not trains_meanwhile:
        assert found is None
        return
    assert found is not None
    assert found.label == shipment.label
    saved = load_file(Path(found.folder) / "model.safetensors")
    assert all(torch.equal(saved[name], before[name]) for name in before)


def test_a_machine_without_a_gpu_is_told_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"transfer is nccl, which needs a CUDA device.*rollouts\.transfer=fetch"):
        check_device(has_gpu=False)
    if __import__("importlib").util.find_spec("vllm") is None:
        with pytest.raises(ConfigError, match=r"pip install 'oncurve\[vllm\]'"):
            check_device(has_gpu=True)
