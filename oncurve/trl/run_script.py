"""Running a script for TRL as it is, up to its end or up to its training."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import oncurve
from oncurve.core.errors import ConfigError, OncurveError
from oncurve.episodes.from_settings import environment_rewards
from oncurve.recipe.messages import OTHER_SYSTEMS
from oncurve.run_errors import Stopped
from oncurve.trl.draft import Draft
from oncurve.trl.names import trl_resolved
from oncurve.trl.options import Note, trl_version
from oncurve.trl.recipe_file import write_recipe
from oncurve.trl.rewards_of_scripts import reward_name
from oncurve.trl.settings import SETTINGS
from oncurve.trl.translation import Translation

NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
OPTION_FILES = (".yaml", ".yml", ".json")
COMMAND = Path(__file__).with_name("grpo_command.py")
"""The script that a file of options is for."""
PACKAGE = Path(oncurve.__file__).resolve().parent
NEVER_TRAINED = "GRPOTrainer(...).train(). Give it the arguments that it needs"
_GUARD = re.compile(r"^if __name__ *== *[\"']__main__[\"']", re.MULTILINE)


class _Messages:
    """Says what a script fails of: a package that is missing in a line, its own exceptions with its own lines."""

    def __init__(self, script: Path) -> None:
        self.script = script

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """Raises ConfigError or Stopped in the place of an exception that is the script's."""
        if not isinstance(error, Exception) or isinstance(error, OncurveError):
            return
        location = f"{self.script}{_line(self.script, error)}"
        if (own := _own_location(error, self.script)) is not None:
            traceback.print_exception(error)
            raise Stopped(
                f"{location}: oncurve itself failed with {type(error).__name__} in {own}. It should have trained, or "
                f"refused with a sentence: please report it with the lines above",
                exit_code=1,
            ) from None
        if isinstance(error, ModuleNotFoundError):
            is_for_trl = re.search(r"\b(trl|unsloth)\b", self.script.read_text(encoding="utf-8", errors="replace"))
            what = "pip install it, or leave it out" if is_for_trl else f"The script does not name TRL. {OTHER_SYSTEMS}"
            raise ConfigError(
                f"{location}: it needs the package {error.name}, which is not installed here. {what}"
            ) from None
        while trace is not None and not _is_of(trace.tb_frame.f_code.co_filename, self.script):
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace or error.__traceback__))
        raise Stopped(f"{location}: the script raised {type(error).__name__}", exit_code=1) from None


class Translated(BaseException):
    """Ends a script where its training would begin; nothing of the script catches it."""

    def __init__(self, translation: Translation) -> None:
        super().__init__("translated")
        self.translation = translation


def run_script(
    script: Path,
    arguments: Sequence[str],
    *,
    accept: Sequence[str] = (),
    overrides: Sequence[str] = (),
    version: str | None = None,
) -> None:
    """Run a file with `trl` resolved to `oncurve.trl`.

    Raises ConfigError for a file or a package that is not there, Stopped for a script that never trains, and whatever
    the training raises; an exception of the script's own is shown with the script's lines and ends the process.
    """
    if script.suffix in OPTION_FILES and script.is_file():
        script, arguments = COMMAND, ["--config", str(script), *arguments]
    if not script.is_file() or script.suffix != ".py":
        what = "is no script that is read here" if script.is_file() else "no such script"
        raise ConfigError(
            f"{script}: {what}. Give a Python file that uses TRL's GRPOTrainer, or a YAML or JSON file with its "
            f"options. {OTHER_SYSTEMS}"
        )
    SETTINGS.accepted.update(accept)
    SETTINGS.overrides = tuple(overrides)
    SETTINGS.version, SETTINGS.has_trained = version, False
    before = sys.argv, list(sys.path)
    try:
        with _Messages(script), trl_resolved():
            run_file(script, arguments)
    finally:
        sys.argv, sys.path = before[0], before[1]
    if not SETTINGS.has_trained and SETTINGS.instead_of_training is None:
        raise Stopped(f"{script} ended without {NEVER_TRAINED}", exit_code=1)


def run_file(script: Path, arguments: Sequence[str]) -> None:
    """Run a file as `python FILE` does, or as `python -m` where it imports from the package that it is in."""
    sys.argv = [str(script), *arguments]
    folder = str(script.resolve().parent)
    sys.path[:] = [folder, *sys.path, str(Path.cwd())]  # as `python -m` has it, for a script that imports from its root
    relative = re.compile(r"^from +\.", re.MULTILINE)
    inside = script.resolve().is_relative_to(Path.cwd()) and script.resolve().parent != Path.cwd()
    if inside and relative.search(script.read_text(encoding="utf-8", errors="replace")):
        module = script.resolve().relative_to(Path.cwd()).with_suffix("")
        sys.path[0] = str(Path.cwd())
        runpy.run_module(".".join(module.parts), run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(script), run_name="__main__")


