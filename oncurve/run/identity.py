"""The identity of a run, by which a checkpoint recognizes it: recipe, data, base model, code of the user's, machine."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import oncurve
from oncurve.core.errors import ConfigError
from oncurve.core.records import SOURCE_ROW, Prompt
from oncurve.observe.manifest import package_versions, redact_tree
from oncurve.observe.run_model import resolve_model
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.schema import Config
from oncurve.run.builder import Parts
from oncurve.run.state import checksum


def identity(parts: Parts) -> dict[str, Any]:
    """The identity of a checkpoint: the recipe, the data, the base and the machine, for its manifest.

    Call it in all processes, while the policy still has the weights of the base.

    Raises ConfigError if another process loaded other data or another model.
    """
    facts = own_identity(parts)
    names = {
        "data": "training prompts",
        "base": "weights of the base model",
        "recipe_sha256": "recipe",
        "given": "rows or rewards",
        "code": "code of rewards, tools or environments",
        "model_files": "configuration or tokenizer",
    }
    for rank, theirs in enumerate(parts.policy.processes.all_gather({key: facts.get(key) for key in names})):
        if other := [text for key, text in names.items() if theirs[key] != facts.get(key)]:
            raise ConfigError(
                f"process {rank} has another {other[0]} than process {parts.policy.processes.rank}. Put recipe, data "
                f"and model where all machines see the same files"
            )
    return facts


def own_identity(parts: Parts) -> dict[str, Any]:
    """The same, as this process sees it."""
    config = recorded(parts.config)
    digest = hashlib.sha256()
    if not isinstance(parts.prompts.train, list):
        digest.update(parts.prompts.train.fingerprint.encode())
    for prompt in parts.prompts.written:
        digest.update(f"{prompt.index}\0{prompt.text}\0{prompt.row.get('answer')}\n".encode("utf-8", "replace"))
    for demonstration in parts.prompts.written_demonstrations:
        digest.update(repr(demonstration.token_ids).encode())
    return {
        "config": config,
        "recipe_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "data": {"num_prompts": len(parts.prompts.train), "sha256": digest.hexdigest()},
        "base": {
            "name": config["model"],
            "sha256": parts.objects.base_sha256 or weights_checksum(parts.policy),
        },
        **({"given": dict(parts.objects.fingerprints)} if parts.objects.fingerprints else {}),
        "code": code_fingerprints(parts.config),
        "model_files": model_fingerprints(str(config["model"])),
        "environment": read_variables(parts.config),
        "columns": column_fingerprints(parts.prompts.written),
        "rank": 0,
        "world_size": parts.policy.processes.count,
        "threads": torch.get_num_threads(),
        "device": str(parts.policy.trained_model.device.type),
        "versions": {"oncurve": oncurve.__version__, "python": platform.python_version(), **package_versions()},
    }


def code_fingerprints(config: Config) -> dict[str, str]:
    """Fingerprints of the code files that the recipe names, by their use and name."""
    return {
        f"{kind}: {name}": digest for kind, file in _code_files(config) for name, digest in fingerprints(file).items()
    }


def read_variables(config: Config) -> dict[str, str]:
    """Fingerprints of the environment variables that this code asks for by name; they may be secrets. "": not set."""
    names = {name for _, file in _code_files(config) for name in variables(file)}
    known = {name: os.environ.get(name) for name in sorted(names)}
    return {name: "" if value is None else hashlib.sha256(value.encode()).hexdigest() for name, value in known.items()}


def _code_files(config: Config) -> Iterator[tuple[str, Path]]:
    """The code files that the recipe names, each with its use."""
    algorithm, rollouts = config.algorithm, config.rollouts
    named: list[tuple[str, Any]] = []
    for reward in config.rewards:
        named += [(f"reward {reward.key}", value) for value in (reward.code_file(), *vars(reward).values())]
    named += [("loss", algorithm.function), ("advantage", algorithm.advantage_function)]
    named += [(f"tool {reference}", reference) for reference in rollouts.tools]
    named += [(f"environment {name}", reference) for name, reference in rollouts.environments.items()]
    named.append(("agent", rollouts.agent))
    for kind, reference in named:
        if (
            not isinstance(reference, str)
            or reference.startswith("given:")
            or not (":" in reference or reference.endswith(".py"))
        ):
            continue
        if (file := file_of(reference)) is not None:
            yield kind, file


MODEL_FILES = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip


def model_fingerprints(model: str) -> dict[str, str]:
    """Fingerprints of what a folder says of a model beside its weights: its shape, its tokenizer, its end tokens, its
    own code."""
    folder = Path(resolve_model(str(Path(model).expanduser())))
    files = [folder / name for name in MODEL_FILES if (folder / name).is_file()]
    files += sorted(folder.glob("*.py")) if (folder / "config.json").is_file() else []
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def column_fingerprints(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Fingerprints of the columns of the training rows, which rewards and environments may read."""
    digests: dict[str, Any] = {}
    write = json.JSONEncoder(sort_keys=True, default=lambda value: type(value).__name__).encode
    for prompt in prompts:
        for name, value in prompt.row.items():
            if name != SOURCE_ROW:
                text = write(value)
                digests.setdefault(name, hashlib.sha256()).update(f"{prompt.index} {text}\n".encode("utf-8", "replace"))
    return {name: digest.hexdigest() for name, digest in digests.items()}


