"""GRPO with the core alone: a small random model learns to write digits, for a reward of ten lines.

python examples/core/digits.py
"""

from functools import partial

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from oncurve.core.algorithm import Algorithm
from oncurve.core.decoder import ModuleDecoders
from oncurve.core.formulas import clipped, group_relative, sequence_mean
from oncurve.core.loop import History, StepSchedule, train
from oncurve.core.order import Prompts
from oncurve.core.policy import DevicePolicy, OneDevice
from oncurve.core.records import Prompt, Reward, SamplingParams
from oncurve.core.scheduler import RowEngine

GROUP_SIZE, PROMPTS_PER_STEP, STEPS = 8, 4, 30


class Digits:
    """The share of a completion's letters that are digits."""

    name = "digits"

    def __call__(self, prompts, completions):
        """One reward per completion."""
        texts = [completion.text for completion in completions]
        return [Reward(sum(letter.isdigit() for letter in text) / max(len(text), 1)) for text in texts]

    def close(self):
        """There is nothing to end."""


def make_tokenizer():
    """Every byte is a token, and there is one more that ends a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def main():
    """The statistics of each step."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes, **ends)
    model = Qwen2ForCausalLM(config).eval()

    texts = [f"{a} + {b} =" for a in range(1, 5) for b in range(1, 5)]
    prompts = [Prompt(text, tuple(tokenizer(text)["input_ids"]), index) for index, text in enumerate(texts)]
    policy = DevicePolicy(model, tokenizer, OneDevice(model, torch.optim.AdamW(model.parameters())), rate=3e-3)
    sampler = RowEngine(SamplingParams(max_completion_tokens=8), ModuleDecoders())
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    algorithm = Algorithm("grpo", group_relative, partial(clipped, **bounds), sequence_mean, GROUP_SIZE)
    rows = PROMPTS_PER_STEP * GROUP_SIZE
    history = History(StepSchedule(total_steps=STEPS, completions_per_step=rows, completions_per_update=rows))
    for step in train(policy, sampler, Prompts(prompts, PROMPTS_PER_STEP), Digits(), algorithm, history):
        print(f"step {step + 1}: mean reward {history.rows[-1]['reward/mean']:.2f}")
    return history.rows


if __name__ == "__main__":
    main()
