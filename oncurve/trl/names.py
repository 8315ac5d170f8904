"""The name `trl` in a script, resolved to `oncurve.trl`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import oncurve.trl
from oncurve.core.errors import ConfigError
from oncurve.trl import unsloth
from oncurve.wording import listed

ELSEWHERE = (
    "BEMACallback", "SyncRefModelCallback", "add_response_schema", "clone_chat_template",
    "create_reference_model", "extract_prompt", "get_training_chat_template", "init_zero_verbose",
    "is_conversational_from_value", "maybe_convert_to_chatml", "maybe_extract_prompt",
    "maybe_unpair_preference_dataset", "pack_dataset", "prepare_multimodal_messages", "supports_tool_calling",
    "unpair_preference_dataset",
)  # fmt: skip
"""Public names of TRL that are not here, beside its other trainers and their configurations, also those that it has no
more. They are TRL's own where it is installed; otherwise a script may import them, and may not use them."""
ITSELF = "trl_itself"
"""The name under which TRL's own package is loaded beside its stand-in: its modules import each other relatively."""
STANDS_FOR = ("trl", "unsloth", "unsloth_zoo")
"""Packages that scripts import and that are found here."""
ASKS_FOR = re.compile(r"(is)?_(?P<package>\w+)_available")
"""Whether a package is installed, which scripts ask of TRL and sometimes set; nothing here is decided by it."""
SHOWING = ("LogCompletionsCallback", "RichProgressCallback", "WeaveCallback")
"""Callbacks of TRL that show what is in the run's folder anyway. They can be made and do nothing."""


class NotInTrl(ConfigError, ImportError):
    """A name or a package that scripts import and that is not here."""


class _Elsewhere(type):
    """A class that may be named and inherited from, and cannot be made."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        """Raises ConfigError."""
        instead = "Run that part with TRL"
        if PathFinder.find_spec("trl") is None:
            instead = "`pip install trl`: beside GRPOTrainer, TRL's own parts run as they are"
        raise ConfigError(f"the script uses trl.{cls.__name__}, which is not imitated here. {instead}")


class ScriptNames(MetaPathFinder, Loader):
    """Finds `trl` and all that is below it in `oncurve.trl`, and Unsloth in `oncurve.trl.unsloth`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of that name; None for those that are none of ours."""
        first = fullname.partition(".")[0]
        asks_vllm = first == "vllm" and "unsloth" in sys.modules and PathFinder.find_spec("vllm") is None
        return ModuleSpec(fullname, self, is_package=True) if first in STANDS_FOR or asks_vllm else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module whose names are those of oncurve.trl, wherever TRL keeps them."""
        module = TrlModule(spec.name, oncurve.trl.__doc__)
        vars(module).update(__version__=oncurve.trl.__version__, __getattr__=lambda name: named(spec.name, name))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are looked up when they are asked for."""

    def get_resource_reader(self, fullname: str) -> Any:
        """The files of TRL's own package, such as the template of its model cards; None where it is not installed."""
        spec = PathFinder.find_spec(fullname) if fullname == "trl" else None
        return None if spec is None else SourceFileLoader("trl", str(spec.origin)).get_resource_reader("trl")


class TrlModule(ModuleType):
    """A module of TRL, in which a script can replace only what is looked up here."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises ConfigError for a name that nothing here calls."""
        is_known = name in oncurve.trl.__all__ or ASKS_FOR.fullmatch(name) is not None
        if not name.startswith("__") and not isinstance(value, ModuleType) and not is_known:
            raise ConfigError(
                f"the script replaces {name!r} in {self.__name__}, which nothing calls here. Say it in GRPOConfig or "
                f"as a reward, or write the loop yourself with oncurve's verbs (docs/python.md)"
            )
        super().__setattr__(name, value)


def named(module: str, name: str) -> Any:
    """Our counterpart of a name of TRL. Raises NotInTrl where there is none."""
    if name.startswith("__"):
        raise AttributeError(name)
    if module.partition(".")[0] != "trl":
        if name in unsloth.NAMES:
            return unsloth.NAMES[name]
        raise NotInTrl(
            f"the script imports {name!r} from {module}, which is not imitated. There are: {listed(unsloth.NAMES)}; "
            f"load other models with transformers and give them to GRPOTrainer"
        )
    if name in oncurve.trl.__all__:
        return oncurve.trl.__getattr__(name)
    if name in ELSEWHERE or name.endswith(("Trainer", "Config", "WithValueHead")):
        own = _own(module, name)
        return _Elsewhere(name, (), {}) if own is None else own
    if match := ASKS_FOR.fullmatch(name):
        is_there = PathFinder.find_spec(match["package"]) is not None
        return (lambda *_, **__: is_there) if name.startswith("is_") else is_there
    if name in SHOWING:
        from transformers import TrainerCallback

        return type(name, (TrainerCallback,), {"__init__": lambda *_, **__: None})
    raise NotInTrl(
        f"the script imports {name!r} from {module}, a part of TRL's own trainers that oncurve.trl has not: a script "
        f"that brings a trainer of its own runs with TRL. For one that does not, leave the import out; there are: "
        f"{', '.join(known for known in oncurve.trl.__all__ if known != '__version__')}"
    )


def _own(module: str, name: str) -> Any:
    """TRL's own object of a name; None where it has none, is not installed, or trains with GRPO itself."""
    spec = PathFinder.find_spec("trl")
    if spec is None or spec.origin is None:
        return None
    if ITSELF not in sys.modules:
        locations = spec.submodule_search_locations
        own = spec_from_file_location(ITSELF, spec.origin, submodule_search_locations=locations)
        assert own is not None
        assert own.loader is not None
        sys.modules[ITSELF] = module_from_spec(own)
        own.loader.exec_module(sys.modules[ITSELF])
    for path in (ITSELF + module.removeprefix("trl"), ITSELF):
        try:
            names = vars(__import__(path, fromlist=[name]))  # which loads it where TRL does it when it is asked for
        except (ImportError, RuntimeError):  # RuntimeError: TRL's, of a package that is missing
            continue
        if name in names:
            kinds = {kind.__name__ for kind in names[name].__mro__} if isinstance(names[name], type) else set()
            return None if "GRPOTrainer" in kinds else names[name]
    return None


@contextmanager
def trl_resolved() -> Iterator[None]:
    """While it lasts, `import trl` is `import oncurve.trl` in this process."""
    finder, before = ScriptNames(), _loaded()
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(before)


def _loaded() -> dict[str, ModuleType]:
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in STANDS_FOR}
    return ours | {name: module for name, module in sys.modules.items() if isinstance(module, TrlModule)}