def weights_checksum(policy: TrainedPolicy) -> str:
    """The checksum of all weights as they are now. All processes call it."""
    weights = policy.trained_model.named_parameters()
    sha256 = checksum(weights, in_full_precision=True, whole=policy.backend.full_tensor)
    assert sha256 is not None  # of a model without weights
    return sha256


def recorded(config: Config) -> dict[str, Any]:
    """A recipe as it is written down: resolved, as JSON gives it back, without what looks like a key."""
    return json.loads(json.dumps(redact_tree(config.model_dump(mode="json"))))


def file_of(location: str) -> Path | None:
    """The file of ``module:name`` or ``path/to/file.py:name``; None for one of an installed package."""
    module = location.rpartition(":")[0] or location
    if module.endswith(".py"):
        return Path(module)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    return origin if origin is not None and is_local(origin) else None


def is_local(path: Path) -> bool:
    """A file of the user's: no part of Python, of an installed package or of this one."""
    resolved = path.resolve()
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed.append(Path(__file__).parents[1])
    return resolved.suffix == ".py" and not any(resolved.is_relative_to(folder.resolve()) for folder in installed)


def fingerprints(first: Path) -> dict[str, str]:
    """Fingerprints of a file and of the files that it imports from beside it, comments and layout apart, by name."""
    return {name: hashlib.sha256(ast.dump(tree).encode()).hexdigest() for name, tree in _trees(first).items()}


def variables(first: Path) -> set[str]:
    """The environment variables that these files ask for by name: `os.environ["NAME"]`, `os.getenv("NAME")`."""
    nodes = [node for tree in _trees(first).values() for node in ast.walk(tree)]
    lookups = [(node.value, node.slice) for node in nodes if isinstance(node, ast.Subscript)]
    lookups += [(node.func, node.args[0]) for node in nodes if isinstance(node, ast.Call) and node.args]
    return {
        str(name.value)
        for where, name in lookups
        if isinstance(name, ast.Constant) and re.search(r"\b(environ(\.get)?|getenv)$", ast.unparse(where))
    }


def _trees(first: Path) -> dict[str, ast.Module]:
    """A file and the files that it imports from beside it, by name."""
    root, waiting, trees = first.resolve().parent, [first.resolve()], dict[str, ast.Module]()
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        if name in trees:
            continue
        try:
            trees[name] = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):  # whoever imports it says what is wrong
            continue
        waiting += [imported for imported in _imported(trees[name], path, root) if is_local(imported)]
    return trees


def _imported(tree: ast.AST, path: Path, root: Path) -> Iterator[Path]:
    """Files that a module imports, looked for beside it and beside the first file."""
    for node in ast.walk(tree):
        names: list[str] = []
        folders = [path.parent, root, Path.cwd()]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folders = [path.parents[node.level - 1]] if len(path.parents) >= node.level else []
            names = [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
        for name in filter(None, names):
            parts = name.split(".")
            for folder in folders:
                for count in range(1, len(parts) + 1):
                    inner = folder.joinpath(*parts[:count])
                    yield from (file for file in (inner.with_suffix(".py"), inner / "__init__.py") if file.is_file())
