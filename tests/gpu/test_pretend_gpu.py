"""Does the pretend GPU raise, count and repeat what a GPU does?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import on_device
import pytest

if TYPE_CHECKING:
    from pretend_gpu import PretendGpu

DEVICES = "Expected all tensors to be on the same device"


@pytest.fixture(scope="module")
def found(pretend_gpu: PretendGpu) -> dict[str, Any]:
    """What all checks gave, of one process."""
    names = [
        "mixing", "carrying", "half_width", "counted", "memory", "failures", "graphs", "refusals", "flash",
        "backward_of_attention", "child_process",
    ]  # fmt: skip
    return pretend_gpu(on_device.several, names)


def test_tensors_of_two_devices_do_not_meet_but_numbers_and_indices_do(found: dict[str, Any]) -> None:
    errors = found["mixing"]
    for name in ("added", "multiplied", "chosen by a mask", "gathered", "written into", "into the CPU", "optimizer"):
        assert DEVICES in errors[name], (name, errors[name])
    assert not any(errors[name] for name in ("a number", "an index", "copied"))


def test_numbers_are_those_of_the_cpu(found: dict[str, Any]) -> None:
    buffer = ("cuda:0", [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], (1, 3))
    assert found["carrying"] == {"buffer": buffer, "same": True, "devices": {"cuda:0"}, "loaded": True}


def test_autocast_casts_and_a_missing_cast_is_noticed(found: dict[str, Any]) -> None:
    half = found["half_width"]
    assert (half["product"], half["total"], half["wide"]) == ("torch.bfloat16", "torch.float32", "torch.float32")
    assert "dtype" in half["not cast"]


def test_launches_and_waits_are_counted(found: dict[str, Any]) -> None:
    counted = found["counted"]
    assert counted["a view"] == (0, 0)
    assert counted["a product"] == (1, 0)
    assert counted["two"] == (2, 0)
    assert counted["many at once"] == (1, 0)
    for name in ("an item", "a list", "to the host", "from the host", "a mask", "as if", "a wait"):
        assert counted[name][1] == 1, (name, counted[name])
    for name in ("to pinned memory", "from pinned memory"):
        assert counted[name][1] == 0, (name, counted[name])


def test_bytes_are_counted_while_they_live(found: dict[str, Any]) -> None:
    memory = found["memory"]
    assert memory["held"] == 4_000_256, "rounded up to 512 bytes, while a view is left"
    assert memory["left"] == 512
    assert memory["peak"] == memory["counted"] == 4_000_256
    assert memory["allocations"] == 2
    assert memory["full"].startswith("OutOfMemoryError: CUDA out of memory")
    assert memory["fits again"] == ""
    assert memory["garbage"], "new memory holds no numbers that anybody could rely on"


def test_memory_runs_out_where_it_is_asked_to(found: dict[str, Any]) -> None:
    assert found["failures"] == {
        "second allocation": [False, True, False, False],
        "third product": [False, False, True, False],
        "before the scope": [False] * 4,
        "in the scope": [True, False, False, False],
    }


def test_a_graph_reads_what_its_memory_holds_now_and_bakes_in_numbers(found: dict[str, Any]) -> None:
    graphs = found["graphs"]
    assert graphs["nothing was computed"] == (True, [0.0] * 3)
    assert graphs["first"] == ([8.0] * 3, [3.0] * 3)
    assert graphs["another weight, the same factor"] == ([26.0] * 3, [33.0] * 3)
    assert "given back since it was recorded" in graphs["given back"]


def test_a_recording_refuses_what_waits(found: dict[str, Any]) -> None:
    refusals = found["refusals"]
    for name in ("an item", "a pageable copy", "an index from the host", "a mask", "empty_cache"):
        assert "operation" in refusals[name], (name, refusals[name])
        assert "captur" in refusals[name], (name, refusals[name])
    assert refusals["a pinned copy"] == ""
    assert "non-default stream" in refusals["default stream"]


def test_the_flash_kernel_reads_the_keys_that_are_used_and_refuses_tables_it_would_misread(
    found: dict[str, Any],
) -> None:
    flash = found["flash"]
    assert flash["error"] < 0.02
    assert "announced" in flash["too many keys"]
    assert "announced" in flash["announced"]
    assert "int32" in flash["long starts"]
    assert "only support" in flash["float32"]


def test_attention_kernels_have_the_gradients_of_plain_products(found: dict[str, Any]) -> None:
    assert found["backward_of_attention"]["flash"] < 0.02
    assert found["backward_of_attention"]["efficient"] < 1e-5


def test_processes_that_it_starts_have_it_too(found: dict[str, Any]) -> None:
    assert found["child_process"] == "2.0 True"
