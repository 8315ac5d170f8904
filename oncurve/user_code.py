"""Functions and objects of the user's, named as module:name or file.py:name; what they break is put back."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from oncurve.core.errors import ConfigError, Failure, attempt

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_EXIT = os._exit
_reported: set[tuple[str, str]] = set()
_contents: dict[str, Any] = {}
"""The text of every imported file by the name of its module."""


class _FileLoader(SourceFileLoader):
    """Compiles the file itself: bytecode beside it counts as current when a text changed within the same second."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of the file as it is now."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def load_function(location: str, *, where: str = "rewards: function") -> Any:
    """The object that ``module:name`` or ``path/to/file.py:name`` names; a class is called without arguments.

    Raises ConfigError, saying what is missing where.
    """
    value, kind = load_object(location, where=where), where.partition(":")[0]
    if is_class := inspect.isclass(value):
        made = attempt(value)
        if isinstance(made, Failure):
            raise ConfigError(f"{kind}: {location} is a class that cannot be made without arguments: {made.detail}")
        value = made
    if not callable(value):
        what = "is a class whose objects" if is_class else f"is of type {type(value).__name__}, which"
        raise ConfigError(f"{kind}: {location} {what} cannot be called. Name a function, or give it a __call__ method.")
    return value


def load_object(location: str, *, where: str) -> Any:
    """The object that ``module:name`` or ``path/to/file.py:name`` names, as it is; ``where`` begins messages.

    Raises ConfigError, saying what is missing where.
    """
    module_name, colon, name = location.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{where} is {location!r}; write module:name or path/to/file.py:name.")
    kind = where.partition(":")[0]
    module = _import_file(Path(module_name), kind) if module_name.endswith(".py") else _import_module(module_name, kind)
    named_object = vars(module).get(name)
    if named_object is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{kind}: {module_name} has no {name!r}. It has: {', '.join(functions) or 'no function'}.")
    return named_object


def _import_file(path: Path, kind: str) -> Any:
    if not os.path.isfile(path):  # also where a folder above it is closed to this user
        raise ConfigError(f"{kind}: there is no file {path} (seen from {Path.cwd()}).")
    if str(path.resolve().parent) not in sys.path:  # so that it may import the files beside it
        sys.path.append(str(path.resolve().parent))
    name = f"oncurve_custom_{path.stem}_{abs(hash(str(path.resolve())))}"
    content = attempt(path.read_bytes)
    if name in sys.modules and _contents.get(name) == content:  # what it holds, such as a judge, is there once
        return sys.modules[name]
    _refuse_other_files(path, content, kind)
    loader = _FileLoader(name, str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path.resolve(), loader=loader)
    if spec is None:
        raise ConfigError(f"{kind}: {path} cannot be read as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    failure = attempt(lambda: loader.exec_module(module))
    if isinstance(failure, Failure):
        del sys.modules[name]
        hint = ". A file beside it is imported by its name, without a dot" if "relative" in failure.detail else ""
        raise ConfigError(f"{kind}: {path} cannot be imported: {failure.detail}{hint}")
    _contents[name] = content
    return module


def _refuse_other_files(path: Path, content: Any, kind: str) -> None:
    """Raise ConfigError if an import of the file names a file beside it, and would find another one of that name."""
    tree = attempt(lambda: ast.parse(content), log=False)
    if isinstance(tree, Failure):  # what is wrong with the file is said when it is imported
        return
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            _refuse_another_file(name, path.resolve().parent, f"{kind}: {path} imports")


def _refuse_another_file(module_name: str, folder: Path, what: str) -> None:
    """Raise ConfigError if the folder holds this module, and importing it would give a module of another place."""
    name = module_name.partition(".")[0]
    beside = [path for path in (folder / f"{name}.py", folder / name / "__init__.py") if path.is_file()]
    if not beside:
        return
    spec = attempt(lambda: importlib.util.find_spec(name), log=False)
    if not isinstance(spec, ModuleSpec) or spec.origin is None or not Path(spec.origin).is_file():
        return
    if not any(Path(spec.origin).resolve() == path.resolve() for path in beside):
        is_loaded = name in sys.modules
        why = "has been imported in this process" if is_loaded else "is found first"
        raise ConfigError(
            f"{what} {name!r}, of which {spec.origin} {why}, not {beside[0]}. Give one of the two another name"
            f"{', or use another process' if is_loaded else ''}."
        )


def _import_module(name: str, kind: str) -> Any:
    if str(Path.cwd()) not in sys.path:  # as `python script.py` would have it
        sys.path.append(str(Path.cwd()))
    _refuse_another_file(name, Path.cwd(), f"{kind} names")
    module = attempt(lambda: importlib.import_module(name))
    if isinstance(module, Failure):
        raise ConfigError(f"{kind}: module {name!r} cannot be imported: {module.detail}")
    return module


@contextmanager
def contained(name: str) -> Iterator[None]:
    """While it lasts, a function of somebody's runs; afterwards the process is as it was before.

    Put back, with one warning for each: the folder, handlers of signals, torch's default type, number of threads and
    gradient mode, and sys.stdout and sys.stderr. A child process that the function forked ends here instead of training
    too; ``os._exit`` in this process is an error of the function and not the end of the run.
    """
    process, before, streams = os.getpid(), _state(), (sys.stdout, sys.stderr)

    def refused(status: int) -> None:
        if os.getpid() == process:
            raise RuntimeError(f"it called os._exit({status})")
        _EXIT(status)

    os._exit = refused  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = _EXIT
        if os.getpid() != process:
            _EXIT(0)
        for (what, number), stream in zip({"stdout": 1, "stderr": 2}.items(), streams, strict=True):
            _put_stream_back(name, what, number, stream)
        after = _state()
        for what, (value, restore) in before.items():
            current = after[what][0] if what in after else "one that was removed"
            if current != value:
                restore(value)
                _warn_once(name, what, f"set {what} to {current}")


def _put_stream_back(name: str, what: str, number: int, stream: Any) -> None:
    """Let sys.stdout or sys.stderr be the stream again that it was; one that was closed is opened anew."""
    is_closed = attempt(lambda: stream.closed, log=False) is True
    if vars(sys)[what] is not stream or is_closed:
        opened = attempt(lambda: os.fdopen(number, "w", closefd=False), log=False) if is_closed else stream
        setattr(sys, what, None if isinstance(opened, Failure) else opened)
        _warn_once(name, what, f"replaced or closed sys.{what}")


def _warn_once(name: str, what: str, did: str) -> None:
    if (name, what) not in _reported:
        _reported.add((name, what))
        logger.warning("%s %s, which would change the run; it was put back", name, did)


def _state() -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """The process-wide state that a function may change, each part with what sets it."""
    state: dict[str, tuple[Any, Callable[[Any], Any]]] = {}
    if not isinstance(folder := attempt(os.getcwd, log=False), Failure):
        state["the working folder"] = folder, os.chdir
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            state[f"the handler of {number.name}"] = (
                signal.getsignal(number),
                lambda handler, number=number: signal.signal(number, handler),
            )
    torch = sys.modules.get("torch")
    if torch is not None:
        state |= {
            "torch's default type": (torch.get_default_dtype(), torch.set_default_dtype),
            "torch's number of threads": (torch.get_num_threads(), torch.set_num_threads),
            "torch's gradient mode": (torch.is_grad_enabled(), torch.set_grad_enabled),
        }
    return state
