"""Unsloth's names over transformers and peft, for scripts that begin with it.

What it does for speed and memory alone is left out, because nothing of that is learned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from oncurve.core.errors import ConfigError

ATTENTION_AND_MLP = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NOTE = "note: unsloth: its names are those of transformers and peft here; its kernels, its memory saving and "
SPEED = frozenset({
    "max_seq_length", "fast_inference", "gpu_memory_utilization", "max_lora_rank", "float8_kv_cache", "device_map",
    "use_gradient_checkpointing", "unsloth_vllm_standby", "unsloth_tiled_mlp", "random_state", "fix_tokenizer",
    "disable_log_stats", "resize_model_vocab", "offload_embedding", "float32_mixed_precision", "rope_scaling",
    "conservativeness", "enable_prefix_caching", "qat_scheme", "temporary_location", "use_exact_model_name",
})  # fmt: skip
"""Arguments that change speed and memory, or only what Unsloth's own sampler may hold."""
LOADING = ("token", "revision", "trust_remote_code")


class FastLanguageModel:
    """Models and adapters, as transformers and peft make them."""

    @staticmethod
    def from_pretrained(model_name: str, dtype: Any = None, **options: Any) -> tuple[Any, Any]:
        """The model and its tokenizer. 4 bits unless ``load_in_4bit=False`` or another size or ``full_finetuning``.

        Raises ConfigError for arguments that would change the model and are not followed here.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

        loading = {name: options.pop(name) for name in LOADING if options.get(name) is not None}
        eight, *whole = (options.pop(name, False) for name in ("load_in_8bit", "load_in_16bit", "full_finetuning"))
        four = options.pop("load_in_4bit", True) and not (eight or any(whole))
        _refuse_rest("FastLanguageModel.from_pretrained", options)
        if options.get("rope_scaling"):
            raise ConfigError("FastLanguageModel.from_pretrained: rope_scaling changes the model. Set it in its config")
        sys.stdout.write(f"{NOTE}its limits on lengths do nothing\n")
        if four or eight:
            kind = {"load_in_8bit": True} if eight else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
            few = (
                {} if eight else {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype or torch.bfloat16}
            )
            if torch.cuda.is_available():
                loading["quantization_config"] = BitsAndBytesConfig(**kind, **few)
            else:
                sys.stdout.write("note: unsloth: there is no GPU; weights are loaded whole, not in few bits\n")
        model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype or "auto", **loading)
        loading.pop("quantization_config", None)
        return _with_methods(model), AutoTokenizer.from_pretrained(model_name, **loading)

    @staticmethod
    def get_peft_model(
        model: Any, r: int = 16, target_modules: Any = ATTENTION_AND_MLP, lora_alpha: int = 16, **options: Any
    ) -> Any:
        """The model with an adapter of peft. ``random_state`` seeds its matrices.

        Raises ConfigError for arguments that peft's LoraConfig does not know.
        """
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(options.pop("random_state", 3407))
        names = ("lora_dropout", "bias", "layers_to_transform", "layers_pattern", "use_rslora", "modules_to_save")
        names += ("init_lora_weights", "task_type")
        settings = {name: options.pop(name) for name in names if name in options}
        if options.pop("loftq_config", None):
            raise ConfigError("FastLanguageModel.get_peft_model: loftq_config is not followed here. Leave it out")
        if any(str(name).startswith("finetune_") and value is False for name, value in options.items()):
            raise ConfigError("FastLanguageModel.get_peft_model: name layers in target_modules, not by finetune_...")
        options = {name: value for name, value in options.items() if not name.startswith("finetune_")}
        _refuse_rest("FastLanguageModel.get_peft_model", options)
        targets = target_modules if isinstance(target_modules, str) else list(target_modules)
        settings.setdefault("task_type", "CAUSAL_LM")
        config = LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=targets, **settings)
        return _with_methods(get_peft_model(model, config))

    @staticmethod
    def for_inference(model: Any) -> Any:
        """The model in evaluation mode."""
        return model.eval()

    @staticmethod
    def for_training(model: Any, **_: Any) -> Any:
        """The model as it is: training sets its own mode."""
        return model


class VllmSamplingParams:
    """Options of sampling, kept as they were given: vLLM's class where vLLM is not installed."""

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)


def is_bfloat16_supported(*_: Any, **__: Any) -> bool:
    """A GPU here computes in bfloat16; a CPU does."""
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing: the original patches TRL for speed."""


def get_chat_template(tokenizer: Any, chat_template: Any = None, **_: Any) -> Any:
    """The tokenizer with its own template. Raises ConfigError where it has none."""
    if not tokenizer.chat_template:
        raise ConfigError(
            f"unsloth.chat_templates.get_chat_template: the template {chat_template!r} is Unsloth's, and the tokenizer "
            f"has none of its own. Set tokenizer.chat_template"
        )
    sys.stdout.write(f"note: unsloth: the tokenizer's own chat template is used, not {chat_template!r}\n")
    return tokenizer


NAMES: Mapping[str, Any] = {
    "FastLanguageModel": FastLanguageModel, "FastModel": FastLanguageModel, "PatchFastRL": nothing,
    "is_bfloat16_supported": is_bfloat16_supported, "is_bf16_supported": is_bfloat16_supported,
    "get_chat_template": get_chat_template,
    "vLLMSamplingParams": VllmSamplingParams, "SamplingParams": VllmSamplingParams,
    "patch_vllm": nothing, "unsloth_train": lambda trainer, *a, **k: trainer.train(*a, **k),
}  # fmt: skip
"""Names of unsloth, of its modules, and of vLLM in a script that imports unsloth."""


def _refuse_rest(caller: str, options: Mapping[str, Any]) -> None:
    unknown = [name for name in options if name not in SPEED]
    if unknown:
        raise ConfigError(
            f"{caller}: {', '.join(unknown)} may change the model, and is not followed here. Leave it out"
        )


def _with_methods(model: Any) -> Any:
    """The model with Unsloth's ways of writing it."""

    def save(folder: str, tokenizer: Any = None, save_method: str = "merged_16bit", **_: Any) -> None:
        whole = model.merge_and_unload() if "merged" in save_method and "peft_config" in vars(model) else model
        whole.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    methods: dict[str, Callable[..., Any]] = {
        "save_pretrained_merged": save,
        "save_lora": lambda folder, **_: model.save_pretrained(folder),
        "load_lora": lambda folder, **_: folder,
    }
    for name, method in methods.items():
        vars(model)[name] = method
    for name in ("save_pretrained_gguf", "push_to_hub_merged", "push_to_hub_gguf", "fast_generate"):
        vars(model)[name] = _missing(name)
    return model


def _missing(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"model.{name} is Unsloth's, and there is none here. The trained model is in the run's folder: sample from "
            f"it with `oncurve sample RUN`, or write it with trainer.save_model"
        )

    return call
