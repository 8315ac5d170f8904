"""From the objects of a script for TRL to a recipe, rows and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve.core.errors import ConfigError, DataError, OncurveError
from oncurve.core.grading import RewardFunction
from oncurve.core.records import SOURCE_ROW
from oncurve.episodes.from_settings import paying_classes
from oncurve.policy.environment import read_rank_info
from oncurve.policy.model_folder import declared_end_ids, load_model, load_tokenizer
from oncurve.recipe.load import apply_overrides
from oncurve.trl.chat import is_conversational, prompt_text
from oncurve.trl.conversion import OPTIMIZERS, SCHEDULES, convert
from oncurve.trl.draft import Draft, tree_of
from oncurve.trl.model_and_adapter import LORA_DEFAULTS, quantization, unsaid
from oncurve.trl.options import Note, OptionOutcome, table
from oncurve.trl.rewards_of_scripts import reward_name, reward_of
from oncurve.trl.script_episodes import episode_row, placeholder_rows, put_episodes
from oncurve.trl.settings import SETTINGS
from oncurve.wording import listed

Row = dict[str, Any]
MEASURED_ROWS = 100
"""Rows of an evaluation set that the model is measured on before and after the run."""
MEASURED_TRAINING_ROWS = 8
"""The same of the training rows, where a script names no others."""
LOST_ARGUMENTS = {
    "rollout_func": "completions come from the engine or from servers (rollouts.type); for turns with a program pass "
    "tools or an environment_factory",
    "optimizers": "a recipe has AdamW or Muon, set by optim, learning_rate and their like; `oncurve trl` takes them",
}
"""Arguments of GRPOTrainer without a place here, and why; losing one changes what is learned."""


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """The arguments of a GRPOTrainer."""

    model: str | PreTrainedModel
    reward_funcs: Sequence[Any]
    args: Any
    train_dataset: Any
    eval_dataset: Any = None
    processing_class: PreTrainedTokenizerBase | None = None
    reward_processing_classes: Sequence[Any] = ()
    quantization_config: Any = None
    peft_config: Any = None
    has_made_adapter: bool = False
    """The adapter in ``model`` was made here of ``peft_config``; the model without it is the reference."""
    tools: Sequence[Any] = ()
    environment_factory: Any = None
    lost: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that have no place here."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of every reward function beside completions and columns."""

    @property
    def reference_is_named(self) -> bool:
        """The reference is what the model is named after, and not what an adapter of the script's made of it."""
        return self.has_made_adapter or "PeftModel" not in {kind.__name__ for kind in type(self.model).__mro__}

    @property
    def has_episodes(self) -> bool:
        """Completions call tools, or happen in an environment."""
        return bool(self.tools) or self.environment_factory is not None


@dataclass(frozen=True)
class Translation:
    """A script as a recipe and what of it stands in no recipe."""

    arguments: TrainerArguments
    draft: Draft
    tokenizer: PreTrainedTokenizerBase | None
    """The script's own; None where the model brings it."""
    rows: list[Row]
    evaluation: Mapping[str, list[Row]]
    """Evaluation rows by the prefix of their metrics."""
    rewards: list[tuple[RewardFunction, float]]
    evaluate_every_steps: int

    def recipe(self) -> dict[str, Any]:
        """The recipe as nested dictionaries, without rows and rewards."""
        return tree_of(self.draft)

    def measured(self) -> list[Row]:
        """Rows that the model is measured on before and after the run."""
        if self.evaluation:
            return [row for rows in self.evaluation.values() for row in rows][:MEASURED_ROWS]
        return self.rows[:MEASURED_TRAINING_ROWS]

    def refuse_losses(self) -> None:
        """Raises ConfigError with all that is lost, changes what is learned, and is not accepted by name."""
        lost = [
            note
            for note in self.draft.notes
            if note.is_loss and note.changes_learning and note.option not in SETTINGS.accepted
        ]
        if not lost:
            return
        lines = [f"  {note.what}: {note.why}" for note in lost]
        names = list(dict.fromkeys(note.option for note in lost))
        flags = " ".join(f"--accept {name}" for name in names)
        raise ConfigError(
            "the script asks for what oncurve does not do, and the model would learn something else without it:\n"
            + "\n".join(lines)
            + f"\nRemove it, or go on without it: oncurve.trl.accept_lost({listed(names)}), or `oncurve trl {flags} "
            f"SCRIPT`"
        )

    def describe(self) -> list[str]:
        """Notes for a person before the run, a line each."""
        lines = [f"{note.what}: {note.why}" for note in self.draft.notes if note.kind != "nothing"]
        idle = [note.option for note in self.draft.notes if note.kind == "nothing"]
        if idle:
            lines.append(f"without meaning here: {', '.join(dict.fromkeys(idle))} (docs/coming_from_trl.md says why)")
        return lines


