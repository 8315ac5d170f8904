"""Does the experiment for a small GPU run under real DeepSpeed ZeRO-2 with offload, alone and in two processes?

It runs in the Python that has DeepSpeed: this one, or ONCURVE_DEEPSPEED_PYTHON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from oncurve.config.load import load_config
from oncurve.errors import ConfigError
from oncurve.policy.deepspeed_settings import ZeroSettings
from oncurve.policy.distributed import ALONE, Processes
from oncurve.recipes.find import find_recipe
from oncurve.wiring.policy import make_sharding

PYTHON = os.environ.get("ONCURVE_DEEPSPEED_PYTHON") or (
    sys.executable if importlib.util.find_spec("deepspeed") else None
)
needs_deepspeed = pytest.mark.skipif(
    PYTHON is None, reason="DeepSpeed is not installed: pip install 'oncurve[deepspeed]', or ONCURVE_DEEPSPEED_PYTHON"
)


class Run:
    """A command in the Python that has DeepSpeed."""

    def __init__(self, folder: Path, *words: object) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        self.log = folder / "output.txt"
        command = [str(PYTHON), "-m", "oncurve", *(str(word) for word in words)]
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        return self.log.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def make(*words: object) -> Run:
        started.append(Run(tmp_path, *words))
        return started[-1]

    yield make
    for one in started:
        one.process.kill()
        one.process.wait()


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(1000)  # DeepSpeed may have to compile first
def test_one_process_is_killed_and_two_are_resumed(
    tmp_path: Path,
    start: Callable[..., Run],
    wait_for: Callable[..., None],
    reaches: Callable[..., bool],
    rows_of: Callable[..., Any],
) -> None:
    run = tmp_path / "run"
    train = ["train", "gsm8k_lora_8gb/tiny", f"run.folder={tmp_path}", "run.name=run"]
    first = start(*train)
    wait_for(lambda: reaches(run, 3), first, 400.0)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    second = start("resume", run, "--processes", 2, "--allow-change")
    assert second.process.wait() == 0, second.output
    assert len(rows_of(run)) == 7
    adapter = json.loads((run / "model" / "adapter_config.json").read_text())
    assert (adapter["r"], sorted(adapter["target_modules"])) == (16, ["k_proj", "o_proj", "q_proj", "v_proj"])
    weights = load_file(run / "model" / "adapter_model.safetensors")
    assert max(float(weight.abs().max()) for name, weight in weights.items() if "lora_B" in name) > 0


def sharding(processes: Processes, *overrides: str) -> object:
    return make_sharding(load_config(find_recipe("gsm8k_lora_8gb"), overrides), processes)


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
