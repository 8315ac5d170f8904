"""Does the memory that a step leaves behind serve the next one, or go back where it should?"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from oncurve.core.batch import collate
from oncurve.core.records import Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.model import decoding
from oncurve.model.ops_native import library
from oncurve.policy import trained_policy as policy_module
from oncurve.sample import engine as engine_module

START = """
import ctypes, os, sys, torch
from oncurve.model import allocator
if getattr(ctypes.CDLL(None), "mallopt", None) is None:
    print("absent"); sys.exit()
for kept, program in zip(sys.argv[1::2], sys.argv[2::2]):
    if (child := os.fork()) == 0:
        is_set = allocator.keep_freed_memory(always=kept == "always")
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
"""Each program in a process whose memory nobody has set up before, forked from one that has imported torch."""
RESIDENT = """
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
"""
STEPS = """
def step():
    parts = [torch.ones(3_000_000) for _ in range(12)]
    total = sum(float(part[-1]) for part in parts)
    del parts
    allocator.give_back()
    return total
before = resident()
for _ in range(3):
    step()
kept = resident() - before
allocator.give_back(always=True)
print(is_set, kept, resident() - before)
"""
LARGE = STEPS.replace("3_000_000) for _ in range(12)", "12_000_000) for _ in range(3)")
BETWEEN = """
before = resident()
for _ in range(3):
    parts = [(torch.ones(200_000), torch.ones(1_000)) for _ in range(120)]
    small = [part for _, part in parts]
    del parts
left = resident() - before
allocator.give_back()
print(left, resident() - before)
"""
resident_is_known = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the system does not say what is resident"
)


def printed(*programs: tuple[str, str], **environment: str) -> list[list[str]]:
    """The words that each program prints in a fresh process, in which memory is kept as said before it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", START, *(word for program in programs for word in program)]
    done = subprocess.run(command, env=env | environment, capture_output=True, text=True, check=True)
    if done.stdout.strip() == "absent":
        pytest.skip("the C library is not glibc")
    return [line.split() for line in done.stdout.splitlines()]


@resident_is_known
def test_the_memory_of_a_step_is_there_for_the_next_one_or_goes_back() -> None:
    """Of 144 MB in small and in large tensors, and of 96 MB between small tensors that live on."""
    kept, returned, kept_large, returned_large, kept_between, returned_between = printed(
        ("always", RESIDENT + STEPS),
        ("until told", RESIDENT + STEPS),
        ("always", RESIDENT + LARGE),
        ("until told", RESIDENT + LARGE),
        ("always", RESIDENT + BETWEEN),
        ("until told", RESIDENT + BETWEEN),
    )
    assert kept[0] == returned[0] == "True"
    assert int(kept[1]) > 120_000 > 40_000 > int(returned[1])
    assert int(kept_large[1]) > 120_000 > 40_000 > int(returned_large[1])
    assert max(int(kept[2]), int(kept_large[2])) < 40_000, "also what is kept, where it is told so"
    assert min(int(kept_between[0]), int(returned_between[0])) > 60_000
    assert int(kept_between[1]) > 60_000 >= int(returned_between[1])


def test_settings_of_ones_own_go_first() -> None:
    program = "print(is_set)"
    found = printed(("always", program), ("until told", program), MALLOC_TRIM_THRESHOLD_="1000000")
    assert found == [["False"], ["False"]]


def test_memory_goes_back_once_nothing_needs_it_any_more(
    make_policy: Callable[..., policy_module.TrainedPolicy],
    make_prompts: Callable[..., list[Prompt]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When prompts were read, when all is sampled, and when the weights have moved."""
    told: list[str] = []
    tables: list[weakref.ref[Tensor]] = []
    cut_short = decoding.LayerDecoder.end_prompts

    def at(place: str, is_free: Callable[[], bool]) -> Callable[[], None]:
        def give_back() -> None:
            assert is_free(), place
            told.append(place)

        return give_back

    def end_prompts(decoder: decoding.LayerDecoder) -> None:
        if decoder.weights:  # not again at every token
            tables.append(weakref.ref(decoder.caches[0].prompt_keys))
            layers = weakref.ref(decoder.weights[0])
            monkeypatch.setattr(decoding, "give_back", at("prompts", lambda: layers() is None or not has_kernels))
        cut_short(decoder)

    policy, has_kernels = make_policy("qwen2"), library() is not None
    monkeypatch.setattr(decoding.LayerDecoder, "end_prompts", end_prompts)
    monkeypatch.setattr(engine_module, "give_back", at("sampled", lambda: all(table() is None for table in tables)))
    parameters = list(policy.model.parameters())
    monkeypatch.setattr(policy_module, "give_back", at("moved", lambda: all(p.grad is None for p in parameters)))
    engine = engine_module.InProcessEngine(SamplingParams(max_completion_tokens=6))
    engine.load_weights(policy, version=0)
    groups: list[Group] = engine.sample(SamplingRequest(make_prompts("1 + 1 =", "2 + 2 ="), 2))
    batch = collate(groups, Tensor([[1, -1], [1, -1]]))
    policy.backward(policy.logprobs(batch)[0].sum())
    policy.update()
    assert told == ["prompts", "sampled", "moved"]


ARENAS = """
import ctypes, sys, threading
from oncurve.model import allocator
from oncurve.episodes.workers import Calls, Workers
libc = ctypes.CDLL(None)
if getattr(libc, "malloc_info", None) is None:
    print("absent"); sys.exit()
def hold():
    held = bytearray(100_000)
    gate.wait()
calls, gate = Calls(Workers(12)), threading.Barrier(12, timeout=100)
for _ in range(12):
    calls.submit(hold, limit_seconds=200, deliver=lambda result, seconds: None)
while not calls.is_idle:
    calls.collect(wait=True)
libc.open_memstream.restype = ctypes.c_void_p
text, size = ctypes.c_char_p(), ctypes.c_size_t()
stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
libc.malloc_info(0, stream)
libc.fclose(stream)
print(text.value.count(b"<heap nr="))
"""


@pytest.mark.nightly
def test_threads_of_tools_share_few_arenas_of_memory() -> None:
    [[shared]] = printed(("always", ARENAS))
    [[own]] = printed(("always", ARENAS), MALLOC_ARENA_MAX="16")
    assert int(shared) <= 4 < 8 < int(own)
