"""The proof of a GPU's decode step: before it is used, some rows are decoded by it and by the model's module.

It may be as far from the result in float32 as the module is in the same arithmetic, times a small number.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from oncurve.algorithm.chunked_head import from_hidden
from oncurve.algorithm.precision import arithmetic_type, dithered_casts, head_type, in_full_precision
from oncurve.core.errors import Shortage, first_line, is_out_of_memory, release
from oncurve.core.logprobs import from_logits
from oncurve.core.sampler import PolicyView
from oncurve.model.decode_memory import GROWTH
from oncurve.model.decoding import LayerDecoder
from oncurve.model.stand_in import KERNEL_FAILURES, agreement, mean, worst_step
from oncurve.model.weights import Backbone, backbone_of, body_of, head_key, head_matrix

log = logging.getLogger(__name__)

PROMPTS, PROMPT_OF = (5, 3), (0, 1, 0)
"""Tokens of each prompt, and which of them each row reads."""
ROUNDINGS = 3.0
"""So many times as far from the exact result as the module may the decode step be, in the same type."""
FLOOR, STEP_FLOOR = 0.01, 0.05
"""Differences of log-probabilities that always count as rounding: the mean of all tokens, and that of one step."""


def needs_proof(backbone: Backbone) -> bool:
    """It decodes with kernels that the tests have not seen."""
    return backbone.device.type != "cpu"


def mismatch(policy: PolicyView, backbone: Backbone, *, tokens: int = GROWTH + 4) -> str | None:
    """The reason against decoding by the backbone, in the arithmetic of here and now; None if there is none.

    Rows of random ``tokens`` are long enough for the buffers to grow once.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = min(head_matrix(policy.model).shape)
    prompts = [torch.randint(0, vocabulary, (length,), generator=draw) for length in PROMPTS]
    rows = torch.randint(0, vocabulary, (len(PROMPT_OF), tokens), generator=draw)
    expected = torch.stack([_by_module(policy, prompts[of], row) for of, row in zip(PROMPT_OF, rows, strict=True)])
    with in_full_precision(policy.model), torch.autocast(backbone.device.type, enabled=False):
        exact = torch.stack([_by_module(policy, prompts[of], row) for of, row in zip(PROMPT_OF, rows, strict=True)])
    try:
        actual = _by_backbone(policy, backbone, prompts, rows)
    except KERNEL_FAILURES as error:
        if is_out_of_memory(error):  # which says nothing of the step
            raise
        return f"raised {type(error).__name__}: {first_line(error)}"
    for name, floor, distance in (
        ("log-probabilities", FLOOR, mean),
        ("log-probabilities of one step", STEP_FLOOR, worst_step),
    ):
        agreed = agreement(name, actual, expected, exact, times=ROUNDINGS, floor=floor, distance=distance)
        if not agreed.holds:
            return f"gives {agreed}"
        log.info("the decode step gives %s", agreed)
    return None


def _by_module(policy: PolicyView, prompt: Tensor, row: Tensor) -> Tensor:
    """log p of the tokens of a row behind its prompt [T], by one pass over both."""
    model = policy.model
    ids = torch.cat([prompt, row])[None].to(model.device)
    with dithered_casts(model):
        hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    dtype = head_type(hidden.device, arithmetic_type(hidden.device, hidden.dtype), torch.float32)
    return from_hidden(hidden.to(dtype), head_matrix(model), row.to(hidden.device), key=head_key(model))[0].cpu()


def _by_backbone(policy: PolicyView, backbone: Backbone, prompts: list[Tensor], rows: Tensor) -> Tensor:
    """The same for all rows [R, T], token by token."""
    compute_type, (count, tokens) = backbone.compute_type(), rows.shape
    lengths = torch.tensor([PROMPTS[prompt] for prompt in PROMPT_OF])
    logprobs = torch.empty(count, tokens)
    with torch.autocast(backbone.device.type, enabled=False):
        decoder = LayerDecoder(
            backbone,
            head_matrix(policy.model),
            compute_type,
            head_key=head_key(policy.model),
            slots=count,
            prompt_slots=len(PROMPTS),
            prompt_tokens=max(PROMPTS),
            completion_tokens=tokens,
        )
        logits = decoder.prefill([prompt.tolist() for prompt in prompts], range(len(PROMPTS)))[list(PROMPT_OF)]
        for past in range(tokens):
            logprobs[:, past] = from_logits(logits, rows[:, past].to(logits.device))[0]
            if past + 1 < tokens:
                addresses = torch.stack(
                    [torch.arange(count), torch.full((count,), past), torch.tensor(PROMPT_OF), lengths], dim=1
                )
                logits = decoder.step(rows[:, past], lengths + past, addresses)
    return logprobs


class Proof:
    """Remembers of a policy's backbone whether it may decode; on a CPU it may."""

    def __init__(self, *, on_cpu: bool = True, on_gpu: bool = True) -> None:
        """Without ``on_gpu`` it may on a CPU alone (``rollouts.cuda_graphs``), without both nowhere."""
        self.on_cpu, self.on_gpu = on_cpu, on_gpu
        self._backbone: Backbone | None = None
        self._holds = False

    def backbone(self, policy: PolicyView) -> Backbone | None:
        """The backbone to decode with, or None where the model's module must do it.

        Found out once for each backbone, in the arithmetic of here and now.
        """
        backbone = backbone_of(policy.model)
        if backbone is None or not needs_proof(backbone):
            return backbone if self.on_cpu else None
        if not self.on_gpu:
            return None
        if self._backbone is not backbone:
            reason: str | None = None
            with Shortage() as shortage:
                reason = mismatch(policy, backbone)
            if shortage.reason is not None:
                release()
                log.warning(
                    "OUT OF MEMORY while the decode step was checked (%s): this time the model samples through its own "
                    "module, slower, with the same completions; it is checked again the next time",
                    shortage.reason,
                )
                return None
            self._backbone, self._holds = backbone, reason is None
            if reason is not None:
                log.warning("the model samples through its own module, slower: its decode step %s", reason)
        return backbone if self._holds else None
