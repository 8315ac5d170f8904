"""Does the experiment for a small GPU run under real DeepSpeed ZeRO-2 with offload, alone and in two processes?

It runs in the Python that has DeepSpeed: this one, or ONCURVE_DEEPSPEED_PYTHON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from oncurve.core.errors import ConfigError
from oncurve.policy.distributed import ALONE, Processes
from oncurve.policy.from_settings import make_sharding
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

FEW = ("evaluation.num_prompts=8", "evaluation.num_prompts_during=4", "run.prompts_per_step=4")


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(1000)  # DeepSpeed may have to compile first
def test_one_process_is_killed_and_two_are_resumed(
    deepspeed_nursery: Nursery,
    tmp_path: Path,
    wait_for: Callable[..., None],
    reaches: Callable[..., bool],
    rows_of: Callable[..., Any],
) -> None:
    run = tmp_path / "run"
    train = ["train", "gsm8k_lora_8gb/tiny", f"run.folder={tmp_path}", "run.name=run", *FEW]
    first = deepspeed_nursery.start(*train)
    wait_for(lambda: reaches(run, 3), first, 400.0)
    first.kill(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    status, said = deepspeed_nursery.run("resume", run, "--processes", 2, "--allow-change")
    assert status == 0, said
    assert len(rows_of(run)) == 7
    adapter = json.loads((run / "model" / "adapter_config.json").read_text())
    assert (adapter["r"], sorted(adapter["target_modules"])) == (16, ["k_proj", "o_proj", "q_proj", "v_proj"])
    weights = load_file(run / "model" / "adapter_model.safetensors")
    assert max(float(weight.abs().max()) for name, weight in weights.items() if "lora_B" in name) > 0


def sharding(processes: Processes, *overrides: str) -> object:
    config = load_config(find_recipe("gsm8k_lora_8gb"), overrides)
    return make_sharding(config.policy, config.optimizer, processes)


def test_deepspeed_is_used_by_one_process_and_under_weights_of_few_bits() -> None:
    settings = sharding(ALONE)
    assert isinstance(settings, ZeroSettings)
    assert settings.stage == 2
    assert settings.source.endswith("gsm8k_lora_8gb/zero2.json")
    assert isinstance(sharding(Processes(0, 2)), ZeroSettings)


def test_what_would_cut_weights_of_few_bits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(ConfigError, match="stages 1 and 2"):
        sharding(ALONE, f"policy.deepspeed={tmp_path / 'zero3.json'}")
    with pytest.raises(ConfigError, match=r"policy\.parallel is fsdp"):
        sharding(Processes(0, 2), "policy.parallel=fsdp", "policy.deepspeed=null")
