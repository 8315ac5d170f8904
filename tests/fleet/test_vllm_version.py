"""Is an environment whose vLLM is too old, or that has none, refused before a server is started?"""

from __future__ import annotations

from pathlib import Path

import pytest

from oncurve.core.errors import ConfigError
from oncurve.fleet.recipe_servers import make_server_sampler
from oncurve.fleet.servers.local_vllm import find_python
from oncurve.recipe.load import parse_config


def python_with(folder: Path, version: str) -> str:
    """A program that tells a version as a python with vLLM would."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1rc1", "1.0.dev3"])
def test_the_version_that_was_tried_and_newer_ones_are_taken(version: str, tmp_path: Path) -> None:
    python = python_with(tmp_path, version)
    assert find_python(python) == python


@pytest.mark.proves("F81", "D40")
@pytest.mark.parametrize("version", ["0.8.5", "0.15.1", "0.31.9+cpu"])
def test_an_older_one_is_refused_with_the_version_that_is_needed(version: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"has vLLM {version[:4]}.*Install vLLM 0\.32 or newer"):
        find_python(python_with(tmp_path, version))


@pytest.mark.proves("F81")
def test_an_environment_without_it_is_refused_by_the_recipe(tmp_path: Path) -> None:
    overrides = [
        "rollouts.type=servers",
        "rollouts.vllm_servers=1",
        f"rollouts.vllm_python={python_with(tmp_path, '')}",
    ]
    config = parse_config("{model: embedded, data: {type: word_problems}}", [*overrides, f"run.folder={tmp_path}"])
    with pytest.raises(ConfigError, match=r"has no vLLM.*docs/servers\.md"):
        make_server_sampler(config)
