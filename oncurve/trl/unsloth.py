"""Unsloth's names over transformers and peft, for scripts that begin with it.

What it does for speed and memory alone is left out, because nothing of that is learned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from oncurve.core.errors import ConfigError

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
NOTE = "note: unsloth: its names are those of transformers and peft here; its kernels, its memory saving and "
SPEED = frozenset({
    "max_seq_length", "fast_inference", "gpu_memory_utilization", "max_lora_rank", "float8_kv_cache", "device_map",
    "use_gradient_checkpointing", "unsloth_vllm_standby", "unsloth_tiled_mlp", "random_state", "fix_tokenizer",
    "disable_log_stats", "offload_embedding", "float32_mixed_precision", "conservativeness", "enable_prefix_caching",
    "temporary_location", "use_exact_model_name", "max_num_seqs", "max_num_batched_tokens", "enforce_eager",
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
        model: Any, r: int = 16, target_modules: Any = (*ATTENTION, *MLP), lora_alpha: int = 16, **options: Any
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
        parts = {name: options.pop(name) for name in list(options) if name.startswith("finetune_")}
        _refuse_rest("FastLanguageModel.get_peft_model", options)
        targets = target_modules if isinstance(target_modules, str) else _targets(target_modules, parts)
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


def _targets(names: Sequence[str], parts: Mapping[str, Any]) -> list[str]:
    """Layers with an adapter, without those of the ``parts`` of the model that are not to be trained.

    Raises ConfigError where none is left, or a part is unknown.
    """
    switched_off = {name for name, value in parts.items() if not value} - {"finetune_vision_layers"}  # here is none
    of_part = {"finetune_attention_modules": ATTENTION, "finetune_mlp_modules": MLP, "finetune_language_layers": names}
    unknown = [name for name in switched_off if name not in of_part]
    left = [name for name in names if not any(name in of_part[part] for part in switched_off - set(unknown))]
    if unknown or not left:
        why = f"{', '.join(unknown)} is not known" if unknown else f"{', '.join(sorted(switched_off))} leaves no layer"
        raise ConfigError(f"FastLanguageModel.get_peft_model: {why}. Name the layers in target_modules")
    return left


def _refuse_rest(caller: str, options: Mapping[str, Any]) -> None:
    unknown = [name for name, value in options.items() if name not in SPEED and value not in (None, False)]
    if unknown:
        raise ConfigError(
            f"{caller}: {', '.join(unknown)} may change the model, and is not followed here. Leave it out"
        )


def _with_methods(model: Any) -> Any:
    """The model with Unsloth's ways of writing it."""

    def save(folder: str, tokenizer: Any = None, save_method: str = "merged_16bit", **_: Any) -> None:
        merges = "merged" in save_method and _is_adapted(model)
        whole = deepcopy(model).merge_and_unload() if merges else model
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
    vars(model)["fast_generate"] = partial(_generate, model)
    for name in ("save_pretrained_gguf", "push_to_hub_merged", "push_to_hub_gguf"):
        vars(model)[name] = _missing(name)
    return model


@dataclass(frozen=True)
class GeneratedText:
    """One completion, as vLLM gives it back."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Answered:
    """A prompt and its completions, as vLLM gives them back."""

    prompt: str
    outputs: list[GeneratedText]


def _generate(
    model: Any, prompts: Any, sampling_params: Any = None, *_: Any, lora_request: str | None = None, **__: Any
) -> list[Answered]:
    """Completions of texts, sampled by transformers: by the adapter in a folder, or without one, as Unsloth has it.

    Of ``sampling_params`` temperature, top_p, top_k, min_p, n, seed and max_tokens (16) count, with vLLM's defaults.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    settings = {
        name: value for name, value in vars(sampling_params or VllmSamplingParams()).items() if value is not None
    }
    temperature, most = float(settings.get("temperature", 1.0)), int(settings.get("max_tokens", 16))
    options = {"do_sample": temperature > 0, "max_new_tokens": most, "num_return_sequences": int(settings.get("n", 1))}
    if temperature > 0:
        options |= {
            "temperature": temperature,
            "top_p": float(settings.get("top_p", 1.0)),
            "min_p": settings.get("min_p"),
        }
        options["top_k"] = max(int(settings.get("top_k", 0)), 0)
    if "seed" in settings:
        torch.manual_seed(settings["seed"])
    made, was_training = [], model.training
    with _adapter(model.eval(), lora_request), torch.inference_mode():
        for text in [prompts] if isinstance(prompts, str) else prompts:
            inputs = tokenizer(text, return_tensors="pt").to(model.device)
            rows = model.generate(
                **inputs,
                **options,
                repetition_penalty=1.0,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            )
            written = rows[:, inputs["input_ids"].shape[1] :].tolist()
            texts = tokenizer.batch_decode(written, skip_special_tokens=True)
            made.append(Answered(text, [GeneratedText(*pair) for pair in zip(texts, written, strict=True)]))
    model.train(was_training)
    return made


def _is_adapted(model: Any) -> bool:
    from peft import PeftModel

    return isinstance(model, PeftModel)


@contextmanager
def _adapter(model: Any, folder: str | None) -> Iterator[None]:
    """While it lasts, the model has the adapter of a folder, or none."""
    if not _is_adapted(model):
        yield
    elif folder is None:
        with model.disable_adapter():
            yield
    else:
        model.load_adapter(folder, "requested")
        model.set_adapter("requested")
        try:
            yield
        finally:
            model.set_adapter("default")
            model.delete_adapter("requested")


def _missing(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"model.{name} is Unsloth's, and there is none here. The trained model is in the run's folder: sample from "
            f"it with `oncurve sample RUN`, or write it with trainer.save_model"
        )

    return call
