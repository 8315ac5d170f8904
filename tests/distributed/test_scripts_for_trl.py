"""Does a script for TRL train the same in several processes, started by `oncurve trl --processes` or by torchrun?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

if TYPE_CHECKING:
    from nursery import Nursery

TOGETHER = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def reward(completions, gold, **kwargs):
    return [float(len(c) % 5) for c in completions]

if __name__ == "__main__":
    import sys
    if "joined" in sys.argv[2]:
        from accelerate import PartialState
        PartialState(cpu=True)
    rows = Dataset.from_list([{"prompt": f"How much is {i} + 1?", "gold": i + 1} for i in range(24)])
    args = GRPOConfig(output_dir="out", max_steps=2, num_generations=4, per_device_train_batch_size=int(sys.argv[1]),
                      max_completion_length=8, bf16=False, use_cpu=True, learning_rate=1e-4, eval_strategy="steps",
                      eval_steps=1, num_generations_eval=2)
    trainer = GRPOTrainer("embedded", reward, args, rows, eval_dataset=rows.select(range(3)))
    trainer.train()
    trainer.save_model(sys.argv[2])
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        trainer.save_model(sys.argv[2] + "_by_main")
        measured = [row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row]
        trainer.save_metrics("eval", {"measured": measured, "processes": trainer.accelerator.num_processes})
"""


@pytest.mark.nightly
def test_two_processes_train_what_one_does(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TOGETHER)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    for words, batch, name in (
        (["oncurve", "trl"], 16, "one"),
        (["oncurve", "trl", "--processes", "2"], 8, "two"),
        ([*torchrun, "oncurve", "trl"], 8, "launched_and_joined"),
    ):
        done = nursery.run_python("-m", *words, "train.py", batch, name)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f'"processes": {1 if name == "one" else 2}' in Path("out/eval_results.json").read_text()
    alone = load_file("one/model.safetensors")
    for name in ("one_by_main", "two", "two_by_main", "launched_and_joined"):
        other = load_file(f"{name}/model.safetensors")
        assert all(torch.allclose(alone[part], other[part], atol=1e-4) for part in alone), name
