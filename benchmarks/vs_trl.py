"""How long does a GRPO step take in oncurve and in TRL, on the same work?

Both train the same random checkpoint on the same prompts with the same group size, lengths, optimizer and reward. They
run in one process, a step of one and then a step of the other, so that what else the machine does falls on both.

    python benchmarks/vs_trl.py --case ragged --steps 9
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from models import SHAPES, build
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from oncurve.algorithm.presets import build as build_algorithm
from oncurve.data.collate import collate, stack_rewards
from oncurve.data.prompts import render_prompts
from oncurve.observe.manifest import describe_run
from oncurve.records import Completion, Prompt, Reward
from oncurve.rollouts.base import SamplingParams
from oncurve.rollouts.engine.engine import Engine
from oncurve.train.checkpoint import load_model
from oncurve.train.policy import OptimizerSettings, Policy
from oncurve.train.steps import score

GROUP_SIZE, PROMPTS, NEW_TOKENS = 8, 8, 128
LEARNING_RATE = 1e-6


def coin(text: str) -> float:
    """A reward that is 0 or 1 with equal chance, fixed by the text."""
    return float(zlib.crc32(text.encode()) & 1)


class CoinReward:
    """The same reward for oncurve."""

    name = "coin"

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> list[Reward]:
        return [Reward(coin(completion.text)) for completion in completions]

    def close(self) -> None:
        pass


class Ours:
    """One oncurve step at a time, made of the parts that the loop is made of."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        model, _ = load_model(str(folder))
        tokenizer = word_tokenizer(folder)
        self.policy = Policy(model, tokenizer, optimizer=OptimizerSettings(learning_rate=LEARNING_RATE))
        self.engine = Engine(SamplingParams(max_completion_tokens=NEW_TOKENS))
        self.algorithm = build_algorithm("dapo", group_size=GROUP_SIZE, max_completion_tokens=NEW_TOKENS)
        self.prompts, _ = render_prompts(rows, tokenizer, template="question_only")
        self.tokens = 0

    def step(self, number: int) -> dict[str, float]:
        start = time.perf_counter()
        self.engine.load_weights(self.policy, version=number)
        groups = self.engine.sample(self.prompts, GROUP_SIZE, step=number)
        sampled = time.perf_counter()
        rewards = stack_rewards(groups, score(groups, CoinReward()))
        batch = collate(groups, self.algorithm.advantages(rewards))
        for microbatch in self.policy.microbatches(batch.with_signal()):
            logprobs, entropy = self.policy.logprobs(microbatch)
            loss, _ = self.algorithm.loss(logprobs, entropy, microbatch)
            self.policy.backward(loss)
        self.policy.update()
        self.tokens += sum(len(c.token_ids) for group in groups for c in group.completions)
        end = time.perf_counter()
        return {"step": end - start, "sample": sampled - start, "train": end - sampled}


class Interleave(TrainerCallback):
    """After each step of TRL, take one of ours, outside of TRL's clock."""

    def __init__(self, ours: Ours) -> None:
        self.ours, self.theirs_seconds, self.ours_seconds = ours, [], []
        self.started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.theirs_seconds.append(time.perf_counter() - self.started)
        self.ours_seconds.append(self.ours.step(len(self.ours_seconds)))


def word_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer as it was saved; AutoTokenizer would take the class of the model's family, which reads no words."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_rows(prompt_tokens: int, vocabulary: int) -> list[dict[str, Any]]:
    """Prompts of random words."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(2, vocabulary, (PROMPTS, prompt_tokens), generator=generator)
    return [{"question": " ".join(f"w{i}" for i in row), "answer": "0"} for row in words.tolist()]


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape = SHAPES[arguments.model]
    rows = make_rows(arguments.prompt_tokens, shape.vocabulary)
    ours = Ours(folder, rows)
    lengths: list[int] = []

    def trl_reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [coin(text) for text in completions]

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=PROMPTS * GROUP_SIZE // arguments.micro_batch,
        num_generations=GROUP_SIZE,
        max_completion_length=NEW_TOKENS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        loss_type="dapo",
        max_steps=arguments.steps,
        bf16=arguments.bf16,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    callback = Interleave(ours)
    trainer = GRPOTrainer(
        model=str(folder),
        processing_class=word_tokenizer(folder),
        reward_funcs=trl_reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": row["question"]} for row in rows]),
        callbacks=[callback],
    )
    trainer.train()
    return summarize(callback, lengths, ours.tokens / len(callback.ours_seconds))


def summarize(callback: Interleave, lengths: list[int], our_tokens: float) -> dict[str, Any]:
    """Medians and ratios; the first step of each is warm-up and left out."""
    theirs, ours = callback.theirs_seconds[1:], callback.ours_seconds[1:]
    ratios = [a / b["step"] for a, b in zip(theirs, ours, strict=True)]
    return {
        "trl_step_seconds": statistics.median(theirs),
        "oncurve_step_seconds": statistics.median(step["step"] for step in ours),
        "oncurve_sample_seconds": statistics.median(step["sample"] for step in ours),
        "oncurve_train_seconds": statistics.median(step["train"] for step in ours),
        "speedup": statistics.median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
        "trl_tokens_per_step": sum(lengths) / max(len(callback.theirs_seconds), 1),
        "oncurve_tokens_per_step": our_tokens,
        "raw": {"trl": callback.theirs_seconds, "oncurve": callback.ours_seconds},
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="S")
    parser.add_argument("--case", choices=["full", "ragged"], default="ragged")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--micro-batch", type=int, default=32, help="TRL's, in completions")
    parser.add_argument("--bf16", action="store_true", help="TRL under autocast")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, float | None]]:
    yield arguments.case, 40.0 if arguments.case == "ragged" else None


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    for case, mean_tokens in cases(arguments):
        with tempfile.TemporaryDirectory() as scratch:
            length = arguments.prompt_tokens + NEW_TOKENS
            folder = build(Path(scratch) / "model", SHAPES[arguments.model], mean_tokens=mean_tokens, max_length=length)
            measured = compare(arguments, folder)
        name = f"vs_trl-{arguments.model}-{case}-{arguments.prompt_tokens}"
        chosen = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
        chosen.pop("output")
        record = {"case": case, "arguments": chosen, "measured": measured, "run": describe_run(None)}
        record["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps({k: v for k, v in measured.items() if k != "raw"}, indent=1))


if __name__ == "__main__":
    main()
