"""Sampling with ``transformers``: the slow reference that every other sampler is compared with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria

from oncurve.algorithm.precision import in_full_precision
from oncurve.errors import SamplerError
from oncurve.model.decode_memory import USUAL_ROWS
from oncurve.model.out_of_memory import Shortage, first_line, is_out_of_memory, release
from oncurve.model.stand_in import FAILURES
from oncurve.records import Group, Prompt
from oncurve.sample.base import (
    PolicyView,
    Sampled,
    Sampler,
    SamplingParams,
    check_ids,
    end_token_ids,
    make_group,
    padding_id,
)
from oncurve.sample.cache import left_pad
from oncurve.sample.generic import PROMPTS, STEPS, disagreement
from oncurve.sample.settings import SamplingKeys
from oncurve.sample.stops import StopStrings
from oncurve.sample.turns import Ask, with_limit

log = logging.getLogger(__name__)

WAYS = ((True, True), (False, True), (False, False))
"""Whether prompts of different length are padded to one batch, and whether there is a cache, from the fastest."""
GROUP = 2
"""Completions of a prompt in the proof of a way."""


class HfSampler:
    """``model.generate`` over all rows at once: finished rows stay in the batch, prompts are read once per completion.

    The model's own generation settings (top-p, repetition penalty, ...) are left aside, since they would sample from
    another distribution than the policy's. Its random numbers depend on the batch, unlike those of the engine.
    """

    def __init__(self, params: SamplingParams, *, max_rows: int = 256) -> None:
        self.params = params
        self.max_rows = max_rows
        self._policy: PolicyView | None = None
        self._version = 0
        self._ways: WeakKeyDictionary[PreTrainedModel, tuple[bool, bool]] = WeakKeyDictionary()

    def load_weights(self, policy: PolicyView, version: int) -> None:
        """Remember the policy: its module holds the current weights already."""
        self._policy, self._version = policy, version

    def close(self) -> None:
        """Let go of the policy."""
        self._policy = None

    def sample(
        self, prompts: Sequence[Prompt], group_size: int, *, step: int = 0, params: SamplingParams | None = None
    ) -> list[Group]:
        """One group per prompt."""
        if self._policy is None:
            raise SamplerError("the sampler has no weights yet; call load_weights before sample")
        params = params or self.params
        model = self._policy.model
        was_training = model.training
        model.eval()
        devices = [model.device] if model.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), torch.inference_mode(), self._policy.compute():
                while True:
                    torch.manual_seed(params.seed * 1_000_003 + step)
                    with Shortage() as shortage:
                        return self._sample(self._policy, prompts, group_size, params)
                    release()
                    self._shrink(prompts, group_size, params, str(shortage.reason))
        finally:
            model.train(was_training)

    def turns(self, params: SamplingParams, *, step: int, post: Callable[[Callable[[], None]], None]) -> GenerateTurns:
        """Turns of the current weights, in whole rounds."""
        return GenerateTurns(self, params, step=step)

    def _sample(
        self, policy: PolicyView, prompts: Sequence[Prompt], group_size: int, params: SamplingParams
    ) -> list[Group]:
        pads, caches = self._way(policy.model)
        at_once = max(1, self.max_rows // group_size)
        if len({len(prompt.prompt_ids) for prompt in prompts}) > 1 and not pads:
            at_once = 1
        return [
            group
            for start in range(0, len(prompts), at_once)
            for group in self._generate(policy, prompts[start : start + at_once], group_size, params, caches)
        ]

    def _way(self, model: PreTrainedModel) -> tuple[bool, bool]:
        """The first way that gives the log-probabilities of the model's own forward pass, found once for each model.

        Raises SamplerError if none does.
        """
        if model not in self._ways:
            devices = [model.device] if model.device.type == "cuda" else []
            with (
                torch.random.fork_rng(devices=devices),
                in_full_precision(model),
                torch.autocast(model.device.type, enabled=False),
            ):
                objection: str | None = None
                for way in WAYS:
                    if (objection := _objection(model, *way)) is None:
                        self._ways[model] = way
                        break
                else:
                    raise SamplerError(
                        f"transformers' generate samples from {type(model).__name__} what its own forward pass does "
                        f"not compute: {objection}. Set rollouts.type to engine"
                    )
        return self._ways[model]

    def _shrink(self, prompts: Sequence[Prompt], group_size: int, params: SamplingParams, reason: str) -> None:
        """From now on half as many groups at a time, as if it had begun so: all are sampled anew.

        Raises SamplerError if that was one.
        """
        at_once = min(max(1, self.max_rows // group_size), len(prompts))
        if at_once == 1:
            raise SamplerError(
                f"there is not enough memory to sample one group of {group_size} completions of up to "
                f"{params.max_completion_tokens} tokens with generate ({reason}). Set rollouts.type to engine, which "
                f"takes less, or lower rollouts.max_completion_tokens or algorithm.group_size"
            )
        self.max_rows = at_once // 2 * group_size
        log.warning(
            "OUT OF MEMORY while %d completions were sampled at a time (%s): from now on %d. The random numbers of "
            "generate depend on that; set rollouts.max_rows=%d to begin so",
            at_once * group_size,
            reason,
            self.max_rows,
            self.max_rows,
        )

    def _generate(
        self, policy: PolicyView, prompts: Sequence[Prompt], group_size: int, params: SamplingParams, caches: bool
    ) -> list[Group]:
        model, tokenizer = policy.model, policy.tokenizer
        for prompt in prompts:
            check_ids(model, prompt.prompt_ids)
        end_ids = end_token_ids(model, tokenizer)
        pad_id = padding_id(policy, end_ids)
        ids, mask = left_pad([prompt.prompt_ids for prompt in prompts], pad_id=pad_id, device=model.device)
        settings = generation_settings(params, end_ids=end_ids, pad_id=pad_id, group_size=group_size)
        settings.use_cache = caches
        ends = _Ends(params, StopStrings(params.stop, tokenizer), end_ids, prompt_width=ids.shape[1])
        generate: Any = model.generate
        with _no_settings_of_its_own(model):
            output = generate(input_ids=ids, attention_mask=mask, generation_config=settings, stopping_criteria=[ends])
        tokens = output.sequences[:, ids.shape[1] :]
        logprobs = _sampled_logprobs(output.logits, tokens, params.temperature)
        sampled = [
            _cut(row_ids, row_logprobs, length)
            for row_ids, row_logprobs, length in zip(tokens.tolist(), logprobs.tolist(), ends.lengths, strict=True)
        ]
        return [
            make_group(
                prompt,
                sampled[place * group_size : (place + 1) * group_size],
                tokenizer=tokenizer,
                end_ids=end_ids,
                version=self._version,
            )
            for place, prompt in enumerate(prompts)
        ]


def _objection(model: PreTrainedModel, pads: bool, caches: bool) -> str | None:
    """The reason against a way to generate; None if there is none."""
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [tuple((7 * place + 3) % vocabulary for place in range(length)) for length in PROMPTS[: 1 + pads]]
    ids, mask = left_pad(prompts, pad_id=0, device=model.device)
    lengths = [len(prompt) for prompt in prompts for _ in range(GROUP)]
    params = SamplingParams(max_completion_tokens=STEPS, temperature=0.0)
    settings = generation_settings(params, end_ids=(), pad_id=0, group_size=GROUP)
    settings.use_cache = caches
    generate: Any = model.generate
    try:
        if not model(input_ids=ids[:1], attention_mask=mask[:1], use_cache=False).logits.isfinite().any():
            return None  # broken weights tell nothing of a way, and whatever is sampled is refused
        with _no_settings_of_its_own(model):
            output = generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        logits, rows = torch.stack(output.logits, dim=1), output.sequences.tolist()
        found = (
            disagreement(model, row[-length - STEPS :], one, start=length)
            for row, one, length in zip(rows, logits, lengths, strict=True)
        )
        return next((objection for objection in found if objection), None)
    except FAILURES as error:
        if is_out_of_memory(error):  # which says nothing of a way
            raise
        return f"it raises {type(error).__name__}: {first_line(error)}"


def generation_settings(
    params: SamplingParams, *, end_ids: tuple[int, ...], pad_id: int, group_size: int
) -> GenerationConfig:
    """Settings for ``generate`` that leave nothing to the model's defaults."""
    settings: dict[str, Any] = {
        "max_new_tokens": params.max_completion_tokens,
        "num_return_sequences": group_size,
        "do_sample": params.temperature > 0,
        "eos_token_id": list(end_ids) or None,
        "pad_token_id": pad_id,
        "return_dict_in_generate": True,
        "output_logits": True,
        "use_cache": True,
        "repetition_penalty": 1.0,
    }
    if params.min_completion_tokens:
        settings["min_new_tokens"] = params.min_completion_tokens
    if params.temperature > 0:
        settings |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        if params.min_p > 0:
            settings["min_p"] = params.min_p
    elif group_size > 1:
        settings |= {"do_sample": True, "temperature": 1.0, "top_k": 1}
    return GenerationConfig(**settings)


