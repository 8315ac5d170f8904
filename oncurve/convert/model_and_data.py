"""The model, data and rewards of a recipe, from those of a script."""

from __future__ import annotations

import math
from typing import Any

from oncurve.convert.draft import Draft
from oncurve.convert.options import DatasetSource, Note, OptionValue

LORA = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
    "bias": "bias",
}
LORA_DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none"}
"""What peft takes where LoraConfig does not say it."""
LORA_IDLE: dict[str, Any] = {
    "task_type": None, "inference_mode": False, "fan_in_fan_out": False, "init_lora_weights": True, "use_rslora": None,
    "modules_to_save": None, "use_dora": False, "rank_pattern": None, "alpha_pattern": None, "target_parameters": None,
    "layers_to_transform": None,
}  # fmt: skip
"""Further arguments, with the value that changes nothing; task_type and use_rslora are looked at by themselves."""
ANSWERS = ("answer", "ground_truth", "solution", "gold", "reference", "target", "label")


def put_model(draft: Draft) -> None:
    """The model, its revision, and the adapter on it."""
    model = draft.found.model
    if model is not None:
        draft.put_found("model", model)
    elif not any(note.what == "model" for note in draft.notes):
        draft.notes.append(Note("unread", "model", "none is named. Write `model` into the recipe"))
    _init_kwargs(draft)
    if draft.found.quantization is not None:
        draft.put_found("policy.quantization", draft.found.quantization)
    if draft.found.lora is not None:
        _put_lora(draft)


def _init_kwargs(draft: Draft) -> None:
    given = draft.ask("model_init_kwargs") or {}
    if not isinstance(given, dict):
        draft.note("unread", "model_init_kwargs", "it is no dictionary")
        return
    for name, value in given.items():
        match name:
            case "revision" | "trust_remote_code":
                draft.put(f"policy.{name}", value, "model_init_kwargs")
            case "dtype" | "torch_dtype":
                why = "weights in training are float32 always, and computed with in policy.compute_type"
                draft.note("differs", "model_init_kwargs", f"{name}: {why}")
            case "attn_implementation" | "device_map" | "use_cache" | "low_cpu_mem_usage":
                draft.note("nothing", "model_init_kwargs", f"{name}: the device and its attention are chosen here")
            case _:
                draft.note("unsupported", "model_init_kwargs", f"there is no key for {name}")


def _put_lora(draft: Draft) -> None:
    given = draft.found.lora or {}
    values = LORA_DEFAULTS | {name: read.value for name, read in given.items()}
    rank = values["r"]
    if values.get("use_rslora"):
        values["lora_alpha"] = round(values["lora_alpha"] * math.sqrt(rank), 6)  # alpha / sqrt(r) is this over r
    for name in ("r", "lora_alpha", "lora_dropout", "bias"):
        said = name if name in given else f"peft's default {name}"
        rs = ", times sqrt(r) for use_rslora" if name == "lora_alpha" and values.get("use_rslora") else ""
        line = given[name].line if name in given else None
        draft.put_found(f"policy.lora.{LORA[name]}", OptionValue(values[name], line), said + rs)
    targets = values.get("target_modules")
    if targets is None:
        why = "peft chooses by the family of the model: q_proj and v_proj in Llama, Qwen and Mistral, as here"
        draft.notes.append(Note("differs", "target_modules", why))
        draft.put("policy.lora.target_modules", ["q_proj", "v_proj"], comment="peft's choice for Llama and Qwen")
    else:
        named = targets if isinstance(targets, str) else sorted(targets)
        line = given["target_modules"].line
        draft.put_found("policy.lora.target_modules", OptionValue(named, line), "target_modules")
    _other_lora(draft, values)


