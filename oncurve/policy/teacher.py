"""The teacher of on-policy distillation: another model, frozen, that reads the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve.core.batch import Batch
from oncurve.core.errors import ConfigError
from oncurve.policy.distributed import Processes, own_rows
from oncurve.policy.model_folder import load_model


class OutsideTeacher(Protocol):
    """A teacher that is not in this process."""

    def logprobs(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """log p of the tokens of each completion behind its prompt, at temperature 1."""
        ...

    def close(self) -> None:
        """Give back what was taken."""
        ...


def taught_logprobs(
    teacher: OutsideTeacher, batch: Batch, processes: Processes, *, share_prompts: bool
) -> Float[Tensor, "B T"]:
    """A teacher's log-probabilities of the completion tokens, 0 outside the mask. Each process asks for its rows."""
    taught = torch.zeros_like(batch.sampler_logprobs)
    mine = own_rows(batch, processes, share_prompts=share_prompts).tolist()
    sizes = [(int(batch.prompt_lengths[row]), int(batch.completion_lengths[row])) for row in mine]
    rows = [
        (batch.prompt_ids[row, :prompt].tolist(), batch.completion_ids[row, :completion].tolist())
        for row, (prompt, completion) in zip(mine, sizes, strict=True)
    ]
    for row, (_, length), scores in zip(mine, sizes, teacher.logprobs(rows), strict=True):
        taught[row, :length] = torch.tensor(scores).to(taught)
    return processes.all_reduce(torch.where(batch.mask.to(taught.device), taught, 0.0))


def with_prompts(batch: Batch, prompts: Mapping[tuple[int, ...], tuple[int, ...]]) -> Batch:
    """The same completions behind other prompts: ``prompts`` gives what stands for each."""
    lengths = batch.prompt_lengths.tolist()
    own = [tuple(row[:length]) for row, length in zip(batch.prompt_ids.tolist(), lengths, strict=True)]
    other = [torch.tensor(prompts[ids]) for ids in own]
    return replace(
        batch,
        prompt_ids=torch.nn.utils.rnn.pad_sequence(other, batch_first=True).to(batch.prompt_ids),
        prompt_lengths=torch.tensor([len(ids) for ids in other]).to(batch.prompt_lengths),
    )


def load_teacher(name: str, student: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The frozen model of a folder, a run or the hub, once its tokenizer is known to be that of the student.

    Raises CheckpointError for a model that cannot be loaded, ConfigError for another tokenizer.
    """
    model, theirs = load_model(name)
    check_tokenizers(name, theirs, student, tokenizer)
    return model.requires_grad_(False)


def check_tokenizers(teacher: str, theirs: PreTrainedTokenizerBase, student: str, own: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError where a token number means something else to the teacher: it reads tokens, never text."""
    ours, others = own.get_vocab(), theirs.get_vocab()
    different = sorted(token for token in ours.keys() | others.keys() if ours.get(token) != others.get(token))
    if different:
        example = different[0]
        raise ConfigError(
            f"algorithm.teacher is {teacher!r}, whose tokenizer is not that of {student!r}: {len(different)} tokens "
            f"differ, such as {example!r}, which is {others.get(example)} there and {ours.get(example)} here. Choose "
            f"a teacher of the same family, or learn its completions with oncurve sft"
        )
