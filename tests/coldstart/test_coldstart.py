import hashlib
import json
import math
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oncurve.coldstart.supervised import SHIPPED, UPDATES, ColdStart, coldstart, fine_tune
from oncurve.coldstart.tiny_model import tiny_model, tiny_tokenizer
from oncurve.errors import CheckpointError, DataError, TrainingError
from oncurve.observe.run_model import EMBEDDED
from oncurve.policy.model_folder import load_model
from oncurve.tasks.word_problems import demonstrations, word_problems

SMALL = ColdStart(num_texts=96, batch_size=8, hidden_size=32, num_layers=1)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coldstart") / "base"
    losses = []
    coldstart(folder, updates=10, settings=SMALL, on_progress=lambda *report: losses.append(report))
    return folder, losses


def small_model(pairs, *, seed=0):
    tokenizer = tiny_tokenizer(prompt + completion for prompt, completion in pairs)
    return tiny_model(tokenizer, seed=seed, hidden_size=32, num_layers=1), tokenizer


def checksum(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_built_base_is_an_ordinary_checkpoint(built):
    folder, _ = built
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt, _ = demonstrations(1)[0]
    inputs = tokenizer(prompt, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert 1 <= written.shape[1] - inputs["input_ids"].shape[1] <= 4


def test_progress_is_told_after_every_update_and_the_loss_falls(built):
    _, reports = built
    assert [done for done, _, _ in reports] == list(range(1, 11))
    assert {total for _, total, _ in reports} == {10}
    assert reports[-1][2] < reports[0][2]


def test_the_provenance_names_command_seed_settings_and_the_checksum_of_the_weights(built):
    folder, _ = built
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["command"] == "oncurve coldstart --output base --seed 0 --updates 10"
    assert provenance["seed"] == 0
    assert provenance["settings"]["num_texts"] == SMALL.num_texts
    assert provenance["sha256"]["model.safetensors"] == checksum(folder)
    assert provenance["packages"]["torch"] == torch.__version__
    assert "commit" in provenance["code"]


def test_the_same_seed_builds_the_same_weights_and_another_seed_others(built, tmp_path):
    folder, _ = built
    assert checksum(coldstart(tmp_path / "again", updates=10, settings=SMALL)) == checksum(folder)
    assert checksum(coldstart(tmp_path / "other", updates=10, seed=1, settings=SMALL)) != checksum(folder)


def test_a_checkpoint_can_be_trained_further_on_the_demonstrations(built, tmp_path):
    folder, losses = built
    more = []
    further = coldstart(
        tmp_path / "more", updates=6, model=folder, settings=SMALL, on_progress=lambda *report: more.append(report[2])
    )
    assert checksum(further) != checksum(folder)
    assert more[0] < losses[0][2]
    provenance = json.loads((further / "provenance.json").read_text())
    assert provenance["command"] == "oncurve coldstart --output more --seed 0 --updates 6 --model base"


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        coldstart(tmp_path, updates=1, settings=SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_few_texts_are_learned_by_heart():
    pairs = [("What?", "1"), ("Who?", "2"), ("Where to?", "33")]
    model, tokenizer = small_model(pairs)
    losses = []
    fine_tune(
        model,
        tokenizer,
        [(pairs, 150)],
        seed=0,
        batch_size=3,
        learning_rate=1e-2,
        on_progress=lambda *report: losses.append(report[2]),
    )
    assert losses[-1] < 0.05 < losses[0]
    inputs = tokenizer("Where to?", return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert written.tolist() == [*tokenizer.encode("33"), tokenizer.eos_token_id]


def test_the_loss_is_the_mean_over_completion_and_end_tokens_alone():
    pairs = [("One question?", "7"), ("A much longer question than that?", "12, 3")]
    model, tokenizer = small_model(pairs)
    expected, num_tokens = 0.0, 0
    for prompt, completion in pairs:
        prompt_ids = tokenizer.encode(prompt)
        ids = [*prompt_ids, *tokenizer.encode(completion), tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected -= sum(logprobs[place - 1, ids[place]].item() for place in range(len(prompt_ids), len(ids)))
        num_tokens += len(ids) - len(prompt_ids)
    losses = []
    fine_tune(
        model, tokenizer, [(pairs, 1)], seed=0, batch_size=2, on_progress=lambda *report: losses.append(report[2])
    )
    assert losses == [pytest.approx(expected / num_tokens, rel=1e-5)]


def test_nothing_to_learn_from_is_refused_and_a_broken_loss_stops_the_training():
    pairs = [("What?", "1")]
    model, tokenizer = small_model(pairs)
    with pytest.raises(DataError, match="at least one"):
        fine_tune(model, tokenizer, [([], 1)], seed=0)
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(TrainingError, match="update 1"):
        fine_tune(model, tokenizer, [(pairs, 1)], seed=0)


def test_the_shipped_base_is_what_its_provenance_says():
    provenance = json.loads((EMBEDDED / "provenance.json").read_text())
    assert provenance["sha256"]["model.safetensors"] == checksum(EMBEDDED)
    assert provenance["command"] == "oncurve coldstart --output base_model --seed 0"
    assert provenance["updates"] == UPDATES
    assert provenance["settings"] == json.loads(json.dumps(asdict(SHIPPED)))


def test_the_shipped_base_is_small_and_its_tokenizer_is_the_one_that_would_be_built():
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 8 * 1024**2
    _, shipped = load_model("embedded")
    pairs = demonstrations(SHIPPED.num_texts, seed=0, levels=SHIPPED.levels)
    rebuilt = tiny_tokenizer(prompt + completion for prompt, completion in pairs)
    assert shipped.get_vocab() == rebuilt.get_vocab()


def test_the_shipped_base_solves_some_unseen_problems_and_not_most():
    model, tokenizer = load_model("embedded")
    problems = word_problems("test", 96)
    prompts = [f"User: {problem.question}\nAssistant: <think>" for problem in problems]
    tokenizer.padding_side = "left"
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    written = model.generate(**inputs, max_new_tokens=72, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    solved = sum(
        text.endswith(f"</think> <answer> {problem.answer} </answer>")
        for text, problem in zip(texts, problems, strict=True)
    )
    assert 0.1 < solved / len(problems) < 0.45
