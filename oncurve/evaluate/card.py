"""Model card for the hub: where a model comes from, how good it is and how certain that is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from oncurve.data.prompts import find_template
from oncurve.data.sources import HUB_NAMES
from oncurve.errors import ConfigError, DataError
from oncurve.evaluate.result_tables import describe, table_lines
from oncurve.observe.record import read_json, write_text
from oncurve.observe.redact import redact_tree

CARD = "README.md"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

_LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")  # this folder, or owner/name on the hub
tokenizer = AutoTokenizer.from_pretrained("{name}")
```"""
_LOAD_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{name}")  # this folder, or owner/name on the hub
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

`oncurve merge` adds the adapter to the base and writes an ordinary model."""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What is known of a model that somebody will publish."""

    name: str
    base: str | None = None
    """Name of the model that training began with."""
    is_adapter: bool = False
    was_merged: bool = False
    """The adapter that was trained is part of the weights now."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved recipe; empty if the model was not trained here."""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    comparison: str = ""
    """The table of before and after, as Markdown."""
    results: Mapping[str, Any] = field(default_factory=dict)
    """Content of a ``results.json``."""
    license: str | None = None


def run_facts(run: Path, **more: Any) -> CardFacts:
    """The facts that a run's folder holds; what is not there is left out.

    Raises DataError for a folder without a recipe and a manifest, or with broken files.
    """
    try:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DataError(f"{run}: no run whose recipe can be read ({' '.join(str(error).split())})") from None
    table = run / "comparison.md"
    lora = (config.get("policy") or {}).get("lora") is not None
    return CardFacts(
        **{
            "name": run.name,
            "base": config.get("model"),
            "is_adapter": lora,
            "config": config,
            "manifest": read_json(run / "manifest.json"),
            "comparison": table.read_text(encoding="utf-8").split("~~~~")[0].strip() if table.is_file() else "",
            **more,
        }
    )


def run_card(run: Path) -> Path:
    """Write the card of a run's final model. Raises DataError if the run's files cannot be read."""
    folder = run / "model"
    return write_card(folder, run_facts(run, is_adapter=(folder / "adapter_config.json").is_file()))


def write_card(folder: Path, facts: CardFacts) -> Path:
    """Write the card into a model's folder, in place of one that is there."""
    write_text(folder / CARD, card_text(facts))
    return folder / CARD


