"""A check that tokens of episodes are trained on as they were sampled: tools, environments, agents.

A small model, taught for a moment to call a tool, is trained on batches that mix four kinds of episodes: a tool whose
answers are hostile and an environment with methods, in plain text; Gymnasium environments in a chat template; agents
that hold two conversations and fork one. A recorder between the sampler of episodes and the engine keeps each turn as
the engine made it. What is counted over all tokens that the policy wrote:

- tokens that are not where the recorder saw them, behind exactly the tokens that the engine read;
- the largest difference between the log-probabilities of sampler and trainer, in float32;
- in float64, the gradient at tokens that the policy did not write, and packed against padded gradients;
- episodes that came out differently alone than among 63 others.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from episode_kinds import MOST_TOKENS, Recorder, make_samplers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "invariance"))
from doubles import in_double  # type: ignore[import-not-found]

PROMPTS, GROUP = 8, 8
"""64 episodes of each kind in a step."""
WORDS = [*"abcdefgh", "ab", "cad", "face", "bead"]
CHAT = """{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@dataclass
class Counts:
    """What was found so far."""

    trained_tokens: int = 0
    told_tokens: int = 0
    episodes: int = 0
    rows: int = 0
    turns: int = 0
    calls: int = 0
    retokenized_tokens: int = 0
    """Of those that the policy wrote, how many are not as they were sampled, where they were sampled."""
    changed_by_tokenizing_again: int = 0
    """How many tokens are in turns whose text has other tokens: what going by text would have changed."""
    largest_logprob_difference: float = 0.0
    largest_gradient_of_told_tokens: float = 0.0
    largest_packed_padded_difference: float = 0.0
    """Of a gradient, beside its largest entry."""
    told_tokens_in_float64: int = 0
    trained_tokens_in_float64: int = 0
    episodes_alone: int = 0
    episodes_alone_that_differ: int = 0
    failures: int = 0


def make_policies(seed: int = 0) -> tuple[Any, list[Any]]:
    """A small model in training in float32, and two in float64 beside it: packed and padded."""
    from oncurve.coldstart.tiny_model import tiny_model, tiny_tokenizer
    from oncurve.policy.settings import OptimizerSettings, PolicySection
    from oncurve.policy.trained_policy import TrainedPolicy

    tags = ("<tool>", "</tool>", "<result>", "</result>")
    tokenizer = tiny_tokenizer(["a bead and a cab", "take one", "Talk."], num_merges=16, more_tags=tags)
    tokenizer.chat_template = CHAT
    model = tiny_model(tokenizer, seed=seed, hidden_size=32, num_layers=2, mlp_size=64, max_tokens=2048)
    teach(model, tokenizer)
    settings = OptimizerSettings(learning_rate=3e-4)
    doubles = [
        TrainedPolicy(
            in_double(copy.deepcopy(model)),
            tokenizer,
            optimizer=settings,
            section=PolicySection(packing=packing),
            compute_type="float64",
        )
        for packing in (True, False)
    ]
    return TrainedPolicy(model, tokenizer, optimizer=settings, total_updates=10**6), doubles


def teach(model: Any, tokenizer: Any, *, updates: int = 150) -> None:
    """Demonstrations of calls and of short turns, so that episodes have several turns."""
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    end = tokenizer.eos_token
    for _ in range(updates):
        texts = []
        for _ in range(16):
            said = "".join(draw.choices(WORDS, k=draw.randint(1, 4)))
            opening = draw.choice(["A:", "</result>", "<assistant>"])
            texts.append(opening + draw.choice([f"<tool>{said}</tool>", f"<tool>{said}</tool>", f"{said}{end}"]))
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        width = max(map(len, ids))
        rows = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids])
        labels = rows.masked_fill(rows == tokenizer.pad_token_id, -100)
        model(input_ids=rows, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def prompts_of(kind: str, tokenizer: Any, rows: Sequence[dict[str, Any]], step: int) -> list[Any]:
    """The prompts of a step: other rows in every step."""
    from oncurve.core.records import Prompt

    made = []
    for place in range(PROMPTS):
        index = (step * PROMPTS + place) % len(rows)
        question = rows[index]["question"]
        text = f"U: {question}\nA:"
        if kind == "steps_in_chat":
            message = [{"role": "user", "content": question}]
            text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        made.append(Prompt(text, tuple(tokenizer.encode(text, add_special_tokens=False)), index, rows[index]))
    return made


def rows_in(groups: Sequence[Any]) -> Iterator[Any]:
    """All rows of groups: completions, and the branches of those that forked."""
    for group in groups:
        for one in group.completions:
            yield one
            yield from one.branches


def same_tokens(one: Any, other: Any) -> bool:
    """Two episodes are the same, row by row."""
    pairs = [(one, other), *zip(one.branches, other.branches, strict=False)]
    return len(one.branches) == len(other.branches) and all(
        (a.prompt_ids, a.token_ids, a.written) == (b.prompt_ids, b.token_ids, b.written) for a, b in pairs
    )


def check_tokens(groups: Sequence[Any], recorder: Recorder, tokenizer: Any, counts: Counts) -> None:
    """Each turn of the policy against what the engine read and made."""
    for row in rows_in(groups):
        counts.rows += 1
        counts.calls += len(row.calls)
        for part in row.segments:
            ids = row.token_ids[part.start : part.end]
            if not part.is_policy:
                counts.told_tokens += len(ids)
                continue
            logprobs = tuple(row.sampler_logprobs[part.start : part.end])
            key = ((*row.prompt_ids, *row.token_ids[: part.start]), ids, logprobs)
            counts.turns += 1
            counts.trained_tokens += len(ids)
            if recorder.seen[key]:
                recorder.seen[key] -= 1
            else:
                counts.retokenized_tokens += len(ids)
            text = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
            if tuple(tokenizer.encode(text, add_special_tokens=False)) != tuple(ids):
                counts.changed_by_tokenizing_again += len(ids)
    counts.episodes += sum(len(group.completions) for group in groups)
    counts.failures += sum(one.failure is not None for group in groups for one in group.completions)


def gradient(policy: Any, algorithm: Any, batch: Any) -> tuple[Any, Any]:
    """The gradient of all weights, and that of the log-probabilities [B, T]."""
    for weight in policy.model.parameters():
        weight.grad = None
    logprobs, entropy = policy.logprobs(batch)
    logprobs.retain_grad()
    policy.backward(algorithm.loss(logprobs, entropy, batch)[0])
    whole = torch.cat([weight.grad.flatten() for weight in policy.model.parameters() if weight.grad is not None])
    return whole, logprobs.grad


def check_gradients(policy: Any, doubles: Sequence[Any], algorithm: Any, batch: Any, counts: Counts) -> None:
    """Nothing flows through what the policy was told, and packing changes nothing, in float64."""
    state = {name: value.double() for name, value in policy.model.state_dict().items()}
    told = (torch.arange(batch.mask.shape[1]) < batch.completion_lengths[:, None]) & ~batch.mask
    found = []
    for double in doubles:
        double.model.load_state_dict(state)
        whole, of_tokens = gradient(double, algorithm, batch)
        found.append(whole)
        largest = float(of_tokens[told].abs().max()) if told.any() else 0.0
        counts.largest_gradient_of_told_tokens = max(counts.largest_gradient_of_told_tokens, largest)
        if not (of_tokens[batch.mask] != 0).any():
            raise SystemExit("no gradient flows at all; this measures nothing")
    packed, padded = found
    difference = float((packed - padded).abs().max() / padded.abs().max())
    counts.largest_packed_padded_difference = max(counts.largest_packed_padded_difference, difference)
    counts.told_tokens_in_float64 += int(told.sum())
    counts.trained_tokens_in_float64 += int(batch.mask.sum())


def one_step(
    step: int, policy: Any, doubles: Sequence[Any], samplers: dict[str, Any], algorithm: Any, counts: Counts
) -> None:
    """Sample all kinds, check, and train on all of them at once."""
    from oncurve.core.batch import collate
    from oncurve.core.sampler import SamplingRequest

    groups: list[Any] = []
    for kind, (sampler, recorder, rows) in samplers.items():
        prompts = prompts_of(kind, policy.tokenizer, rows, step)
        recorder.seen.clear()
        made = sampler.sample(SamplingRequest(prompts, GROUP, step=step))
        check_tokens(made, recorder, policy.tokenizer, counts)
        place = step % PROMPTS
        [alone] = sampler.sample(SamplingRequest([prompts[place]], 1, step=step))
        counts.episodes_alone += 1
        is_same = same_tokens(alone.completions[0], made[place].completions[0])
        counts.episodes_alone_that_differ += not is_same
        groups += made
    paid = torch.tensor([[float(len(set(one.written_ids))) for one in group.completions] for group in groups])
    batch = collate(groups, paid - paid.mean(dim=1, keepdim=True))
    with torch.no_grad():
        logprobs, _ = policy.logprobs(batch)
    difference = float((logprobs - batch.sampler_logprobs)[batch.mask].abs().max())
    counts.largest_logprob_difference = max(counts.largest_logprob_difference, difference)
    check_gradients(policy, doubles, algorithm, batch, counts)
    logprobs, entropy = policy.logprobs(batch)
    policy.backward(algorithm.loss(logprobs, entropy, batch)[0])
    policy.update()
    for sampler, _, _ in samplers.values():
        sampler.load_weights(policy, version=step + 1)


def measure(tokens: int) -> dict[str, Any]:
    """Train on at least so many tokens that the policy wrote; what was found."""
    from oncurve.algorithm.presets import build

    torch.manual_seed(0)
    policy, doubles = make_policies()
    samplers, counts, step = make_samplers(policy), Counts(), 0
    algorithm = build("grpo", group_size=GROUP, max_completion_tokens=MOST_TOKENS)
    found: dict[str, Any] = {}
    try:
        while counts.trained_tokens < tokens:
            one_step(step, policy, doubles, samplers, algorithm, counts)
            step += 1
            found = {"steps": step, "kinds": [*samplers], "episodes_at_once": PROMPTS * GROUP, **vars(counts)}
    finally:
        for sampler, _, _ in samplers.values():
            sampler.close()
    return found
