"""Does rejection sampling keep what is correct once, say where it comes from, go on after a stop, and train?"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from oncurve.cli.app import app
from oncurve.commands.keep_correct import chosen, parts_of
from oncurve.data.demonstrations import demonstrated_row, render_demonstrations
from oncurve.errors import DataError, OncurveError
from oncurve.evaluate import resumable
from oncurve.evaluate.evaluate import Example
from oncurve.evaluate.resumable import PartialResults
from oncurve.observe.record import read_metrics
from oncurve.policy.model_folder import load_tokenizer
from oncurve.rollouts.episodes.dialects import ForeignText

SAMPLE = ["sample", "word_problems", "--keep-correct", "rows.jsonl", "data.limit=40"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def read(name: str = "rows.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_two_commands_sample_and_train() -> None:
    done = run(*SAMPLE, "--per-prompt", "2")
    assert done.exit_code == 0, done.output
    rows = read()
    assert f"{len(rows)} kept" in done.output
    assert all(f"<answer> {row['answer']} </answer>" in row["completion"] for row in rows)
    assert max(Counter(row["question"] for row in rows).values()) == 2
    assert len({(row["question"], row["completion"]) for row in rows}) == len(rows)
    source = rows[0]["source"]
    assert source["model"] == "embedded"
    assert source["recipe"] == "word_problems data.limit=40"
    assert source["reward"] == 1.0
    assert len(source["weights_sha256"]) > 30
    assert not Path("rows.jsonl.unfinished").exists()
    [command] = [line for line in done.output.splitlines() if line.startswith("train on them: oncurve ")]
    words = command.removeprefix("train on them: oncurve ").split()
    more = ["run.name=taught", "run.prompts_per_step=16", "evaluation.num_prompts=4", "evaluation.every_steps=0"]
    done = run(*words, *more)
    assert done.exit_code == 0, done.output
    losses = [row["sft/loss"] for row in read_metrics(Path("runs/taught")) if row["step"]]
    assert 0 < losses[-1] < 0.2, "the model has sampled these rows itself"
    done = run(*SAMPLE[:2], "model=runs/taught", "--keep-correct", "again.jsonl", "data.limit=40")
    assert done.exit_code == 0, done.output
    assert read("again.jsonl")[0]["source"]["weights_sha256"] != source["weights_sha256"]


def test_sampling_goes_on_after_a_stop_and_gives_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "PROMPTS_PER_CALL", 16)
    assert run(*SAMPLE).exit_code == 0
    whole = Path("rows.jsonl").read_bytes()
    Path("rows.jsonl").unlink()
    add, parts = PartialResults.add, []

    def stopping(self: PartialResults, examples: Any) -> None:
        parts.append(len(examples))
        if len(parts) == 2:
            raise KeyboardInterrupt
        add(self, examples)

    with monkeypatch.context() as patched:
        patched.setattr(PartialResults, "add", stopping)
        stopped = run(*SAMPLE)
    assert isinstance(stopped.exception, OncurveError)
    assert stopped.exception.exit_code == 130
    assert "The same command resumes it" in str(stopped.exception)
    assert not Path("rows.jsonl").exists()
    assert len(read("rows.jsonl.unfinished/samples.jsonl")) == parts[0]
    other = run(*SAMPLE, "run.seed=1")
    assert "holds an evaluation with other settings" in str(other.exception)
    assert "Choose another --keep-correct" in str(other.exception)
    assert run(*SAMPLE).exit_code == 0
    assert Path("rows.jsonl").read_bytes() == whole


def example(text: str, index: int = 0, category: Any = "correct", **more: Any) -> Example:
    options: dict[str, Any] = {"finish_reason": "stop", "reward": 1.0, "correct_any_format": None, **more}
    return Example(index=index, question="", answer="", completion=text, num_tokens=3, category=category, **options)


def test_every_completion_is_counted_once() -> None:
    examples = [
        example("a"), example(" a "), example("b"), example("c"), example("a", 1), example("d", 1, "wrong", reward=0.0),
        example("e", 1, finish_reason="length"), example("f", 1, "error", reward=None, error="crashed"),
    ]  # fmt: skip
    kept, counts = chosen(examples, per_prompt=2)
    assert [(one.index, one.completion) for one in kept] == [(0, "a"), (0, "b"), (1, "a")]
    assert counts == {
        "kept": 3, "wrong": 1, "not graded": 1, "cut off": 1, "repeated": 1, "beyond 2 of a prompt": 1,
    }  # fmt: skip
    generous, _ = chosen([example("a", category="wrong", reward=0.5)], per_prompt=1, min_reward=0.5)
    assert len(generous) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sample", "embedded", "2+3?", "--per-prompt", "2"], "Add --keep-correct FILE"),
        ([*SAMPLE, "--count", "3"], "--count: not with --keep-correct"),
        ([*SAMPLE, "rollouts.max_completion_tokens=1"], "none of 256 completions is correct"),
        ([*SAMPLE, "rewards=[{type: length_limit}]"], "rewards"),
        ([*SAMPLE, "rollouts.agent='own.py:agent'", "rewards=[{type: environment}]"], "several conversations"),
        ([*SAMPLE, "sft={}"], "samples nothing"),
        (["sample", "word_problems", "--keep-correct", "."], "exists already"),
    ],
)
def test_what_cannot_be_kept_is_one_message(words: list[str], expected: str) -> None:
    done = run(*words)
    assert isinstance(done.exception, OncurveError)
    assert expected in str(done.exception)


OWN = '''
class Twice:
    """Asks twice, and is content with any answers."""

    def reset(self, seed=None, **row):
        self.turns = 0
        return " Say something.", {}

    def step(self, action):
        self.turns += 1
        return "And more?", 0.5, self.turns == 2, False, {}
'''


def test_episodes_are_kept_with_who_wrote_what_and_trained_on_by_their_masks() -> None:
    Path("own.py").write_text(OWN)
    episodes = ["rollouts.environments={twice: own.py:Twice}", "rewards=[{type: environment}]"]
    small = ["data.limit=40", "run.prompts_per_step=4", "algorithm.group_size=4", "rollouts.max_completion_tokens=120"]
    done = run("sample", "word_problems", "--keep-correct", "rows.jsonl", *small, *episodes)
    assert done.exit_code == 0, done.output
    rows = read()
    assert len(rows) > 8
    for row in rows:
        mine, told, last = row["parts"]
        assert row["prompt"].endswith("Say something.\nAssistant: <think>")
        assert told["learned"] is False
        assert "And more?" in told["text"]
        assert mine["learned"]
        assert last["learned"]
        assert mine["text"].endswith("<|endoftext|>"), "the model ended its turn itself"
    [command] = [line for line in done.output.splitlines() if line.startswith("train on them: oncurve ")]
    words = command.removeprefix("train on them: oncurve ").split()
    more = ["run.name=taught", "run.steps=1", "sft.epochs=null", "evaluation.num_prompts=4", "evaluation.every_steps=0"]
    done = run(*words, *more, f"run.prompts_per_step={len(rows) - 8}", *episodes)
    assert done.exit_code == 0, done.output
    [step] = [row for row in read_metrics(Path("runs/taught")) if row["step"]]
    assert 0 < step["sft/loss"] < 0.5, "the model has sampled these rows itself"
    shown = [json.loads(line) for line in Path("runs/taught/rollouts/step_000001.jsonl").read_text().splitlines()]
    kinds = [[part[0] for part in one["completions"][0]["segments"]] for one in shown]
    assert kinds == [[True, False, True]] * len(shown)
    learned = sum(part[2] for one in shown for part in one["completions"][0]["segments"] if part[0])
    assert step["tokens/trained"] == learned


def test_an_answer_that_spells_a_mark_stays_words() -> None:
    _, tokenizer = load_tokenizer("embedded")
    mark = str(tokenizer.eos_token)
    spelled = ForeignText(tokenizer).encode(f"so {mark} it")
    turn = [*tokenizer.encode("a b", add_special_tokens=False), tokenizer.eos_token_id]
    said = [[True, "a b", len(turn)], [False, f"so {mark} it", len(spelled)], [True, "a b", len(turn)]]
    parts = parts_of({"segments": said, "token_ids": turn + spelled + turn}, tokenizer)
    row = demonstrated_row("row 0", json.loads(json.dumps({"prompt": "Say:", "parts": parts})))
    assert row is not None
    [shown], _ = render_demonstrations([row], tokenizer)
    assert shown.token_ids == tuple(turn + spelled + turn)
    assert [(part.is_policy, part.end - part.start) for part in shown.segments] == [
        (True, len(turn)), (False, len(spelled)), (True, len(turn)),
    ]  # fmt: skip
    for part in parts:
        part["tokens"] = [1, 2]  # of another tokenizer
    with pytest.raises(DataError, match="behind the end token"):
        render_demonstrations([{**row, "parts": parts}], tokenizer)
