"""Does every named algorithm learn, through the engine and the loop that the product runs?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lanes import gate
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from oncurve.algorithm.presets import PRESETS, build
from oncurve.core.records import Completion, Prompt, SamplingParams
from oncurve.observe.record import read_metrics
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from oncurve.run.services import Run

LETTERS = "abcdef"
STEPS, GROUP_SIZE, LIMIT = 30, 24, 2
IN_GATE = ("grpo", "gspo", "cispo")
"""Rows of the table whose losses differ most; a toy policy learns by each loss in tests/algorithm/test_learning.py, and
from a teacher in tests/integration/test_teachers.py."""
CHOICES: dict[str, dict[str, Any]] = {"high_entropy": {"high_entropy_share": 0.7}}
"""Where the setting of a paper makes no sense here: a fifth of two tokens is less than the one that matters."""


@pytest.fixture(scope="module")
def alphabet() -> PreTrainedTokenizerFast:
    """Sixteen tokens: six letters to learn, others to err with, and what every tokenizer has."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = ["<pad>", "<end>", "<unknown>", "=", *LETTERS, *"uvwxyz"]
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<pad>")


def beginner(
    tokenizer: PreTrainedTokenizerFast, *, with_reference: bool, teacher: PreTrainedModel | None, seed: int
) -> TrainedPolicy:
    """A policy that knows nothing, with a copy of itself or the teacher as the reference."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).eval()
    reference = teacher or (copy.deepcopy(model).requires_grad_(False) if with_reference else None)
    settings = OptimizerSettings(learning_rate=0.004, beta2=0.95)
    return TrainedPolicy(model, tokenizer, optimizer=settings, reference=reference)


def repeats(prompt: Prompt, completion: Completion) -> bool:
    """The first word of the completion is the first word of the prompt."""
    return completion.text.split()[:1] == prompt.text.split()[:1]


def learned_rewards(
    preset: str, alphabet: PreTrainedTokenizerFast, train_in: Callable[..., Run], *, teacher: PreTrainedModel | None
) -> tuple[TrainedPolicy, list[float]]:
    """A beginner trained with a preset, and its mean reward after each step."""
    algorithm = build(preset, group_size=GROUP_SIZE, max_completion_tokens=LIMIT, **CHOICES.get(preset, {}))
    policy = beginner(alphabet, with_reference=algorithm.needs_reference, teacher=teacher, seed=0)
    prompts: list[Any] = [
        Prompt(f"{letter} =", tuple(alphabet(f"{letter} =")["input_ids"]), index)
        for index, letter in enumerate(LETTERS)
    ]
    sampling = SamplingParams(max_completion_tokens=LIMIT)
    run = train_in(
        policy, prompts, repeats, algorithm, sampling, steps=STEPS, prompts_per_step=len(LETTERS), updates_per_step=2,
        folder=preset,
    )  # fmt: skip
    return policy, [row["reward/mean"] for row in read_metrics(run.log.folder.path)]


@pytest.mark.proves("F23")
@pytest.mark.parametrize("preset", gate(PRESETS, *IN_GATE))
def test_a_policy_learns_to_repeat_a_letter(
    preset: str, alphabet: PreTrainedTokenizerFast, train_in: Callable[..., Run]
) -> None:
    teacher = None
    if build(preset, group_size=GROUP_SIZE, max_completion_tokens=LIMIT).kl.reference == "teacher":
        learned, _ = learned_rewards("grpo", alphabet, train_in, teacher=None)
        teacher = learned.model.requires_grad_(False)
    _, rewards = learned_rewards(preset, alphabet, train_in, teacher=teacher)
    assert rewards[0] < 0.3
    assert sum(rewards[-3:]) / 3 >= 0.9, [f"{reward:.2f}" for reward in rewards]
