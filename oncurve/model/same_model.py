"""The comparison of two models by what they hold and compute.

Their configurations say that. The names of their weights do not: files of one model have them in several forms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MAX_DIFFERENCES = 3
_IDLE = frozenset({
    "_name_or_path", "architectures", "auto_map", "chunk_size_feed_forward", "dtype", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "num_labels", "prefix", "problem_type", "quantization_config", "return_dict",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Settings without a part in what a trained model computes."""
_IDLE_ENDS = ("_token_id", "_token_ids", "_token_index", "dropout", "dropout_prob", "pdrop", "_aux_loss_coef")
_IDLE_BEGINS = ("_attn_implementation", "output_", "initializer_")


def described_config(config: PreTrainedConfig) -> dict[str, Any]:
    """The configuration of a model's part for text, as JSON can hold it."""
    return json.loads(config.get_text_config().to_json_string(use_diff=False))


def why_another(own: PreTrainedConfig, other: Mapping[str, Any]) -> str | None:
    """The reason why a configuration is that of another model than this one; None if it is not.

    What is told is read by this side's class first, so that two versions of transformers say the same of one model.
    """
    text = own.get_text_config()
    if other.get("model_type") != text.model_type:
        return f"it is of the kind {other.get('model_type')}, and {text.model_type} is trained"
    here, there = (_read(text, config) for config in (described_config(text), other))
    differ = [key for key in sorted(here) if _counts(key) and here[key] != there.get(key)]
    differences = [f"{key} is {there.get(key)} there and {here[key]} here" for key in differ]
    return "; ".join(differences[:_MAX_DIFFERENCES]) or None


def _read(own: PreTrainedConfig, other: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return described_config(type(own).from_dict(dict(other)))
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError):
        return dict(other)


def _counts(key: str) -> bool:
    return key not in _IDLE and not key.endswith(_IDLE_ENDS) and not key.startswith(_IDLE_BEGINS)
