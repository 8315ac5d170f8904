"""Installed packages that programs may import, each with nothing of its neighbours."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from oncurve.core.errors import ConfigError

INSIDE = "/packages"
"""Their place in a program's own file system."""


def package_paths(names: Sequence[str]) -> list[Path]:
    """The files and folders that belong to distributions, at the top of where they are installed.

    Raises ConfigError for one that is not installed.
    """
    paths: dict[str, Path] = {}
    for name in names:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            raise ConfigError(
                f"rewards: programs.packages names {name!r}, which is not installed here. Run pip install {name}, or "
                f"remove it"
            ) from None
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        paths |= {top: Path(str(package.locate_file(top))) for top in sorted(tops)}
    return [path for path in paths.values() if path.exists()]


@functools.cache
def folder_of_links(names: tuple[str, ...]) -> str:
    """A folder that holds only links to the packages, for programs that share the file system; it goes at the end."""
    folder = tempfile.mkdtemp(prefix="oncurve-packages-")
    os.chmod(folder, 0o755)
    for path in package_paths(names):
        os.symlink(path.resolve(), os.path.join(folder, path.name))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def module_names(names: Sequence[str]) -> list[str]:
    """The modules that programs import from the packages."""
    tops = [path.name.removesuffix(".py") for path in package_paths(names)]
    return [top for top in tops if top.isidentifier()]
