"""Conversion of a GRPOConfig into a recipe: every option is taken over, found idle, or reported."""

from __future__ import annotations

import math
from pathlib import Path

from oncurve.trl.algorithms import has_servers, put_algorithm
from oncurve.trl.draft import Draft, own_default
from oncurve.trl.model_and_adapter import put_model
from oncurve.trl.options import Note, OptionOutcome, older, table
from oncurve.trl.trl_batch import StepShape, TrlBatch, step_of

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit",
}  # fmt: skip
OFF = {"top_k": 0, "top_p": 1.0}
"""The value that None means, and -1 in vLLM."""
BESIDE = {
    "vllm_": "use_vllm", "sync_ref_model": "beta", "ref_model_": "sync_ref_model", "use_bias_correction_kl": "beta",
    "entropy_coef_": "use_adaptive_entropy", "entropy_target": "use_adaptive_entropy", "eval_steps": "eval_strategy",
    "num_generations_eval": "eval_strategy", "save_steps": "save_strategy",
}  # fmt: skip
"""Options that mean nothing, in TRL neither, while another one is off; by how their names begin."""
TRACKERS = ("tensorboard", "wandb", "trackio")


def convert(outcome: OptionOutcome, *, processes: int = 1, rows: int) -> Draft:
    """The recipe of what a script asks for, beside its data and its rewards.

    ``processes`` is how many of them TRL would run, ``rows`` how many rows it trains on.

    Raises ConfigError for numbers that TRL refuses too.
    """
    draft = Draft(outcome, notes=list(outcome.notes))
    _rename(draft)
    batch = TrlBatch.requested(draft.ask, processes)
    step = step_of(batch)
    put_model(draft)
    put_algorithm(draft, step)
    _direct(draft)
    _rollouts(draft)
    _policy(draft)
    steps = _length(draft, batch, step, rows)
    _optimizer(draft, step, steps)
    _run(draft, step, steps, rows)
    _evaluation(draft, step, rows)
    _idle_and_lost(draft)
    return draft


def _rename(draft: Draft) -> None:
    """Names of earlier versions become today's."""
    for name, value in list(draft.outcome.options.items()):
        if name in table():
            continue
        old = older()[name]
        del draft.outcome.options[name]
        if old.now is not None:
            draft.outcome.options.setdefault(old.now, value)
        elif old.to is None:
            draft.notes.append(Note("nothing", name, old.why))
        elif name == "warmup_ratio":
            draft.outcome.options.setdefault("warmup_steps", value)
        elif value is not None:
            draft.put(old.to, value, comment=f"{name}; {old.how}")


def _direct(draft: Draft) -> None:
    """Options that are a key of the recipe by another name; defaults only where ours are others."""
    for option in table().values():
        if option.fate != "direct" or option.to is None or option.name == "num_generations":
            continue
        value = draft.ask(option.name)
        if option.name in OFF and (value is None or value < 0):
            value = OFF[option.name]
        if value is None:
            default = own_default(option.to)
            draft.note("unsupported", option.name, f"a value is needed; {option.to} keeps its default, {default}")
        elif draft.is_set(option.name) or value != own_default(option.to):
            draft.put(option.to, value, option.name)


def _rollouts(draft: Draft) -> None:
    if draft.ask("min_p"):
        draft.put("rollouts.min_p", draft.ask("min_p"), "min_p")
    _generation_kwargs(draft)
    if (calls := draft.ask("max_tool_calling_iterations")) is not None:
        draft.put("rollouts.episodes.max_turns", int(calls) + 1, "max_tool_calling_iterations")
    if has_servers(draft):
        host, port = draft.ask("vllm_server_host"), draft.ask("vllm_server_port")
        url = draft.ask("vllm_server_base_url") or f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        names = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_mode")
        draft.put("rollouts.type", "servers", "vllm_mode")
        draft.put("rollouts.servers", [url], *names)
        draft.put("rollouts.deadlines.gone_seconds", float(draft.ask("vllm_server_timeout")), "vllm_server_timeout")
        draft.note("differs", "vllm_mode", "the server is started in another way, see docs/servers.md")
    elif draft.ask("use_vllm"):
        draft.put("rollouts.type", "engine", "use_vllm")
        why = "the engine in this process samples from the weights in training: no copy, no correction between the two"
        draft.note("differs", "use_vllm", why)


