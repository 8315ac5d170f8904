"""Does a GPU's decode step compute what the model's module does? Some rows are decoded both ways before it is used."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from oncurve.algorithm.logprobs import from_hidden, from_logits
from oncurve.products import arithmetic_type, head_type
from oncurve.rollouts.base import PolicyView
from oncurve.trunk.decoding import GROWTH, Decoder
from oncurve.trunk.weights import Trunk, body_of, head_matrix, trunk_of

log = logging.getLogger(__name__)

PROMPTS, PROMPT_OF = (5, 3), (0, 1, 0)
"""Tokens of each prompt, and which of them each row reads."""
TOLERANCE, STEP_TOLERANCE = 0.1, 0.5
"""Largest mean difference of log-probabilities, of all tokens and of those of one step. Rounding to bfloat16 makes some
hundredths, a mistake one or more."""
FAILURES = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError)


def needs_proof(trunk: Trunk) -> bool:
    """It decodes with kernels that the tests have not seen."""
    return trunk.device.type != "cpu"


def objection(policy: PolicyView, trunk: Trunk, *, tokens: int = GROWTH + 4) -> str | None:
    """What speaks against decoding by the trunk, in the arithmetic of here and now; None if nothing does.

    Rows of random ``tokens`` are long enough for the buffers to grow once.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = min(head_matrix(policy.model).shape)
    prompts = [torch.randint(0, vocabulary, (length,), generator=draw) for length in PROMPTS]
    rows = torch.randint(0, vocabulary, (len(PROMPT_OF), tokens), generator=draw)
    expected = torch.stack([_by_module(policy, prompts[of], row) for of, row in zip(PROMPT_OF, rows, strict=True)])
    try:
        found = _by_trunk(policy, trunk, prompts, rows)
    except FAILURES as error:
        return f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    by_step = (found - expected).abs().mean(dim=0)
    mean, largest = float(by_step.mean()), float(by_step.max())
    if mean <= TOLERANCE and largest <= STEP_TOLERANCE:
        return None
    return f"gives log-probabilities that differ by {mean:.2g} on average, {largest:.2g} at most"


def _by_module(policy: PolicyView, prompt: Tensor, row: Tensor) -> Tensor:
    """log p of the tokens of a row behind its prompt [T], by one pass over both."""
    model = policy.model
    ids = torch.cat([prompt, row])[None].to(model.device)
    hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    dtype = head_type(hidden.device, arithmetic_type(hidden.device, hidden.dtype), torch.float32)
    return from_hidden(hidden.to(dtype), head_matrix(model), row.to(hidden.device))[0].cpu()


def _by_trunk(policy: PolicyView, trunk: Trunk, prompts: list[Tensor], rows: Tensor) -> Tensor:
    """The same for all rows [R, T], token by token."""
    compute_type, (count, tokens) = trunk.compute_type(), rows.shape
    lengths = torch.tensor([PROMPTS[prompt] for prompt in PROMPT_OF])
    found = torch.empty(count, tokens)
    with torch.autocast(trunk.device.type, enabled=False):
        decoder = Decoder(
            trunk,
            head_matrix(policy.model),
            compute_type,
            slots=count,
            prompt_slots=len(PROMPTS),
            prompt_tokens=max(PROMPTS),
            completion_tokens=tokens,
        )
        logits = decoder.prefill([prompt.tolist() for prompt in prompts], range(len(PROMPTS)))[list(PROMPT_OF)]
        for past in range(tokens):
            found[:, past] = from_logits(logits, rows[:, past].to(logits.device))[0]
            if past + 1 < tokens:
                places = torch.stack(
                    [torch.arange(count), torch.full((count,), past), torch.tensor(PROMPT_OF), lengths], dim=1
                )
                logits = decoder.step(rows[:, past], lengths + past, places)
    return found


class Proof:
    """Remembers of a policy's trunk whether it may decode; on a CPU it may."""

    def __init__(self, *, on_gpu: bool = True) -> None:
        """Without ``on_gpu`` it may on a CPU alone (``rollouts.cuda_graphs``)."""
        self.on_gpu = on_gpu
        self._trunk: Trunk | None = None
        self._holds = False

    def trunk(self, policy: PolicyView) -> Trunk | None:
        """The trunk to decode with, or None where the model's module must do it.

        Found out once for each trunk, in the arithmetic of here and now.
        """
        trunk = trunk_of(policy.model)
        if trunk is None or not needs_proof(trunk):
            return trunk
        if not self.on_gpu:
            return None
        if self._trunk is not trunk:
            reason = objection(policy, trunk)
            self._trunk, self._holds = trunk, reason is None
            if reason is not None:
                log.warning("the model samples through its own module, slower: its decode step %s", reason)
        return trunk if self._holds else None
