"""Does everything around the loop happen when it is due, and are its numbers exact?"""

from __future__ import annotations

import io
import math
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console

from oncurve.algorithm.presets import build
from oncurve.core.errors import RewardError, TrainingError
from oncurve.core.records import Completion, Group, Mean, Prompt, Reward, SamplingParams
from oncurve.observe.measure import rollout_metrics
from oncurve.observe.progress import Progress
from oncurve.observe.record import RunFolder, read_metrics, read_rollouts
from oncurve.rewards.terms import PipelinedRewards
from oncurve.run.interruption import Interrupted
from oncurve.run.services import Run
from oncurve.run.step_log import StepLog

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oncurve.policy.trained_policy import TrainedPolicy

SAMPLING = SamplingParams(max_completion_tokens=8)
TEXTS = tuple(f"{'word ' * number}= {number}" for number in range(8))

RandomGroups = Callable[..., list[Group]]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """A run without a loop, whose screen is a text."""
    folders: list[RunFolder] = []

    def make(*, total_steps: int = 6, folder: str = "run", max_error_fraction: float = 0.2, **options: Any) -> Run:
        folders.append(RunFolder(tmp_path / folder))
        progress = Progress(total_steps, console=Console(file=io.StringIO()))
        options = {"completions_per_step": 12, "completions_per_update": 12} | options
        log = StepLog(folders[-1], progress, max_staleness_steps=9, max_error_fraction=max_error_fraction)
        return Run(log, total_steps=total_steps, **options)

    yield make
    for folder in folders:
        folder.close()


@pytest.fixture
def groups(random_groups: RandomGroups) -> list[Group]:
    return random_groups(3, 4)


def graded(groups: list[Group]) -> list[list[Reward]]:
    return [[Reward(float(completion.index % 2)) for completion in group.completions] for group in groups]


def one_step(run: Run, step: int, groups: list[Group]) -> None:
    """What the loop asks of a run in a step, without training."""
    rewards = graded(groups)
    run.observe(step, groups, rewards)
    run.observe(step, groups, rewards, torch.ones(len(groups), len(groups[0].completions)))
    run.end_step(step)


def test_everything_happens_when_it_is_due(make_run: Callable[..., Run], groups: list[Group]) -> None:
    done: dict[str, list[int]] = {"two": [], "three": [], "never": []}

    def note(name: str) -> Callable[[int], dict[str, float]]:
        def due(step: int) -> dict[str, float]:
            done[name].append(step)
            return {f"evaluation/{name}": float(step)}

        return due

    run = make_run(rollouts_every_steps=4, every=[(2, note("two")), (3, note("three")), (0, note("never"))])
    for step in run.steps():
        one_step(run, step, groups)
    assert done == {"two": [2, 4, 6], "three": [3, 6], "never": []}
    rows = read_metrics(run.log.folder.path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.get("evaluation/two") for row in rows] == [None, 2.0, None, 4.0, None, 6.0]
    written = sorted(path.name for path in (run.log.folder.path / "rollouts").iterdir())
    assert written == ["step_000001.jsonl", "step_000004.jsonl", "step_000006.jsonl"]


@pytest.mark.proves("D36")
def test_statistics_are_added_up_and_divided_once(make_run: Callable[..., Run], groups: list[Group]) -> None:
    run = make_run(total_steps=2)
    for step in run.steps():
        for total, count in ((6.0, 2), (1.0, 1), (0.0, 5)):
            run.log.add({"policy/entropy": Mean(total, count)})
        assert run.log.mean("policy/entropy") == pytest.approx(7 / 8)
        run.log.add({"policy/kl": Mean(float(step), 1)})
        one_step(run, step, groups)
    first, second = read_metrics(run.log.folder.path)
    assert first["policy/entropy"] == second["policy/entropy"] == pytest.approx(7 / 8)
    assert first["tokens/trained"] == 8
    assert (first["policy/kl"], second["policy/kl"]) == (0.0, 1.0), "a step begins with nothing"
    assert first["reward/mean"] == rollout_metrics(groups, graded(groups))["reward/mean"] == 0.5