def _generation_kwargs(draft: Draft) -> None:
    kwargs = draft.ask("generation_kwargs") or {}
    if type(kwargs).__name__ in ("SamplingParams", "VllmSamplingParams"):  # Unsloth's vllm_sampling_params
        kwargs = {name: value for name, value in vars(kwargs).items() if value is not None}
    if not isinstance(kwargs, dict):
        draft.note("unread", "generation_kwargs", "it is no dictionary. Write its keys under rollouts")
        return
    for name, value in kwargs.items():
        match name:
            case "stop" | "stop_strings" if value:
                stops = [value] if isinstance(value, str) else list(value or ())
                draft.put("rollouts.stop", stops, "generation_kwargs")
            case "min_tokens" | "min_new_tokens":
                draft.put("rollouts.min_completion_tokens", value, "generation_kwargs")
            case "temperature" | "top_p" | "top_k" | "min_p":  # in TRL they override the options of that name
                draft.outcome.options[name] = value
                value = OFF[name] if name in OFF and value < 0 else value
                draft.put(f"rollouts.{name}", value, "generation_kwargs")
            case "max_new_tokens" | "max_tokens" if draft.ask("loss_type") != "dr_grpo":  # which divides by the option
                draft.outcome.options["max_completion_length"] = value
                draft.put("rollouts.max_completion_tokens", value, "generation_kwargs")
            case _ if _changes_nothing(draft, name, value):
                draft.note("nothing", "generation_kwargs", f"{name} changes nothing here")
            case _:
                draft.note("unsupported", "generation_kwargs", f"completions are drawn without {name}")


def _changes_nothing(draft: Draft, name: str, value: object) -> bool:
    """A setting of sampling that is what happens anyway."""
    idle = {"do_sample": True, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "num_beams": 1, "num_return_sequences": 1, "n": 1, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
            "use_cache": True, "early_stopping": False, "typical_p": 1.0, "penalty_alpha": None}  # fmt: skip
    if name in idle:
        return value is None or value == idle[name]
    if name in ("max_new_tokens", "max_tokens"):
        return value == draft.ask("max_completion_length")
    names = ("seed", "include_stop_str_in_output", "skip_special_tokens", "pad_token_id", "return_dict_in_generate")
    names += ("remove_invalid_values", "renormalize_logits")  # of logits that are finite, before a softmax
    return value is None or name in (*names, "max_length", "max_time", "cache_implementation", "bos_token_id")


def _policy(draft: Draft) -> None:
    half = "float16" if draft.ask("fp16") else "bfloat16"
    wide = draft.ask("bf16") is False and half == "bfloat16"
    draft.put("policy.compute_type", "float32" if wide else half, "bf16", "fp16")
    if draft.ask("use_cpu"):
        draft.put("policy.device", "cpu", "use_cpu")
    deepspeed = draft.ask("deepspeed")
    if isinstance(deepspeed, str):
        draft.put("policy.parallel", "deepspeed", "deepspeed")
        draft.put("policy.deepspeed", deepspeed, "deepspeed")
    elif deepspeed is not None:
        why = "write it into a JSON file, name that in policy.deepspeed, and set policy.parallel to deepspeed"
        draft.note("unsupported", "deepspeed", why, changes_learning=False)
    if draft.ask("fsdp"):
        draft.put("policy.parallel", "fsdp", "fsdp")


def _length(draft: Draft, batch: TrlBatch, step: StepShape, rows: int) -> int:
    """The number of steps, and the batch of each."""
    sources = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    draft.put("run.prompts_per_step", step.prompts, *sources, "generation_batch_size", "num_generations")
    if step.updates > 1:
        draft.put("run.completions_per_update", step.completions_per_update, *sources)
        draft.note(
            "differs", "steps_per_generation", "TRL shuffles completions into updates, here groups stay together"
        )
    if not step.is_exact:
        why = (
            "an update of TRL mixes two batches of completions here, or two passes over one; the recipe makes one "
            "update of every batch. Set steps_per_generation to a multiple of gradient_accumulation_steps to be sure"
        )
        draft.note("unsupported", "gradient_accumulation_steps", why)
    if step.iterations > 1:
        draft.put("run.passes_per_step", step.iterations, "num_iterations")
    if draft.ask("shuffle_dataset") is False:
        draft.put("data.shuffle", False, "shuffle_dataset")
    max_steps, epochs = draft.ask("max_steps"), draft.ask("num_train_epochs")
    if max_steps > 0:
        steps, names = step.count(max_steps), ("max_steps",)
    else:
        steps, names = step.count(batch.updates(epochs=epochs, rows=rows)), ("num_train_epochs",)
    updates = step.updates * step.iterations
    comment = f"{draft.origin(*names)}; {updates} update{'s'[: updates > 1]} each"
    draft.put("run.steps", steps, comment=comment)
    if max_steps > 0 and steps * updates != max_steps:
        draft.note("differs", "max_steps", f"a step makes {updates} updates: {steps * updates} in all")
    return steps