def translate(arguments: TrainerArguments) -> Translation:
    """A script's request as a recipe.

    Raises ConfigError for numbers that TRL refuses too, DataError for rows that are no prompts.
    """
    args, names = arguments.args, [reward_name(function) for function in arguments.reward_funcs]
    outcome = OptionOutcome(
        "the script",
        arguments.model if isinstance(arguments.model, str) else arguments.model.name_or_path or "given",
        args.options(),
        num_rewards=len(names),
    )
    if args.dated is not None:
        outcome.notes.append(Note("differs", "versions", args.dated.describe()))
    for name in arguments.lost:
        outcome.notes.append(Note("unsupported", name, LOST_ARGUMENTS[name]))
    _take_best(outcome)
    _take_optimizer(outcome)
    put_weights(arguments, outcome)
    if not isinstance(arguments.model, str) and arguments.model.dtype in (torch.bfloat16, torch.float16):
        kind = str(arguments.model.dtype).removeprefix("torch.")
        why = f"its {kind} weights are trained in float32, and are float32 afterwards; save_model writes {kind}"
        outcome.notes.append(Note("differs", "model", why))
    options = dict(args.chat_template_kwargs or {})
    outcome.options.pop("chat_template_kwargs", None)  # done here
    tokenizer = tokenizer_of(arguments)
    _without_own_ends(arguments, tokenizer, outcome)
    data = arguments.train_dataset
    if data is None and arguments.environment_factory is not None:
        data = placeholder_rows(args, arguments.environment_factory, max(_generated(args) // args.num_generations, 1))
    enough = None if args.max_steps <= 0 else args.max_steps * _generated(args)  # of a stream
    rows = _rows(data, arguments, tokenizer, options, limit=enough)
    evaluation = {
        prefix: _rows(part, arguments, tokenizer, options)
        for prefix, part in evaluation_sets(arguments.eval_dataset).items()
    }
    draft = convert(outcome, processes=SETTINGS.processes or read_rank_info().count, rows=len(rows))
    every = int(draft.values.get("evaluation.every_steps", 0))
    if every and not evaluation:
        raise ConfigError("eval_strategy is set and there is no eval_dataset. Pass one, or set eval_strategy='no'")
    for key in [key for key in draft.values if key.startswith("evaluation.")]:
        del draft.values[key]
    draft.put("data.template", "as_is", comment="the prompt of the row as it is")
    if arguments.has_episodes:
        put_episodes(draft, args)
    number = len([row for part in evaluation.values() for row in part])
    count = min(number, MEASURED_ROWS) if number else min(len(rows), MEASURED_TRAINING_ROWS)
    origin = "of eval_dataset" if number else "of the training rows, since the script names no others"
    draft.put("evaluation.num_prompts", count, comment=f"measured before and after the run; {origin}")
    apply_overrides({}, SETTINGS.overrides)  # which refuses what is no key=value
    for key, _, value in (override.partition("=") for override in SETTINGS.overrides):
        draft.put(key, yaml.safe_load(value), comment="oncurve trl --set")
    return Translation(
        arguments, draft, arguments.processing_class, rows, evaluation, _rewards(arguments, names, rows), every
    )


def _take_best(outcome: OptionOutcome) -> None:
    """Take out what the trainer does itself when training has ended, and no recipe can say."""
    loads = outcome.options.pop("load_best_model_at_end", False)
    for name in ("metric_for_best_model", "greater_is_better"):
        outcome.options.pop(name, None)
    if loads and SETTINGS.instead_of_training is None and read_rank_info().count > 1:
        why = "with several processes the final model is that of the last step; load the best checkpoint afterwards"
        outcome.notes.append(Note("unsupported", "load_best_model_at_end", why))
    if outcome.options.get("save_strategy") == "best" and SETTINGS.instead_of_training is not None:
        why = "a recipe writes checkpoints by steps; run.save_every_steps is 0"
        outcome.notes.append(Note("unsupported", "save_strategy", why, changes_learning=False))
    if loads and SETTINGS.instead_of_training is not None:
        why = "the final model of a recipe is that of the last step; the best checkpoint is kept beside it"
        outcome.notes.append(Note("unsupported", "load_best_model_at_end", why))
    if loads and outcome.options.pop("save_total_limit", None):
        why = "with load_best_model_at_end every checkpoint stays, so that the best one is there"
        outcome.notes.append(Note("differs", "save_total_limit", why))


def _take_optimizer(outcome: OptionOutcome) -> None:
    """Take out what transformers makes for the trainer, and no recipe can say."""
    if SETTINGS.instead_of_training is not None:
        return
    for name in ("lr_scheduler_kwargs", "optim_args", "optim_target_modules"):  # AdamW reads none in TRL either
        outcome.options.pop(name, None)
    for name, known in (("lr_scheduler_type", SCHEDULES), ("optim", OPTIMIZERS)):
        value = str(outcome.options.get(name, next(iter(known))))
        if value in known:
            continue
        del outcome.options[name]
        outcome.notes.append(
            Note("differs", f"{name} = {value}", "transformers makes it; the run's recipe does not say it")
        )


def _without_own_ends(arguments: TrainerArguments, tokenizer: Any, outcome: OptionOutcome) -> None:
    """Leave end tokens out of generation_kwargs where they are those that end a completion anyway."""
    options = outcome.options.get("generation_kwargs")
    if not isinstance(options, Mapping):
        return
    if isinstance(arguments.model, str):
        ends = set(declared_end_ids(arguments.model, tokenizer))
    else:
        config: Any = arguments.model.generation_config or arguments.model.config
        own = config.eos_token_id
        ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    rest = dict(options)
    for name in ("eos_token_id", "stop_token_ids"):
        ids = rest.get(name)
        named = set(ids) if isinstance(ids, (list, tuple)) else {ids}
        if name in rest and (named == ends or (name == "stop_token_ids" and named <= ends)):
            del rest[name]
            outcome.notes.append(
                Note("nothing", "generation_kwargs", f"{name} are the tokens that end a completion anyway")
            )
    outcome.options["generation_kwargs"] = rest


READ_BY_TRL_LATER = frozenset(
    {"output_dir", "learning_rate", "max_steps", "num_train_epochs", "per_device_train_batch_size", "warmup_steps",
     "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "lr_scheduler_type", "optim",
     "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "num_generations_eval", "seed"}
)  # fmt: skip
"""Options of which TRL takes what they are when training begins, beside those that change nothing learned."""


def changed_options(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Options that a script changed after it made the trainer.

    Raises ConfigError for those that TRL's trainer has read by then, so that it would not notice.
    """
    changed = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
    grpo = {name for name in changed if name in table() and table()[name].fate in ("direct", "computed")}
    own = sorted(
        grpo - READ_BY_TRL_LATER - {name for name in grpo if name.startswith(("eval_", "save_", "report_", "run_"))}
    )
    if own:
        raise ConfigError(
            f"args: {listed(own)} changed after GRPOTrainer was made, which TRL's trainer does not notice any more. "
            f"Change it before, or make a new GRPOTrainer"
        )
    return changed


def evaluation_rows(arguments: TrainerArguments, data: Any, prefix: str) -> dict[str, list[Row]]:
    """Rows of another evaluation set, by the prefix of their metrics."""
    options = dict(arguments.args.chat_template_kwargs or {})
    sets = evaluation_sets(data) if isinstance(data, Mapping) else {prefix: data}
    return {name: _rows(rows, arguments, tokenizer_of(arguments), options) for name, rows in sets.items()}


def put_weights(arguments: TrainerArguments, outcome: OptionOutcome) -> None:
    """The bits of the weights, and the adapter."""
    _read_bits(arguments, outcome)
    config = arguments.peft_config
    if config is not None and config.peft_type != "LORA":
        why = "a recipe has LoRA; `oncurve trl` trains every kind whose weights are in the model's layers"
        outcome.notes.append(Note("unsupported", "peft_config", f"{type(config).__name__}: {why}"))
    elif config is not None:
        outcome.lora = _lora(arguments)


def with_adapter(arguments: TrainerArguments) -> TrainerArguments:
    """The arguments with an adapter in the model, where ``peft_config`` asks for one that no recipe can say.

    peft makes it, by the seed of the script; whether it is trained right is proven when it is loaded, as for a model
    that came with an adapter. Raises ConfigError for what peft refuses.
    """
    config = arguments.peft_config
    if config is None:
        return arguments
    from peft import PeftConfig, PeftModel, get_peft_model

    from oncurve.policy.lora import without_old_names  # lazy

    if not isinstance(config, PeftConfig):
        raise ConfigError(f"peft_config is a {type(config).__name__}. Pass a configuration of peft, such as LoraConfig")
    if isinstance(arguments.model, PeftModel):
        raise ConfigError(
            "peft_config is set, and the model has an adapter already. Merge it, or leave one of them out"
        )
    if SETTINGS.instead_of_training is not None or (config.peft_type == "LORA" and _has_keys(arguments)):
        return arguments

    tokenizer, model, args = tokenizer_of(arguments), arguments.model, arguments.args
    init = args.model_init_kwargs or {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        try:
            if isinstance(model, str):
                model = load_model(model, revision=init.get("revision"), trust_remote_code=_trusts(args))[0]
            with without_old_names():
                model = get_peft_model(model, config)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            if isinstance(error, OncurveError):  # of the model
                raise
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"peft_config: peft cannot make a {type(config).__name__}: {reason}") from None
    return replace(arguments, model=model, peft_config=None, has_made_adapter=True, processing_class=tokenizer)


def _has_keys(arguments: TrainerArguments) -> bool:
    """The keys of ``policy.lora`` say all of the adapter."""
    return not unsaid(LORA_DEFAULTS | _lora(arguments))


def tokenizer_of(arguments: TrainerArguments) -> Any:
    """The script's own, or the model's."""
    if arguments.processing_class is not None:
        if arguments.processing_class.pad_token is None:  # as TRL does
            arguments.processing_class.pad_token = arguments.processing_class.eos_token
        return arguments.processing_class
    name = arguments.model if isinstance(arguments.model, str) else arguments.model.name_or_path
    if not name:
        raise ConfigError("processing_class: the model has no name, so its tokenizer is not known. Pass the tokenizer")
    init = arguments.args.model_init_kwargs or {}
    return load_tokenizer(name, revision=init.get("revision"), trust_remote_code=_trusts(arguments.args))[1]


def _trusts(args: Any) -> bool:
    """Code that came with the model may run."""
    return bool(args.trust_remote_code or (args.model_init_kwargs or {}).get("trust_remote_code"))


def _generated(args: Any) -> int:
    passes = args.steps_per_generation or args.gradient_accumulation_steps
    return args.generation_batch_size or args.per_device_train_batch_size * passes * read_rank_info().count


def _rows(
    data: Any, arguments: TrainerArguments, tokenizer: Any, options: Mapping[str, Any], *, limit: int | None = None
) -> list[Row]:
    """The rows of a data set, each with the text that the model reads and the row that it came from.

    A data set without a length is read up to ``limit`` rows.
    """
    if not isinstance(data, Iterable) and {"__len__", "__getitem__"} <= set(dir(type(data))):  # torch's Dataset
        data = [data[index] for index in range(len(data))]
    if data is None or isinstance(data, (str, Mapping)) or not isinstance(data, Iterable):
        kind = "nothing" if data is None else type(data).__name__
        raise DataError(f"train_dataset is {kind}. Pass rows with a column prompt, such as load_dataset(...)['train']")
    is_stream = "__len__" not in dir(type(data))
    if is_stream and limit is None:
        raise ConfigError("train_dataset is a stream, whose end is not known. Set max_steps")
    rows: list[Row] = []
    for index, row in enumerate(islice(data, limit) if is_stream else data):
        if not isinstance(row, Mapping) or "prompt" not in row:
            columns = listed(row) if isinstance(row, Mapping) else type(row).__name__
            raise DataError(f"train_dataset: row {index} has no column 'prompt', which TRL reads. Columns: {columns}")
        if row.get("image") is not None or row.get("images") is not None:
            raise DataError(f"train_dataset: row {index} has pictures, which are not trained on here")
        prompt, where = row["prompt"], f"train_dataset: row {index}"
        if arguments.has_episodes:
            made = episode_row(row, tokenizer, options, arguments.environment_factory, source=where)
            rows.append(made | _gold(row))
            continue
        own = {**options, **(row.get("chat_template_kwargs") or {})}
        text = prompt_text(prompt, tokenizer, own, source=where)
        rows.append({"question": text, SOURCE_ROW: dict(row)} | _gold(row))
    if not rows:
        raise DataError("train_dataset: there are no rows")
    return rows


def _gold(row: Mapping[str, Any]) -> Row:
    """The column "answer", with which a person compares a completion; nothing where a row does not say it."""
    for name in ("answer", "ground_truth", "solution", "gold", "target", "label"):
        if isinstance(row.get(name), (str, int, float)) and str(row[name]).strip():
            return {"answer": str(row[name])}
    return {}


def evaluation_sets(data: Any) -> dict[str, Any]:
    """Evaluation sets by the prefix of their metrics."""
    if data is None:
        return {}
    if isinstance(data, Mapping):
        return {f"eval_{name}": rows for name, rows in data.items()}
    return {"eval": data}


def _rewards(
    arguments: TrainerArguments, names: Sequence[str], rows: Sequence[Row]
) -> list[tuple[RewardFunction, float]]:
    weights = arguments.args.reward_weights
    if weights is not None and len(weights) != len(names):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(names)} rewards. Give one for each")
    if not names:
        if arguments.environment_factory is not None and paying_classes(arguments.environment_factory):
            return []
        raise ConfigError("reward_funcs: there is none. Pass a function or a list of them")
    messages = is_conversational({"prompt": rows[0][SOURCE_ROW]["prompt"]})
    tokenizers = list(arguments.reward_processing_classes) or [None] * len(names)
    if len(tokenizers) != len(names):
        raise ConfigError(
            f"reward_processing_classes has {len(tokenizers)} entries for {len(names)} rewards. Give each one, "
            f"None for functions"
        )
    made = [
        reward_of(function, name, messages=messages, tokenizer=tokenizer, extras=arguments.extras)
        for function, name, tokenizer in zip(arguments.reward_funcs, names, tokenizers, strict=True)
    ]
    return [(reward, 1.0 if weights is None else float(weights[index])) for index, reward in enumerate(made)]


def _read_bits(arguments: TrainerArguments, outcome: OptionOutcome) -> None:
    """Weights of few bits, from wherever a script may say so."""
    init = dict(arguments.args.model_init_kwargs or {})
    settings = arguments.quantization_config or init.pop("quantization_config", None)
    for old, new in (("load_in_4bit", True), ("load_in_8bit", True)):
        if init.pop(old, False):
            settings = settings or {old: new, "bnb_4bit_quant_type": "nf4"}
    if not isinstance(arguments.model, str):
        settings = settings or vars(arguments.model.config).get("quantization_config")
    if settings is not None:
        values = settings if isinstance(settings, Mapping) else settings.to_dict()
        outcome.quantization = quantization(dict(values), outcome)
        if outcome.quantization is None:
            outcome.notes.append(Note("unsupported", "quantization_config", "there are nf4 and int8 of bitsandbytes"))
    if "model_init_kwargs" in outcome.options:
        outcome.options["model_init_kwargs"] = init


def _lora(arguments: TrainerArguments) -> dict[str, Any]:
    """The settings of a peft configuration beside peft's defaults; layers are those that peft takes for the model."""
    from peft import LoraConfig
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    config = arguments.peft_config
    plain = vars(LoraConfig())
    idle = ("peft_type", "auto_mapping", "base_model_name_or_path", "revision", "runtime_config", "peft_version")
    settings = {name: value for name, value in vars(config).items() if name not in idle and value != plain.get(name)}
    if config.target_modules is None:
        settings["target_modules"] = sorted(TARGETS.get(_model_type(arguments), ["q_proj", "v_proj"]))
    return settings


def _model_type(arguments: TrainerArguments) -> str:
    if not isinstance(arguments.model, str):
        return str(arguments.model.config.model_type)
    return str(load_tokenizer(arguments.model, trust_remote_code=bool(arguments.args.trust_remote_code))[0].model_type)
