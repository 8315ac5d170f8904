"""Where memory runs out outside of sampling, does a step end with the same result, or in one message?"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from oncurve.algorithm.presets import build
from oncurve.cli import app
from oncurve.core.errors import (
    OncurveError,
    TrainingError,
)
from oncurve.core.records import Completion, Prompt, SamplingParams
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run_errors import CheckpointError, memory_error_as

if TYPE_CHECKING:
    from oncurve.core.batch import Batch
    from oncurve.run.services import Run

MakePolicy = Callable[..., TrainedPolicy]
MakeBatch = Callable[[str], "Batch"]
TEXTS = tuple(f"{'word ' * number}= {number}" for number in range(8))
SAID = "CUDA out of memory. Tried to allocate 3.00 GiB"


def is_even(prompt: Prompt, completion: Completion) -> bool:
    return completion.token_ids[0] % 2 == 0


@pytest.fixture
def small_run(make_prompts: Callable[..., list[Prompt]], train_in: Callable[..., Run]) -> Callable[..., Run]:
    """A step of the loop of the product."""

    def start(policy: TrainedPolicy, **options: Any) -> Run:
        algorithm = build("grpo", group_size=4, max_completion_tokens=8)
        settings = {"steps": 1, "prompts_per_step": 4} | options
        sampling = SamplingParams(max_completion_tokens=8)
        return train_in(policy, make_prompts(*TEXTS), is_even, algorithm, sampling, **settings)

    return start


def test_nothing_of_a_try_that_failed_is_left_when_smaller_parts_are_tried(
    make_policy: MakePolicy, small_run: Callable[..., Run]
) -> None:
    policy = make_policy()
    backward, logprobs, made, alive = policy.backward, policy.logprobs, [], []

    def choking(loss: torch.Tensor) -> None:
        made.append(weakref.ref(loss))
        if len(made) == 1:
            raise torch.OutOfMemoryError(SAID)
        backward(loss)

    def watched(batch: Batch) -> Any:
        alive.append([ref() is not None for ref in made])
        return logprobs(batch)

    policy.backward, policy.logprobs = choking, watched  # type: ignore[method-assign]
    small_run(policy)
    assert alive[:2] == [[], [False]]


@pytest.mark.parametrize("first", [True, False])
def test_no_update_is_made_twice_where_memory_runs_out_in_the_optimizer(
    first: bool, make_policy: MakePolicy, small_run: Callable[..., Run]
) -> None:
    policy = make_policy()
    if not first:
        small_run(policy, folder="before")
    step, calls = policy.backend.optimizer.step, []

    def choking(*given: Any) -> None:
        calls.append(1)
        step()
        raise torch.OutOfMemoryError(SAID)

    policy.backend.optimizer.step = choking  # type: ignore[method-assign]
    done = policy.num_updates
    with pytest.raises(TrainingError, match=rf"move the weights in update {done + 1}: .*adamw_8bit.*Tried to allocate"):
        small_run(policy)
    assert calls == [1]
    assert policy.num_updates == done


def test_a_checkpoint_that_finds_no_memory_is_told_of_in_one_message(
    make_policy: MakePolicy, small_run: Callable[..., Run]
) -> None:
    def choking(step: int, metrics: Any) -> dict[str, float]:
        raise MemoryError("Unable to allocate 5.00 GiB")

    saver: Any = SimpleNamespace(after_step=choking, mark=lambda *given, **options: None)
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 1 holds .Unable to allocate"):
        small_run(make_policy(), saver=saver)


def test_the_command_line_says_a_lack_of_memory_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loading(**options: Any) -> None:
        raise torch.OutOfMemoryError(f"{SAID}. GPU 0 has a total capacity\nand more")

    monkeypatch.setattr(app, "make_app", lambda command: loading)
    with pytest.raises(SystemExit) as left:
        app.main()
    said = capsys.readouterr().err
    assert left.value.code == 1
    assert said.startswith("oncurve: there is not enough memory. Set policy.gradient_checkpointing=true, ")
    assert said.endswith(f"({SAID}. GPU 0 has a total capacity)\n")
    assert said.count("\n") == 1


def test_the_command_line_hides_no_other_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**options: Any) -> None:
        raise RuntimeError("a shape is wrong")

    monkeypatch.setattr(app, "make_app", lambda command: broken)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        app.main()


def test_an_error_that_was_said_already_is_not_said_again() -> None:
    with pytest.raises(OncurveError, match=r"^first$"), memory_error_as(CheckpointError, "second"):
        raise TrainingError("first")
