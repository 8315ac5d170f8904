"""Is a card one that the hub can read, with true numbers and nothing of the machine in it?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from evaluation_fakes import evaluation_of
from huggingface_hub import ModelCard

from oncurve.config.load import parse_config
from oncurve.errors import DataError
from oncurve.evaluate.card import CardFacts, card_text, is_hub_name, run_card, run_facts, write_card
from oncurve.evaluate.compare import compare
from oncurve.evaluate.numbers import report_numbers
from oncurve.observe.manifest import describe_run
from oncurve.observe.record import RunFolder

RECIPE = """
model: Qwen/Qwen2.5-0.5B
data: {type: gsm8k, path: /home/somebody/data/train.jsonl, template: think_answer}
rewards: [{type: r1_zero}]
"""


def results(**changes: Any) -> dict[str, Any]:
    texts = [["[1]", "[1]", "[9]", "boom"], ["[2]", "[9]", "[9]", "[9]"]]
    entry = {
        "title": "GSM8K",
        "source": {
            "path": "/home/somebody/gsm8k_test.jsonl", "split": "test", "chosen": "test", "limit": None,
            "dataset": {"path": "openai/gsm8k", "subset": "main", "split": "test"},
        },
        "is_whole": True,
        "num_excluded": 1,
        "prompt": {"template": {"name": "boxed"}, "chat": False, "example": "2+3?"},
        "grader": "mathematics, answer in boxed",
        "grader_name": "mathematics",
        "decoding": {"temperature": 0.7, "top_p": 1.0, "max_completion_tokens": 64, "seed": 0, "stop": []},
        "numbers": report_numbers(evaluation_of(texts, samples=4)),
        "contamination": {"checked": False, "why": "not known"},
        **changes,
    }  # fmt: skip
    return {"model": {"label": "mine", "num_parameters": 1}, "benchmarks": {"gsm8k": entry}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder as a run leaves it."""
    config = parse_config(RECIPE).model_dump(mode="json")
    before, after = evaluation_of(["[1]", "[9]", "3"]), evaluation_of(["[1]", "[2]", "3"])
    with RunFolder(tmp_path / "my-run") as folder:
        folder.write_start(RECIPE, config, describe_run(["oncurve", "train", "x"]))
        for name, found in (("base", before), ("trained", after)):
            folder.write_evaluation(name, found.rows(), found.summary())
        compare(before, after).write(folder.path)
    (tmp_path / "my-run" / "model").mkdir()
    return tmp_path / "my-run"


def test_the_hub_reads_the_metadata_of_a_run(run: Path) -> None:
    card = ModelCard.load(run_card(run))
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B"
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.model_name == "my-run"


def test_a_card_says_all_that_a_reader_needs(run: Path) -> None:
    text = run_card(run).read_text()
    for heading in ("## Training", "## Evaluation", "## Limits", "## How to ask", "## How to load"):
        assert text.count(heading) == 1
    assert "base and trained on 3 held-out problems" in text
    assert "| correct | 1/3 (33.3%)" in text
    assert "Question" not in text.split("## How to ask")[1].split("##")[0]
    assert "User: {question}\nAssistant: <think>" in text
    assert yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])["model"] == "Qwen/Qwen2.5-0.5B"


def test_benchmarks_become_results_with_their_intervals(run: Path) -> None:
    card = ModelCard(card_text(run_facts(run, results=results())))
    body = card.content
    assert "4: 45.8 [" in body
    assert "1 completions could not be graded (1 timeout) and count neither way" in body
    assert "1 problems were left out because their prompt is too long" in body
    assert "was not checked for all of them" in body


def test_a_part_of_a_benchmark_does_not_pass_for_all_of_it(run: Path) -> None:
    card = ModelCard(card_text(run_facts(run, results=results(is_whole=False))))
    assert "not to be compared with others" in card.content


def test_what_nothing_was_graded_of_is_no_result() -> None:
    nothing = report_numbers(evaluation_of(["boom"]))
    text = card_text(CardFacts(name="mine", results=results(numbers=nothing)))
    assert "nothing graded" in text


def test_nothing_of_the_machine_and_no_key_is_in_a_card(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"] = "/home/somebody/models/base"
    config["run"]["name"] = "hf_" + "a" * 30
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = card_text(run_facts(run, results=results()))
    assert "somebody" not in text
    assert "hf_a" not in text
    assert "train.jsonl" in text
    assert ModelCard(text).data.base_model is None


def test_an_adapter_is_loaded_over_its_base(run: Path) -> None:
    (run / "model" / "adapter_config.json").write_text("{}")
    card = ModelCard.load(run_card(run))
    assert card.data.library_name == "peft"
    assert "lora" in card.data.tags
    assert 'PeftModel.from_pretrained(base, "my-run")' in card.content


def test_a_model_that_was_not_measured_says_so(tmp_path: Path) -> None:
    text = write_card(tmp_path, CardFacts(name="mine", base="owner/base", license="mit")).read_text()
    assert "Not evaluated." in text
    assert ModelCard(text).data.license == "mit"


def test_a_folder_that_is_no_run_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run whose recipe can be read"):
        run_facts(tmp_path)
    (tmp_path / "config.yaml").write_text("model: embedded\n")
    (tmp_path / "manifest.json").write_text(json.dumps([1]))
    with pytest.raises(DataError, match="not a JSON object"):
        run_facts(tmp_path)


def test_names_of_repositories_are_told_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert is_hub_name("Qwen/Qwen2.5-0.5B")
    for name in ("runs/demo", "embedded", "/a/b", "./a/b", "a/b/c", None):
        assert not is_hub_name(name)
