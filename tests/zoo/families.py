"""Families of the zoo: tiny random models from transformers' own configuration classes, peculiarities switched on.

Most sizes are common to all, under whatever name a configuration knows them; a row says what is its own.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT, WINDOW = 128, 16
SIZES: dict[str, Any] = {
    "vocab_size": 260, "vocab_size_per_layer_input": 260, "max_position_embeddings": CONTEXT, "n_positions": CONTEXT,
    "n_ctx": CONTEXT, "max_seq_len": CONTEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "lru_width": 32, "word_embed_proj_dim": 32, "n_layer": 2,
    "num_hidden_layers": 2, "n_layers": 2, "num_blocks": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "num_key_value_heads": 2, "n_mamba_heads": 2, "head_dim": 8, "rotary_dim": 8,
    "intermediate_size": 64, "n_inner": 64, "ffn_dim": 64, "d_ff": 64, "laurel_rank": 4,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "index_topk": WINDOW, "index_n_heads": 16, "index_head_dim": 8,
    "sliding_window": WINDOW, "window_size": WINDOW, "attention_window_size": WINDOW,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 1,
    "mamba_n_groups": 1, "state_size": 8, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8,
    "mamba_dt_rank": 4, "time_step_rank": 4,
    "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "decoder_ffn_dim": 64, "encoder_ffn_dim": 64, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "dff": 64, "d_inner": 64, "dim_ff": 64,
    "dim_head": 8, "emb_dim": 32, "input_embedding_size": 32, "output_embedding_size": 32, "embedding_size": 32,
    "linear_head_dim": 8, "linear_num_heads": 4, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2, "router_hidden_size": 16, "moe_num_shared_experts": 1, "shared_experts_intermediate_size": 16,
    "shape_embed_dim": 8, "pronunciation_embed_dim": 8, "shape_vocab_size": 16, "pronunciation_vocab_size": 16,
    "kv_n_heads": 2, "moe_top_k": 2, "out_hidden_size": 32, "depth": 2, "image_size": 16, "patch_size": 8,
}  # fmt: skip
"""A configuration gets those of these names that it knows."""

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 2.0,
    "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
MIXED = {"layer_types": [SLIDING, FULL]}
HYBRID = {"layer_types": [LINEAR, FULL]}
SHARED_KV = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL] * 2}

LATENT_SIZES = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
TWO_HYBRIDS: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2}
MLA = {"num_key_value_heads": 4}
"""Latent attention has as many keys as queries."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, llama3 rope, tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, longrope": ("llama", {"rope_parameters": LONGROPE}),
    "llama, dynamic rope": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3, windows": ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
    "mistral, window": ("mistral", {}),
    "phi3, window and longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "phi3, partial rotary": ("phi3", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "gemma2": ("gemma2", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0}),
    "gemma3_text": ("gemma3_text", MIXED),
    "gemma3n_text, shared keys": ("gemma3n_text", {**SHARED_KV, "activation_sparsity_pattern": [0.0] * 4}),
    "gemma4_text, shared keys": ("gemma4_text", SHARED_KV),
    "cohere": ("cohere", {"logit_scale": 0.1}),
    "cohere2": ("cohere2", {**MIXED, "logit_scale": 0.1}),
    "granite": ("granite", {"logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "granitemoehybrid": ("granitemoehybrid", {"layer_types": ["mamba", "attention"], "mamba_d_head": 8}),
    "hyperclovax": ("hyperclovax", {"logits_scaling": 2.0}),
    "minicpm3": ("minicpm3", {**MLA, "dim_model_base": 16}),
    "modernbert-decoder": ("modernbert-decoder", {"cls_token_id": 1, "sep_token_id": 2}),
    "exaone4": ("exaone4", MIXED),
    "olmo3": ("olmo3", MIXED),
    "olmo_hybrid": ("olmo_hybrid", HYBRID),
    "qwen3_5_text": ("qwen3_5_text", HYBRID),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", HYBRID),
    "qwen3_next": ("qwen3_next", HYBRID),
    "lfm2": ("lfm2", {"layer_types": ["conv", FULL]}),
    "lfm2_moe": ("lfm2_moe", {"layer_types": ["conv", FULL], "num_dense_layers": 1}),
    "lfm3": ("lfm3", {"layer_types": ["conv", FULL]}),
    "bamba": ("bamba", {"attn_layer_indices": [1], "mamba_d_head": 16, "mamba_expand": 2}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1}),
    "nemotron_h": ("nemotron_h", {"n_groups": 1, "expand": 1}),
    "recurrent_gemma": ("recurrent_gemma", {"num_hidden_layers": 3}),
    "youtu": ("youtu", {**MLA, "pad_token_id": None}),  # transformers zeroes the row of the padding when it loads it
    "llama4_text": ("llama4_text", {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", FULL]}),
    "longcat_flash": ("longcat_flash", {**MLA, "num_layers": 1}),
    "kimi_linear": ("kimi_linear", {**MLA, **HYBRID}),
    "cohere_compass_text": ("cohere_compass_text", {
        **MIXED, "logit_scale": 0.1,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (SLIDING, FULL)},
    }),
    "dots3_note_text": ("dots3_note_text", {
        **MLA, "layer_types": [SLIDING, "indexed_attention"], "head_dim": 16,
        "per_layer_config": {0: {**LATENT_SIZES, "num_attention_heads": 4, **MLA, "head_dim": 16}},
    }),
    "gemma4_unified_text": ("gemma4_unified_text", MIXED),
    "zamba": ("zamba", {**TWO_HYBRIDS, "attention_hidden_size": 64, "attention_head_dim": 16}),
    "zamba2": ("zamba2", {"num_hidden_layers": 4, "layers_block_type": [LINEAR, "hybrid"] * 2}),
    "zaya": ("zaya", {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"]}),
    "dbrx": ("dbrx", {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}, "ffn_config": {"ffn_hidden_size": 32},
    }),
    "gemma3, with its tower": ("gemma3", {
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64,
                          "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8},
        "mm_tokens_per_image": 4,
    }),
    "xmod": ("xmod", {"is_decoder": True, "default_language": "en_XX"}),
    "xlm": ("xlm", {"n_words": 260, "causal": True, "use_lang_emb": False}),
}  # fmt: skip
"""By name in the table: a model type, and what is this row's own."""
REFUSED_AT_LOAD = ("xlm",)
"""Families whose own numbers are not to be had."""
PLAIN = (
    "afmoe", "apertus", "arcee", "aria_text", "bailing_hybrid", "beam", "biogpt", "bitnet", "bloom",
    "codegen", "cohere2_moe", "cwm", "deepseek_v4", "diffllama", "doge",
    "dots1", "ernie4_5", "ernie4_5_moe", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "flint",
    "gemma", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
    "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling_text", "inkling2_text",
    "jais2", "jamba", "jetmoe", "kolibri1", "laguna", "mamba", "mellum", "mimo_v2_flash", "minimax",
    "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mixtral", "mpt", "nanochat", "nemotron", "olmo",
    "olmo2", "olmoe", "openai-gpt", "opt", "persimmon", "phi", "phimoe", "qwen2_moe", "qwen3_moe", "qwen4_exp_text",
    "rwkv", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "xglm", "xlstm", 
)  # fmt: skip
"""Model types that the common sizes describe."""
LATENT = (
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"
)  # fmt: skip
"""The same with latent attention."""
TOWERS = (
    "gemma4", "gemma4_unified", "git", "llama4", "moshi", "phi4_multimodal",
    "qwen3_5", "qwen3_5_moe", "qwen4_exp",
)  # fmt: skip
"""Models that also see or hear, of whose parts the common sizes are enough."""
DECODERS = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
    "trocr", "whisper", "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
    "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
    "xlm-roberta-xl",
)  # fmt: skip
"""Model types of which the decoder, or the encoder as a decoder, is a causal language model."""
STRANGERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, heads wider than the model": (
        "qwen3", {"head_dim": 20, "num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "llama, one key for all heads": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3,
         "tie_word_embeddings": True},
    ),
    "llama, an odd vocabulary": ("llama", {
        "vocab_size": 269, "bos_token_id": None, "pad_token_id": None, "eos_token_id": [2, 5, 7], "head_dim": 6,
    }),
    "glm, a quarter of the head turns": (
        "glm", {"head_dim": 16, "partial_rotary_factor": 0.25, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "gemma3_text, a rope for each kind of layer": ("gemma3_text", {
        **MIXED, "sliding_window": 3, "num_key_value_heads": 1, "final_logit_softcapping": 3.0,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    }),
    "mistral, a window of one": ("mistral", {"sliding_window": 1, "head_dim": 16}),
    "qwen2_moe, experts in every other layer": ("qwen2_moe", {
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True,
        "vocab_size": 263, "shared_expert_intermediate_size": 24, "use_sliding_window": True, "max_window_layers": 2,
    }),
    "phi, norms of queries and keys": ("phi", {
        "qk_layernorm": True, "partial_rotary_factor": 0.5, "num_key_value_heads": 1, "tie_word_embeddings": True,
    }),
    "cohere, norms of queries and keys": (
        "cohere", {"use_qk_norm": True, "num_key_value_heads": 1, "logit_scale": 0.3, "attention_bias": True},
    ),
    "deepseek_v3, queries at full rank": ("deepseek_v3", {
        **MLA, "q_lora_rank": None, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "rope_interleave": False,
        "routed_scaling_factor": 2.5, "attention_bias": True, "tie_word_embeddings": True,
    }),
    "stablelm, side by side": ("stablelm", {
        "use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.25, "use_qkv_bias": True,
        "num_key_value_heads": 1, "tie_word_embeddings": True,
    }),
    "gpt_oss, no window and one key": (
        "gpt_oss", {"layer_types": [FULL, SLIDING], "sliding_window": 1, "num_key_value_heads": 1, "head_dim": 16},
    ),
}  # fmt: skip
"""Settings that seldom stand together."""
FAMILIES |= STRANGERS
FAMILIES |= {name: (name, {"is_decoder": True, "is_encoder_decoder": False}) for name in DECODERS}
FAMILIES |= {name: (name, {}) for name in (*TOWERS, "ctrl", "gpt-sw3", "internlm3", "iquestcoder")}
FAMILIES |= {name: (name, {}) for name in PLAIN} | {name: (name, MLA) for name in LATENT}


def make_config(name: str) -> Any:
    """The configuration of a row of the zoo."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, own = FAMILIES[name]
    return _sized(CONFIG_MAPPING[model_type], own)


def _sized(kind: Any, own: dict[str, Any]) -> Any:
    """A configuration of the common sizes, and those of its parts: towers, experts, an encoder."""
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", ())}
    parts = {
        part: _sized(below, own.get(part, {}))
        for part, below in getattr(kind, "sub_configs", {}).items()
        if hasattr(below, "model_type")
    }
    return kind(**parts | {key: value for key, value in SIZES.items() if key in known} | own | parts)


def make_zoo_model(name: str) -> PreTrainedModel:
    """A random model with weights so large that what a family does differently shows: std = 1 / sqrt(inputs)."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = make_config(name)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)  # some families draw weights of one dimension, such as time steps and sinks
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5, generator=draw)
            else:  # biases and sinks, which begin as zeros
                weight += 0.1 * torch.randn(weight.shape, generator=draw)
    ends = config.eos_token_id if name in STRANGERS else 2
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
    return model.eval()