def card_text(facts: CardFacts) -> str:
    """The card: metadata for the hub between lines of dashes, then Markdown."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        model_name=facts.name,
        base_model=facts.base if is_hub_name(facts.base) else None,
        datasets=_training_datasets(facts) or None,
        library_name="peft" if facts.is_adapter else "transformers",
        license=facts.license,
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning", "oncurve", *(["lora"] if facts.is_adapter else [])],
    )
    body = "\n".join(_sections(facts))
    return f"---\n{data.to_yaml()}\n---\n\n{body}\n"


def is_hub_name(name: str | None) -> bool:
    """Whether a name is that of a repository, and not of a folder here."""
    return name is not None and _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _sections(facts: CardFacts) -> Iterator[str]:
    base = _public(facts.base or "an unknown base model")
    yield f"# {facts.name}\n"
    kind = "A LoRA adapter for" if facts.is_adapter else "Made from"
    how = f" by GRPO with oncurve {facts.manifest.get('oncurve', '')}".rstrip()
    yield f"{kind} `{base}`{how if facts.config else ''}.\n"
    if facts.config:
        yield "## Training\n"
        yield from _training(facts)
    yield "## Evaluation\n"
    yield from _evaluation(facts)
    yield "## Limits\n"
    yield from _limits(facts)
    if facts.config:
        yield "## How to ask\n"
        yield from _asking(facts.config.get("data") or {})
    yield "## How to load\n"
    form = _LOAD_ADAPTER if facts.is_adapter else _LOAD
    yield form.format(name=facts.name, base=base)


def _training(facts: CardFacts) -> Iterator[str]:
    config, manifest = facts.config, facts.manifest
    run, algorithm, data = (config.get(key) or {} for key in ("run", "algorithm", "data"))
    rows = {
        "base": f"`{_public(facts.base or '')}`",
        "data": f"{data.get('type')}, split {data.get('split')}, prompt template {data.get('template')}",
        "rewards": ", ".join(f"{one['type']} x {one['weight']}" for one in config.get("rewards", ())),
        "algorithm": f"{algorithm.get('type')}, {algorithm.get('group_size')} completions per prompt",
        "steps": f"{run.get('steps')} of {run.get('prompts_per_step')} prompts",
        "trained": _trained(facts),
        "learning rate": f"{(config.get('optimizer') or {}).get('learning_rate')}",
        "seed": f"{run.get('seed')}, one run",
        "code": f"oncurve {manifest.get('oncurve')}, commit {(manifest.get('code') or {}).get('commit') or 'unknown'}",
        "packages": ", ".join(f"{name} {version}" for name, version in (manifest.get("packages") or {}).items()),
        "hardware": _hardware(manifest.get("hardware") or {}),
        "started": f"{manifest.get('started')}",
    }
    yield "| | |\n|---|---|"
    yield "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows.items())
    said = _without_nothing(_public_tree(redact_tree(dict(config))))
    recipe = yaml.safe_dump(said, sort_keys=False, allow_unicode=True)
    yield f"\n<details><summary>The whole recipe</summary>\n\n```yaml\n{recipe}```\n\n</details>\n"


def _asking(data: Mapping[str, Any]) -> Iterator[str]:
    """The words around a question in training, which the model expects again."""
    try:
        template = find_template(str(data.get("template")))
    except ConfigError:  # a text file that is not there any more
        yield f"With the prompt template {_public(str(data.get('template')))} that it was trained with.\n"
        return
    asked = template.turn.replace("{user}", template.user)
    text = "\n".join([*([template.system] if template.system else []), asked + template.opening])
    chat = ", as messages through the chat template" if data.get("chat") else ""
    yield f"As in training, with the question in the place of `{{question}}`{chat}:\n\n```text\n{text}\n```\n"


def _evaluation(facts: CardFacts) -> Iterator[str]:
    if not (facts.comparison or facts.results):
        yield "Not evaluated.\n"
        return
    if facts.comparison:
        yield f"{facts.comparison}\n"
    if facts.results:
        yield "\n".join(table_lines(facts.results)) + "\n"
        yield "Shares in percent, with 95 % intervals over problems.\n"
        for entry in facts.results["benchmarks"].values():
            public = {**entry, "source": _public_tree(entry["source"])}
            whole = "" if entry["is_whole"] else " Not all problems of the benchmark: not to be compared with others."
            yield f"- {entry['title']}: {' '.join(describe(public))}{whole}"
        yield ""


def _limits(facts: CardFacts) -> Iterator[str]:
    yield (
        "- The intervals are over problems of one trained model. Another training seed can move the numbers by more "
        "than that."
    )
    checked = [entry["contamination"]["checked"] for entry in (facts.results or {}).get("benchmarks", {}).values()]
    if not checked or not all(checked):
        yield "- Whether evaluation problems were in the training data was not checked for all of them."
    yield "- What the base model saw in its own training is not known, and may hold the evaluation problems."
    if facts.config:
        yield "- It was rewarded for answers in one form, and may do worse on prompts of another form."
    yield "- It was not evaluated for safety, and is no assistant that was made fit for the public.\n"


def _training_datasets(facts: CardFacts) -> list[str]:
    data = facts.config.get("data") or {}
    path = data.get("path")
    if path is None and data.get("type") in HUB_NAMES:
        return [HUB_NAMES[data["type"]][0]]
    return [str(path)] if is_hub_name(path) else []


def _trained(facts: CardFacts) -> str:
    if facts.was_merged:
        return "an adapter (LoRA), added to the weights of the base; the measurements are those of the adapter"
    return "an adapter (LoRA)" if facts.is_adapter else "all weights"


def _hardware(found: Mapping[str, Any]) -> str:
    gpus = ", ".join(gpu["name"] for gpu in found.get("gpus") or ())
    return gpus or f"{found.get('cpu_cores')} cores of {found.get('cpu')}"


def _public_tree(value: Any) -> Any:
    """Without the folders of the machine: of an absolute path its last part stays."""
    if isinstance(value, str):
        return _public(value)
    if isinstance(value, Mapping):
        return {key: _public_tree(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_public_tree(item) for item in value]
    return value


def _without_nothing(value: Any) -> Any:
    """Without the keys that are None: a recipe has many, and each means its default."""
    if isinstance(value, Mapping):
        return {key: _without_nothing(item) for key, item in value.items() if item is not None}
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value


def _public(text: str) -> str:
    return Path(text).name if text.startswith(("/", "~", "./", "../")) else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