def _other_lora(draft: Draft, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name in LORA or name == "use_rslora":
            continue
        line = (draft.found.lora or {})[name].line
        if name == "task_type" and (value is None or str(value).endswith("CAUSAL_LM")):
            continue
        if name not in LORA_IDLE or value != LORA_IDLE[name]:
            why = "policy.lora has rank, alpha, dropout, target_modules and bias"
            draft.notes.append(Note("unsupported", f"LoraConfig {name} = {value!r:.60}", why, line))


def put_data(draft: Draft) -> None:
    """The rows to train on, and those to measure on where the script has some."""
    if draft.found.train is None:
        if not any(note.what in ("the data set", "datasets") for note in draft.notes):
            draft.notes.append(Note("unread", "the data set", "none is named. Write `data` into the recipe"))
        return
    _put_rows(draft, draft.found.train, "data")
    if draft.found.evaluation is not None:
        _put_rows(draft, draft.found.evaluation, "evaluation.data")


def _put_rows(draft: Draft, rows: DatasetSource, key: str) -> None:
    path, kind = rows.path, "jsonl" if rows.is_json else "huggingface"
    line = f"line {rows.line}"
    if path is not None and path.endswith("gsm8k") and not rows.is_json and rows.subset in (None, "main"):
        path, kind = None, "gsm8k"
        why = "its column `answer` holds the number after ####, what stands before it is in `solution`"
        draft.notes.append(Note("differs", "openai/gsm8k", why, rows.line))
    elif path is None:
        return
    elif rows.subset is not None and rows.subset != "default":
        why = 'there is no key for it. Save the rows with `.to_json("rows.jsonl")` and name that file in data.path'
        draft.notes.append(Note("unsupported", f"subset {rows.subset!r}", why, rows.line))
    draft.put(f"{key}.type", kind, comment=line)
    if path is not None:
        draft.put(f"{key}.path", path, comment=line)
    if kind != "jsonl":
        draft.put(f"{key}.split", rows.split, comment=line)
    columns = _columns(draft, rows, kind)
    if columns:
        draft.put(f"{key}.columns", columns, comment="our names: theirs")
    draft.put(f"{key}.template", "question_only", comment="the prompt of the row, without further words")
    if rows.is_chat or draft.ask("chat_template_kwargs"):
        options = draft.ask("chat_template_kwargs")
        draft.put(f"{key}.chat", options or True, comment="the prompt is a list of messages")
    if rows.limit is not None:
        draft.put(f"{key}.limit", rows.limit, comment=line)


def _columns(draft: Draft, rows: DatasetSource, kind: str) -> dict[str, str]:
    """Our names to the script's: TRL's prompt is our question, and every row has an answer here."""
    columns = {ours: theirs for ours, theirs in rows.columns.items() if ours != theirs}
    if kind == "gsm8k":
        return {ours: theirs for ours, theirs in columns.items() if ours not in ("question", "answer")}
    if "question" not in rows.columns:
        columns["question"] = "prompt"
    if "answer" in rows.columns:
        return columns
    read = {column for reward in draft.found.rewards for column in reward.columns}
    gold = next((name for name in ANSWERS if name in read), None)
    if gold is None:
        columns["answer"] = columns.get("question", "question")
        why = "a row needs an answer and no reward seems to read one; the prompt stands for it. Correct data.columns"
        draft.notes.append(Note("differs", "column answer", why, rows.line))
    elif gold != "answer":
        columns["answer"] = rows.columns.get(gold, gold)
    return columns


def put_rewards(draft: Draft) -> None:
    """The list of rewards with their weights."""
    rewards = draft.found.rewards
    weights = draft.ask("reward_weights")
    if weights is not None and (not isinstance(weights, (list, tuple)) or len(weights) != len(rewards)):
        draft.note(
            "unread", "reward_weights", f"there are {len(rewards)} rewards that could be read. Write the weights"
        )
        weights = None
    if not rewards:
        if not any(note.what.startswith("reward") for note in draft.notes):
            draft.notes.append(Note("unread", "rewards", "none is named. Write `rewards` into the recipe"))
        return
    items: list[dict[str, Any]] = []
    for place, reward in enumerate(rewards):
        keys = dict(reward.keys)
        if weights is not None:
            keys["weight"] = float(weights[place])
        items.append(keys)
    draft.put("rewards", items, comment=f"reward_funcs, line {rewards[0].line}")
