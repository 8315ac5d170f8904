"""Checkpoints with weights of few bits: read as numbers times scales, trained as whole numbers, saved as such."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model, model_config
from torch import Tensor

from oncurve.policy.few_bits import as_whole_numbers
from oncurve.policy.model_folder import load_model, save_model
from oncurve.policy.passport import files_of, passport_of
from oncurve.run_errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BLOCK = 16


def blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """FP8 with a scale for each block of a matrix, and what it stands for."""
    parts = weight.view(weight.shape[0] // BLOCK, BLOCK, weight.shape[1] // BLOCK, BLOCK)
    scale = parts.abs().amax((1, 3), keepdim=True) / 448
    numbers = (parts / scale).to(torch.float8_e4m3fn)
    exact = (numbers.float() * scale).view_as(weight)
    return {"weight": numbers.view_as(weight), "weight_scale_inv": scale[:, 0, :, 0]}, exact


def channels(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale, "input_scale": torch.ones(1)}, numbers.float() * scale


def integers(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scale).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scale}, numbers * scale


def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Eight integers of four bits in a word, with a scale for each 16 of a row."""
    parts = weight.view(len(weight), -1, BLOCK)
    scale = parts.abs().amax(2) / 7
    numbers = (parts / scale[..., None]).round().clamp(-8, 7)
    exact = (numbers * scale[..., None]).view_as(weight)
    words = in_words(numbers.view_as(weight))
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}, exact


def asymmetric(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The same with a zero for each 16 of a row; words hold the zeros of eight rows."""
    parts = weight.view(len(weight), -1, BLOCK)
    low, high = parts.aminmax(dim=2)
    scale = (high - low) / 15
    zero = (-8 - low / scale).round().clamp(-8, 7)
    numbers = (parts / scale[..., None] + zero[..., None]).round().clamp(-8, 7)
    stored, _ = packed(weight)
    words = {"weight_packed": in_words(numbers.view(weight.shape)), "weight_zero_point": in_words(zero.T).T}
    return stored | words | {"weight_scale": scale}, ((numbers - zero[..., None]) * scale[..., None]).view_as(weight)


def floats_of_four_bits(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """NVFP4: a sign and one of eight sizes, a scale in float8 for each 16 of a row, and one for all."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    parts = weight.view(len(weight), -1, BLOCK)
    whole = 448 * 6 / weight.abs().max()
    scale = (parts.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    each = scale.float()[..., None] / whole
    codes = ((parts.abs() / each)[..., None] - sizes).abs().argmin(-1)
    exact = (sizes[codes] * parts.sign() * each).view_as(weight)
    nibbles = (codes + 8 * (parts < 0)).view(len(weight), -1, 2).to(torch.uint8)
    stored = {"weight_packed": nibbles[..., 0] | nibbles[..., 1] << 4, "weight_scale": scale}
    return stored | {"weight_global_scale": whole.view(1)}, exact


def in_words(numbers: Tensor) -> Tensor:
    """Eight signed integers of four bits in a word of 32, the first lowest."""
    nibbles = (numbers.reshape(len(numbers), -1, 8) + 8).to(torch.int64)
    words = (nibbles << 4 * torch.arange(8)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def compressed(form: str, kind: str, bits: int, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, "symmetric": True, **more}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
KINDS: dict[str, tuple[Callable[[Tensor], tuple[dict[str, Tensor], Tensor]], dict[str, Any]]] = {
    "fp8": (blocks, FP8),
    "compressed-tensors, floats": (channels, compressed("float-quantized", "float", 8)),
    "compressed-tensors, integers": (integers, compressed("int-quantized", "int", 8)),
    "compressed-tensors, packed": (packed, compressed("pack-quantized", "int", 4, group_size=BLOCK)),
    "compressed-tensors, asymmetric": (asymmetric, compressed("pack-quantized", "int", 4, symmetric=False)),
    "compressed-tensors, NVFP4": (floats_of_four_bits, compressed("nvfp4-pack-quantized", "float", 4)),
}


def write(folder: Path, tokenizer: PreTrainedTokenizerFast, kind: str) -> Any:
    """A folder of that kind; the model that its numbers are."""
    few, described = KINDS[kind]
    model = make_model(model_config("llama", tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stored, exact = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(folder / "model.safetensors").items():
        parts, exact[name] = few(weight) if "_proj." in name else ({"weight": weight}, weight)
        stored |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": described}))
    model.load_state_dict(exact)
    return model


def row(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 35)[None]).logits.log_softmax(-1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_few_bits_is_its_numbers_times_its_scales_and_is_saved_as_whole_numbers(
    kind: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    exact = row(write(tmp_path / "few", tokenizer, kind))
    model, own = load_model(str(tmp_path / "few"))
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert torch.allclose(row(model), exact, atol=1e-5)
    passport = passport_of(model)
    assert passport is not None
    assert "to float32, which training updates" in passport.weights
    save_model(model, own, tmp_path / "whole")
    again, _ = load_model(str(tmp_path / "whole"))
    assert torch.equal(row(again), row(model))
    assert "quantization_config" not in json.loads((tmp_path / "whole" / "config.json").read_text())


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "no_such"},
        compressed("marlin-24", "int", 4),
        compressed("pack-quantized", "int", 3),
    ],
)
def test_other_checkpoints_of_few_bits_are_refused(
    described: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = model_config("llama", tokenizer)
    make_model(config).save_pretrained(tmp_path)
    config.quantization_config = described
    with pytest.raises(CheckpointError, match=r"is quantized by .* not read here"):
        as_whole_numbers("tiny", config, files_of(str(tmp_path)), torch.float32)
