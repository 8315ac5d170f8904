"""From the objects of a script for SFTTrainer to a recipe and rows of a supervised stage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from oncurve.convert.options import Note, OptionOutcome, table
from oncurve.convert.trl import convert_supervised
from oncurve.data.demonstrations import demonstrated_row, render_demonstrations
from oncurve.errors import ConfigError, DataError, counted, listed
from oncurve.policy.environment import read_place
from oncurve.trl.sft_config import COMPUTED, sft_options
from oncurve.trl.translation import (
    MEASURED_ROWS,
    MEASURED_TRAINING_ROWS,
    Row,
    TrainerArguments,
    Translation,
    evaluation_sets,
    put_weights,
    tokenizer_of,
)

LOST_SFT_ARGUMENTS = {
    "data_collator": "microbatches are made from the tokens of prompt and completion",
    "compute_loss_func": "the loss is the negative log-likelihood",
    "compute_metrics": "the loss and the fraction of completions that the model repeats are measured",
    "optimizers": "the optimizer is AdamW, set by optim, learning_rate and their like",
    "optimizer_cls_and_kwargs": "the optimizer is AdamW, set by optim, learning_rate and their like",
    "preprocess_logits_for_metrics": "there are no metrics of logits",
}
"""Arguments of SFTTrainer without a place here, and why."""
SURROUNDINGS = ("compute_metrics", "preprocess_logits_for_metrics")
"""Those that change no weight."""
Formatting = Callable[[Any], Any]


def translate_supervised(asked: TrainerArguments, formatting: Formatting | None) -> Translation:
    """What a script asks of SFTTrainer as a recipe.

    Raises DataError for rows that are no demonstrations, ConfigError for a data set without an end.
    """
    args = asked.args
    given = args.options()
    shared = {name: value for name, value in given.items() if name not in COMPUTED}
    for name in ("loss_type", "shuffle_dataset", "remove_unused_columns"):
        shared.pop(name, None)
    shared.setdefault("learning_rate", args.learning_rate)
    alone = {name: shared.pop(name) for name in list(shared) if name not in table()}
    found = OptionOutcome("the script", asked.model if isinstance(asked.model, str) else _name(asked), shared)
    for name in asked.lost:
        found.notes.append(
            Note("unsupported", name, LOST_SFT_ARGUMENTS[name], changes_learning=name not in SURROUNDINGS)
        )
    if args.loss_type not in ("nll", "chunked_nll"):
        why = "the loss of a supervised stage is the negative log-likelihood"
        found.notes.append(Note("unsupported", f"loss_type = {args.loss_type!r}", why))
    for name in alone:
        option = sft_options()[name]
        if option.fate in ("nothing", "unsupported"):
            found.notes.append(Note(option.fate, name, option.why))  # type: ignore[arg-type]
    put_weights(asked, found)
    tokenizer = _tokenizer(asked, found)
    rows = sft_rows(asked.train_dataset, asked, tokenizer, formatting)
    sets = evaluation_sets(asked.eval_dataset)
    evaluation = {prefix: sft_rows(each, asked, tokenizer, formatting) for prefix, each in sets.items()}
    tokens = _note_lengths(rows, args, tokenizer, found)
    per_block = 1 if not args.packing else max(int(args.max_length // (tokens / len(rows))), 1)
    draft = convert_supervised(found, processes=read_place().count * per_block, rows=len(rows))
    if args.max_length is not None:
        draft.put("sft.max_tokens", int(args.max_length), "max_length")
    if per_block > 1:
        why = f"an update takes {per_block} rows for each block of {args.max_length} tokens: so many fit on average"
        draft.notes.append(Note("differs", "packing", why))
    draft.put("data.template", "plain", comment="rows hold their completions")
    number = len([row for each in evaluation.values() for row in each])
    count = min(number, MEASURED_ROWS) if number else min(len(rows), MEASURED_TRAINING_ROWS)
    draft.put("evaluation.num_prompts", count, comment="measured before and after the run")
    every = 0
    if evaluation and str(args.eval_strategy) == "steps":
        every = max(int(args.eval_steps or args.logging_steps), 1)
    return Translation(asked, draft, tokenizer, rows, evaluation, [], every)


def _name(asked: TrainerArguments) -> str:
    return getattr(asked.model, "name_or_path", "") or "given"


def _tokenizer(asked: TrainerArguments, found: OptionOutcome) -> Any:
    """The script's tokenizer, with the end token and the chat template that its options name."""
    tokenizer, args = tokenizer_of(asked), asked.args
    if args.eos_token is None and args.chat_template_path is None:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    if args.eos_token is not None:
        if args.eos_token not in tokenizer.get_vocab():
            raise ConfigError(f"eos_token is {args.eos_token!r}, which is no token of {tokenizer.name_or_path!r}")
        tokenizer.eos_token = args.eos_token
    if args.chat_template_path is not None:
        file = Path(args.chat_template_path)
        if file.suffix in (".jinja", ".j2") and file.is_file():
            tokenizer.chat_template = file.read_text(encoding="utf-8")
        else:
            why = "a chat template is read from a file .jinja, not from another model. Set tokenizer.chat_template"
            found.notes.append(Note("unsupported", "chat_template_path", why))
    return tokenizer


