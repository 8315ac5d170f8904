"""Environments of OpenEnv servers, through the client of that package.

The policy's whole turn is the action. Where an action has one field of text, that is the turn; any other action is
written as a JSON object with its fields.
"""

from __future__ import annotations

import importlib
import json
import typing
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from oncurve.core.errors import ConfigError

BESIDES = ("metadata", "done", "reward")
"""Fields of every action or observation, which say nothing to the policy."""
_INVALID = "VALIDATION_ERROR"
"""A server's code for an action that does not fit its schema."""


class OpenEnvSession:
    """A session with a server, in Gymnasium's form."""

    def __init__(self, client: Any, schema: Mapping[str, Any], make_action: Callable[[dict[str, Any]], Any]) -> None:
        """``schema`` is that of an action, ``make_action`` what the client takes for the fields of one."""
        self._client = client.sync() if _is_client(client, "EnvClient") else client
        self._make_action = make_action
        fields = {
            name: schema_of_field
            for name, schema_of_field in schema.get("properties", {}).items()
            if name not in BESIDES
        }
        texts = [name for name, schema_of_field in fields.items() if schema_of_field.get("type") == "string"]
        self.only_text = texts[0] if len(fields) == 1 and texts else None
        """The one field of an action, where it is a text."""
        self.fields = tuple(fields)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        result = self._reply(lambda: self._client.reset(seed=seed))
        return text_of(result.observation), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send a turn. One that is no action is answered with what is wrong, as is one that the server refuses."""
        try:
            sent = self._make_action(self._read(action))
            result = self._reply(lambda: self._client.step(sent))
        except ValueError as error:
            return f"error: {str(error)[:300]}", 0.0, False, False, {}
        return text_of(result.observation), float(result.reward or 0.0), bool(result.done), False, {}

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _read(self, action: str) -> dict[str, Any]:
        if self.only_text is not None:
            return {self.only_text: action}
        try:
            made = json.loads(action)
        except (ValueError, RecursionError):
            made = None
        if not isinstance(made, dict):
            raise ValueError(f"the action must be a JSON object with {', '.join(self.fields)}")
        return made

    @staticmethod
    def _reply(ask: Callable[[], Any]) -> Any:
        """A server's reply. Raises ValueError for an invalid action, ConnectionError where the server is gone."""
        lost = importlib.import_module("websockets.exceptions").WebSocketException
        try:
            return ask()
        except (lost, TimeoutError) as error:
            raise ConnectionError(f"the OpenEnv server does not answer: {error}") from error
        except RuntimeError as error:
            if _INVALID in str(error):
                raise ValueError(str(error)) from None
            raise


def session_at(address: str) -> OpenEnvSession:
    """A new session with the server at an address.

    Raises ConfigError without the package, ConnectionError where no server answers.
    """
    try:
        client = importlib.import_module("openenv.core").GenericEnvClient
    except ImportError:
        raise ConfigError(
            f"rollouts.environments: openenv:{address} needs OpenEnv's client. Run `pip install openenv-core`"
        ) from None
    return OpenEnvSession(client(base_url=address), _schema_at(address), lambda fields: fields)


def session_around(client: Any) -> OpenEnvSession:
    """A session through a client of a user, whose class names the type of its actions."""
    inner = client.async_client if _is_client(client, "SyncEnvClient") else client
    for base in (generic for kind in type(inner).__mro__ for generic in vars(kind).get("__orig_bases__", ())):
        action, *_ = (*typing.get_args(base), None)
        if isinstance(action, type) and "model_json_schema" in dir(action):
            return OpenEnvSession(client, action.model_json_schema(), action.model_validate)  # type: ignore[attr-defined]
    raise ConfigError(
        f"environment: {type(inner).__name__} does not name the type of its actions. Derive it from "
        f"EnvClient[MyAction, MyObservation, MyState], or name the server as openenv:http://HOST:PORT"
    )


def is_openenv(made: Any) -> bool:
    """The object is a client of OpenEnv, which need not be imported to see that."""
    return _is_client(made, "EnvClient") or _is_client(made, "SyncEnvClient")


def text_of(observation: Any) -> str:
    """An observation as text: its one field of text, else what it holds as JSON."""
    content = observation.model_dump() if "model_dump" in dir(observation) else observation
    if not isinstance(content, Mapping):
        return str(content)
    fields = {str(key): value for key, value in content.items() if key not in BESIDES and value is not None}
    texts = [value for value in fields.values() if isinstance(value, str)]
    if len(fields) == 1 and texts:
        return texts[0]
    return json.dumps(fields, ensure_ascii=False, default=str)


def _is_client(made: Any, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.startswith("openenv.") for kind in type(made).__mro__)


def _schema_at(address: str) -> Mapping[str, Any]:
    """The schema of an action. Raises ConnectionError where no server gives one."""
    url = f"{address.rstrip('/')}/schema"
    try:
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            return json.load(answer)["action"]
    except (OSError, ValueError, KeyError, urllib.error.URLError) as error:
        raise ConnectionError(f"no OpenEnv server answers at {url} ({error})") from error
