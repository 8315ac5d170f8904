"""Adapters of every kind that peft writes, as they reach a server and a folder: peft's own numbers, or a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from oncurve.core.errors import ConfigError
from oncurve.policy.lora import open_adapter
from oncurve.policy.lora_merge import adapter_weights, merged_weights
from oncurve.policy.model_folder import load_model, merge_adapter, save_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerFast

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning"
)  # of peft about kinds of adapters
IDS = torch.arange(3, 40)[None]
RIGHT: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "other ranks by layer": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.self_attn.v_proj": 64}},
    "scaled by the root of the rank": {"use_rslora": True},
    "a norm trained whole": {"modules_to_save": ["input_layernorm"]},
    "head and embedding trained whole": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "a few embeddings": {"trainable_token_indices": [5, 9]},
    "on the head": {"target_modules": ["q_proj", "lm_head"]},
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a bias that the base lacks": ("llama", {"lora_bias": True}),
    "a head of its own in a tied model": ("qwen2", {"modules_to_save": ["lm_head"]}),
}


def adapter_of(base: PreTrainedModel, options: dict[str, Any], folder: Path) -> None:
    """The folder of an adapter all of whose weights are random, made and written by peft."""
    from peft import LoraConfig, get_peft_model

    own = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    made = get_peft_model(base, LoraConfig(**own))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=draw)
    made.save_pretrained(str(folder))


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.fixture
def base(
    tmp_path: Path, tiny_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> Callable[..., Path]:
    def save(architecture: str) -> Path:
        return save_model(tiny_model(architecture), tokenizer, tmp_path / "base")

    return save


@pytest.mark.parametrize("kind", RIGHT)
def test_the_whole_weights_of_an_adapter_are_those_that_peft_computes_with(
    kind: str, base: Callable[..., Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    place = base("llama")
    adapter_of(load_model(str(place))[0], RIGHT[kind], tmp_path / "adapter")
    wanted = logits(PeftModel.from_pretrained(load_model(str(place))[0], str(tmp_path / "adapter")))  # type: ignore[arg-type]
    assert not torch.allclose(logits(load_model(str(place))[0]), wanted, atol=0.01)
    adapter = open_adapter(load_model(str(place))[0], tmp_path / "adapter")
    served, _ = load_model(str(place))
    served.load_state_dict(merged_weights(adapter.model))  # under the base's names, all of them and no others
    torch.testing.assert_close(logits(served), wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits(adapter.model), wanted)  # the adapter is what it was
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits(load_model(str(tmp_path / "merged"))[0]), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", REFUSED)
def test_an_adapter_that_is_more_than_weights_of_its_base_is_refused_where_it_would_have_to_be(
    kind: str, base: Callable[..., Path], tmp_path: Path
) -> None:
    architecture, options = REFUSED[kind]
    place = base(architecture)
    adapter_of(load_model(str(place))[0], options, tmp_path / "adapter")
    adapter = open_adapter(load_model(str(place))[0], tmp_path / "adapter")
    assert adapter_weights(adapter.model) is None or "modules_to_save" in options
    with pytest.raises(ConfigError, match=r"cannot become part of|both are one matrix"):
        merged_weights(adapter.model)
