"""Do a script's rewards, logs and resumes look alike under TRL and here?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import oncurve.trl
from oncurve.observe.run_model import EMBEDDED

Rows = list[dict[str, Any]]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of TRL and what it stands on


class Seen(TrainerCallback):
    """What a reward was called with, and what was logged."""

    def __init__(self) -> None:
        self.called: list[dict[str, Any]] = []
        self.logged: list[tuple[int, set[str]]] = []

    def reward(self, completions: list[Any], **given: Any) -> list[float]:
        kinds = {name: type(value).__name__ for name, value in given.items()}
        rows = {name: given[name] for name in ("gold", "even", "marks", "prompts")}
        self.called.append({"kinds": kinds, "first": str(type(completions[0])), **rows})
        return [float(place) for place, _ in enumerate(completions)]  # every group has a signal

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append((state.global_step, set(logs)))


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., tuple[Seen, Any]]:
    """Train two steps with a library of TRL's names."""
    from datasets import Dataset

    rows = [
        {"prompt": f"How much is {n} + 1?", "gold": n + 1, "even": n % 2 == 0, "marks": [n, None]} for n in range(16)
    ]

    def run(library: ModuleType, *, resume: str | None = None, **options: Any) -> tuple[Seen, Any]:
        seen = Seen()
        folder = tmp_path / library.__name__.replace(".", "_")
        args = library.GRPOConfig(
            **{
                "output_dir": str(folder), "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8,
                "use_cpu": True, "max_completion_length": 6, "bf16": False, "learning_rate": 1e-4, "report_to": "none",
                "disable_tqdm": True, "logging_steps": 1, "save_steps": 1,
            } | options
        )  # fmt: skip
        model, tokenizer = AutoModelForCausalLM.from_pretrained(EMBEDDED), AutoTokenizer.from_pretrained(EMBEDDED)
        trainer = library.GRPOTrainer(
            model=model, reward_funcs=seen.reward, args=args, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer, callbacks=[seen],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=None if resume is None else str(folder / resume))
        return seen, trainer

    return run


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    return pytest.importorskip("trl", reason="TRL is not installed: it comes with the extra trl")


OWN_FILES = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}


def test_a_script_sees_the_same_under_both(ask: Callable[..., tuple[Seen, Any]], theirs: ModuleType) -> None:
    """Arguments and columns of rewards, steps and keys of logs, files, and steps after a resume from checkpoint-1."""
    (there, their_trainer), (here, our_trainer) = ask(theirs), ask(oncurve.trl)
    for a, b in zip(there.called, here.called[1:-1], strict=True):  # not those of the measurements
        assert {**a["kinds"], "environments": "list"} == b["kinds"]
        assert a["first"] == b["first"]
        for seen in (a, b):
            assert all(n == gold - 1 for gold, (n, _) in zip(seen["gold"], seen["marks"], strict=True))
            assert {type(value) for value in seen["even"]} == {bool}
    assert [step for step, _ in there.logged] == [step for step, _ in here.logged]
    for (_, a), (_, b) in zip(there.logged, here.logged, strict=True):
        assert a - b == set()
    saved = [
        {path.name for path in Path(trainer.args.output_dir, "checkpoint-2").iterdir()}
        for trainer in (their_trainer, our_trainer)
    ]
    assert saved[0] - saved[1] == OWN_FILES
    resumed = [ask(library, resume="checkpoint-1", max_steps=3) for library in (theirs, oncurve.trl)]
    steps = [[row["step"] for row in trainer.state.log_history] for _, trainer in resumed]
    assert steps == [[1, 2, 3, 3], [1, 2, 3, 3]]
    assert [[step for step, _ in seen.logged] for seen, _ in resumed] == [[2, 3, 3], [2, 3, 3]]
