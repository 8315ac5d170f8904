"""Resource limits of one graded program."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program.

    Example: ``Limits(cpu_seconds=2, memory_mib=256)``
    """

    cpu_seconds: int = 3
    """Processor time of one process, whole seconds; a test counts as timed out when it is used up."""
    wall_seconds: float = 8.0
    """Time on the clock for one test or call. It is there for programs that sleep; a busy machine must not decide."""
    program_seconds: float = 60.0
    """Time on the clock for all tests of one program together; tests not reached by then count as failed."""
    memory_mib: int = 512
    """Address space of one process."""
    scratch_mib: int = 64
    """Size of the private /tmp. Without namespaces there is none and nothing can be written."""
    file_mib: int = 16
    """Largest file."""
    output_bytes: int = 1_000_000
    """Most bytes of standard output, or of a returned value as it is sent."""
    open_files: int = 64
    """Most open descriptors."""
    num_threads: int = 64
    """Most threads; other processes cannot be started at all."""
    max_exhausted_tests: int = 2
    """After so many tests that ran out of time or memory, the rest of a program's are not run and count as failed."""

    def patient(self) -> Limits:
        """The same with four times the time on the clock, for a second try on a machine that was busy."""
        return replace(self, wall_seconds=4 * self.wall_seconds, program_seconds=4 * self.program_seconds)
