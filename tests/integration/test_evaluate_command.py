"""Does `oncurve evaluate MODEL --benchmark ...` work from the command to the files that it leaves?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.errors import CheckpointError, ConfigError, DataError, OncurveError, Stopped
from oncurve.evaluate import resumable
from oncurve.rollouts.engine.engine import InProcessEngine

WARM = ["--samples", "3", "--temperature", "0.8"]


def evaluate(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model on its own problems, with everything that can be written."""
    folder = tmp_path_factory.mktemp("evaluation") / "out"
    evaluate(
        "embedded", "--benchmark", "word_problems", "--limit", 40, *WARM, "--trained-on", "word_problems",
        "--output", folder,
    )  # fmt: skip
    return folder


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    rows = [{"question": f"{n}+1?", "answer": n + 1} for n in range(12)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_embedded_model_gets_numbers_with_intervals(embedded: Path) -> None:
    found = read(embedded)
    assert found["schema"] == "oncurve-evaluation/1"
    entry = found["benchmarks"]["word_problems"]
    numbers = entry["numbers"]
    low, high = numbers["avg"]["over_prompts"]
    assert 0 < low < numbers["avg"]["value"] < high < 1
    assert numbers["pass"]["1"]["value"] == pytest.approx(numbers["avg"]["value"])
    assert numbers["pass"]["3"]["value"] > numbers["pass"]["1"]["value"]
    assert set(numbers["majority"]) == {"2", "3"}
    assert entry["decoding"]["temperature"] == 0.8
    assert entry["prompt"]["example"].startswith("User: ")
    assert entry["contamination"]["checked"]
    assert not entry["is_whole"]
    assert found["model"]["num_parameters"] > 1e6
    text = (embedded / "results.md").read_text()
    assert "do not compare this with published numbers" in text
    assert f"3: {100 * numbers['avg']['value']:.1f} [" in text


@pytest.mark.parametrize("sampler", ["engine", "transformers"])
def test_after_ctrl_c_the_same_command_ends_at_the_same_results(
    sampler: str, checkpoints: dict[str, Path], sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "COMPLETIONS_PER_CALL", 12)  # four prompts of three completions
    command = [
        checkpoints["qwen2"], "--benchmark", "jsonl", "--data", sums, "--max-tokens", 8, *WARM, "--sampler", sampler,
    ]  # fmt: skip
    evaluate(*command, "--output", tmp_path / "whole")
    from oncurve.rollouts.hf import HfSampler

    kind: Any = InProcessEngine if sampler == "engine" else HfSampler
    real, calls = kind.sample, []

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(options["step"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    monkeypatch.setattr(kind, "sample", interrupted)
    with pytest.raises(Stopped, match="4 of 12 problems are kept") as stopped:
        evaluate(*command, "--output", tmp_path / "cut")
    assert stopped.value.exit_code == 130
    assert not (tmp_path / "cut" / "results.json").exists()
    said = evaluate(*command, "--output", tmp_path / "cut")
    assert "4 of 12 problems were done before" in said
    assert calls == [0, 4, 4, 8]
    names = ("whole", "cut")
    assert len({(tmp_path / name / "jsonl" / "samples.jsonl").read_bytes() for name in names}) == 1
    first, second = (read(tmp_path / name)["benchmarks"]["jsonl"] for name in names)
    assert first["numbers"] == second["numbers"]
    with pytest.raises(ConfigError, match="other settings"):
        evaluate(*command, "--seed", 1, "--output", tmp_path / "cut")


def test_two_models_are_compared_and_several_seeds_pooled(
    checkpoints: dict[str, Path], sums: Path, tmp_path: Path
) -> None:
    options = ["--benchmark", "jsonl", "--data", f"jsonl={sums}", "--max-tokens", 8]
    first, second = checkpoints["qwen2"], checkpoints["llama"]
    said = evaluate(first, *options, "--against", second, "--output", tmp_path / "pair")
    assert "qwen2 and llama on 12 problems of JSON lines" in " ".join(said.split())
    assert (tmp_path / "pair" / "comparison_jsonl" / "comparison.md").is_file()
    assert {read(tmp_path / "pair" / name)["model"]["label"] for name in ("qwen2", "llama")} == {"qwen2", "llama"}
    evaluate(first, *options, "--also", second, "--also", first, "--output", tmp_path / "seeds")
    pooled = json.loads((tmp_path / "seeds" / "pooled_jsonl.json").read_text())
    assert list(pooled["models"]) == ["qwen2", "llama", "qwen2-2"]
    low, high = pooled["over_runs_and_prompts"]
    assert low <= pooled["value"] <= high


def test_a_trained_run_and_its_adapter_are_measured_and_get_their_cards(tmp_path: Path) -> None:
    options = [
        "run.steps=1", "run.prompts_per_step=2", "run.save_every_steps=0", f"run.folder={tmp_path}", "run.name=lora",
        "algorithm.group_size=2", "policy.lora.rank=2", "evaluation.num_prompts=4", "evaluation.data.limit=4",
        "evaluation.every_steps=0", "data.limit=40", "rollouts.max_completion_tokens=12",
    ]  # fmt: skip
    result = CliRunner().invoke(app, ["train", "word_problems", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    run, output = tmp_path / "lora", tmp_path / "out"
    assert ModelCard.load(run / "model" / "README.md").data.library_name == "peft"
    evaluate(run, "--benchmark", "word_problems", "--limit", 4, "--max-tokens", 12, "--card", "--output", output)
    entry = read(output)["benchmarks"]["word_problems"]
    assert read(output)["model"]["adapter_of"] == "embedded"
    assert entry["contamination"]["num_training_rows"] == 40
    card = ModelCard.load(run / "model" / "README.md")
    assert "Not all problems of the benchmark" in card.content
    merged = CliRunner().invoke(app, ["merge", str(run / "model"), "--output", str(tmp_path / "merged")])
    assert merged.exit_code == 0
    listed = CliRunner().invoke(app, ["push", str(tmp_path / "merged"), "--repo", "me/merged", "--dry-run"])
    assert listed.exit_code == 0
    assert "model.safetensors" in listed.output
    assert ModelCard.load(tmp_path / "merged" / "README.md").data.library_name == "transformers"
    with pytest.raises(CheckpointError, match="which nobody else can load"):
        CliRunner().invoke(app, ["push", str(run), "--repo", "me/merged", "--dry-run"], catch_exceptions=False)


def test_a_chat_template_is_used_where_there_is_one(
    tiny_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, sums: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "chatty"
    tiny_model("qwen2").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    (folder / "chat_template.jinja").write_text(template)
    options = ["--benchmark", "jsonl", "--data", sums, "--max-tokens", 4]
    evaluate(folder, *options, "--output", tmp_path / "chat")
    evaluate(folder, *options, "--no-chat", "--template", "gsm8k", "--output", tmp_path / "plain")
    chat, plain = (read(tmp_path / name)["benchmarks"]["jsonl"] for name in ("chat", "plain"))
    assert chat["prompt"]["example"].startswith("[user]0+1?")
    assert chat["decoding"]["stop"] == []
    assert plain["prompt"]["example"].startswith("Question: 0+1?")
    assert plain["decoding"]["stop"] == ["\nQuestion:"]
    assert plain["grader"] == "mathematics, answer in hash"


def test_problems_that_do_not_fit_are_left_out_and_counted(
    checkpoints: dict[str, Path], tmp_path: Path, sums: Path
) -> None:
    long = json.dumps({"question": "x" * 200, "answer": 1}) + "\n"
    sums.write_text(long + sums.read_text())
    said = evaluate(checkpoints["qwen2"], "--benchmark", "jsonl", "--data", sums, "--output", tmp_path / "out")
    entry = read(tmp_path / "out")["benchmarks"]["jsonl"]
    assert "at most 128 tokens, half of the model's context" in said
    assert (entry["num_excluded"], entry["numbers"]["num_prompts"], entry["is_whole"]) == (1, 12, False)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["--benchmark", "gsm8"], ConfigError, "Did you mean 'gsm8k'"),
        (["--benchmark", "jsonl"], ConfigError, "needs --data"),
        (["--benchmark", "jsonl", "--data", "none.jsonl"], DataError, "does not exist"),
        (["--benchmark", "gsm8k", "--data", "math500=x"], ConfigError, "is not among --benchmark"),
        (["--benchmark", "word_problems", "--data", "x"], ConfigError, "made on the spot"),
        (["--benchmark", ","], ConfigError, "names none"),
        (["--benchmark", "word_problems", "--split", "train"], ConfigError, "--split"),
        (["--benchmark", "word_problems", "--samples", "2"], ConfigError, "same completion 2 times"),
        (["--benchmark", "word_problems", "--max-tokens", "9999"], ConfigError, "the model's context has"),
        (["--benchmark", "word_problems", "--chat"], ConfigError, "no chat template"),
        (["--benchmark", "word_problems", "--template", "boxd"], ConfigError, "there is no 'boxd'"),
        (["--benchmark", "word_problems", "--sampler", "magic"], ConfigError, "rollouts.type"),
        (["--benchmark", "word_problems", "rollouts.max_rowz=3"], ConfigError, "max_rows"),
        (["--benchmark", "word_problems", "--trained-on", "nothing"], ConfigError, "nothing"),
        (["--benchmark", "word_problems", "--model", "embedded"], ConfigError, "give the model as the first argument"),
        (["--benchmark", "word_problems", "--against", "no/such/folder"], CheckpointError, "no such folder"),
    ],
)
def test_a_users_mistake_is_a_message(
    arguments: list[str], error: type[OncurveError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limit = ["--limit", "2"] if "word_problems" in arguments else []
    with pytest.raises(error, match=said):
        evaluate("embedded", *arguments, *limit, "--output", tmp_path / "out")


def test_options_of_benchmarks_are_refused_for_a_recipe_rather_than_ignored() -> None:
    with pytest.raises(ConfigError, match="--samples, --card: only with --benchmark"):
        evaluate("word_problems", "--samples", 8, "--card")


def test_a_run_without_a_final_model_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="a run without a final model"):
        evaluate(tmp_path, "--benchmark", "word_problems")


def test_public_problems_are_read_from_a_folder(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shared = Path(__file__).parents[3] / "shared" / "data"
    if not (shared / "math500.jsonl").is_file():
        pytest.skip("the public data sets are not at ../shared/data beside the project")
    shutil.copy(shared / "math500.jsonl", tmp_path / "math500.jsonl")
    options = ["--data", tmp_path, "--limit", 40, "--samples", 2, "--max-tokens", 8]
    evaluate(checkpoints["qwen2"], "--benchmark", "math500", *options, "--output", tmp_path / "out")
    numbers = read(tmp_path / "out")["benchmarks"]["math500"]["numbers"]
    assert set(numbers["by_category"]) == {"subject", "level"}
    assert numbers["num_truncated"] > 0
