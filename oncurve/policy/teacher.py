"""The teacher of on-policy distillation: another model, frozen, that reads the same tokens."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve.errors import ConfigError
from oncurve.policy.model_folder import load_model


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
