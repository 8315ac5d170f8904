"""The whole way of each kind of tokenizer: checked, trained for a step, resumed for another, and asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lanes import gate
from test_fourteen_tokenizers import CASES, HEADERS, IM, INST, NAMES, of_bytes, of_pieces
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, CTRLTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.errors import OncurveError

CLOCK = "{{ strftime_now('%d %b %Y') }}\n" + IM
SPEAKS = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + IM


def padded_beyond() -> Any:
    tokenizer = of_bytes(IM, eos="<|im_end|>")
    tokenizer.add_special_tokens({"pad_token": AddedToken("[PAD]", special=True)})
    return tokenizer


def with_space_before() -> Any:
    """Byte pairs that put a space before every text, as of RoBERTa."""
    made = of_bytes()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


def of_unigrams() -> Any:
    """The most likely pieces, as of T5 and XLM-R."""
    marks, letters = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)], [(chr(code), -5.0) for code in range(33, 127)]
    pieces = [*marks, ("▁", -2.0), *letters, ("▁the", -3.0), ("▁What", -3.5), ("is", -4.0), ("▁is", -3.0)]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\n", " ")])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def like_tekken() -> Any:
    """Marks in the first places, whole words without merges, digits one by one, as of Mistral's newer models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    vocabulary = {piece: index for index, piece in enumerate([*marks, *alphabet, "ĠWhat", "What", "Ġis"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=INST)
    tokenizer.add_tokens([AddedToken(name, special=True) for name in marks])
    return tokenizer


def in_python(folder: Path) -> Any:
    """Pairs of letters by a class that is written in Python alone."""
    letters = [chr(code) for code in range(33, 127)]
    words = ["<unk>", "</s>", *(f"{letter}@@" for letter in letters), *letters]
    (folder / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CTRLTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), eos_token="</s>")


WAYS: dict[str, tuple[Callable[[], Any], str, int]] = {
    **{name: (make, template, 0) for name, (make, template, _, _) in CASES.items()},
    "a clock": (lambda: of_bytes(CLOCK, eos="<|im_end|>"), "boxed", 0),
    "a system message of its own": (lambda: of_bytes(SPEAKS, eos="<|im_end|>"), "boxed", 0),
    "two marks of the beginning": (lambda: of_bytes("{{ bos_token }}" + HEADERS, eos="<|eot|>"), "boxed", 0),
    "pieces without a space before": (lambda: of_pieces(IM, eos="<|im_end|>", leads=False), "think_answer", 0),
    "a mark for padding beyond the embedding": (padded_beyond, "boxed", 1),
    "words beyond the embedding": (padded_beyond, "boxed", 1 + len(NAMES)),
    "byte pairs with a space before": (with_space_before, "think_answer", 0),
    "unigrams": (of_unigrams, "question_only", 0),
    "tekken": (like_tekken, "boxed", 0),
    "bytes in Python": (ByT5Tokenizer, "think_answer", 0),
    "letters in Python": (lambda: in_python(Path()), "question_only", 0),
}
"""A tokenizer, a template, and how many rows the embedding has too few."""


REFUSED = ("words beyond the embedding",)
FAULTY = (
    *REFUSED, "gpt-oss, thinking tag", "without system messages", "thinking shut", "wordpiece", "wordpiece without end",
)  # fmt: skip
"""Of which `oncurve check` says what is wrong, with an exit code that is not 0."""


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a command, which ends without a traceback."""
    done = CliRunner().invoke(app, [*arguments])
    unexpected = done.exception if not isinstance(done.exception, (SystemExit, OncurveError)) else None
    assert unexpected is None, f"{arguments[0]}: {unexpected!r}\n{done.output[-2000:]}"
    message = str(done.exception) if isinstance(done.exception, OncurveError) else ""
    return done.exit_code, done.output + message


IN_THE_GATE = ("deepseek-r1", "gpt-oss, thinking tag", "wordpiece", "words beyond the embedding", "tekken")


@pytest.mark.slow
@pytest.mark.parametrize("name", gate(WAYS, *IN_THE_GATE))
def test_a_tokenizer_goes_the_whole_way_or_is_refused_in_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, template, short = WAYS[name]
    tokenizer = make()
    tokenizer.save_pretrained("base")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer) - short, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
        )
    ).save_pretrained("base")  # fmt: skip
    rows = [{"question": f"What is {number}+3?", "answer": str(number + 3)} for number in range(1, 9)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    chat = CASES[name][2] if name in CASES else "auto"
    Path("mine.yaml").write_text(
        f"model: base\ndata: {{path: rows.jsonl, template: {template}, chat: {str(chat).lower()}}}\n"
        "rewards: [{type: mathematics}]\nalgorithm: {group_size: 2}\n"
        "run: {name: mine, steps: 2, prompts_per_step: 2, save_every_steps: 1}\n"
        "rollouts: {max_completion_tokens: 8}\nevaluation: {num_prompts: 2}\n",
        encoding="utf-8",
    )
    checked, output = run("check", "mine.yaml")
    assert (checked != 0) == (name in FAULTY), output
    trained, output = run("train", "mine.yaml")
    assert (trained != 0) == (name in REFUSED), output
    if trained:
        assert "beyond" in output or "embedding" in output
        return
    second = Path("runs/mine/rollouts/step_000002.jsonl")
    recorded = [json.loads(line)["completions"] for line in second.read_text(encoding="utf-8").splitlines()]
    shutil.rmtree("runs/mine/model")
    shutil.rmtree("runs/mine/checkpoints/step_000002")
    resumed = run("resume", "runs/mine")
    assert resumed[0] == 0, resumed[1]
    again = [json.loads(line)["completions"] for line in second.read_text(encoding="utf-8").splitlines()]
    assert [[completion["text"] for completion in group] for group in again] == [
        [completion["text"] for completion in group] for group in recorded
    ]
    answer = run("sample", "runs/mine", "What is 2+3?", "--max-tokens", "8")
    assert answer[0] == 0, answer[1]
    [first, *_] = Path("runs/mine/rollouts/step_000001.jsonl").read_text(encoding="utf-8").splitlines()
    assert "What is" in json.dumps(json.loads(first))
