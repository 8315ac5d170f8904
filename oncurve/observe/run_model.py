"""Models in folders: that of a run, that of this package, and adapters with the base that they are for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from oncurve.constants import ADAPTER_CONFIG, MODEL_FILES
from oncurve.extensions import imported
from oncurve.observe.record import METRICS
from oncurve.run_errors import CheckpointError
from oncurve.wording import did_you_mean

RUNS = "runs"
"""The folder that runs go to; a name that begins with it is no name on the Hugging Face Hub."""
EMBEDDED = Path(__file__).resolve().parent.parent / "assets" / "base_model"
"""The small model inside this package, which the name "embedded" stands for."""
OTHER_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ADAPTER_CONFIG)
"""Ends of the names of files beside which a GGUF file is not read."""
MODEL = "model"
"""Folder of a run's final model, in the run's folder."""


def is_run(path: str | Path) -> bool:
    """Whether a folder is that of a run, finished or not."""
    folder = Path(path).expanduser()
    # not Path.is_file, which raises where a folder may not be read
    measured, has_status, configured = (
        os.path.isfile(folder / name) for name in (METRICS, "status.json", "config.yaml")
    )
    return measured or (has_status and configured)


def resolve_model(name: str) -> str:
    """The final model of a run's folder; the folder that is made of a GGUF file; any other name as it is.

    Raises CheckpointError for a run that has no final model yet, and for a GGUF file that is not read.
    """
    if not is_run(name):
        gguf = _gguf_of(Path(name).expanduser())
        return name if gguf is None else str(imported("oncurve.policy.gguf_start:as_folder")(gguf))
    run = Path(name).expanduser()
    if not (run / MODEL).is_dir():
        raise CheckpointError(
            f"{name} is a run without a final model: it has not finished. `oncurve resume {name}` finishes it; until "
            f"then, name one of its checkpoints in {run / 'checkpoints'}"
        )
    return str(run / MODEL)


def _gguf_of(path: Path) -> Path | None:
    """A GGUF file, or that of a folder which has no other weights. Raises CheckpointError for one with several."""
    if path.suffix == ".gguf":
        return path if os.path.isfile(path) else None
    names = os.listdir(path) if os.access(path, os.R_OK | os.X_OK) and os.path.isdir(path) else []
    files = sorted(name for name in names if name.endswith(".gguf"))
    if not files or any(name.endswith(OTHER_WEIGHTS) for name in names):
        return None
    if len(files) > 1:
        raise CheckpointError(
            f"{path} holds {len(files)} GGUF files, {', '.join(files[:3])}: name one of them, such as {path / files[0]}"
        )
    return path / files[0]


def locate(name: str) -> str:
    """The folder or Hub name behind a model's name in a recipe or a command; for a run's folder, its final model.

    Raises CheckpointError for a run that has no final model yet.
    """
    if name == "embedded":
        return str(EMBEDDED)
    return resolve_model(str(Path(name).expanduser()) if name.startswith("~") else name)


def locate_model(name: str) -> tuple[str, bool]:
    """The model's place, and whether it must be a folder. Raises CheckpointError if it must and is not there."""
    located = locate(name)
    path = Path(located)
    is_hub_name = located.count("/") == 1 and not path.is_absolute() and not located.startswith(".")
    looks_local = not is_hub_name or path.parts[0] == RUNS
    if os.path.isfile(located):
        raise CheckpointError(f"model {name!r}: is a file. Name the folder with the model's config.json")
    if looks_local and not os.path.isdir(located):
        raise CheckpointError(
            f"model {name!r}: no such folder. {did_you_mean(name, ['embedded'])}Name a folder with a config.json, a "
            f"Hugging Face Hub model such as "
            f'Qwen/Qwen2.5-0.5B, or "embedded"; if the recipe builds its base model first, its first line says how'
        )
    if os.path.isdir(located) and not any(os.path.isfile(path / file) for file in MODEL_FILES):
        raise CheckpointError(f"model {name!r}: {_describe_foreign(path)}")
    return located, looks_local


def _describe_foreign(folder: Path) -> str:
    """A description of a folder without a configuration, with what to do."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"the folder cannot be read ({error.strerror}). Give yourself the right to read it"
    if any(name.startswith("consolidated") for name in names):
        return (
            "the folder has no config.json; consolidated files are the form in which Meta and Mistral publish weights "
            "for their own programs. Download config.json and the files model*.safetensors of the same model, too"
        )
    if weights := [name for name in names if name.endswith((".safetensors", ".bin"))]:
        return f"the folder has weights ({weights[0]}) and no config.json. Put the config.json of that model there"
    return (
        "the folder has no config.json and no adapter_config.json, so it is not a model. Name the folder that the "
        "model was saved in, or the folder of a finished run"
    )


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    return os.path.isfile(Path(path) / ADAPTER_CONFIG)  # False, not an error, in a closed folder


def read_adapter(folder: str | Path) -> dict[str, object]:
    """An adapter as peft wrote it: its base model, rank, layers. Raises CheckpointError if it cannot be read."""
    return read_object(Path(folder) / ADAPTER_CONFIG)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model. Raises CheckpointError if it cannot be read, or is none."""
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(described, dict):
            raise TypeError(f"a {type(described).__name__} instead of an object")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}. Download or save it again") from None
    return described


def base_of(folder: str | Path) -> tuple[str, str | None]:
    """Name and revision of the model that an adapter was made for. Raises CheckpointError if it names none."""
    described = read_adapter(folder)
    name, revision = described.get("base_model_name_or_path"), described.get("revision")
    if not isinstance(name, str) or not name:
        raise CheckpointError(
            f"{folder}: its {ADAPTER_CONFIG} names no base model. Write base_model_name_or_path there"
        )
    return name, revision if isinstance(revision, str) else None


def bases_under(folder: str | Path) -> list[tuple[str, str | None]]:
    """The bases of an adapter by name and revision: the last is a whole model, those before it are adapters.

    Raises CheckpointError if one of them names no base, or if they lie over each other in a circle.
    """
    seen, bases = [Path(folder).resolve()], [base_of(folder)]
    while is_adapter(path := locate(bases[-1][0])):
        if Path(path).resolve() in seen:
            raise CheckpointError(
                f"{folder}: the base that its {ADAPTER_CONFIG} names is an adapter over itself. Write the model that "
                f"it was trained over into base_model_name_or_path"
            )
        seen.append(Path(path).resolve())
        bases.append(base_of(path))
    return bases