def test_times_of_a_phase_add_up(make_run: Callable[..., Run], groups: list[Group]) -> None:
    run = make_run(total_steps=1)
    for step in run.steps():
        for _ in range(2):
            with run.timed("sample"):
                pass
        one_step(run, step, groups)
    [row] = read_metrics(run.log.folder.path)
    assert 0 < row["time/sample_seconds"] < row["time/step_seconds"] <= row["time/elapsed_seconds"]
    assert 0 < row["memory/process_gib"] < 1000
    assert row["memory/sample_gib"] > 0
    assert row["speed/sampled_tokens_per_second"] == pytest.approx(row["tokens/sampled"] / row["time/sample_seconds"])


def test_speeds_are_tokens_by_the_seconds_of_their_phase(make_run: Callable[..., Run], groups: list[Group]) -> None:
    run = make_run(total_steps=1)
    run.log.begin({"time/save_seconds": 3.0})
    for phase, seconds in (("sample", 1.0), ("sample", 3.0), ("train", 0.5)):
        run.log.phase(phase, seconds)
    run.log.measure(0, groups, graded(groups))
    run.log.add({"policy/entropy": Mean(1.0, 8)})
    found = run.log.metrics()
    assert (found["time/save_seconds"], found["time/sample_seconds"], found["time/train_seconds"]) == (3.0, 4.0, 0.5)
    assert (found["tokens/trained"], found["speed/trained_tokens_per_second"]) == (8, 16.0)
    assert found["speed/sampled_tokens_per_second"] == found["tokens/sampled"] / 4
    assert found["speed/tokens_per_second"] == pytest.approx(found["tokens/sampled"] / found["time/step_seconds"])
    assert math.isnan(run.log.mean("policy/kl"))
    run.log.begin({})
    assert run.log.metrics().keys() == {
        "tokens/trained", "time/step_seconds", "memory/process_gib", "speed/tokens_per_second"
    }  # fmt: skip


def test_completions_may_be_as_old_as_the_recipe_allows(make_run: Callable[..., Run], groups: list[Group]) -> None:
    log = make_run().log

    def aged(*versions: int) -> list[Group]:
        pairs = zip(groups, versions, strict=True)
        return [
            replace(group, completions=tuple(replace(one, policy_version=version) for one in group.completions))
            for group, version in pairs
        ]

    found = log.check_age(12, aged(12, 9, 3))
    assert (found["completion/mean_staleness_steps"], found["completion/max_staleness_steps"]) == (4.0, 9.0)
    for versions, said in (((12, 12, 2), "0 to 10 steps old; at most 9"), ((13, 12, 12), "-1 to 0 steps old")):
        with pytest.raises(TrainingError, match=said):
            log.check_age(12, aged(*versions))
    log.max_staleness_steps = 0
    assert log.check_age(12, aged(12, 12, 12)) == {
        "completion/mean_staleness_steps": 0.0, "completion/max_staleness_steps": 0.0
    }  # fmt: skip
    assert log.check_age(12, []) == log.check_age(12, aged(12, 12, 12))


def test_the_first_failure_of_grading_is_told_and_an_ungraded_run_is_refused(
    make_run: Callable[..., Run], groups: list[Group]
) -> None:
    rewards, log = graded(groups), make_run(max_error_fraction=1.0).log
    failed = Reward(None, error="crashed", detail="ZeroDivisionError", trace="Traceback: here")
    with pytest.raises(RewardError, match="step 1"):
        log.measure(0, groups, [[failed] * 4] * 3)
    log = make_run(folder="other", max_error_fraction=1.0).log
    log.measure(0, groups, rewards)
    for step in (1, 2):
        log.measure(step, groups, [[failed] * 4, *rewards[1:]])
    shown = log.progress.console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("WARNING") == 1
    assert "step 2: grading failed for 4 of 12 completions" in " ".join(shown.split())
    written = (log.folder.path / "log.txt").read_text()
    assert "step 2: grading failed for 4 of 12 completions" in written
    assert "Traceback: here" in written


