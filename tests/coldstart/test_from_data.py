"""Does a cold start on demonstrations of one's own give a model that everything else takes?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.coldstart import from_data
from oncurve.core.errors import ConfigError, DataError, OncurveError
from oncurve.core.records import SOURCE_ROW
from oncurve.observe.record import read_metrics
from oncurve.policy.model_folder import load_model
from oncurve.recipe.load import load_config

SHORT = ["run.prompts_per_step=8", "optimizer.warmup_updates=2", "evaluation.num_prompts=4",
         "rollouts.max_completion_tokens=8"]  # fmt: skip
LETTERS = "abcdefgh"
WORDS = [a + b + c for a in LETTERS for b in LETTERS for c in LETTERS][::3]


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_from_an_empty_folder_to_a_step_of_grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("shown.jsonl"), [{"prompt": f"Reverse {word}\n", "completion": word[::-1]} for word in WORDS])
    write_rows(Path("words.jsonl"), [{"question": f"Reverse {word}", "answer": word[::-1]} for word in WORDS])
    Path("reward.py").write_text(
        "def letters(completion, answer):\n    return sum(a == b for a, b in zip(completion, answer)) / 3\n"
    )
    said = run("coldstart", "--data", "shown.jsonl", "--size", "nano", "--output", "runs/base", *SHORT, "sft.epochs=2")
    assert "minus its loss" in " ".join(said.split())
    written = load_config("runs/base/coldstart.yaml")
    assert (written.sft.epochs, written.run.prompts_per_step) == (2, 8)
    losses = [row["sft/loss"] for row in read_metrics(Path("runs/base")) if row["step"]]
    assert losses[-1] < losses[0] - 2
    Path("own.yaml").write_text(
        "model: runs/base\n"
        "data: {path: words.jsonl, template: reverse.txt}\n"
        "rewards: [{type: custom, function: 'reward.py:letters'}]\n"
        "algorithm: {group_size: 4}\n"
        "run: {steps: 1, name: trained, prompts_per_step: 4}\n"
    )
    Path("reverse.txt").write_text("{question}\n\n")
    run("train", "own.yaml", *SHORT[2:])
    assert [row["step"] for row in read_metrics(Path("runs/trained")) if row["step"]] == [1]


def test_messages_bring_a_chat_template_and_a_model_may_be_like_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = [[("user", f"Reverse {word}"), ("assistant", word[::-1]), ("user", "Again"), ("assistant", word)]
            for word in WORDS[:64]]  # fmt: skip
    rows = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in said]
    write_rows(Path("chats.jsonl"), rows)
    run("coldstart", "--data", "chats.jsonl", "--size", "nano", "--output", "runs/chat", *SHORT, "sft.epochs=1")
    _, tokenizer = load_model("runs/chat")
    messages = [{"role": "user", "content": "Reverse abc"}]
    assert len(tokenizer.encode("<|user|>", add_special_tokens=False)) == 1
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|user|>Reverse abc<|endoftext|><|assistant|>"
    )
    again = ["--like", "runs/chat", "--layers", "1", "--output", "runs/like"]
    run("coldstart", "--data", "chats.jsonl", *again, *SHORT, "sft.epochs=1")
    model, same = load_model("runs/like")
    assert model.config.num_hidden_layers == 1
    assert len(model.config.layer_types) == 1
    stream = torch.random.get_rng_state()
    one, again, other = (from_data._like("runs/chat", 2, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert one.config.num_hidden_layers == 2, "all that it has"
    weights = [made.model.layers[1].mlp.up_proj.weight for made in (one, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    with pytest.raises(ConfigError, match="--layers 3: runs/chat has 2"):
        from_data._like("runs/chat", 3, 0)
    assert same.get_vocab() == tokenizer.get_vocab()


def test_pieces_are_learned_from_long_rows_and_the_context_is_twice_the_longest() -> None:
    size = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "mlp_size": 16}
    short, long = "reversed words " * 8, "reversed words " * 30
    assert len(from_data._small([{}], [[short]], size, 0)[1].encode(short)) == len(short), "each character is a token"
    assert len(from_data._small([{}], [[long]], size, 0)[1].encode(long)) < len(long) / 3
    border = "ab" * 128
    for text, is_in_pieces in ((border, False), (border + "a", True)):
        _, tokenizer = from_data._small([{}], [[text[:100], text[100:]]], size, 0)
        assert (len(tokenizer.encode(text)) < len(text)) == is_in_pieces
    for characters, context in ((128, 512), (254, 512), (255, 1024)):  # with two more for each text
        model, _ = from_data._small([{}], [["a" * characters]], size, 0)
        assert model.config.max_position_embeddings == context


def test_a_recipe_has_800_updates_in_whole_epochs_of_which_there_are_20_at_most(tmp_path: Path) -> None:
    for num_rows, epochs in (
        (None, 1),
        (12_801, 1),
        (12_800, 1),
        (12_799, 2),
        (640, 20),
        (639, 20),
        (673, 20),
        (680, 19),
    ):
        recipe = yaml.safe_load(from_data.recipe_of(tmp_path / "rows.jsonl", Path("made"), num_rows))
        assert recipe["sft"] == {"epochs": epochs}
        assert (recipe["model"], recipe["data"]) == ("made", {"path": str(tmp_path / "rows.jsonl")})
    for name in ("", "rows.parquet", "rows.arrow"):
        assert "type: huggingface" in from_data.recipe_of(tmp_path / name, Path("made"))


def test_a_folder_with_a_train_file_is_read_and_only_what_is_written_is_learned(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [{"prompt": "Reverse ab\n", "completion": "ba"}] * 700)
    size = {"size": "nano", "like": None, "layers": None, "seed": 0, "overrides": []}
    recipe = yaml.safe_load(from_data.write_from_data(tmp_path / "made", tmp_path, **size))
    assert recipe["sft"]["epochs"] == 19
    row = {"prompt": "a", "messages": [{"role": "user", "content": "b"}], SOURCE_ROW: {"prompt": "c"}, "tokens": ["d"]}
    assert list(from_data._texts(row)) == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--data", "none.jsonl"], DataError, "there is no such file"),
        (["--data", "bare.jsonl"], DataError, "shows nothing to learn"),
        (["--data", "asked.jsonl"], DataError, "a prompt without a completion.*data.columns: {completion: "),
        (["--data", "."], DataError, r"is a folder without a train.jsonl .* such as asked.jsonl"),
        (["--data", "asked.jsonl", "--like", "embedded", "--layers", "0"], ConfigError, "1 or more"),
        (["--data", "bare.jsonl", "--size", "huge"], ConfigError, "Use one of nano, tiny, small"),
        (["--data", "bare.jsonl", "--layers", "2"], ConfigError, "--like"),
        (["--data", "bare.jsonl", "--size", "tiny", "--like", "embedded"], ConfigError, "exclude each other"),
        (["--data", "bare.jsonl", "--task", "programs"], ConfigError, "exclude each other"),
        (["--size", "tiny"], ConfigError, "give --data FILE"),
        ([], ConfigError, "with --data FILE, or a task of the package with --task: one of word_problems"),
    ],
)
def test_what_cannot_be_begun_is_refused_and_leaves_nothing(
    words: list[str], error: type[OncurveError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("bare.jsonl"), [{"question": "2+3?"}, {"question": "3+4?"}])
    Path("a note").touch()
    write_rows(Path("asked.jsonl"), [{"prompt": "2+3?", "reply": "5"}])
    with pytest.raises(error, match=message):
        CliRunner().invoke(app, ["coldstart", "--output", "runs/base", *words], catch_exceptions=False)
    assert not Path("runs").exists()