def _sampled_logprobs(logits: Sequence[Tensor], tokens: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the sampled tokens [B, T], at the temperature (at 1 for greedy)."""
    scale = temperature if temperature > 0 else 1.0
    columns = [
        torch.log_softmax(step.float() / scale, dim=-1).gather(1, tokens[:, t : t + 1]) for t, step in enumerate(logits)
    ]
    return torch.cat(columns, dim=1)


@contextmanager
def _no_settings_of_its_own(model: PreTrainedModel) -> Iterator[None]:
    """While it lasts, the model has no generation settings: ``generate`` fills in from them what it was not given."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class _Ends(StoppingCriteria):
    """Ends rows where the engine would: ``generate`` looks for stop strings in the prompt, and before the minimum."""

    def __init__(
        self, params: SamplingParams, stops: StopStrings, end_ids: tuple[int, ...], *, prompt_width: int
    ) -> None:
        self.params, self.stops, self.end_ids, self.prompt_width = params, stops, end_ids, prompt_width
        self.lengths: list[int | None] = []
        """Tokens of each completion when it ended by itself; None while it has not."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Which rows have ended."""
        length = input_ids.shape[1] - self.prompt_width
        rows = input_ids[:, -min(length, max(self.stops.window, 1)) :].tolist()
        self.lengths = self.lengths or [None] * len(rows)
        running = [place for place, length in enumerate(self.lengths) if length is None]
        stopped = self.stops.ended([rows[place] for place in running])
        for place, is_stopped in zip(running, stopped, strict=True):
            ids = rows[place]
            if ids[-1] in self.end_ids or (is_stopped and length >= self.params.min_completion_tokens):
                self.lengths[place] = length
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)