def sft_rows(data: Any, asked: TrainerArguments, tokenizer: Any, formatting: Formatting | None) -> list[Row]:
    """The rows of a data set in the forms of a supervised stage."""
    args = asked.args
    if data is None or isinstance(data, (str, Mapping)) or not isinstance(data, Iterable):
        kind = "nothing" if data is None else type(data).__name__
        raise DataError(f"train_dataset is {kind}. Pass rows of messages, text, or prompt and completion")
    limit = None
    if "__len__" not in dir(type(data)):
        if args.max_steps <= 0:
            raise ConfigError("train_dataset is a stream, whose end is not known. Set max_steps")
        limit = args.max_steps * args.per_device_train_batch_size * args.gradient_accumulation_steps
    rows = [_row(row, args, tokenizer, formatting, place) for place, row in enumerate(islice(data, limit))]
    if not rows:
        raise DataError("train_dataset: there are no rows")
    return rows


def _row(row: Any, args: Any, tokenizer: Any, formatting: Formatting | None, place: int) -> Row:
    """A row as TRL reads it: which part of it is learned follows from the options."""
    where = f"train_dataset: row {place}"
    if not isinstance(row, Mapping):
        raise DataError(
            f"{where} is a {type(row).__name__}. Give dictionaries of messages, text, or prompt and completion"
        )
    if formatting is not None:
        written = formatting(row)
        if not isinstance(written, str):
            raise DataError(f"{where}: formatting_func gives a {type(written).__name__}. Give back text for one row")
        return {"text": written}
    if "completion" in row:
        if args.completion_only_loss is not False:
            return {"prompt": row.get("prompt"), "completion": row["completion"]}
        if isinstance(row["completion"], str):
            return {"text": f"{row.get('prompt', '')}{row['completion']}"}
        return {"text": _conversation([*row["prompt"], *row["completion"]], tokenizer, where)}
    if "messages" in row:
        if args.assistant_only_loss:
            return {"messages": row["messages"]}
        return {"text": _conversation(row["messages"], tokenizer, where)}
    if args.dataset_text_field in row:
        return {"text": row[args.dataset_text_field]}
    raise DataError(
        f"{where} has none of the columns messages, completion and {args.dataset_text_field!r} (dataset_text_field). "
        f"Columns: {listed(row)}"
    )


def _conversation(messages: Any, tokenizer: Any, where: str) -> str:
    """All messages as the chat template writes them, without the first token that the tokenizer adds by itself."""
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: its rows are messages, and the tokenizer of {tokenizer.name_or_path!r} has no chat template. "
            f"Set chat_template_path or tokenizer.chat_template"
        )
    text = str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    first = tokenizer.bos_token
    adds_first = bool(first) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    text = text.removeprefix(first) if adds_first else text
    stripped = text.rstrip()
    return stripped if stripped.endswith(str(tokenizer.eos_token)) else text


def _note_lengths(rows: list[Row], args: Any, tokenizer: Any, found: OptionOutcome) -> float:
    """Tokens of all rows; a note of those that TRL would cut."""
    checked = [demonstrated_row(f"train_dataset: row {place}", row) or row for place, row in enumerate(rows)]
    shown, _ = render_demonstrations(checked, tokenizer, template="plain")
    if args.max_length is not None and not args.packing:
        long = sum(one.num_tokens > args.max_length for one in shown)
        if long:
            why = f"{counted(long, 'row')} of {len(rows)} are longer. They are left out, where TRL cuts them"
            found.notes.append(Note("unsupported", f"max_length = {args.max_length}", why))
    return float(sum(one.num_tokens for one in shown))
