"""What `oncurve check` says of a model without its weights is what a run finds when it loads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from families import make_zoo_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi", "lfm2", "mamba", "qwen3_moe"])
def test_the_way_is_foreseen(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    from oncurve.policy.model_folder import load_tokenizer
    from oncurve.recipe.load import parse_config
    from oncurve.run.builder import make_policy
    from oncurve.run.model_paths import describe_paths, foresee_paths

    make_zoo_model(name).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = parse_config("{data: {type: word_problems}}", [f"model={tmp_path}"], source="foreseen")
    foreseen = foresee_paths(config, load_tokenizer(str(tmp_path))[0])
    found = describe_paths(make_policy(config))

    def ways(said: str) -> list[str]:
        """Without the reasons, whose numbers differ."""
        return [part.partition(", since")[0].partition(" (shown")[0] for part in said.split("; sampled ")]

    assert ways(foreseen) == ways(found)


def test_what_cannot_be_foreseen_is_said(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    from oncurve.policy.model_folder import load_tokenizer
    from oncurve.recipe.load import parse_config
    from oncurve.run.model_paths import foresee_paths

    model = make_zoo_model("dbrx")
    model.config.attn_config.clip_qkv = None  # with which transformers' code of it cannot compute
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = parse_config("{data: {type: word_problems}}", [f"model={tmp_path}"], source="foreseen")
    said = foresee_paths(config, load_tokenizer(str(tmp_path))[0])
    assert "found when it is loaded" in said


def test_an_encoder_with_a_decoder_is_refused_by_check_and_when_it_is_loaded(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    from transformers import T5Config

    from oncurve.policy.model_folder import load_model, load_tokenizer
    from oncurve.recipe.load import parse_config
    from oncurve.run.model_paths import foresee_paths
    from oncurve.run_errors import CheckpointError

    T5Config(vocab_size=len(tokenizer), d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    config = parse_config("{data: {type: word_problems}}", [f"model={tmp_path}"], source="foreseen")
    with pytest.raises(CheckpointError, match="no causal language model of its kind"):
        foresee_paths(config, load_tokenizer(str(tmp_path))[0])
    with pytest.raises(CheckpointError, match="no causal language model of its kind"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "kind", ["mixtral", "qwen3_moe", "deepseek_v3", "gemma3n_text", "falcon_h1", "gpt_oss", "llama"]
)
def test_the_small_model_of_a_large_kind_is_small_and_keeps_shared_keys(kind: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from oncurve.model.stand_in import stand_in

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](), dtype=torch.float32)
    made = stand_in(whole, "cpu")
    small, large = made.config, whole.config
    assert sum(weight.numel() for weight in made.parameters()) < 1e8
    assert small.num_key_value_heads >= min(2, large.num_key_value_heads)
    grouped = [one.num_attention_heads // one.num_key_value_heads for one in (small, large)]
    assert grouped[0] == grouped[1]
