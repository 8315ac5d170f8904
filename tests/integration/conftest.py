"""A checkpoint made on the spot: a tokenizer learnt from GSM8K's questions and a tiny random Qwen2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.jsonl"


@pytest.fixture(scope="session")
def gsm8k_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not GSM8K.is_file():
        pytest.skip("the public data sets are not at ../shared/data beside the project")
    with GSM8K.open(encoding="utf-8") as lines:
        questions = [json.loads(next(lines))["question"] for _ in range(300)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(questions, trainer)
    folder = tmp_path_factory.mktemp("gsm8k-checkpoint")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(backend.get_vocab()),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=1024,
        eos_token_id=backend.token_to_id("<eos>"),
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
