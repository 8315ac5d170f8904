"""Weights in parts: the memory of loading and of checkpoints, what a checkpoint holds, and the numbers they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import part_tasks
import pytest
import tasks
import torch
import workers
from lanes import gate
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from oncurve.algorithm.precision import dithered, key_of
from oncurve.policy.distributed import ALONE
from oncurve.policy.model_folder import load_tokenizer
from oncurve.run.checkpoint_manifest import checkpoints_in, verify

FSDP: dict[str, Any] = {"way": "fsdp", "double": False, "lora": False}
SLACK = 16 * 2**20
"""What a process takes for messages, files and threads."""


def saved_model(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    load_tokenizer("embedded")[1].save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 million weights, the largest matrix 3 million."""
    config = LlamaConfig(
        vocab_size=5000,
        hidden_size=600,
        intermediate_size=1600,
        num_hidden_layers=7,
        num_attention_heads=10,
        num_key_value_heads=10,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    return saved_model(LlamaForCausalLM(config), tmp_path_factory.mktemp("large"))


@pytest.mark.nightly
@pytest.mark.slow
def test_a_process_takes_the_memory_of_its_own_part_and_one_tensor(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 16))  # so that the policy leaves the allocator alone
    found = workers.run(2, part_tasks.memory, tmp_path / "said", model=large, root=tmp_path / "checkpoints")
    total = sum(one["kept"] for one in found)
    whole = sum(one["part"] for one in found)
    print(json.dumps(found))
    for rank, one in enumerate(found):
        more = one["largest"] + SLACK
        assert one["kept"] <= total / 2 + one["largest"]
        assert one["copying"] <= one["kept"] + more
        assert one["writing"] <= more
        parts = 2 * one["part"]  # of the model and of its reference
        assert one["loading"] <= parts + (whole if rank == 0 else 0) + more  # process 0 publishes whole weights
        moments = 2 * one["part"]
        assert one["reading"] <= moments + more


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A checkpoint of two processes, and what they had then and in the end."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, workers.run(2, part_tasks.save_trained, folder / "said", root=folder, **FSDP)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_checkpoint_of_two_processes_is_an_ordinary_model_in_two_files(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, said = saved
    place = folder / "step_000002"
    manifest = verify(place)
    for stem in ("model", "optimizer", "reference"):
        assert {f"{stem}-0000{number}-of-00002.safetensors" for number in (1, 2)} <= manifest["files"].keys()
    sizes = [sum(p.stat().st_size for p in place.glob(f"*-0000{number}-of-*")) for number in (1, 2)]
    assert max(sizes) < 1.1 * min(sizes)
    assert_equal(
        dict(AutoModelForCausalLM.from_pretrained(place).named_parameters()),
        {name: said[0]["saved"][name] for name in dict(tasks.tiny_llama().named_parameters())},
    )


@pytest.mark.proves("D14")
@pytest.mark.parametrize(("count", "degree"), gate([(1, None), (2, None), (3, None), (4, 2)], (1, None), (2, None)))
def test_any_number_of_processes_opens_it(
    count: int, degree: int | None, saved: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, said = saved
    if count == 1:
        found = [part_tasks.go_on(ALONE, root=folder, **FSDP)]
    else:
        found = workers.run(count, part_tasks.go_on, tmp_path, root=folder, degree=degree, **FSDP)
    for one in found:
        assert_equal(one["opened"], said[0]["saved"])
        if count == 2:
            assert_equal(one["end"], said[0]["end"])
        else:
            gap = max(float((one["end"][name] - said[0]["end"][name]).abs().max()) for name in one["end"])
            assert gap < 1e-5


@pytest.mark.nightly
def test_processes_of_which_two_and_two_have_all_weights_save_an_ordinary_checkpoint(tmp_path: Path) -> None:
    said = workers.run(4, part_tasks.save_trained, tmp_path / "said", root=tmp_path, degree=2, **FSDP)
    found = part_tasks.go_on(ALONE, root=tmp_path, **FSDP)
    assert_equal(found["opened"], said[0]["saved"])
    assert max(float((found["end"][name] - said[0]["end"][name]).abs().max()) for name in found["end"]) < 1e-5


def test_a_checkpoint_of_one_process_opens_in_parts(tmp_path: Path) -> None:
    alone = part_tasks.save_trained(ALONE, root=tmp_path, **FSDP)
    assert (tmp_path / "step_000002" / "model.safetensors").is_file()
    for one in workers.run(2, part_tasks.go_on, tmp_path / "said", root=tmp_path, **FSDP):
        assert_equal(one["opened"], alone["saved"])


@pytest.mark.proves("D14")
def test_a_share_that_cannot_be_written_leaves_no_checkpoint_and_the_older_one(tmp_path: Path) -> None:
    found = workers.run(2, part_tasks.broken_write, tmp_path / "said", root=tmp_path / "checkpoints")
    assert all("process 1: No space left on device" in said for said in found)
    assert [step for step, _ in checkpoints_in(tmp_path / "checkpoints")] == [1]
    assert list((tmp_path / "checkpoints").glob(".*")) == []


def small_model(folder: Path) -> Path:
    """As it is after some training: no number of it fits into bfloat16."""
    model = tasks.tiny_llama()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.01 * torch.randn(weight.shape, generator=generator))
    return saved_model(model, folder)


