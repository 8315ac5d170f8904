"""Log-probabilities and entropies of a batch's completion tokens, by a model's own forward pass over padded rows."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from oncurve.core.batch import Batch


def from_logits(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, " N"], *, temperature: float = 1.0
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Log-probability of each target and entropy of each distribution, in float32 or better, at the temperature.

    With z the logits over the temperature: log p = z_target - logsumexp(z);  H = logsumexp(z) - sum(p z)
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    normalizer = torch.logsumexp(scaled, dim=-1)
    logprobs = scaled.gather(1, targets[:, None]).squeeze(1) - normalizer
    entropy = normalizer - (torch.softmax(scaled, dim=-1) * scaled).sum(dim=-1)
    return logprobs, entropy


class PaddedScorer(nn.Module):
    """Scores a batch by a model of transformers, its rows padded on the right.

    Under a causal mask padding cannot reach a token, so that no attention mask is needed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, batch: Batch, temperature: float, is_training: bool
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Log-probabilities and entropies of the completion tokens, 0 outside the mask, in training as without."""
        device = self.model.device
        ids, predicts = join_rows(batch)
        logits = self.model(input_ids=ids.to(device), use_cache=False).logits[predicts.to(device)]
        targets = batch.completion_ids[batch.mask].to(device)
        return spread(batch, from_logits(logits, targets, temperature=temperature))


def join_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Token ids of prompt and completion side by side [B, L], and the positions that predict a trained token."""
    width = int(batch.row_lengths.max())
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    predicts = torch.zeros(len(batch), width, dtype=torch.bool)
    for row in range(len(batch)):
        prompt, completion = int(batch.prompt_lengths[row]), int(batch.completion_lengths[row])
        ids[row, :prompt] = batch.prompt_ids[row, :prompt]
        ids[row, prompt : prompt + completion] = batch.completion_ids[row, :completion]
        predicts[row, prompt - 1 : prompt - 1 + completion] = batch.mask[row, :completion]
    return ids, predicts


def spread(batch: Batch, of_tokens: tuple[Tensor, Tensor]) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Log-probabilities and entropies of the trained tokens [N] at their positions, 0 elsewhere."""
    mask = batch.mask.to(of_tokens[0].device)
    first, second = (torch.zeros(mask.shape, dtype=part.dtype, device=part.device) for part in of_tokens)
    return first.masked_scatter(mask, of_tokens[0]), second.masked_scatter(mask, of_tokens[1])