def _optimizer(draft: Draft, step: StepShape, steps: int) -> None:
    schedule, optimizer = str(draft.ask("lr_scheduler_type")), str(draft.ask("optim"))
    if schedule not in SCHEDULES:
        draft.note("unsupported", "lr_scheduler_type", "there are linear, cosine and constant; cosine is used")
    draft.put("optimizer.schedule", SCHEDULES.get(schedule, "cosine"), "lr_scheduler_type")
    if optimizer not in OPTIMIZERS:
        draft.note("unsupported", "optim", "there is AdamW, in 32 and in 8 bits; that in 32 bits is used")
    if draft.is_set("optim"):
        draft.put("optimizer.type", OPTIMIZERS.get(optimizer, "adamw"), "optim")
    warmup = draft.ask("warmup_steps")
    if schedule == "constant" and warmup:
        draft.note("nothing", "warmup_steps", "the schedule constant of transformers has no warm-up")
    elif warmup:
        updates = math.ceil(warmup * steps * step.updates * step.iterations) if warmup < 1 else int(warmup)
        draft.put("optimizer.warmup_updates", updates, "warmup_steps")


def _run(draft: Draft, step: StepShape, steps: int, rows: int) -> None:
    if draft.ask("output_dir"):
        draft.put("run.folder", draft.ask("output_dir"), "output_dir")
    name = draft.ask("run_name")
    if name is not None and Path(str(name)).name == str(name):
        draft.put("run.name", str(name), "run_name")
    elif name is not None:
        why = "it is not the name of one folder. Set run.name"
        draft.note("unsupported", "run_name", why, changes_learning=False)
    _save(draft, step, steps, rows)
    report = draft.ask("report_to")
    trackers = [] if report in ("none", None, []) else [report] if isinstance(report, str) else list(report)
    if trackers in (["all"], []):
        if trackers:
            draft.note("differs", "report_to", "what has a key in the environment is used")
        else:
            draft.put("run.track", [], "report_to")
        return
    for other in [tracker for tracker in trackers if tracker not in (*TRACKERS, "none")]:
        why = f"there is no {other}; there are {', '.join(TRACKERS)}"
        draft.note("unsupported", "report_to", why, changes_learning=False)
    draft.put("run.track", [tracker for tracker in trackers if tracker in TRACKERS], "report_to")


def _in_steps(value: float, step: StepShape, steps: int) -> int:
    """A number of updates, or a share of all of them, in steps."""
    if 0 < value < 1:
        return max(math.ceil(value * steps), 1)
    return max(round(value / (step.updates * step.iterations)), 1)


def _every(strategy: str, value: float, step: StepShape, steps: int, rows: int) -> int | None:
    """A number of steps, by what is counted; 0 for never, None for what nobody counts here."""
    match strategy:
        case "no" | "best":  # the trainer saves where an evaluation is the best so far
            return 0
        case "steps":
            return _in_steps(value, step, steps)
        case "epoch":
            return max(rows // step.prompts, 1)
    return None


def _save(draft: Draft, step: StepShape, steps: int, rows: int) -> None:
    strategy, limit = draft.ask("save_strategy"), draft.ask("save_total_limit")
    every = _every(strategy, draft.ask("save_steps"), step, steps, rows)
    name = "save_steps" if strategy == "steps" else "save_strategy"
    if every is None:
        why = "set run.save_every_steps; checkpoints are written after every 10 steps"
        draft.note("unsupported", name, why, changes_learning=False)
    else:
        draft.put("run.save_every_steps", every, name)
    if limit or every or strategy == "best":
        draft.put("run.keep_checkpoints", limit or 0, "save_total_limit")


def _evaluation(draft: Draft, step: StepShape, rows: int) -> None:
    strategy, interval = draft.ask("eval_strategy"), "eval_steps" if draft.ask("eval_steps") else "logging_steps"
    every = _every(strategy, draft.ask(interval), step, draft.values["run.steps"], rows)
    name = interval if strategy == "steps" else "eval_strategy"
    if every is None:
        why = "it is measured before and after the run. Set evaluation.every_steps"
        draft.note("unread", name, why, changes_learning=False)
    elif every:
        draft.put("evaluation.every_steps", every, name)
        draft.put("evaluation.samples", draft.ask("num_generations_eval") or draft.ask("num_generations"),
                  "num_generations_eval", "num_generations")  # fmt: skip
        draft.put("evaluation.temperature", draft.values.get("rollouts.temperature", draft.ask("temperature")),
                  "temperature")  # fmt: skip


def _idle_and_lost(draft: Draft) -> None:
    """Options that were written and mean nothing here, or are lost."""
    for name, value in draft.outcome.options.items():
        option = table()[name]
        partner = next((partner for start, partner in BESIDE.items() if name.startswith(start)), name)
        if option.fate == "nothing" and name not in draft.used:
            draft.note("nothing", name, option.why)
        elif option.fate != "unsupported" and partner != name and draft.ask(partner) in (False, "no", 0, None):
            draft.note("nothing", name, f"{partner} is off, so that it means nothing in TRL either")
        elif option.fate == "unsupported" and value != option.default:
            draft.note("unsupported", name, option.why, changes_learning=option.changes_learning)
