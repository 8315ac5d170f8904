"""Names that the extensions of the package add: the core imports none of them, and loads what is asked for by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

TABLE = {
    "agents": "oncurve.agents.recipe_agent:with_agent",
    "foreign environments": "oncurve.agents.foreign_environments:environment_of",
    "look-ahead sampling": "oncurve.fleet.prefetch:Prefetch",
    "processes": "oncurve.fleet.launch.local:supervise",
    "serve": "oncurve.fleet.serve_model:serve_model",
    "servers": "oncurve.fleet.recipe_servers:make_server_sampler",
    "servers of a machine": "oncurve.fleet.settle:settle",
    "slurm": "oncurve.fleet.launch.slurm:submit_run",
    "teacher behind a server": "oncurve.fleet.servers.teacher_server:connect_teacher",
    "trl": "oncurve.trl.run_script:run_script",
    "trl recipe": "oncurve.trl.run_script:write_script_recipe",
}
"""The module and what is taken from it."""


def extension(name: str) -> Any:
    """The object under a name of the table, imported now."""
    return imported(TABLE[name])


def imported(reference: str) -> Any:
    """The object at a place such as "oncurve.sample.engine:make_engine", imported now."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)
