"""Does `oncurve evaluate MODEL --benchmark ...` work from the command to the files that it leaves?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.errors import ConfigError, DataError, OncurveError
from oncurve.core.sampler import SamplingRequest
from oncurve.data.prompts import find_template
from oncurve.evaluate import resumable
from oncurve.recipe.load import load_config
from oncurve.run.measuring import BENCHMARKS
from oncurve.run_errors import CheckpointError, Stopped
from oncurve.sample.engine import InProcessEngine

WARM = ["evaluation.samples=3", "evaluation.temperature=0.8"]
SHORT = "rollouts.max_completion_tokens=8"


def evaluate(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def summary(folder: Path, name: str = "evaluation") -> dict[str, Any]:
    return json.loads((folder / "evaluations" / f"{name}.json").read_text())


def rows(folder: Path, name: str = "evaluation") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "evaluations" / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    lines = [{"question": f"{n}+1?", "answer": n + 1} for n in range(12)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return path


@pytest.mark.proves("F139", "F145")
def test_the_embedded_model_gets_numbers_with_intervals(tmp_path: Path) -> None:
    said = evaluate(
        "embedded", "--benchmark", "word_problems", "evaluation.num_prompts=40", *WARM, "--output", tmp_path / "out"
    )
    found = summary(tmp_path / "out")
    correct = found["correct"]
    assert 0 < correct["low"] < correct["fraction"] < correct["high"] < 1
    assert found["pass_at_k"]["2"] > found["pass_at_k"]["1"] == pytest.approx(correct["fraction"])
    assert (found["num_prompts"], found["samples_per_prompt"], found["params"]["temperature"]) == (40, 3, 0.8)
    assert f"correct {correct['successes']}/120" in said
    assert "pass@3" in said
    assert "40 of its 500 problems. Do not compare this with published numbers" in said


def test_every_benchmark_of_the_package_is_a_recipe_without_training() -> None:
    for path in BENCHMARKS.glob("*.yaml"):
        config = load_config(path, ["model=embedded"])
        assert path.read_text().startswith("# "), path
        assert config.evaluation.samples == 1 or config.evaluation.temperature > 0, path
        head = find_template(config.data.template).turn.partition("{user}")[0].strip()
        assert config.rollouts.stop == (f"\n{head}",), path


@pytest.mark.parametrize("sampler", ["engine", "transformers"])
def test_after_ctrl_c_the_same_command_ends_at_the_same_results(
    sampler: str, checkpoints: dict[str, Path], sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "COMPLETIONS_PER_CALL", 12)  # four prompts of three completions
    command = [
        checkpoints["qwen2"], "--benchmark", "jsonl", f"data.path={sums}", SHORT, *WARM, f"rollouts.type={sampler}",
    ]  # fmt: skip
    evaluate(*command, "--output", tmp_path / "whole")
    kind: Any = InProcessEngine
    real, calls = kind.sample, []

    def interrupted(self: Any, request: SamplingRequest) -> Any:
        calls.append(request.step)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, request)

    monkeypatch.setattr(kind, "sample", interrupted)
    with pytest.raises(Stopped, match="4 of 12 problems are kept") as stopped:
        evaluate(*command, "--output", tmp_path / "cut")
    assert stopped.value.exit_code == 130
    assert not (tmp_path / "cut" / "evaluations").exists()
    with pytest.raises(ConfigError, match="other settings"):
        evaluate(*command, "run.seed=1", "--output", tmp_path / "cut")
    evaluate(*command, "--output", tmp_path / "cut")
    assert calls == [0, 4, 4, 8]
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")


def test_two_models_are_compared_on_each_of_several_benchmarks(
    checkpoints: dict[str, Path], sums: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"data: {{path: {sums}, template: boxed}}\nrewards: [{{type: mathematics}}]\n")
    first, second = checkpoints["qwen2"], checkpoints["llama"]
    said = evaluate(
        first,
        "--benchmark",
        f"{mine},jsonl",
        f"data.path={sums}",
        SHORT,
        "--against",
        second,
        "--output",
        tmp_path / "out",
    )
    assert "qwen2" in said
    for name in ("mine", "jsonl"):
        assert (tmp_path / "out" / name / "comparison.md").is_file()
        assert summary(tmp_path / "out" / name, "trained")["num_examples"] == 12


def test_a_trained_run_and_its_adapter_are_measured_and_have_cards(tmp_path: Path) -> None:
    options = [
        "run.steps=1", "run.prompts_per_step=2", "run.save_every_steps=0", f"run.folder={tmp_path}", "run.name=lora",
        "algorithm.group_size=2", "policy.lora.rank=2", "evaluation.num_prompts=4", "evaluation.data.limit=4",
        "evaluation.every_steps=0", "data.limit=40", "rollouts.max_completion_tokens=12",
    ]  # fmt: skip
    result = CliRunner().invoke(app, ["train", "word_problems", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    run = tmp_path / "lora"
    assert "library_name: peft" in (run / "model" / "README.md").read_text()
    evaluate(run, "--benchmark", "word_problems", "evaluation.num_prompts=4", SHORT, "--output", tmp_path / "out")
    assert summary(tmp_path / "out")["num_examples"] == 4
    merged = CliRunner().invoke(app, ["merge", str(run / "model"), "--output", str(tmp_path / "merged")])
    assert merged.exit_code == 0
    listed = CliRunner().invoke(app, ["push", str(tmp_path / "merged"), "--repo", "me/merged", "--dry-run"])
    assert listed.exit_code == 0
    assert "model.safetensors" in listed.output
    assert "Its base is not on the Hub" in (run / "model" / "README.md").read_text()
    listed = CliRunner().invoke(app, ["push", str(run), "--repo", "me/merged", "--dry-run"], catch_exceptions=False)
    assert "adapter_model.safetensors" in listed.output


def test_a_chat_template_is_used_where_there_is_one(
    tiny_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, sums: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "chatty"
    tiny_model("qwen2").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    (folder / "chat_template.jinja").write_text(template)
    options = ["--benchmark", "jsonl", f"data.path={sums}", SHORT]
    chat = evaluate(folder, *options, "--output", tmp_path / "chat")
    plain = evaluate(folder, *options, "data.chat=false", "--output", tmp_path / "plain")
    assert "in the chat template" in chat
    assert "in the chat template" not in plain
    texts = [[row["completion"] for row in rows(tmp_path / name)] for name in ("chat", "plain")]
    assert texts[0] != texts[1], "the two were asked in other words"


def test_problems_that_do_not_fit_are_left_out_and_said(
    checkpoints: dict[str, Path], tmp_path: Path, sums: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        f"data: {{type: huggingface, path: {sums}, template: boxed}}\nrewards: [{{type: mathematics}}]\n"
        f"evaluation: {{num_prompts: 13}}\n"
    )
    sums.write_text(json.dumps({"question": "x" * 250, "answer": 1}) + "\n" + sums.read_text())
    said = evaluate(checkpoints["qwen2"], "--benchmark", mine, SHORT, "--output", tmp_path / "out")
    assert "mine: 12 of its 13 problems. Do not compare this" in said


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["--benchmark", "gsm8"], ConfigError, "Did you mean 'gsm8k'"),
        (["--benchmark", "jsonl"], ConfigError, "data.path is missing"),
        (["--benchmark", "jsonl", "data.path=none.jsonl"], DataError, "cannot be read"),
        (["--benchmark", "word_problems", "data.few_shot=2"], ConfigError, "no training rows"),
        (["--benchmark", "word_problems", "evaluation.samples=2"], ConfigError, "temperature"),
        (["--benchmark", "word_problems", "rollouts.max_completion_tokens=9999"], ConfigError, "context"),
        (["--benchmark", "word_problems", "data.chat=true"], ConfigError, "no chat template"),
        (["--benchmark", "word_problems", "data.template=boxd"], ConfigError, "there is no 'boxd'"),
        (["--benchmark", "word_problems", "rollouts.max_rowz=3"], ConfigError, "max_rows"),
        (["--benchmark", "word_problems", "--model", "embedded"], ConfigError, "give the model as the first argument"),
        (["--benchmark", "word_problems", "--against", "no/such/folder"], CheckpointError, "no such folder"),
        (["--benchmark", "word_problems", "--limit", "3"], ConfigError, "--limit was removed: take evaluation.num_pro"),
        (["--benchmark", "word_problems", "--card"], ConfigError, "--card was removed: the card of a run holds"),
    ],
)
def test_a_users_mistake_is_a_message(
    arguments: list[str], error: type[OncurveError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said):
        evaluate("embedded", *arguments, "--output", tmp_path / "out")


def test_a_run_without_a_final_model_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="a run without a final model"):
        evaluate(tmp_path, "--benchmark", "word_problems")


def test_public_problems_are_read_from_a_file(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shared = Path(__file__).parents[3] / "shared" / "data"
    if not (shared / "math500.jsonl").is_file():
        pytest.skip("the public data sets are not at ../shared/data beside the project")
    shutil.copy(shared / "math500.jsonl", tmp_path / "math500.jsonl")
    options = ["evaluation.num_prompts=40", "evaluation.samples=2", SHORT, f"data.path={tmp_path / 'math500.jsonl'}"]
    evaluate(checkpoints["qwen2"], "--benchmark", "math500", *options, "--output", tmp_path / "out")
    assert summary(tmp_path / "out")["metrics"]["evaluation/truncated_fraction"] > 0
