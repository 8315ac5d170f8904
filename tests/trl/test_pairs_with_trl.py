"""Do a script's rewards, callbacks, logs, files and resumes look alike under TRL and here, in ten settings?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lanes import gate
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import oncurve.trl
from oncurve.observe.run_model import EMBEDDED

Rows = list[dict[str, Any]]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of TRL and what it stands on
OWN_FILES = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "README.md"}
"""Files of transformers' optimizer, which is not the one here, and the card of an adapter."""
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Seen(TrainerCallback):
    """What a reward was called with, what a callback heard of, and what was logged."""

    def __init__(self, stops_after: int | None = None) -> None:
        self.called: list[dict[str, Any]] = []
        self.logged: list[tuple[int, set[str]]] = []
        self.events: Counter[str] = Counter()
        self.stops_after = stops_after
        for name in EVENTS:
            setattr(self, name, self._counting(name))

    def _counting(self, name: str) -> Callable[..., Any]:
        def heard(args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> Any:
            self.events[name] += 1
            if name == "on_log":
                self.logged.append((state.global_step, set(logs)))
            if name == "on_step_end" and state.global_step == self.stops_after:
                control.should_training_stop = True
            return control

        return heard

    def reward(self, completions: list[Any], log_metric: Any, log_extra: Any, **arguments: Any) -> list[float]:
        kinds = {name: type(value).__name__ for name, value in arguments.items()}
        rows = {name: arguments[name] for name in ("gold", "even", "marks", "prompts")}
        self.called.append({"kinds": kinds, "first": str(type(completions[0])), **rows})
        log_metric("mine", 1.0)
        log_extra("place", list(range(len(completions))))
        return [float(index) for index, _ in enumerate(completions)]  # every group has a signal

    async def sometimes(self, completions: list[Any], **_: Any) -> list[float | None]:
        return [None if index % 2 else 1.0 for index, _ in enumerate(completions)]


def texts(number: int) -> Any:
    return f"How much is {number} + 1?"


def messages(number: int) -> Any:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": texts(number)}]


CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PAIRS: dict[str, dict[str, Any]] = {
    "plain": {},
    "messages": {"prompt": messages},
    "two rewards, one of them async and sometimes None": {"rewards": 2, "reward_weights": [1.0, 0.5]},
    "evaluation": {"held": 4, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    "rows of logs now and then": {"logging_steps": 2, "logging_first_step": True, "max_steps": 3},
    "completions as tables": {"log_completions": True, "num_completions_to_print": 1},
    "a KL term": {"beta": 0.1, "loss_type": "grpo"},
    "an adapter": {"adapter": True},
    "accumulated updates": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "save_total_limit": 1},
    "weights in bfloat16": {"dtype": torch.bfloat16, "loss_type": "dr_grpo", "scale_rewards": "none"},
    "a callback that stops": {"stops_after": 1, "max_steps": 3},
    "cispo by epochs": {"loss_type": "cispo", "epsilon_high": 5.0, "max_steps": -1, "num_train_epochs": 1, "rows": 4,
                        "save_strategy": "epoch", "logging_strategy": "epoch"},
}  # fmt: skip


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., tuple[Seen, Any]]:
    """Train two steps with a library of TRL's names."""
    from datasets import Dataset

    def run(library: ModuleType, *, resume: str | None = None, **options: Any) -> tuple[Seen, Any]:
        take = options.pop
        seen, number, num_held_out = Seen(take("stops_after", None)), take("rewards", 1), take("held", 0)
        prompt, dtype, adapter = take("prompt", texts), take("dtype", torch.float32), take("adapter", False)
        made = [
            {"prompt": prompt(n), "gold": n + 1, "even": n % 2 == 0, "marks": [n, None]}
            for n in range(take("rows", 16))
        ]
        folder = tmp_path / library.__name__.replace(".", "_")
        args = library.GRPOConfig(
            **{
                "output_dir": str(folder), "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8,
                "use_cpu": True, "max_completion_length": 6, "bf16": False, "learning_rate": 1e-4, "report_to": "none",
                "disable_tqdm": True, "logging_steps": 1, "save_steps": 1,
            } | options
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
        tokenizer.chat_template = CHAT
        trainer = library.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=dtype),
            reward_funcs=[seen.reward, seen.sometimes][:number], args=args, train_dataset=Dataset.from_list(made),
            eval_dataset=Dataset.from_list(made[:num_held_out]) if num_held_out else None, processing_class=tokenizer,
            callbacks=[seen], peft_config=LoraConfig(r=2, target_modules=["q_proj"]) if adapter else None,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=None if resume is None else str(folder / resume))
        trainer.save_model(str(folder / "saved"))
        return seen, trainer

    return run


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    return pytest.importorskip("trl", reason="TRL is not installed: it comes with the extra trl")


def files(trainer: Any) -> dict[str, set[str]]:
    """What lies in the folders of models and checkpoints that a script wrote."""
    folder = Path(trainer.args.output_dir)
    folders = [*folder.glob("checkpoint-*"), folder / "saved", folder / "completions"]
    return {
        folder_of_files.name: {path.name for path in folder_of_files.iterdir()}
        for folder_of_files in folders
        if folder_of_files.is_dir()
    }


@pytest.mark.parametrize("name", PAIRS)
def test_a_script_sees_the_same_under_both(name: str, ask: Callable[..., tuple[Seen, Any]], theirs: ModuleType) -> None:
    """Arguments and columns of rewards, events, steps and keys of logs, and files."""
    (there, their_trainer), (here, our_trainer) = ask(theirs, **PAIRS[name]), ask(oncurve.trl, **PAIRS[name])
    kinds = [{str((call["kinds"], call["first"])) for call in seen.called} for seen in (there, here)]
    assert [len(kind) for kind in kinds] == [1, 1]
    assert there.called[0]["kinds"] == here.called[0]["kinds"]
    assert there.called[0]["first"] == here.called[0]["first"]
    for call in (*there.called, *here.called):
        assert all(n == gold - 1 for gold, (n, _) in zip(call["gold"], call["marks"], strict=True))
        assert {type(value) for value in call["even"]} == {bool}
    assert there.events == here.events
    assert [step for step, _ in there.logged] == [step for step, _ in here.logged]
    for (_, a), (_, b) in zip(there.logged, here.logged, strict=True):
        assert a - b == set()
    assert their_trainer.state.global_step == our_trainer.state.global_step
    assert their_trainer.state.epoch == our_trainer.state.epoch
    saved, ours = files(their_trainer), files(our_trainer)
    assert saved.keys() == ours.keys()
    assert not any(names - ours[name_of_folder] - OWN_FILES for name_of_folder, names in saved.items())
    if name != "an adapter":
        folders = [f"{trainer.args.output_dir}/saved" for trainer in (their_trainer, our_trainer)]
        assert len({AutoModelForCausalLM.from_pretrained(folder).dtype for folder in folders}) == 1


@pytest.mark.parametrize("name", gate(["plain", "an adapter", "rows of logs now and then"], "plain"))
def test_a_resume_from_a_named_checkpoint_makes_the_same_steps(
    name: str, ask: Callable[..., tuple[Seen, Any]], theirs: ModuleType
) -> None:
    runs = []
    for library in (theirs, oncurve.trl):
        ask(library, **{**PAIRS[name], "max_steps": 2})
        seen, trainer = ask(library, resume="checkpoint-1", **{**PAIRS[name], "max_steps": 3})
        steps = [row["step"] for row in trainer.state.log_history]
        runs.append((steps, [step for step, _ in seen.logged], seen.events))
    assert runs[0] == runs[1]
    assert runs[0][0][-1] == 3
