"""Do two processes under DeepSpeed end at the weights of one without it, and are contradictions in its file refused?

The training runs in the Python that has DeepSpeed: this one, or ONCURVE_DEEPSPEED_PYTHON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tasks
import torch

from oncurve.core.errors import ConfigError
from oncurve.policy.deepspeed_settings import read_settings, resolve
from oncurve.policy.distributed import ALONE
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.sharding import ZeroSettings
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config

if TYPE_CHECKING:
    from nursery import Nursery

PYTHON = os.environ.get("ONCURVE_DEEPSPEED_PYTHON") or (
    sys.executable if importlib.util.find_spec("deepspeed") else None
)
needs_deepspeed = pytest.mark.skipif(
    PYTHON is None, reason="DeepSpeed is not installed: make engines, which make test-all uses"
)
pytestmark = pytest.mark.timeout(1000)
OPTIMIZER = OptimizerSettings(learning_rate=1e-3, max_gradient_norm=0.5)
LIMIT = 1e-5
"""Largest difference of a weight, in float32."""
NAMES = (
    "zero1",
    "zero1-offload",
    "zero2",
    "zero2-offload",
    "zero2-offload-lora",
    "zero2-offload-idle",
    "zero2-offload-lora-idle",
    "zero3",
    "zero3-offload",
    "zero3-offload-lora",
    "zero3-idle",
)


@pytest.fixture(scope="module")
def script_says(deepspeed_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that the script found, in one start of two processes."""
    folder = tmp_path_factory.mktemp("deepspeed")
    done = deepspeed_nursery.run_python(Path(__file__).with_name("zero_script.py"), folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return torch.load(folder / "found.pt", weights_only=False)


def largest_gap(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).detach().abs().max()) for name in expected)


@pytest.mark.proves("F48", "F49")
@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_end_at_the_weights_of_one(name: str, script_says: dict[str, Any]) -> None:
    options = script_says["variants"][name]
    alone = tasks.train(ALONE, way="ddp", double=False, **{k: v for k, v in options.items() if k != "zero"})
    found = [one[name] for one in script_says["trained"]]
    start = dict(tasks.make_policy(ALONE, "ddp", double=False, lora=options["lora"]).model.named_parameters())
    assert largest_gap(start, alone["weights"]) > 1e-3, "training moved nothing"
    for one in found:
        assert largest_gap(one["weights"], alone["weights"]) < LIMIT
        assert largest_gap(one["shown"], alone["weights"]) < LIMIT, "samplers see other weights"
        assert one["statistics"] == pytest.approx(alone["statistics"], rel=1e-3, abs=1e-6)
    assert sum(one["tokens"] for one in found) == alone["tokens"]
    if "idle" in name:
        assert sorted(one["tokens"] > 0 for one in found) == [False, True]
    held = max(one["numbers_held"] for one in found)
    assert (held < 0.7 * alone["numbers_held"]) == name.startswith("zero3")


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2-offload", "zero2-offload-lora", "zero3-offload", "zero3"])
def test_a_checkpoint_in_the_middle_changes_no_bit(name: str, script_says: dict[str, Any]) -> None:
    for one in script_says["saved"]:
        whole, again = one[name]["whole"], one[name]["again"]
        assert [key for key in whole if not torch.equal(whole[key], again[key])] == []


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_copies_in_bfloat16_are_dithered_as_in_one_process(stage: int, script_says: dict[str, Any]) -> None:
    for one in script_says["dithered"]:
        found = one[f"stage {stage}"]
        assert torch.equal(found["deepspeed"], found["alone"])
        assert not torch.equal(found["nearest"], found["alone"])


@needs_deepspeed
@pytest.mark.slow
def test_updates_that_make_no_sense_move_nothing(script_says: dict[str, Any]) -> None:
    for one in script_says["senseless"]:
        assert one["zero"] == 0.0, "no gradient: no momentum either"
        assert one["nan"] == 0.0
        assert one["zero_statistics"] == {"policy/skipped_updates": 1.0, "policy/nonfinite_updates": 0.0}
        assert one["nan_statistics"] == {"policy/skipped_updates": 1.0, "policy/nonfinite_updates": 1.0}


@needs_deepspeed
@pytest.mark.slow
def test_what_deepspeed_does_not_take_is_a_message(script_says: dict[str, Any]) -> None:
    assert all("DeepSpeed does not take it" in one["said"] for one in script_says["refused"])


def settings(tree: dict[str, Any], *, offload: bool = False) -> ZeroSettings:
    return ZeroSettings(tree, "ds.json", offload)


def resolved(tree: dict[str, Any], *, offload: bool = False, half: bool = False) -> dict[str, Any]:
    return resolve(settings(tree, offload=offload), OPTIMIZER, hidden_size=64, half=half, world_size=2)


@pytest.mark.proves("F49")
def test_auto_takes_the_numbers_of_recipe_and_model() -> None:
    found = resolved(
        {
            "train_batch_size": "auto",
            "gradient_clipping": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.99]}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
        },
        offload=True,
        half=True,
    )
    assert found["gradient_clipping"] == 0.5
    assert found["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 64 * 64,
        "offload_optimizer": {"device": "cpu"},
    }
    assert found["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert found["managed_gradient_accumulation"] is False
    assert not found.keys() & {"optimizer", "scheduler", "bf16"}


@pytest.mark.proves("D47")
@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0, and the recipe says 0.5"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "lr is 1e-05, and the recipe says 0.001"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type is 'Lion'"),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, "torch_adam is not known"),
        ({"optimizer": "AdamW"}, "optimizer is 'AdamW'; it must be an object"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "scheduler is the recipe's to say"),
        ({"train_batch_size": 64}, "train_batch_size is the recipe's to say"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4; use 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "round_robin_gradients": "auto"}}, 'what "auto" means for zero_opt'),
    ],
)
def test_a_file_that_contradicts_the_recipe_is_refused(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolved(tree)


def test_a_file_that_cannot_be_read_is_a_message(tmp_path: Path) -> None:
    assert read_settings(None, offload=True).stage == 2
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    for name, said in (("gone", "cannot be read"), ("broken", "cannot be read"), ("list", "not a JSON object")):
        with pytest.raises(ConfigError, match=said):
            read_settings(str(tmp_path / f"{name}.json"), offload=False)
    (tmp_path / "good.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert read_settings(str(tmp_path / "good.json"), offload=False).stage == 3


def test_a_file_without_deepspeed_is_refused() -> None:
    with pytest.raises(ConfigError, match="names a file, but"):
        load_config(find_recipe("word_problems"), ["policy.deepspeed=ds.json"])


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_without_deepspeed_it_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install"):
        tasks.make_policy(ALONE, "deepspeed", double=False, lora=False, settings=settings({}))
    assert "LOCAL_RANK" not in os.environ, "others would take it for a launcher"