def test_a_step_says_what_it_does_in_its_order_and_is_shown(
    make_run: Callable[..., Run], groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[int, str]] = []
    marks: list[int] = []
    monkeypatch.setattr(RunFolder, "write_status", lambda self, step, phase: said.append((step, phase)))
    monkeypatch.setattr(RunFolder, "sync", lambda self: said.append((-1, "sync")))

    class Saver:
        root = Path("checkpoints")

        def mark(self, step: int, *, pending: object = None) -> None:
            marks.append(step)

        def after_step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
            return {"time/save_seconds": float(step)}

        def save_marked(self) -> bool:
            return marks[-1] == 2

    run = make_run(total_steps=2, every=[(2, lambda step: {"evaluation/x": 1.0})], saver=Saver())
    shown = []
    for step in run.steps():
        with run.timed("sample"):
            pass
        one_step(run, step, groups)
        assert run.last is not None
        shown.append((repr(run.last), run.last.save()))
    assert said == [
        (0, "sample"), (0, "record"), (1, "save"), (-1, "sync"),
        (1, "sample"), (1, "evaluate"), (1, "record"), (2, "save"), (-1, "sync"),
    ]  # fmt: skip
    assert marks == [1, 2]
    assert shown == [
        ("<Step 1: mean reward 0.500>", None),
        ("<Step 2: mean reward 0.500>", Path("checkpoints/step_000002")),
    ]
    first, second = read_metrics(run.log.folder.path)
    assert ("time/save_seconds" in first, second["time/save_seconds"]) == (False, 1.0)
    table = run.last._repr_html_() if run.last is not None else ""
    assert table.count("<tr>") == 1 + len(groups)
    assert table.count(">1<") == table.count(">0<") == len(groups)
    assert make_run(folder="unsaved").last is None


def test_a_resumed_run_goes_on_where_it_stopped(make_run: Callable[..., Run]) -> None:
    run = make_run(total_steps=5)
    run.steps_done = 3
    assert list(run.steps()) == [3, 4]
    assert run.steps_done == 5
    assert list(run.steps()) == []


def test_too_many_failed_graders_stop_the_run(make_run: Callable[..., Run], groups: list[Group]) -> None:
    rewards = graded(groups)
    rewards[0] = [Reward(None, error="crashed", detail="ZeroDivisionError")] * 4
    run = make_run(max_error_fraction=0.4)
    run.log.measure(0, groups, rewards)
    run.log.max_error_fraction = 0.3
    with pytest.raises(RewardError, match="4 of 12 completions"):
        run.log.measure(0, groups, rewards)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_a_signal_while_sampling_leaves_the_step_and_handlers_are_given_back(
    number: signal.Signals, code: int, make_run: Callable[..., Run], groups: list[Group]
) -> None:
    before, seen = signal.getsignal(number), []
    run = make_run()

    def loop() -> None:
        for step in run.steps():
            seen.append(step)
            with run.timed("sample"):
                if step == 2:
                    signal.raise_signal(number)
                    seen.append(-1)
            one_step(run, step, groups)

    with pytest.raises(Interrupted), run.interruption.listen():
        loop()
    assert seen == [0, 1, 2]
    assert (run.steps_done, run.interruption.exit_code) == (2, code)
    assert [row["step"] for row in read_metrics(run.log.folder.path)] == [1, 2]
    assert signal.getsignal(number) is before
    again = "Press Ctrl-C again to quit now" if number == signal.SIGINT else "Another signal quits now"
    assert again in run.log.progress.console.file.getvalue()  # type: ignore[attr-defined]


