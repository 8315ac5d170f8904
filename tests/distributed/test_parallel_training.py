"""Do several processes end at the weights of one? With real processes that talk over gloo."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tasks
import workers
from lanes import gate

from oncurve.policy.distributed import ALONE, Processes

LIMIT = {False: 1e-5, True: 1e-10}
"""Largest difference of a weight, in float32 and in float64."""
VARIANTS: dict[str, dict[str, Any]] = {
    f"{way}-{'lora' if lora else 'whole'}-{bits}": {"way": way, "lora": lora, "double": bits == "float64"}
    for way, lora, bits in itertools.product(("ddp", "fsdp"), (False, True), ("float32", "float64"))
}
OTHERS: dict[str, dict[str, Any]] = {
    "ddp-idle": {"way": "ddp", "lora": False, "double": True, "one_row": True, "kl_coef": 0.0},
    "fsdp-idle": {"way": "fsdp", "lora": False, "double": True, "one_row": True, "kl_coef": 0.0},
    "fsdp-lora-idle": {"way": "fsdp", "lora": True, "double": True, "one_row": True, "kl_coef": 0.0},
    "ddp-padded": {"way": "ddp", "lora": False, "double": True, "packing": False},
    "fsdp-recomputed": {"way": "fsdp", "lora": True, "double": True, "gradient_checkpointing": True},
    "fsdp-kept": {"way": "fsdp", "lora": False, "double": True, "reshard": False},
    "fsdp-publishing": {"way": "fsdp", "lora": True, "double": False, "publishes": True},
    "fsdp-gspo": {"way": "fsdp", "lora": False, "double": True, "one_row": True, "kl_coef": 0.0, "preset": "gspo"},
}
IN_THE_GATE = (
    "ddp-whole-float32",
    "ddp-lora-float64",
    "fsdp-whole-float64",
    "fsdp-lora-float32",
    "ddp-idle",
    "fsdp-lora-idle",
    "fsdp-recomputed",
    "fsdp-publishing",
)
"""Each way, whole and with an adapter, and both widths with each; an idle process with each way, too."""


def train_all(processes: Processes, variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every variant, one after the other in the same processes."""
    return {name: tasks.train(processes, **options) for name, options in variants.items()}


@pytest.fixture(scope="module")
def in_the_gate(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found, for the variants of the gate."""
    kept = {name: options for name, options in (VARIANTS | OTHERS).items() if name in IN_THE_GATE}
    return workers.run(2, train_all, tmp_path_factory.mktemp("two"), variants=kept)


@pytest.fixture
def two(variant: str, request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    """What each of two processes found, for a variant among others."""
    if variant in IN_THE_GATE:
        return request.getfixturevalue("in_the_gate")
    return workers.run(2, train_all, tmp_path / "two", variants={variant: (VARIANTS | OTHERS)[variant]})


def largest_gap(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).detach().abs().max()) for name in expected)


def assert_same(found: list[dict[str, Any]], alone: dict[str, Any], *, double: bool) -> None:
    for one in found:
        assert largest_gap(one["weights"], alone["weights"]) < LIMIT[double]
        assert largest_gap(one["shown"], alone["weights"]) < LIMIT[double], "samplers see other weights"
        assert one["statistics"] == pytest.approx(alone["statistics"], rel=1e-3, abs=1e-6)
    assert sum(one["tokens"] for one in found) == alone["tokens"]


@pytest.mark.proves("F69", "D12")
@pytest.mark.parametrize("variant", gate(VARIANTS, *(name for name in VARIANTS if name in IN_THE_GATE)))
def test_two_processes_end_at_the_weights_of_one(variant: str, two: list[dict[str, Any]]) -> None:
    options = VARIANTS[variant]
    alone = tasks.train(ALONE, **options)
    start = dict(
        tasks.make_policy(ALONE, "ddp", double=options["double"], lora=options["lora"]).model.named_parameters()
    )
    assert largest_gap(start, alone["weights"]) > 1e-3, "training moved nothing"
    found = [one[variant] for one in two]
    assert_same(found, alone, double=options["double"])
    assert max(one["tokens"] for one in found) < 0.65 * alone["tokens"], "one process does most of the work"
    held = [one["numbers_held"] for one in found]
    assert max(held) < 0.7 * alone["numbers_held"] if options["way"] == "fsdp" else held == [alone["numbers_held"]] * 2


@pytest.mark.parametrize("variant", gate(["ddp-idle", "fsdp-idle", "fsdp-lora-idle"], "ddp-idle", "fsdp-lora-idle"))
def test_a_process_without_a_trainable_token_keeps_step(variant: str, two: list[dict[str, Any]]) -> None:
    found = [one[variant] for one in two]
    assert sorted(one["tokens"] > 0 for one in found) == [False, True]
    assert_same(found, tasks.train(ALONE, **OTHERS[variant]), double=True)


@pytest.mark.parametrize("variant", ["fsdp-publishing"])
def test_where_servers_sample_one_process_has_all_weights_and_the_others_their_part(
    variant: str, two: list[dict[str, Any]]
) -> None:
    options = {name: value for name, value in OTHERS[variant].items() if name != "publishes"}
    alone = tasks.train(ALONE, **options)
    first, second = (one[variant] for one in two)
    for one in (first, second):
        assert largest_gap(one["weights"], alone["weights"]) < LIMIT[False]
    assert largest_gap(first["shown"], alone["weights"]) < LIMIT[False], "servers get other weights"
    assert second["shown"] is None


@pytest.mark.parametrize(
    "variant", gate(["ddp-padded", "fsdp-recomputed", "fsdp-kept", "fsdp-gspo"], "fsdp-recomputed")
)
def test_other_ways_of_computing_end_at_the_same_weights(variant: str, two: list[dict[str, Any]]) -> None:
    assert_same([one[variant] for one in two], tasks.train(ALONE, **OTHERS[variant]), double=True)


@pytest.mark.nightly
@pytest.mark.parametrize("bits", ["float64", "float32"])
def test_four_processes_end_at_the_weights_of_one(bits: str, tmp_path: Path) -> None:
    """Also where two and two hold all weights (HSDP)."""
    variants = {name: options for name, options in VARIANTS.items() if name.endswith(bits)}
    rows: dict[str, dict[str, Any]] = {
        f"{name} in rows of two": {**variants[name], "degree": 2} for name in variants if name.startswith("fsdp")
    }
    found = workers.run(4, train_all, tmp_path, variants=variants | rows)
    for name, options in (variants | rows).items():
        alone = tasks.train(ALONE, **{key: value for key, value in options.items() if key != "degree"})
        assert_same([one[name] for one in found], alone, double=options["double"])
    held = {name: found[0][name]["numbers_held"] for name in found[0]}
    assert held[f"fsdp-whole-{bits} in rows of two"] > 1.8 * held[f"fsdp-whole-{bits}"]
