"""The interface of a sampler."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from oncurve.core.errors import SamplerError
from oncurve.core.records import Completion, FinishReason, Group, Prompt, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class PolicyView(Protocol):
    """The policy as a sampler may see it: its current weights and how to read its tokens."""

    @property
    def model(self) -> PreTrainedModel:
        """The module with the current weights."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Text to tokens and back."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of its passes; the whole copy of a policy in parts may lie elsewhere."""
        ...

    def compute(self) -> AbstractContextManager[object]:
        """The arithmetic in which the model is to be evaluated."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """The groups that a sampler is asked for."""

    prompts: Sequence[Prompt]
    group_size: int
    """Completions of each prompt."""
    step: int = 0
    """Enters the random streams."""
    params: SamplingParams | None = None
    """In place of the sampler's own, as for a measurement."""

    def with_prompts(self, prompts: Sequence[Prompt]) -> SamplingRequest:
        """The request for other prompts, such as a share of these."""
        return replace(self, prompts=prompts)

    def completion_indices(self) -> list[list[int]]:
        """The numbers of each prompt's completions in its random streams; a repeated prompt continues the count."""
        seen: Counter[int] = Counter()
        indices: list[list[int]] = []
        for prompt in self.prompts:
            first = seen[prompt.index] * self.group_size
            indices.append(list(range(first, first + self.group_size)))
            seen[prompt.index] += 1
        return indices

    def stream_keys(self, seed: int) -> np.ndarray:
        """The random stream of every completion [P, G]."""
        import numpy as np  # lazy

        from oncurve.core.draw import stream_keys  # lazy: it loads torch

        numbers = np.repeat(np.array([prompt.index for prompt in self.prompts], dtype=np.int64), self.group_size)
        indices = np.array(self.completion_indices(), dtype=np.int64).reshape(-1)
        return stream_keys(seed, self.step, numbers, indices).reshape(len(self.prompts), self.group_size)


class Sampler(Protocol):
    """Produces completions from the latest weights it was given."""

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Sample from these weights from now on and stamp completions with the version."""

    def sample(self, request: SamplingRequest) -> list[Group]:
        """One group per prompt, in order."""
        ...

    def close(self) -> None:
        """Give back what was taken."""


@runtime_checkable
class TellsGroups(Protocol):
    """A sampler that tells of each group when it is whole, while it samples others."""

    on_group: Callable[[Group], None] | None
    """Called in whichever thread samples, with the very group that ``sample`` will give back; None: nobody listens."""


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's end token and those of the model's generation settings."""
    declared = model.generation_config.eos_token_id if model.generation_config else None
    listed = declared if isinstance(declared, list) else [declared]
    ids = [token for token in [tokenizer.eos_token_id, *listed] if isinstance(token, int)]
    return tuple(dict.fromkeys(ids))


def _vocabulary(model: PreTrainedModel) -> int:
    """Rows of the model's embedding."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def check_ids(model: PreTrainedModel, ids: Collection[int]) -> None:
    """Raises SamplerError for a token that the model's embedding has no row for."""
    rows = _vocabulary(model)
    if ids and max(ids) >= rows:
        raise SamplerError(
            f"token {max(ids)} is beyond the model's embedding, which has {rows} rows: tokens were added to its "
            f"tokenizer and not to the model. Call model.resize_token_embeddings(len(tokenizer)) and save it, or take "
            f"the tokenizer that belongs to it"
        )


def padding_id(policy: PolicyView, end_ids: tuple[int, ...]) -> int:
    """A token to fill rows with; masks keep it from having any influence.

    A padding token that was added to the tokenizer alone has no row in the model's embedding, and is not taken.
    """
    rows = _vocabulary(policy.model)
    declared = policy.tokenizer.pad_token_id
    known = [token for token in (declared, *end_ids) if isinstance(token, int) and token < rows]
    return known[0] if known else 0


def exact_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], end_ids: Collection[int] = ()) -> str:
    """Token ids as text, special tokens too, without the end token behind them."""
    written = ids[:-1] if ids and ids[-1] in end_ids else ids
    return str(tokenizer.decode(list(written), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def check_finite(logprobs: Sequence[float], prompt: Prompt, version: int) -> None:
    """Raises SamplerError for a log-probability that is not finite."""
    if not math.isfinite(sum(logprobs)):
        raise SamplerError(
            f"the model's logits are not finite (prompt {prompt.index}, policy version {version}). "
            f"Lower optimizer.learning_rate if it was trained, or take policy.compute_type float32 or bfloat16"
        )


def make_group(
    prompt: Prompt,
    sampled: Sequence[tuple[Sequence[int], Sequence[float], FinishReason]],
    *,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: tuple[int, ...],
    version: int,
) -> Group:
    """The record of what was sampled for one prompt.

    Raises SamplerError for a log-probability that is not finite.
    """
    completions: list[Completion] = []
    for index, (ids, logprobs, reason) in enumerate(sampled):
        check_finite(logprobs, prompt, version)
        text = exact_text(tokenizer, ids, end_ids)
        completions.append(Completion(prompt.prompt_ids, ids, text, logprobs, reason, version, index))
    return Group(prompt, tuple(completions))