def test_training_is_left_between_microbatches_until_the_weights_move(
    make_run: Callable[..., Run], groups: list[Group]
) -> None:
    run, update = make_run(), {"policy/skipped_updates": Mean(0, 1)}
    with run.interruption.listen():
        steps = run.steps()
        next(steps)
        run.log.add({"policy/loss": Mean(1, 1)})
        run.end_update(update)
        with run.timed("train"):
            signal.raise_signal(signal.SIGTERM)
        run.log.add({"policy/loss": Mean(1, 1)})
        run.end_update(update)  # the step is brought to its end
        one_step(run, 0, groups)
        with pytest.raises(Interrupted):
            next(steps)
    assert run.steps_done == 1
    again = make_run(folder="again")
    with again.interruption.listen():
        next(again.steps())
        with again.timed("train"):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            again.record({"policy/loss": Mean(1, 1)})


def test_a_measurement_that_is_left_is_made_up_for_later(make_run: Callable[..., Run], groups: list[Group]) -> None:
    marks: list[tuple[int, dict[str, float] | None]] = []

    class Marks:
        def mark(self, step: int, *, pending: dict[str, float] | None = None) -> None:
            marks.append((step, pending))

        def after_step(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
            return {}

    def measured(step: int) -> dict[str, float]:
        if step == 2 and not again:
            signal.raise_signal(signal.SIGTERM)
        return {"evaluation/score": float(step)}

    again: list[bool] = []
    run = make_run(every=[(1, measured)], saver=Marks())

    def loop() -> None:
        for step in run.steps():
            one_step(run, step, groups)

    with pytest.raises(Interrupted), run.interruption.listen():
        loop()
    (_, none), (done, pending) = marks
    assert none is None
    assert done == 2
    assert pending is not None
    assert "evaluation/score" not in pending
    again.append(True)
    resumed = make_run(every=[(1, measured)], folder="resumed")
    resumed.steps_done = 2
    resumed.finish(resumed.steps_done, dict(pending))
    [row] = read_metrics(resumed.log.folder.path)
    assert row["step"] == row["evaluation/score"] == 2
    assert row["reward/mean"] == 0.5


def test_a_run_outside_the_main_thread_leaves_signals_alone(make_run: Callable[..., Run]) -> None:
    run, seen = make_run(total_steps=2), []
    thread = threading.Thread(target=lambda: seen.extend(run.steps()))
    thread.start()
    thread.join()
    assert seen == [0, 1]


@pytest.mark.proves("F118", "D36")
@pytest.mark.parametrize("updates_per_step", [1, 2])
def test_metrics_are_exact_over_microbatches(
    updates_per_step: int,
    make_policy: Callable[..., TrainedPolicy],
    make_prompts: Callable[..., list[Prompt]],
    train_in: Callable[..., Run],
) -> None:
    """One large microbatch and many small ones give the same numbers, those of the rollouts where they can be told."""
    algorithm = build("dr_grpo", group_size=4, max_completion_tokens=8)
    rows: list[dict[str, float]] = []
    compared: list[tuple[object, int]] = []
    for tokens in (100_000, 40):
        policy = make_policy(tokens_per_microbatch=tokens)
        run = train_in(
            policy,
            make_prompts(*TEXTS),
            lambda prompt, completion: prompt.index % 4 > 0 and completion.token_ids[0] % 2 == 0,
            algorithm,
            SAMPLING,
            steps=1,
            prompts_per_step=8,
            updates_per_step=updates_per_step,
            folder=f"{tokens} tokens",
            compare=lambda policy, rows: compared.append((policy, rows.size.num_rows)),
        )
        assert compared.pop() == (policy, 32 // updates_per_step)
        assert not compared, "once, before the first update"
        rows += read_metrics(run.log.folder.path)
    whole, parts = rows
    kept = [key for key in whole if not key.startswith(("time/", "speed/", "memory/"))]
    assert {"policy/loss", "policy/entropy", "policy/gradient_norm", "mismatch/kl", "reward/mean"} <= set(kept)
    assert {key: parts[key] for key in kept} == pytest.approx({key: whole[key] for key in kept}, rel=1e-3, abs=1e-5)
    sampled = [c for group in read_rollouts(run.log.folder.path, 1) for c in group["completions"]]
    assert whole["tokens/sampled"] == sum(c["num_tokens"] for c in sampled)
    assert whole["tokens/trained"] == sum(c["num_tokens"] for c in sampled if c["advantage"] != 0)
    assert 0 < whole["tokens/trained"] < whole["tokens/sampled"]
    assert whole["group/zero_signal_fraction"] >= 0.25
    if updates_per_step == 1:
        surrogate = -sum(c["advantage"] * c["num_tokens"] for c in sampled) / (len(sampled) * 8)
        assert whole["policy/loss"] == pytest.approx(surrogate, rel=1e-4)


def test_a_reference_that_moves_is_the_policy_after_its_steps(
    make_policy: Callable[..., TrainedPolicy],
    tiny_model: Callable[..., PreTrainedModel],
    make_prompts: Callable[..., list[Prompt]],
    train_in: Callable[..., Run],
) -> None:
    policy = make_policy(reference=tiny_model("qwen2").requires_grad_(False))
    assert policy.reference is not None
    moving: dict[str, Any] = {"kl_coef": 0.1, "reference": "refreshed", "reference_every_steps": 2}
    algorithm = build("grpo", group_size=4, max_completion_tokens=8, **moving)
    same: list[bool] = []
    for steps in (1, 2):
        train_in(
            policy, make_prompts(*TEXTS), lambda prompt, completion: completion.token_ids[0] % 2 == 0, algorithm,
            SAMPLING, steps=steps, prompts_per_step=4, folder=f"{steps} steps",
        )  # fmt: skip
        pairs = zip(policy.reference.parameters(), policy.model.parameters(), strict=True)
        same.append(all(torch.equal(reference, moved) for reference, moved in pairs))
    assert same == [False, True]


def test_a_step_without_any_signal_moves_nothing_and_goes_on(
    make_policy: Callable[..., TrainedPolicy], make_prompts: Callable[..., list[Prompt]], train_in: Callable[..., Run]
) -> None:
    policy, algorithm = make_policy(), build("grpo", group_size=4, max_completion_tokens=8)
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    run = train_in(
        policy, make_prompts(*TEXTS), lambda prompt, completion: False, algorithm, SAMPLING, steps=2, prompts_per_step=4
    )
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), before, strict=True))
    rows = read_metrics(run.log.folder.path)
    assert [row["group/zero_signal_fraction"] for row in rows] == [1.0, 1.0]
    assert [row["policy/skipped_updates"] for row in rows] == [1.0, 1.0]
    assert [row["policy/loss"] for row in rows] == [0.0, 0.0]
    assert [row["tokens/trained"] for row in rows] == [0.0, 0.0]


