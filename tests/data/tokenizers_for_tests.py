"""Small tokenizers made on the spot: one token per byte, with and without BOS, EOS and a chat template."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<pad>")
BOS, EOS = 0, 1

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM_CHAT_TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT_TEMPLATE
)


def byte_tokenizer(
    *, adds_bos: bool = False, adds_eos: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """A tokenizer of 259 tokens that works like a real one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos or adds_eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{'<s> ' * adds_bos}$A{' </s>' * adds_eos}", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=chat_template,
        name_or_path="tiny/byte-tokenizer",
    )
