"""Environments of other libraries: OpenEnv's servers and clients, and tasksets of verifiers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from oncurve.agents.openenv_session import is_openenv, session_around, session_at
from oncurve.agents.verifiers_task import VerifiersTask, is_taskset, load_tasks, tasks_of
from oncurve.core.errors import ConfigError
from oncurve.episodes.settings import OPENENV, VERIFIERS


def environment_of(found: Any) -> Callable[[], Any]:
    """A factory of environments, one per completion: itself, or an adapter around another library's.

    Raises ConfigError where that library or what is named in it is missing.
    """
    if isinstance(found, str) and found.startswith(OPENENV):
        return partial(session_at, found.removeprefix(OPENENV))
    if isinstance(found, str):
        return partial(VerifiersTask, load_tasks(found.removeprefix(VERIFIERS)))
    if is_taskset(found):
        return partial(VerifiersTask, tasks_of(found))
    if not callable(found):
        raise ConfigError(f"environments: {type(found).__name__} is none. Pass a class, or a function that makes one")

    def make() -> Any:
        made = found()
        return session_around(made) if is_openenv(made) else made

    return make