def write_script_recipe(
    script: Path,
    arguments: Sequence[str],
    output: Path | None,
    *,
    processes: int = 1,
    overwrite: bool = False,
    accept: Sequence[str] = (),
    overrides: Sequence[str] = (),
    version: str | None = None,
) -> tuple[str, bool]:
    """Run a script up to its training and write the recipe that it asks for, its rows beside it.

    The report for people, and whether everything was taken over that is not accepted to be lost. Raises ConfigError for
    a script that never trains.
    """

    def stop(translation: Translation) -> NoReturn:
        raise Translated(translation)

    SETTINGS.instead_of_training, SETTINGS.processes = stop, processes
    try:
        run_script(script, arguments, accept=accept, overrides=overrides, version=version)
    except Translated as caught:
        translation = caught.translation
    else:
        raise ConfigError(f"{script}: it ended without {NEVER_TRAINED}")
    finally:
        SETTINGS.instead_of_training, SETTINGS.processes = None, None
    folder = Path.cwd() if output is None else output.parent
    rows = folder / f"{(output or script).stem}_rows.jsonl"
    beside = {rows: _as_lines(translation.rows)}
    if translation.evaluation:
        beside[rows.with_name(rows.name.replace("_rows", "_evaluation_rows"))] = _as_lines(translation.measured())
    draft = translation.draft
    draft.outcome.source = script.name
    _put_files(translation, draft, script, folder, list(beside))
    command = " ".join([f"--processes {processes}", script.name, *arguments])
    head = f"From `oncurve trl --recipe FILE {command}`; options of TRL {trl_version()}."
    text = write_recipe(draft, head, output, overwrite=overwrite, beside=beside)
    return text, not any(note.is_loss and note.option not in SETTINGS.accepted for note in draft.notes)


def _put_files(translation: Translation, draft: Draft, script: Path, folder: Path, rows: Sequence[Path]) -> None:
    """Rows and rewards as files that a recipe can name."""
    draft.put("data.type", "jsonl", comment="the rows that the script made")
    draft.put("data.path", _relative(rows[0], folder), comment="")
    measured = {"type": "jsonl", "path": _relative(rows[-1], folder), "template": "as_is"}
    if "data.chat" in draft.values:
        measured["chat"] = draft.values["data.chat"]
    draft.put("evaluation.data", measured, comment="measured on")
    if not translation.evaluation:
        draft.put("evaluation.allow_training_rows", True, comment="the script names no other rows")
    sections: list[dict[str, Any]] = []
    arguments = translation.arguments
    for function, (reward, weight) in zip(arguments.reward_funcs, translation.rewards, strict=True):
        reference = _reference_or_note(function, "reward", draft, script, folder, name=reward.name)
        sections.append({"type": "custom", "function": reference, "name": reward.name, "weight": weight})
    if arguments.environment_factory is not None:
        sections += environment_rewards(arguments.environment_factory)
    draft.put("rewards", sections, comment="reward_funcs")
    factories = arguments.environment_factory
    if factories is not None and not isinstance(factories, Mapping):
        factories = {"default": factories}
    tools = [_reference_or_note(tool, "tool", draft, script, folder) for tool in arguments.tools]
    environments = {
        name: _reference_or_note(factory, "environment", draft, script, folder)
        for name, factory in (factories or {}).items()
    }
    if tools:
        draft.put("rollouts.tools", tools, comment="tools")
    if environments:
        draft.put("rollouts.environments", environments, comment="environment_factory")
    if not isinstance(translation.arguments.model, str):
        why = "the recipe names where it was loaded from; what the script changed in it is not in the recipe"
        draft.notes.append(Note("differs", "model", why))


def _reference_or_note(thing: Any, kind: str, draft: Draft, script: Path, folder: Path, name: str | None = None) -> str:
    """The reference from which a recipe loads an object; without one a name to be filled in, and a note of it."""
    name = name or reward_name(thing)
    if (reference := _reference(thing, script, folder)) is not None:
        return reference
    why = "it has no name at the top of a file that can be imported. Move it there, and write file.py:name"
    draft.notes.append(Note("unread", f"{kind} {name}", why))
    return f"{script.stem}_{kind}s.py:{name}"


def _reference(function: Any, script: Path, folder: Path) -> str | None:
    """The reference from which a recipe can load a function; None if there is none."""
    is_named = inspect.isfunction(function) or inspect.isclass(function)
    if not is_named or not function.__qualname__.isidentifier() or function.__name__ == "<lambda>":
        return None
    if function.__module__ != "__main__":
        file = Path(inspect.getfile(function))
        local = file.resolve().is_relative_to(script.resolve().parent)
        return f"{_relative(file, folder) if local else function.__module__}:{function.__name__}"
    text = script.read_text(encoding="utf-8")
    defined = {node.name for node in ast.parse(text).body if isinstance(node, NAMED)}
    if function.__name__ not in defined or not _GUARD.search(text):
        return None
    return f"{_relative(script, folder)}:{function.__name__}"


def _as_lines(rows: Sequence[dict[str, Any]]) -> str:
    made = [{**row, "answer": row.get("answer", "none")} for row in rows]
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in made)


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def _own_location(error: BaseException, script: Path) -> str | None:
    """Place in oncurve's code that raised by mistake; None where the script's own code did."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        is_ours = path not in (script.resolve(), Path(__file__)) and path.is_relative_to(PACKAGE)
        if is_ours and frame.name not in ("__getattr__", "__setattr__", "__call__"):
            return f"{path.relative_to(PACKAGE.parent)}, line {frame.lineno}"
        if not is_ours and "site-packages" not in path.parts and path.is_relative_to(script.resolve().parent):
            return None
    return None


def _line(script: Path, error: BaseException) -> str:
    """The line of the script in which an exception came up."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if _is_of(frame.filename, script)]
    return f", line {lines[-1]}" if lines else ""


def _is_of(filename: str, script: Path) -> bool:
    return filename in (str(script), str(script.resolve()))
