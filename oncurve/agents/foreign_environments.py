"""Environments of other libraries: OpenEnv's servers and clients, and tasksets of verifiers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from oncurve.agents.openenv_session import is_openenv, session_around, session_at
from oncurve.agents.verifiers_task import VerifiersTask, is_taskset, load_tasks, tasks_of
from oncurve.core.errors import ConfigError
from oncurve.episodes.settings import OPENENV, VERIFIERS


def environment_of(environment: Any) -> Callable[[], Any]:
    """A factory of environments, one per completion: itself, or an adapter around another library's.

    Raises ConfigError where that library or what is named in it is missing.
    """
    if isinstance(environment, str) and environment.startswith(OPENENV):
        return partial(session_at, environment.removeprefix(OPENENV))
    if isinstance(environment, str):
        return partial(VerifiersTask, load_tasks(environment.removeprefix(VERIFIERS)))
    if is_taskset(environment):
        return partial(VerifiersTask, tasks_of(environment))
    if not callable(environment):
        raise ConfigError(
            f"environments: {type(environment).__name__} is none. Pass a class, or a function that makes one"
        )

    def make() -> Any:
        made = environment()
        return session_around(made) if is_openenv(made) else made

    return make
