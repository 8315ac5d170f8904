"""The way by which a model is trained: the fastest of a ladder that computes what its own forward pass does.

It is found when a model is loaded, with rows of the model itself and of a small model of its kind, in which windows,
chunks and indexes begin after a few tokens. How far a way may be from the model's own result is a small multiple of
what rounding its embeddings once more does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from oncurve.algorithm.precision import in_full_precision
from oncurve.core.batch import Batch, Size
from oncurve.core.errors import first_line
from oncurve.core.logprobs import from_logits, join_rows
from oncurve.model.context import context_of
from oncurve.model.stand_in import (
    FAILURES,
    ROUNDINGS,
    Agreement,
    agreement,
    allowed,
    changes_with_length,
    find_stand_in,
    nudged,
    of_size,
)
from oncurve.model.weights import Trust, set_trust
from oncurve.policy.forward import completion_logprobs, has_own_layers
from oncurve.policy.packed_attention import (
    IN_BLOCKS,
    NAME,
    kernel_for,
    ordinary_attention,
    set_attention,
    use_packed_attention,
)
from oncurve.run_errors import CheckpointError

log = logging.getLogger(__name__)

KNOWS_LITTLE = 0.5
"""Share of log V from which on a model that reads a prompt so badly is told of. SmolLM2-135M reads a problem of GSM8K
at 0.36 of it, with rows in the order of another rope at 0.53, with its embedding or layers misplaced above 0.9."""
KERNEL_ROUNDINGS = 4.0
"""So many times as far from the exact result as padded rows are may packed rows be."""


def disagreement(
    kinds: Iterable[tuple[str, Tensor, Tensor, Tensor]], subject: str, *, times: float, floor: float
) -> Agreement | None:
    """The first of (name, fast, plain, exact) in which the fast way is further from the exact result than rounding
    explains; None if there is none. The others go to the log after what is ``subject``."""
    for name, fast, plain, exact in kinds:
        result = agreement(name, fast, plain, exact, times=times, floor=floor, distance=of_size)
        if not result.holds:
            return result
        log.info("%s %s", subject, result)
    return None


def short(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {first_line(error)}"


def choose_kernel(model: PreTrainedModel, batch: Batch, compute_type: torch.dtype) -> str | None:
    """Let packed rows go through the kernel for runs of any length, if there is one here and it is right; what speaks
    against it, otherwise None. Without it they stay in blocks."""
    use_packed_attention(model)
    if kernel_for(model.device, compute_type) is None:
        return None
    if mismatch := _mismatch(model, batch, compute_type):
        use_packed_attention(model, in_blocks=True)
        return mismatch
    return None


def _mismatch(model: PreTrainedModel, batch: Batch, compute_type: torch.dtype) -> str | None:
    """The reason against packed attention as it is now; None if it differs from the exact result as rounding does.

    How much rounding does, padded rows say themselves: in the compute type and in the type of the weights.
    """
    exact = _outcome(model, batch, packed=False)
    with torch.autocast(model.device.type, dtype=compute_type):
        padded = _outcome(model, batch, packed=False)
        try:
            packed = _outcome(model, batch, packed=True)
        except FAILURES as error:
            return f"raised {short(error)}"
    least = torch.finfo(compute_type).eps
    names = ("log-probabilities", "gradients")
    kinds = zip(names, packed, padded, exact, strict=True)
    result = disagreement(kinds, "the flash kernel gives", times=KERNEL_ROUNDINGS, floor=least)
    return None if result is None else f"gives {result}"


def _outcome(model: PreTrainedModel, batch: Batch, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of their sum by a factor of each number of the embeddings.

    All layers have a part in it, and no weight gets a gradient.
    """
    factors: list[Tensor] = []

    def scale(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        factors.append(torch.ones_like(output[0, 0]).requires_grad_())
        return output * factors[-1]

    hook = model.get_input_embeddings().register_forward_hook(scale)
    try:
        with torch.enable_grad():
            logprobs, _ = completion_logprobs(model, batch, temperature=1.0, packed=packed)
            [gradient] = torch.autograd.grad(logprobs.sum(), factors)
    finally:
        hook.remove()
    return logprobs.detach().double(), gradient.double()


GRADIENT_FLOOR = 1e-4
"""Difference of gradients that always counts as rounding, as a part of their size."""
LENGTHS = ((3, 5), (3, 24), (21, 4), (21, 9))
"""Tokens of prompts and completions of the rows; they are as long as 30 tokens, and of different length."""
COPIES = 9
"""Times that one row stands in a call in which it has to have the numbers that it has alone."""
WRITTEN_FOR_ALL = ("torch", "transformers", "peft", "bitsandbytes", "oncurve")
"""Packages whose modules are those of many models, which the tests here know."""
PLAIN_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
"""Layers that mix tokens by attention alone; others, such as convolutions, carry a state across packed rows."""


@dataclass(frozen=True)
class ScoringPath:
    """The way in which a model is trained."""

    method: str
    """In words."""
    is_packed: bool
    reasons: tuple[str, ...] = ()
    """The reasons against the faster ways."""

    def __str__(self) -> str:
        return self.method + (f", since {'; '.join(self.reasons)}" if self.reasons else "")


@dataclass(frozen=True)
class _Candidate:
    description: str
    is_packed: bool
    layers: bool = False
    head: bool = True
    padding: bool = True


_CANDIDATES = (
    _Candidate("packed rows through our own layers", is_packed=True, layers=True),
    _Candidate("packed rows through the model's modules", is_packed=True),
    _Candidate("padded rows through the model's modules", is_packed=False),
    _Candidate("padded rows through the model's own forward pass, with more memory", is_packed=False, head=False),
    _Candidate("its own forward pass row by row, which is slow", is_packed=False, head=False, padding=False),
)


def find_scoring_path(
    model: PreTrainedModel,
    compute_type: torch.dtype = torch.float32,
    *,
    packing: bool = True,
    in_parts: bool = False,
) -> ScoringPath:
    """The first way that is right, which the model is made ready for. Without ``packing``, rows are padded at least.

    A model whose weights will be ``in_parts`` is trained through its modules, around which they are put together. One
    with code of its own is looked at in its longest row too (``expect_rows``): no setting says what begins
    after how many tokens.

    Raises CheckpointError for a model whose own forward pass fails, or gives other numbers each time.
    """
    with in_full_precision(model):
        path = _find(model, packing, in_parts, _LONGEST.get(model, 0) if has_own_code(model) else 0)
        if path.is_packed and (mismatch := choose_kernel(model, example_batch(model), compute_type)):
            log.warning(
                "packed attention goes on in blocks, slower and with more memory: the flash kernel %s", mismatch
            )
    log.info("the model is trained with %s", path)
    return path


_LONGEST: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def expect_rows(model: PreTrainedModel, longest_tokens: int) -> None:
    """Let a model be looked at in a row of so many tokens, where its code is its own."""
    _LONGEST[model] = longest_tokens


def has_own_code(model: nn.Module) -> bool:
    """Some of its modules are neither torch's nor of a library that is known here."""
    return any(type(part).__module__.partition(".")[0] not in WRITTEN_FOR_ALL for part in model.modules())


def _find(model: PreTrainedModel, packing: bool, in_parts: bool, longest_tokens: int) -> ScoringPath:
    if model.config.get_text_config()._attn_implementation in (NAME, IN_BLOCKS):
        ordinary_attention(model)
    set_trust(model, Trust())
    subjects = list(_subjects(model, longest_tokens))
    if subjects[0].is_finite:
        subjects[0].refuse_company()
    if not all(subject.is_finite for subject in subjects):  # whatever is sampled is refused
        return ScoringPath("padded rows through the model's modules", is_packed=False)
    reasons, has_layers = list[str](), True
    for candidate in _CANDIDATES:
        is_own = candidate.layers
        if (is_own and not has_own_layers(model)) or (candidate.is_packed and not packing and not is_own):
            continue
        mismatch = packing_mismatch(model) if candidate.is_packed else None
        for subject in subjects:
            mismatch = mismatch or subject.mismatch(candidate)
        if mismatch is not None:
            reasons.append(mismatch)
            has_layers = has_layers and not is_own
        elif not candidate.is_packed or (
            packing and not (is_own and in_parts)
        ):  # own layers that are right also sample
            set_trust(model, Trust(has_layers, candidate.head, candidate.padding))
            if candidate.is_packed:
                use_packed_attention(model, in_blocks=True)
            return ScoringPath(candidate.description, candidate.is_packed, tuple(dict.fromkeys(reasons)))
    raise CheckpointError(f"{type(model).__name__} cannot be trained: {'; '.join(reasons)}")


def packing_mismatch(model: PreTrainedModel) -> str | None:
    """A reason in the model's configuration not to lay rows end to end, whatever a few rows would show; or None."""
    config = model.config.get_text_config()
    kinds = [kind for kind in getattr(config, "layer_types", None) or () if kind not in PLAIN_LAYERS]
    if kinds:
        return f"it has layers of the kind {kinds[0]}"
    if getattr(config, "index_topk", None):
        return "its attention chooses tokens by an index"
    return None


def _subjects(model: PreTrainedModel, longest_tokens: int) -> Iterator[_Subject]:
    """The models to look at: itself, and one of its kind in which everything begins after a few tokens."""
    yield _Subject(model, has_gradient=False, longest_tokens=longest_tokens)
    made = find_stand_in(model)
    if made is not None:
        yield _Subject(made, has_gradient=model.device.type == "cpu")
    elif changes_with_length(model, max(sum(row) for row in LENGTHS)):
        log.warning("there is no small model of the kind of %s, on which its long rows would be proven", type(model))


class _Subject:
    """A model, a few rows, and what its own forward pass makes of each of them alone."""

    def __init__(self, model: PreTrainedModel, *, has_gradient: bool, longest_tokens: int = 0) -> None:
        self.model, self.batch, self.has_gradient = model, example_batch(model, longest_tokens), has_gradient
        self.was_training = model.training
        self.attention = str(model.config.get_text_config()._attn_implementation)
        try:
            self.exact, self.gradient = self._outcome(lambda: own_logprobs(model, self.batch))
            nudge, near = self._outcome(lambda: own_logprobs(model, self.batch, is_nudged=True))
        except FAILURES as error:
            raise CheckpointError(
                f"{type(model).__name__} cannot compute a row of {len(self.batch)} short ones: {short(error)}. Its "
                f"config.json asks for what transformers' own code of it cannot do"
            ) from error
        self.allowed = allowed(model, float((nudge - self.exact).abs().max()))
        self.gradient_rounding = _distance(near, self.gradient)
        self._refuse_foresight()

    def refuse_company(self) -> None:
        """Raises CheckpointError for a model in which a row has other numbers in a second call, or among its copies.

        Most of the rows have to show it: in a single one, rounding may have sent a token to another expert.
        """
        again, copies = zip(*(self._repeated(number) for number in range(len(self.batch))), strict=True)
        kind = type(self.model).__name__
        if sorted(again)[len(again) // 2] > (0.0 if self.model.device.type == "cpu" else self.allowed):
            raise CheckpointError(
                f"{kind} gives other log-probabilities in a second call with the same row, by {max(again):.2g}: "
                f"something in it is drawn anew or stays from call to call, and nothing can be compared with it. "
                f"Correct its code"
            )
        if sorted(copies)[len(copies) // 2] > self.allowed:
            raise CheckpointError(
                f"{kind} gives a row other log-probabilities among {COPIES} of it in one call than alone, by "
                f"{max(copies):.2g} (at most {self.allowed:.2g} is rounding): what it samples would not be what is "
                f"trained. Correct its code"
            )

    def _repeated(self, number: int) -> tuple[float, float]:
        """How far a row's log-probabilities are from themselves in a second call, and among its copies in one."""
        ids = join_rows(self.batch.select(torch.tensor([number])))[0].to(self.model.device)
        with torch.no_grad():
            alone, again, copies = (
                from_logits(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())[0].view(len(rows), -1)
                for rows in (ids, ids, ids.repeat(COPIES, 1))
                for logits in [self.model(input_ids=rows, use_cache=False).logits]
            )
        return float((again - alone).abs().max()), float((copies - alone).abs().max())

    def _refuse_foresight(self) -> None:
        """Raises CheckpointError for a model in which a token's probability changes with what comes after it, also in a
        row with the token for padding."""
        ids = join_rows(self.batch)[0][self.batch.row_lengths.argmax()].to(self.model.device)
        half, padding = len(ids) // 2, vars(self.model.config.get_text_config()).get("pad_token_id")
        if isinstance(padding, int) and 0 <= padding < ids.max():
            ids[1:3] = padding
        rows = (ids[None], ids[None, :half])
        with torch.no_grad():
            whole, part = (
                from_logits(self.model(input_ids=row, use_cache=False).logits[0, :half], ids[1 : half + 1])[0]
                for row in rows
            )
            error = float((whole - part).abs().max())
            if error <= self.allowed:
                return
            near = from_logits(nudged(self.model, rows[0])[0, :half], ids[1 : half + 1])[0]
        if error > allowed(self.model, float((near - whole).abs().max())):
            raise CheckpointError(
                f"{type(self.model).__name__} is no causal language model: the log-probability of a token changes by "
                f"{error:.2g} with the tokens behind it, so that nothing can be sampled from it token by token. A "
                f"decoder whose config.json lacks is_decoder=true computes so, and so does one that cuts a row short "
                f"for each token for padding in it"
            )

    @property
    def is_finite(self) -> bool:
        """Its numbers are numbers."""
        return bool(self.exact.isfinite().all())

    def mismatch(self, candidate: _Candidate) -> str | None:
        """The reason against a way; None if there is none. The model's attention is the ordinary one afterwards."""
        set_trust(self.model, Trust(candidate.layers, candidate.head, candidate.padding))
        model, batch = self.model, self.batch
        try:
            if candidate.is_packed:
                use_packed_attention(model, in_blocks=True)
            logprobs, gradient = self._outcome(
                lambda: completion_logprobs(model, batch, temperature=1.0, packed=candidate.is_packed)[0]
            )
            with torch.no_grad():
                own = own_logprobs(model, batch) if candidate.is_packed else self.exact
        except FAILURES as error:
            return f"{_kind(candidate)} raised {short(error)}"
        finally:
            set_trust(model, Trust())
            set_attention(model, self.attention)
        return self._differs(candidate, logprobs, own, gradient)

    def _differs(self, candidate: _Candidate, logprobs: Tensor, own: Tensor, gradient: list[Tensor]) -> str | None:
        for name, numbers in (("log-probabilities", logprobs), ("log-probabilities in ordinary calls", own)):
            error = float((numbers - self.exact).abs().max())
            if not error <= self.allowed:
                return (
                    f"{_kind(candidate)} give {name} that differ by {error:.2g} from the model's own (at most "
                    f"{self.allowed:.2g} is rounding)"
                )
        most = max(GRADIENT_FLOOR, ROUNDINGS * self.gradient_rounding)
        if not (error := _distance(gradient, self.gradient)) <= most:
            return f"{_kind(candidate)} give gradients that differ by {error:.2g} (at most {most:.2g} is rounding)"
        log.info("%s of %s agree with the model's own", _kind(candidate), type(self.model).__name__)
        return None

    def _outcome(self, compute: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Log-probabilities, and where it is asked for the gradient of their sum by all weights."""
        if not self.has_gradient:
            with torch.no_grad():
                return compute().detach(), []
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        with torch.enable_grad():
            logprobs = compute()
            gradients = torch.autograd.grad(logprobs.sum(), weights, allow_unused=True)
        return logprobs.detach(), [
            torch.zeros_like(weight) if gradient is None else gradient
            for weight, gradient in zip(weights, gradients, strict=True)
        ]


def _kind(candidate: _Candidate) -> str:
    return candidate.description.partition(",")[0]


def _distance(actual: list[Tensor], exact: list[Tensor]) -> float:
    """|a - b| / |b| over all weights."""
    if not exact:
        return 0.0
    error = sum(float((a - b).double().norm()) ** 2 for a, b in zip(actual, exact, strict=True))
    return (error / max(sum(float(b.double().norm()) ** 2 for b in exact), 1e-30)) ** 0.5


def own_logprobs(model: PreTrainedModel, batch: Batch, *, is_nudged: bool = False) -> Tensor:
    """Log-probabilities [B, T] by the model's own forward pass over each row alone."""
    rows = []
    for row in range(len(batch)):
        single = batch.select(torch.tensor([row]))
        ids, predicts = (part.to(model.device) for part in join_rows(single))
        logits = nudged(model, ids) if is_nudged else model(input_ids=ids, use_cache=False).logits
        targets = single.completion_ids[single.mask].to(model.device)
        logprobs = from_logits(logits[predicts], targets)[0]
        rows.append(torch.nn.functional.pad(logprobs, (0, batch.mask.shape[1] - len(logprobs))))
    return torch.stack(rows)


def example_batch(model: PreTrainedModel, longest_tokens: int = 0) -> Batch:
    """Rows of two prompts, as long as the model's context allows, with its tokens for beginning, end and padding in
    them; one of them has ``longest_tokens`` if that is more."""
    config = model.config.get_text_config()
    context = context_of(model.config) or max(1024, longest_tokens)
    longest = [(21, longest_tokens - 21)] if longest_tokens > sum(LENGTHS[-1]) else []
    pairs = [(min(prompt, context - 2), completion) for prompt, completion in [*LENGTHS[:3], *(longest or LENGTHS[3:])]]
    pairs = [(prompt, min(completion, context - prompt)) for prompt, completion in pairs]
    draw, vocabulary = torch.Generator().manual_seed(0), config.vocab_size
    prompts, lengths = (torch.tensor(column) for column in zip(*pairs, strict=True))
    groups, width = torch.tensor([0, 0, 1, 1]), int(lengths.max())
    prompt_ids = torch.randint(0, vocabulary, (2, int(prompts.max())), generator=draw)[groups]
    completion_ids = torch.randint(0, vocabulary, (len(pairs), width), generator=draw)
    for number, token in enumerate(_special_tokens(config)):
        for ids, column in ((prompt_ids, 2 * number), (completion_ids, 1 + 2 * number)):
            if column < ids.shape[1] - 1:
                ids[2:, column] = token
    mask, zeros = torch.arange(width)[None] < lengths[:, None], torch.zeros(len(pairs), width)
    size = Size(len(pairs), int(mask.sum()), 2)
    return Batch(prompt_ids, prompts, completion_ids, mask, lengths, groups, torch.zeros(len(pairs)), zeros, size)


def _special_tokens(config: PreTrainedConfig) -> list[int]:
    """The tokens of a configuration for padding, beginning and end that are in its vocabulary."""
    known = vars(config)
    listed = [known.get(f"{name}_token_id") for name in ("pad", "bos", "eos")]
    tokens = [token for value in listed for token in (value if isinstance(value, list) else [value])]
    return [token for token in dict.fromkeys(tokens) if type(token) is int and 0 <= token < config.vocab_size][:4]


TOKENS_AT_A_TIME = 256
"""Tokens whose probabilities over the whole vocabulary are in memory together."""


@dataclass(frozen=True)
class OwnPass:
    """How far a policy's way of training is from its model's own forward pass on rollouts."""

    error: float
    """The largest difference of a log-probability."""
    allowed: float
    sampler_error: float
    """The mean difference of those that the sampler gave."""
    num_tokens: int
    """Tokens of the longest row."""
    prompt_nats: float
    """Mean negative log-probability of a prompt's tokens; NaN for a prompt of one."""
    chance_nats: float
    """The same if all tokens are equally probable: log V."""

    def __str__(self) -> str:
        text = f"your model's own pass: {self.error:.1g} on the first rollouts (a row of {self.num_tokens} tokens)"
        if math.isnan(self.prompt_nats):
            return text
        text += f"; it reads a prompt at {self.prompt_nats:.1f} nats a token, chance is {self.chance_nats:.1f}"
        if self.prompt_nats < KNOWS_LITTLE * self.chance_nats:
            return text
        return f"{text}: so does a model that never learned to write prompts, or whose weights or tokens are misplaced"


@torch.no_grad()
def compare_with_own_pass(model: PreTrainedModel, batch: Batch, *, packed: bool, temperature: float = 1.0) -> OwnPass:
    """The longest row of a batch with its neighbour, scored as in training and by the model's own forward pass with
    its ordinary attention, and as they were sampled at a temperature.

    How much rounding moves is seen in all tokens of the rows, prompts included: a few of which the model is sure hardly
    move at all.
    """
    first = int((batch.row_lengths * batch.mask.any(dim=1)).argmax())
    rows = batch.select(torch.tensor(sorted({first, (first + 1) % len(batch)})))
    attention = str(model.config.get_text_config()._attn_implementation)
    with in_full_precision(model):
        scored = completion_logprobs(model, rows, temperature=1.0, packed=packed)[0]
        if attention in (NAME, IN_BLOCKS):
            ordinary_attention(model)
        try:
            passes = [_own_pass(model, rows.select(torch.tensor([row])), temperature) for row in range(len(rows))]
        finally:
            set_attention(model, attention)
    mask = rows.mask.cpu()
    own, drawn = (torch.cat([numbers[side] for numbers in passes]) for side in (0, 1))
    rounding, prompt = max(float(numbers[2]) for numbers in passes), passes[0][3]
    error = float((scored.cpu()[mask] - own).abs().max())
    sampled = float((drawn - rows.sampler_logprobs.cpu()[mask]).abs().mean())
    chance = math.log(model.config.get_text_config().vocab_size)
    nats = -float(prompt.mean())
    return OwnPass(error, allowed(model, rounding), sampled, int(rows.row_lengths.max()), nats, chance)


def _own_pass(model: PreTrainedModel, row: Batch, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of a row's trained tokens, the same at the temperature, the most that nudged embeddings move
    any of its tokens, and the log-probabilities of its prompt."""
    ids, predicts = (part.to(model.device) for part in join_rows(row))
    targets, trained = ids[0, 1:], predicts[0, :-1]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    own = _in_parts(logits, targets)
    drawn = own[trained] if temperature in (0.0, 1.0) else _in_parts(logits[trained], targets[trained], temperature)
    del logits
    moved = _in_parts(nudged(model, ids)[0, :-1], targets) - own
    return own[trained].cpu(), drawn.cpu(), moved.abs().max().cpu(), own[: int(row.prompt_lengths[0]) - 1].cpu()


def _in_parts(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the targets, some tokens at a time."""
    parts = zip(logits.split(TOKENS_AT_A_TIME), targets.split(TOKENS_AT_A_TIME), strict=True)
    return torch.cat([from_logits(part, expected, temperature=temperature)[0] for part, expected in parts])
