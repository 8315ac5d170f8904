"""The model of a recipe and the adapter on it, from those of a script."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from oncurve.trl.draft import Draft
from oncurve.trl.options import Note, OptionOutcome

LORA = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
    "bias": "bias",
}
LORA_DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none"}
"""The defaults of peft's LoraConfig."""
LORA_IDLE: dict[str, Any] = {
    "task_type": None, "inference_mode": False, "fan_in_fan_out": False, "init_lora_weights": True, "use_rslora": None,
    "modules_to_save": None, "use_dora": False, "rank_pattern": None, "alpha_pattern": None, "target_parameters": None,
    "layers_to_transform": None,
}  # fmt: skip
"""Further arguments, with the value that changes nothing; task_type and use_rslora are looked at by themselves."""


def put_model(draft: Draft) -> None:
    """The model, its revision, and the adapter on it."""
    draft.put("model", draft.outcome.model, comment="")
    _init_kwargs(draft)
    if draft.outcome.quantization is not None:
        draft.put("policy.quantization", draft.outcome.quantization, comment="")
    if draft.outcome.lora is not None:
        _put_lora(draft, LORA_DEFAULTS | draft.outcome.lora)


def _init_kwargs(draft: Draft) -> None:
    kwargs = draft.ask("model_init_kwargs") or {}
    if not isinstance(kwargs, dict):
        draft.note("unread", "model_init_kwargs", "it is no dictionary")
        return
    for name, value in kwargs.items():
        match name:
            case "revision" | "trust_remote_code":
                draft.put(f"policy.{name}", value, "model_init_kwargs")
            case "dtype" | "torch_dtype":
                why = "weights in training are float32 always, and computed with in policy.compute_type"
                draft.note("differs", "model_init_kwargs", f"{name}: {why}")
            case "attn_implementation" | "device_map" | "use_cache" | "low_cpu_mem_usage":
                draft.note("nothing", "model_init_kwargs", f"{name}: the device and its attention are chosen here")
            case _:
                draft.note("unsupported", "model_init_kwargs", f"there is no key for {name}")


def _put_lora(draft: Draft, values: dict[str, Any]) -> None:
    lora, scale = draft.outcome.lora or {}, ""
    if values.get("use_rslora"):
        values["lora_alpha"] = round(values["lora_alpha"] * math.sqrt(values["r"]), 6)  # alpha / sqrt(r) is this over r
        scale = ", times sqrt(r) for use_rslora"
    for name in LORA_DEFAULTS:
        origin = name if name in lora else f"peft's default {name}"
        draft.put(f"policy.lora.{LORA[name]}", values[name], comment=origin + scale * (name == "lora_alpha"))
    targets = values.get("target_modules")
    if targets is None:
        why = "peft chooses by the family of the model: q_proj and v_proj in Llama, Qwen and Mistral, as here"
        draft.notes.append(Note("differs", "target_modules", why))
        draft.put("policy.lora.target_modules", ["q_proj", "v_proj"], comment="peft's choice for Llama and Qwen")
    else:
        named = targets if isinstance(targets, str) else sorted(targets)
        draft.put("policy.lora.target_modules", named, comment="target_modules")
    for name, value in unsaid(values).items():
        why = "policy.lora has rank, alpha, dropout, target_modules and bias"
        draft.notes.append(Note("unsupported", f"LoraConfig {name} = {value!r:.60}", why))


def unsaid(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a LoraConfig that change the adapter and that ``policy.lora`` has no key for."""

    def has_key(name: str, value: Any) -> bool:
        is_usual = name == "task_type" and (value is None or str(value).endswith("CAUSAL_LM"))
        is_idle = name in LORA_IDLE and value == LORA_IDLE[name]
        return name in LORA or name == "use_rslora" or is_usual or is_idle

    return {name: value for name, value in values.items() if not has_key(name, value)}


def quantization(values: dict[str, Any], outcome: OptionOutcome) -> str | None:
    """nf4 or int8, as bitsandbytes' options ask for."""
    if values.get("load_in_4bit"):
        if (kind := values.get("bnb_4bit_quant_type", "fp4")) != "nf4":
            outcome.notes.append(Note("unsupported", f"4 bits of type {kind}", "nf4 is used instead"))
        return "nf4"
    return "int8" if values.get("load_in_8bit") else None
