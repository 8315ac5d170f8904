"""Cards of models that were measured or merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from oncurve.errors import DataError
from oncurve.evaluate.card import CARD, CardFacts, run_facts, write_card
from oncurve.observe.run_model import resolve_model
from oncurve.policy.lora import base_of, is_adapter
from oncurve.policy.model_folder import merge_adapter


def card_with_results(name: str, results: Mapping[str, Any]) -> Path:
    """Write the card of a model that was measured on benchmarks, with the facts of its run where it has one.

    Raises DataError if the model is no folder of the user's.
    """
    folder = Path(resolve_model(name)).expanduser()
    if not folder.is_dir():
        raise DataError(f"--card: {name} is no folder here, so its card cannot be written. Download the model first")
    write_card(folder, _facts_of(folder, results=results))
    return folder / CARD


def _facts_of(folder: Path, **more: Any) -> CardFacts:
    """What is known of a model's folder: with the run around it, or of the folder alone."""
    adapted = is_adapter(folder)
    run = folder.parent
    if folder.name == "model" and (run / "config.yaml").is_file():
        return run_facts(run, is_adapter=adapted, **more)
    return CardFacts(name=folder.name, base=base_of(folder)[0] if adapted else None, is_adapter=adapted, **more)


def merge_with_card(adapter: Path, output: Path) -> Path:
    """Merge an adapter into its base, with a card that says so."""
    adapter = Path(resolve_model(str(adapter)))
    folder = merge_adapter(adapter, output)
    write_card(folder, replace(_facts_of(adapter), name=folder.name, is_adapter=False, was_merged=True))
    return folder
