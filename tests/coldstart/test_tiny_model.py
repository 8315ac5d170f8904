from itertools import product

import pytest
import torch

from oncurve.coldstart.tiny_model import TAGS, tiny_model, tiny_tokenizer
from oncurve.observe.run_model import EMBEDDED
from oncurve.policy.model_folder import load_model
from oncurve.tasks.word_problems import demonstrations, word_problems


@pytest.fixture(scope="module")
def pairs():
    return demonstrations(400)


@pytest.fixture(scope="module")
def learned(pairs):
    return tiny_tokenizer(prompt + completion for prompt, completion in pairs)


@pytest.fixture(scope="module")
def saved(learned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model(learned, seed=0, hidden_size=32, num_layers=1)
    model.save_pretrained(folder)
    learned.save_pretrained(folder)
    return folder


def test_digits_are_single_tokens(learned):
    assert learned.tokenize("67-52=15") == list("67-52=15")


def test_the_tags_are_one_token_each_and_survive_decoding(learned):
    for tag in TAGS:
        (only,) = learned.encode(tag)
        assert learned.decode([only], skip_special_tokens=True) == tag
    assert len({learned.encode(tag)[0] for tag in TAGS}) == 4


def test_the_end_token_does_not_survive_decoding_and_is_not_the_pad_token(learned):
    assert learned.eos_token_id != learned.pad_token_id
    assert learned.decode([learned.eos_token_id, learned.pad_token_id], skip_special_tokens=True) == ""


def test_there_is_no_chat_template_and_nothing_is_added_to_a_text(learned):
    assert learned.chat_template is None
    assert learned("1")["input_ids"] == learned("1", add_special_tokens=False)["input_ids"]
    assert len(learned("1")["input_ids"]) == 1


def test_any_text_survives_encoding_and_decoding(learned):
    for text in ("Ünïcode 😀, tabs\tand\n\nlines", "</think>  <answer>x</answer>", " lead and trail "):
        assert learned.decode(learned.encode(text)) == text


def test_the_tokens_of_prompt_and_completion_are_those_of_the_whole_text(learned, pairs):
    for prompt, completion in pairs[:100]:
        assert learned.encode(prompt) + learned.encode(completion) == learned.encode(prompt + completion)


def test_a_saved_tokenizer_loads_with_the_same_tokens(learned, saved, pairs):
    _, loaded = load_model(str(saved))
    assert len(loaded) == len(learned)
    for prompt, completion in pairs[:100]:
        assert loaded.encode(prompt + completion) == learned.encode(prompt + completion)


def test_the_same_seed_gives_the_same_weights_and_the_global_stream_is_left_alone(learned):
    before = torch.random.get_rng_state()
    first, again, other = (tiny_model(learned, seed=seed, hidden_size=32, num_layers=1) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_model_has_its_size_and_ties_its_embeddings(learned):
    model = tiny_model(learned, seed=0)
    assert 1.6e6 < sum(weight.numel() for weight in model.parameters()) < 1.9e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.06, rel=0.05)
    config = model.config
    assert (config.hidden_size, config.intermediate_size, config.max_position_embeddings) == (192, 512, 512)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (4, 4, 2)
    assert config.rope_parameters["rope_theta"] == 10_000
    for heads, shared in ((1, 1), (2, 1), (6, 3)):
        made = tiny_model(learned, seed=0, hidden_size=24, num_layers=1, num_heads=heads, mlp_size=8)
        assert made.config.num_key_value_heads == shared


def test_so_many_pieces_are_learned_and_none_of_a_tag(learned):
    words = " ".join("".join(letters) for letters in product("abcdefgh", repeat=3))
    assert len(tiny_tokenizer([words])) == 256 + 400 + 2 + len(TAGS)
    assert not learned.clean_up_tokenization_spaces
    assert not any(learned.added_tokens_decoder[learned.encode(tag)[0]].normalized for tag in TAGS)
    few = tiny_tokenizer(["<think>ab</think> <x>ab<x>"], num_merges=1, more_tags=["<x>"])
    assert few.tokenize("ab<x>") == ["ab", "<x>"]


def test_a_saved_model_loads_with_its_logits_and_generates_greedily_up_to_the_end_token(learned, saved):
    model, tokenizer = load_model(str(saved))
    original = tiny_model(learned, seed=0, hidden_size=32, num_layers=1).eval()
    token_ids = torch.tensor([tokenizer.encode("User: 1+2?")])
    assert torch.equal(model(token_ids).logits, original(token_ids).logits)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert not model.generation_config.do_sample


def test_every_question_fits_into_the_embedded_models_context():
    model, tokenizer = load_model("embedded")
    assert EMBEDDED.is_dir()
    longest = max(len(tokenizer.encode(p.question + p.solution)) for p in word_problems("test", 200, levels=(3, 4)))
    assert longest < model.config.max_position_embeddings / 2
