"""Functions of the package on the two ways of CONTRIBUTING.md, counted in a run of two steps of ``word_problems``.

python tests/architecture/ways.py           how many functions in how many files
python tests/architecture/ways.py --names   and which
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

import oncurve
from oncurve.core.batch import Batch
from oncurve.core.records import Completion, Group, Prompt, Reward
from oncurve.core.sampler import SamplingRequest
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config, read_text
from oncurve.run.training import run_recipe
from oncurve.section import Section

PACKAGE = Path(oncurve.__file__).parent
FEW = ("run.steps=2", "run.prompts_per_step=2", "evaluation.num_prompts=4", "evaluation.every_steps=0")
READERS = ("recipe", "section")
"""Readers of the recipe, which are not counted among those that get it."""


def holds(value: Any, kinds: tuple[type, ...]) -> bool:
    """A value is of one of the kinds, or a sequence of them."""
    if isinstance(value, (list, tuple)) and value:
        return holds(value[0], kinds)
    return isinstance(value, kinds)


class Counter:
    """Notes which functions get what, while it is installed as a profiler."""

    def __init__(self) -> None:
        self.recipe: set[tuple[str, str]] = set()
        self.data: set[tuple[str, str]] = set()
        self.in_step = self.has_gradient = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Look at the arguments of a call."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)) or code.co_name.startswith("<"):
            return
        file = str(Path(code.co_filename).relative_to(PACKAGE))
        name, count = code.co_qualname, code.co_argcount + code.co_kwonlyargcount
        arguments = [frame.f_locals.get(key) for key in code.co_varnames[:count]]
        if name == "StepLog.begin":
            self.in_step = True
        is_reader = file.split("/")[0].removesuffix(".py") in READERS
        if not self.has_gradient and not is_reader and any(isinstance(value, Section) for value in arguments):
            self.recipe.add((file, name))
        if self.in_step and not self.has_gradient and any(holds(one, KINDS) for one in arguments):
            self.data.add((file, name))
        if name == TrainedPolicy.backward.__qualname__:
            self.has_gradient = True


KINDS = (Prompt, SamplingRequest, Completion, Group, Reward, Batch)


def main() -> None:
    path = find_recipe("word_problems")
    counter = Counter()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(path, [*FEW, f"run.folder={folder}", "run.name=run"])
        sys.setprofile(counter)
        try:
            run_recipe(config, read_text(path), console=Console(file=io.StringIO()))
        finally:
            sys.setprofile(None)
    for what, found in (
        ("the recipe or a section", counter.recipe),
        ("a prompt, completion, reward or batch", counter.data),
    ):
        print(f"{len(found)} functions in {len({file for file, _ in found})} files get {what}")
        if "--names" in sys.argv:
            by_file = defaultdict(list)
            for file, name in sorted(found):
                by_file[file].append(name)
            for file, names in by_file.items():
                print(f"  {file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
