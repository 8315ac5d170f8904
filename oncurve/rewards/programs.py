"""Reward for programs, which run against the tests of their row in a sandbox."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal

from oncurve.core.errors import ConfigError
from oncurve.core.records import Completion, Prompt, Reward
from oncurve.rewards.code_blocks import program_in
from oncurve.rewards.late_graders import ProgramsReward
from oncurve.rewards.thinking import spoken_text
from oncurve.sandbox.failures import SandboxDied
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.packages import module_names
from oncurve.sandbox.pool import SandboxPool, Workplace
from oncurve.sandbox.program_cases import run_cases
from oncurve.sandbox.program_judge import run_test_program
from oncurve.sandbox.program_results import ProgramVerdict, TestResult, same_for_all
from oncurve.sandbox.program_tests import (
    ProgramCase,
    ProgramCases,
    Tests,
    UnusableTests,
    names_of,
    read_tests,
    sources_of,
)

_CONTROL = ProgramCases("two", (ProgramCase((), {}, "", 2),))


def judge_program(workplace: Workplace, sources: Sequence[str], tests: Tests, *, limits: Limits) -> ProgramVerdict:
    """The verdict on one program, with a second and more patient try if the machine was too busy for the first.

    Raises SandboxDied.
    """
    verdict = ProgramVerdict()
    for attempt in (limits, limits.patient()):
        if isinstance(tests, ProgramCases):
            verdict = run_cases(workplace.program, sources, tests, limits=attempt, judge=workplace.judge)
        else:
            verdict = run_test_program(workplace, sources, tests, limits=attempt)
        if not any(result.was_starved for result in verdict.results):
            break
    return verdict


class Programs:
    """Runs the last fenced program of a completion against the tests of its row.

    What the program does wrong, such as looping, exiting or eating the memory, costs it the tests it does wrong on.
    What is not its doing gives no value but an error: "unparsable_reference" if the tests cannot be run, "sandbox" if
    no sandbox could be started. Parts: "correct" (1.0 if all tests passed), "passed_fraction", "format" (1.0 if there
    was a program).

    Owns the processes of its pool until ``close()``; a pool that is given stays open. It grades several programs at
    once and equal ones only once per call.

    Raises SandboxUnavailable if this machine has no isolation as strong as the allowed one.
    """

    name = "programs"
    waits: Literal[True] = True

    def __init__(
        self,
        section: ProgramsReward | None = None,
        *,
        template: str = "{program}",
        limits: Limits | None = None,
        pool: SandboxPool | None = None,
    ) -> None:
        """``limits`` of one program: those of the section, if none are passed."""
        if "{program}" not in template:
            raise ConfigError("programs: the template does not contain {program}. Say where the program goes.")
        self.kinds: Counter[str] = Counter()
        """Number of verdicts of each kind since the start: "passed", "wrong", "timeout", ..."""
        self._section = section = section or ProgramsReward()
        self._checker = None if section.checker is None else _code_in(section.checker)
        self._template = template
        self._limits = limits or Limits(cpu_seconds=section.cpu_seconds)
        self._owns_pool = pool is None
        self._pool = pool or SandboxPool(
            limits=self._limits, allow=section.isolation, num_workers=section.workers, packages=section.packages
        )
        if section.packages:
            self._check_packages(section.packages)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Reward]:
        """One reward per completion."""
        tests: dict[int, Tests | UnusableTests] = {}
        running: dict[tuple[int, str], Future[ProgramVerdict]] = {}
        graded: list[Future[ProgramVerdict] | Reward] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            row = id(prompt.row)
            if row not in tests:
                tests[row] = self._tests_of(prompt.row)
            row_tests = tests[row]
            if isinstance(row_tests, UnusableTests):
                graded.append(self._failed("unparsable_reference", str(row_tests)))
                continue
            spoken = spoken_text(prompt, completion)
            program = program_in(spoken, require_fence=self._section.require_fence, names=names_of(row_tests))
            if program is None:
                self.kinds["no_program"] += 1
                parts = {"correct": 0.0, "passed_fraction": 0.0, "format": 0.0}
                graded.append(Reward(value=0.0, parts=parts, detail="no program in the completion"))
                continue
            if (row, program) not in running:
                running[row, program] = self._start(program, row_tests, prompt.row)
            graded.append(running[row, program])
        return [item if isinstance(item, Reward) else self._reward(item) for item in graded]

    def close(self) -> None:
        """Ends the sandboxes; calling it twice is harmless."""
        if self._owns_pool:
            self._pool.close()

    def _tests_of(self, row: Mapping[str, Any]) -> Tests | UnusableTests:
        try:
            source = row.get(self._section.checker_column)
            checker = source if isinstance(source, str) and source.strip() else self._checker
            return read_tests(row, checker=checker)
        except UnusableTests as error:
            return error

    def _start(self, program: str, tests: Tests, row: Mapping[str, Any]) -> Future[ProgramVerdict]:
        sources = sources_of(self._template.replace("{program}", program), row)
        return self._pool.submit(partial(judge_program, sources=sources, tests=tests, limits=self._limits))

    def _reward(self, future: Future[ProgramVerdict]) -> Reward:
        try:
            verdict = future.result()
        except SandboxDied as error:
            if not self._sandboxes_work():
                return self._failed("sandbox", str(error))
            verdict = same_for_all(TestResult("killed_sandbox", f"twice: {error}"), 1)
        if verdict.broken:
            return self._failed("unparsable_reference", verdict.summary)
        self.kinds[verdict.kind] += 1
        correct = float(verdict.is_correct)
        value = correct if self._section.scale == "binary" else verdict.passed_fraction
        parts = {"correct": correct, "passed_fraction": verdict.passed_fraction, "format": 1.0}
        return Reward(value=value, parts=parts, detail=verdict.summary)

    def _sandboxes_work(self) -> bool:
        """Whether a harmless program can be graded: then a sandbox that died twice died of the program it ran."""
        control = partial(judge_program, sources=["def two(): return 2"], tests=_CONTROL, limits=Limits())
        try:
            return self._pool.submit(control).result().is_correct
        except SandboxDied:
            return False

    def _check_packages(self, packages: Sequence[str]) -> None:
        """Refuses packages that programs could not import: every program that does would be wrong."""
        source = "\n".join([*(f"import {name}" for name in module_names(packages)), "def two(): return 2"])
        control = partial(judge_program, sources=[source], tests=_CONTROL, limits=self._limits)
        verdict = self._pool.submit(control).result()
        if not verdict.is_correct:
            raise ConfigError(
                f"rewards: programs.packages are {', '.join(packages)}, which the sandbox cannot import: "
                f"{verdict.summary}. Name what they need as well, and install them where every user may read"
            )

    def _failed(self, error: str, detail: str) -> Reward:
        self.kinds[error] += 1
        return Reward(value=None, error=error, detail=detail)


def _code_in(path: str) -> str:
    """The code of a file. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"rewards: programs.checker is {path}, which cannot be read: {error.strerror}") from None
