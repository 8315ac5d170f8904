"""Quantized checkpoints as a start: their weights are dequantized when they are read, and training updates those.

FP8 with block scales and MXFP4 are read by transformers; compressed-tensors here, for its forms that are a product of a
scale and a number of eight or four bits.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import FineGrainedFP8Config, Mxfp4Config, PreTrainedConfig

from oncurve.observe.model_files import QUANTIZATION, ModelFiles
from oncurve.policy.passport import quantization_of, stored_tensors
from oncurve.run_errors import CheckpointError

BY_TRANSFORMERS = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}
"""Kinds that transformers dequantizes."""
LEFT_TO_TRANSFORMERS = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")
"""Kinds that stay in few bits, over which an adapter is trained."""
FORMS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized")
"""Forms of compressed-tensors that are read here."""
WIDTHS = (2, 4, 8)
"""Bits of a number that fill words of 32; older and newer writers lay others out in different ways."""
OF_ACTIVATIONS = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
                  ".input_global_scale")  # fmt: skip
"""Ends of the names of scales by which engines round activations and caches; training rounds neither."""


def as_whole_numbers(
    name: str, config: PreTrainedConfig, files: ModelFiles | None, dtype: torch.dtype
) -> tuple[dict[str, Any], str | None]:
    """Arguments with which transformers loads a checkpoint of few bits into whole numbers, and a sentence on what that
    means; nothing for any other.

    Raises CheckpointError for a kind that is not read.
    """
    known = quantization_of(config)
    kind = None if known is None else str(known.get("quant_method") or "compressed-tensors")
    if known is None or kind in LEFT_TO_TRANSFORMERS:
        return {}, None
    sentence = (
        f"dequantized from {kind} to {str(dtype).removeprefix('torch.')}, which training updates and saves; quantize "
        f"what is saved again if {kind} is needed"
    )
    if kind in BY_TRANSFORMERS:
        return {"quantization_config": BY_TRANSFORMERS[kind](dequantize=True)}, sentence
    if kind == "compressed-tensors" and files is None:
        raise CheckpointError(
            f"model {name!r}: its weights are not on this machine yet. Fetch them: `hf download {name}`"
        )
    if kind != "compressed-tensors" or files is None or not files.tensors:
        raise CheckpointError(
            f"model {name!r} is quantized by {kind}, which is not read here. Name the model in bfloat16 that it was "
            f"made from, or one in FP8, MXFP4 or compressed-tensors"
        )
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        for key in QUANTIZATION:
            vars(part).pop(key, None)
    return {"config": plain, "state_dict": decompress(name, known, files, dtype)}, sentence


def decompress(name: str, known: Mapping[str, Any], files: ModelFiles, dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole weights of a checkpoint of compressed-tensors: ``(number - zero) * scale / global scale``, with a scale
    and perhaps a zero for each group, channel or matrix.

    Raises CheckpointError for a form with more than that.
    """
    groups = [group.get("weights") or {} for group in dict(known.get("config_groups") or {}).values()]
    forms = {str(known.get("format")), *(str(group["format"]) for group in groups if group.get("format"))}
    kinds = {(group.get("type"), group.get("num_bits")) for group in groups}
    strange = sorted(key for key in files.tensors if key.endswith((".weight_g_idx", ".bitmask")))
    if not forms <= {*FORMS} or len(kinds) != 1 or strange or not {bits for _, bits in kinds} <= {*WIDTHS}:
        what = strange[0] if strange else f"its form is {' and '.join(sorted(forms))} with weights of {sorted(kinds)}"
        raise CheckpointError(
            f"model {name!r} is quantized by compressed-tensors in a form that is not read here ({what}). Name the "
            f"model in bfloat16 that it was made from"
        )
    [(_, bits)] = kinds
    stored = {key: tensor for key, tensor in stored_tensors(files, files.tensors) if not key.endswith(OF_ACTIVATIONS)}
    whole = dict[str, Tensor]()
    for key, tensor in stored.items():
        if key.endswith((".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_global_scale")):
            continue
        stem = key.removesuffix("_packed")
        scale, zero = stored.get(f"{stem}_scale"), stored.get(f"{stem}_zero_point")
        if scale is None:
            whole[stem] = tensor
            continue
        numbers = tensor.float()
        if tensor.dtype == torch.uint8:
            numbers = _floats_of_four_bits(tensor)
        elif stem != key:
            numbers = _unpacked(tensor, int(bits or 0), [int(size) for size in stored[f"{stem}_shape"]]).float()
        if zero is not None:
            if zero.dtype == torch.int32:  # words with the zeros of several rows
                zero = _unpacked(zero.T, int(bits or 0), [zero.shape[1], len(scale)]).T
            numbers = numbers - _spread(zero.float(), numbers.shape)
        scale = scale.float() / stored.get(f"{stem}_global_scale", torch.ones(1)).float()
        whole[stem] = (numbers * _spread(scale, numbers.shape)).to(dtype)
    return whole


def _floats_of_four_bits(packed: Tensor) -> Tensor:
    """Numbers of a sign, two bits of exponent and one of mantissa, two in a byte, of which the lower comes first."""
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    return sizes[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


def _unpacked(packed: Tensor, bits: int, shape: Sequence[int]) -> Tensor:
    """Signed integers of a few bits from words of 32 bits, of which the lowest come first."""
    shifts = torch.arange(0, 32 - 32 % bits, bits, dtype=torch.int32)
    numbers = (packed[:, :, None] >> shifts) & (2**bits - 1)
    return numbers.flatten(1)[:, : shape[1]] - 2 ** (bits - 1)


def _spread(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """A scale for each number of a matrix, from those of the matrix, of its rows, or of equal parts of either."""
    if scale.numel() == 1:
        return scale.view(1, 1)
    rows, columns = (scale.shape[0], 1) if scale.ndim == 1 else scale.shape
    sizes = [-(-size // parts) for size, parts in zip(shape, (rows, columns), strict=True)]
    spread = scale.view(rows, columns).repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)
    return spread[: shape[0], : shape[1]]
