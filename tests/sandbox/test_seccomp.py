"""The filter of system calls allows what programs need and nothing else, on both machines."""

from __future__ import annotations

import re
import subprocess
from hashlib import sha256

import pytest
from bpf import verdict

from oncurve.sandbox.inside import syscalls
from oncurve.sandbox.inside.seccomp import ALLOW, AUDIT_ARCH, ENOSYS, EPERM, KILL, child_filter

OWN_PID = 4242
TABLES = syscalls.FILES + syscalls.FILE_CHANGES + syscalls.WAITING + syscalls.MEMORY_AND_THREADS + syscalls.PROCESS
FORK = {"x86_64": 57, "aarch64": 1_000}
EXECVE = {"x86_64": 59, "aarch64": 221}
SOCKET = {"x86_64": 41, "aarch64": 198}
PTRACE = {"x86_64": 101, "aarch64": 117}
MEMFD = {"x86_64": 319, "aarch64": 279}


def ask(machine: str, number: int, *arguments: int) -> int:
    program = child_filter(machine, OWN_PID, may_change_files=True)
    return verdict(program, architecture=AUDIT_ARCH[machine], number=number, arguments=arguments)


def checked(machine: str, name: str, *arguments: int) -> int:
    return ask(machine, syscalls.numbers(syscalls.CHECKED, machine)[name], *arguments)


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_every_call_of_the_tables_is_allowed_and_every_other_number_refused(machine: str) -> None:
    allowed = set(syscalls.numbers(TABLES, machine).values())
    conditional = set(syscalls.numbers(syscalls.CHECKED, machine).values())
    for number in range(600):
        if number not in conditional:
            expected = ALLOW if number in allowed else EPERM if number < 424 else ENOSYS
            assert ask(machine, number) == expected, number


@pytest.mark.parametrize("machine", syscalls.MACHINES)
@pytest.mark.parametrize("numbers", [EXECVE, SOCKET, PTRACE, MEMFD])
def test_dangerous_calls_are_refused(machine: str, numbers: dict[str, int]) -> None:
    assert ask(machine, numbers[machine]) == EPERM


def test_the_programs_are_those_that_were_reviewed() -> None:
    """Each instruction counts: a change of a program is a visible decision."""
    found = {
        (machine, may_change): sha256(child_filter(machine, OWN_PID, may_change_files=may_change)).hexdigest()[:16]
        for machine in syscalls.MACHINES
        for may_change in (True, False)
    }
    assert found == {
        ("x86_64", True): "9bc84a762e3dfd37", ("x86_64", False): "e68700bf94a2355e",
        ("aarch64", True): "b72804450c95b6d3", ("aarch64", False): "f34f277809628895",
    }  # fmt: skip


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_threads_may_be_started_but_no_process_and_no_namespace(machine: str) -> None:
    thread = 0x3D0F00
    assert checked(machine, "clone", thread) == ALLOW
    assert checked(machine, "clone", 17) == EPERM
    assert checked(machine, "clone", thread | 0x10000000) == EPERM


@pytest.mark.parametrize("machine", syscalls.MACHINES)
@pytest.mark.parametrize("name", ["kill", "tgkill"])
@pytest.mark.parametrize("target", [0, 1, OWN_PID + 1, 2**32 - 1])
def test_only_the_process_itself_may_be_signalled(machine: str, name: str, target: int) -> None:
    assert checked(machine, name, target, 9) == EPERM
    assert checked(machine, name, OWN_PID, 9) == ALLOW


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_a_file_may_not_be_used_to_signal_others(machine: str) -> None:
    for command in (8, 10, 15, 1024):
        assert checked(machine, "fcntl", 3, command, 1) == EPERM
    assert checked(machine, "fcntl", 3, 4, 0o4000) == ALLOW
    assert checked(machine, "ioctl", 3, 0x8901) == EPERM
    assert checked(machine, "ioctl", 3, 0x5412) == EPERM
    assert checked(machine, "ioctl", 3, 0x5421) == ALLOW


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_sockets_come_in_connected_stream_pairs_only(machine: str) -> None:
    close_on_exec = 0o2000000
    assert checked(machine, "socketpair", 1, 1 | close_on_exec) == ALLOW
    assert checked(machine, "socketpair", 1, 2) == EPERM
    assert checked(machine, "socketpair", 2, 1) == EPERM
    assert checked(machine, "sendto", 3, 0, 5, 0, 0, 0) == ALLOW
    assert checked(machine, "sendto", 3, 0, 5, 0, 0x7F0000001000, 16) == EPERM
    assert checked(machine, "sendto", 3, 0, 5, 0, 0x100000000, 16) == EPERM


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_limits_are_changed_for_the_process_itself_and_the_process_keeps_its_death_signal(machine: str) -> None:
    assert checked(machine, "prlimit64", 0) == ALLOW
    assert checked(machine, "prlimit64", 1) == EPERM
    assert checked(machine, "prctl", 15) == ALLOW
    assert checked(machine, "prctl", 1) == EPERM


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_files_are_changed_only_where_there_is_a_folder_of_the_program_s_own(machine: str) -> None:
    program = child_filter(machine, OWN_PID, may_change_files=False)
    for name, number in syscalls.numbers(syscalls.FILE_CHANGES, machine).items():
        assert verdict(program, architecture=AUDIT_ARCH[machine], number=number) == EPERM, name
        assert ask(machine, number) == ALLOW, name


@pytest.mark.parametrize("machine", syscalls.MACHINES)
def test_no_file_is_truncated_by_opening_it_for_reading(machine: str) -> None:
    for flags, expected in (
        (0, ALLOW),
        (0x241, ALLOW),
        (0x202, ALLOW),
        (0x200, EPERM),
        (0x203, EPERM),
        (0x80200, EPERM),
    ):
        assert checked(machine, "openat", 2**32 - 100, 0x7F0000001000, flags) == expected


def test_calls_through_the_gates_for_32_bit_programs_are_fatal() -> None:
    program = child_filter("x86_64", OWN_PID, may_change_files=True)
    assert verdict(program, architecture=0x40000003, number=1) == KILL
    assert verdict(program, architecture=AUDIT_ARCH["x86_64"], number=0x40000000) == KILL


def test_a_machine_without_a_table_has_no_filter() -> None:
    with pytest.raises(KeyError):
        child_filter("riscv64", OWN_PID, may_change_files=False)


@pytest.mark.parametrize(
    ("machine", "header", "defines"),
    [
        ("x86_64", "asm/unistd_64.h", ""),
        (
            "aarch64",
            "asm-generic/unistd.h",
            "#define __BITS_PER_LONG 64\n#define __ARCH_WANT_RENAMEAT\n#define __ARCH_WANT_NEW_STAT\n"
            "#define __ARCH_WANT_SET_GET_RLIMIT\n#define __ARCH_WANT_SYS_CLONE3\n",
        ),
    ],
)
def test_the_numbers_are_those_of_the_kernel_headers(machine: str, header: str, defines: str) -> None:
    try:
        ended = subprocess.run(
            ["cc", "-E", "-dM", "-"],
            input=f"{defines}#include <{header}>\n",
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler with kernel headers: sudo apt-get install gcc linux-libc-dev")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", ended.stdout))
    for name, number in syscalls.numbers(TABLES + syscalls.CHECKED, machine).items():
        if name in found:
            assert number == int(found[name]), name
    assert len(found) > 200