def test_grading_while_sampling_changes_no_reward_and_no_record(
    make_policy: Callable[..., TrainedPolicy], make_prompts: Callable[..., list[Prompt]], train_in: Callable[..., Run]
) -> None:
    def is_right(prompt: Prompt, completion: Completion) -> bool:
        if completion.token_ids[0] % 11 == 0:
            raise ZeroDivisionError
        return completion.token_ids[-1] % 2 == 0

    algorithm, found = build("grpo", group_size=4, max_completion_tokens=8), []
    for name, rewarded in (("afterwards", lambda function: function), ("early", PipelinedRewards)):
        run = train_in(
            make_policy(),
            make_prompts(*TEXTS),
            is_right,
            algorithm,
            SAMPLING,
            steps=3,
            prompts_per_step=4,
            folder=name,
            rewarded=rewarded,
            max_error_fraction=1.0,
            rollouts_every_steps=1,
        )
        rows = read_metrics(run.log.folder.path)
        kept = [{k: v for k, v in row.items() if not k.startswith(("time/", "speed/", "memory/"))} for row in rows]
        found.append((kept, [read_rollouts(run.log.folder.path, step) for step in (1, 2, 3)]))
    assert any(row["reward/error_fraction"] for row in found[0][0])
    assert found[0] == found[1]