@pytest.mark.parametrize("change", gate(["safetensors", "bin"], "safetensors"))
def test_two_processes_compute_in_half_width_what_one_computes(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As close as one process is to itself with other microbatches."""
    model = small_model(tmp_path / "model")
    if change == "bin":
        torch.save(AutoModelForCausalLM.from_pretrained(model).state_dict(), model / "pytorch_model.bin")
        (model / "model.safetensors").unlink()
    monkeypatch.setattr("oncurve.policy.forward.backbone_of", lambda model: None)  # as on a GPU: transformers' layers
    options: dict[str, Any] = {"model": model, "compute_type": "bfloat16"}
    alone = part_tasks.logprobs(ALONE, **options)
    other = part_tasks.logprobs(ALONE, **options, tokens=90)
    exact = part_tasks.logprobs(ALONE, model=model, compute_type="float32")
    rounding, ragged = float((alone - exact).abs().mean()), float((alone - other).abs().mean())
    for found in workers.run(2, part_tasks.logprobs, tmp_path / "said", **options):
        gap = float((found - alone).abs().mean())
        print(f"rounding {rounding:.3g}, other microbatches {ragged:.3g}, two processes {gap:.3g}")
        assert gap <= 1.2 * ragged
        assert ragged < rounding
    if change == "safetensors":  # thresholds by the index in a part, not in the whole, are found
        planted = workers.run(2, part_tasks.logprobs, tmp_path / "planted", planted=True, **options)[0]
        assert float((planted - alone).abs().mean()) > 4 * ragged


@pytest.mark.parametrize("grid", gate(["2", "4", "2 x 2"], "2"))
def test_copies_of_parts_are_the_copies_of_the_whole(grid: str, tmp_path: Path) -> None:
    """After updates too: what is sampled from is the dithered copy of the weights that all processes have together, and
    their gradients are added up in float32."""
    model, is_hybrid = small_model(tmp_path / "model"), "x" in grid
    options: dict[str, Any] = {"model": model, "shard_degree": 2 if is_hybrid else None}
    found = workers.run(4 if is_hybrid else int(grid), part_tasks.learn_in_half_width, tmp_path / "said", **options)
    whole, copied = found[0]["whole"], found[0]["copied"]  # the first process has the copy to send
    halved = [name for name in copied if copied[name].dtype == torch.bfloat16]
    assert halved
    for name in halved:
        assert torch.equal(copied[name], dithered(whole[name], torch.bfloat16, key_of(0, name)))
        assert not torch.equal(copied[name], whole[name].bfloat16())
    for one in found:
        assert_equal(one["whole"], whole)
        assert one["narrow"] < 0.9, "gradients are summed in bfloat16"
    shown, taught = (sum(getattr(one["arrived"], part) for one in found) for part in ("total", "count"))
    assert 0.9 < shown / taught < 1.1