def _cut(ids: list[int], logprobs: list[float], length: int | None) -> Sampled:
    """Remove the padding after the end of a completion and say why it ended."""
    return (ids, logprobs, "length") if length is None else (ids[:length], logprobs[:length], "stop")


ROUNDS = 4096
"""Rounds of one step at most, so that each has random numbers of its own."""


def make_hf_sampler(section: SamplingKeys, *, seed: int) -> HfSampler:
    """The sampler by transformers that a recipe's section asks for."""
    return HfSampler(section.sampling(seed), max_rows=USUAL_ROWS if section.max_rows == "auto" else section.max_rows)


class GenerateTurns:
    """Whole rounds of ``model.generate``, whose random numbers depend on the round and on who is in it."""

    def __init__(self, sampler: Sampler, params: SamplingParams, *, step: int) -> None:
        self._sampler, self._params, self._step = sampler, params, step
        self._waiting: list[Ask] = []
        self._round = 0

    def ask(self, asked: Ask) -> None:
        """Sample this in the next round of its size."""
        self._waiting.append(asked)

    def advance(self) -> bool:
        """One round: those that wait and ask for as many turns as the first of them."""
        if not self._waiting:
            return False
        count = len(self._waiting[0].keys)
        now = [asked for asked in self._waiting if len(asked.keys) == count]
        self._waiting = [asked for asked in self._waiting if len(asked.keys) != count]
        prompts = [Prompt("", asked.token_ids, place) for place, asked in enumerate(now)]
        params = with_limit(self._params, max(asked.max_tokens for asked in now))
        groups = self._sampler.sample(prompts, count, step=self._step * ROUNDS + self._round % ROUNDS, params=params)
        self._round += 1
        for asked, group in zip(now, groups, strict=True):
            for place, completion in enumerate(group.completions):
                ids, logprobs = list(completion.token_ids), list(completion.sampler_logprobs)
                sampled: Sampled = (ids, logprobs, "stop" if not completion.is_truncated else "length")
                if len(ids) > asked.max_tokens:
                    sampled = (ids[: asked.max_tokens], logprobs[: asked.max_tokens], "length")
                asked.deliver(place, sampled)
        return True

    def close(self) -> None:
        """Forget what waits."""
        self._waiting = []
