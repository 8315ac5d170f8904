"""Does a run that goes wrong say so once, leave the weights alone, and stop where it must?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from oncurve.algorithm.presets import build
from oncurve.core.errors import TrainingError, is_out_of_memory
from oncurve.core.records import Completion, Mean, Prompt, SamplingParams
from oncurve.observe.record import read_metrics
from oncurve.run.guards import Guards, KlAlarm

if TYPE_CHECKING:
    from oncurve.policy.trained_policy import TrainedPolicy
    from oncurve.run.services import Run

SAMPLING = SamplingParams(max_completion_tokens=8)
TEXTS = tuple(f"{'word ' * number}= {number}" for number in range(8))


def is_even(prompt: Prompt, completion: Completion) -> bool:
    return completion.token_ids[0] % 2 == 0


def weights(policy: TrainedPolicy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.model.parameters()]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def small_run(make_prompts: Callable[..., list[Prompt]], train_in: Callable[..., Run]) -> Callable[..., Run]:
    """A few steps of the loop of the product with a policy."""

    def start(
        policy: TrainedPolicy, *, is_right: Callable[..., bool] = is_even, preset: str = "grpo", **options: Any
    ) -> Run:
        algorithm = build(preset, group_size=4, max_completion_tokens=8, **options.pop("choices", {}))
        settings = {"steps": 3, "prompts_per_step": 4, "sampling": SAMPLING} | options
        return train_in(policy, make_prompts(*TEXTS), is_right, algorithm, settings.pop("sampling"), **settings)

    return start


@pytest.mark.parametrize("poison", ["gradient", "loss"])
def test_an_update_that_is_not_finite_is_left_out_and_counted(
    poison: str, make_policy: Callable[..., TrainedPolicy], small_run: Callable[..., Run]
) -> None:
    policy: TrainedPolicy = make_policy(tokens_per_microbatch=60)
    backward, calls, before = policy.backward, [], []

    def poisoned(loss: torch.Tensor) -> None:
        calls.append(policy.num_updates)
        if policy.num_updates == 1 and len(before) < 1:
            before.append(weights(policy))
            if poison == "loss":
                loss = loss + (loss.detach() * 0 + math.inf)  # a constant: the gradient stays finite
                return backward(loss)
            backward(loss)
            next(policy.model.parameters()).grad[0] = math.nan  # type: ignore[index]
            return None
        return backward(loss)

    policy.backward = poisoned  # type: ignore[method-assign]
    run = small_run(policy)
    rows = read_metrics(run.log.folder.path)
    assert [row["policy/nonfinite_updates"] for row in rows] == [0, 1, 0]
    assert [row["policy/skipped_updates"] for row in rows] == [0, 1, 0]
    assert policy.num_updates == 2, "the schedule does not advance without an update"
    assert all(torch.isfinite(parameter).all() for parameter in policy.model.parameters())
    assert "ALARM the loss or gradient" in run.log.progress.console.file.getvalue()  # type: ignore[attr-defined]


def test_several_such_updates_in_a_row_end_the_run_with_the_weights_before_them(
    make_policy: Callable[..., TrainedPolicy], small_run: Callable[..., Run]
) -> None:
    policy: TrainedPolicy = make_policy()
    before = weights(policy)
    backward = policy.backward

    def poisoned(loss: torch.Tensor) -> None:
        backward(loss * math.nan)

    policy.backward = poisoned  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"3 updates in a row .* then resume the run"):
        small_run(policy, steps=10)
    assert are_equal(weights(policy), before)


def test_one_finite_update_in_between_starts_the_count_again() -> None:
    guards = Guards(max_nonfinite=2)
    bad, good = {"policy/nonfinite_updates": Mean(1, 1)}, {"policy/nonfinite_updates": Mean(0, 1)}
    for statistics in (bad, good, bad, {"policy/loss": Mean(0, 1)}):
        guards.after_update(statistics)
    with pytest.raises(TrainingError, match="2 updates in a row"):
        guards.after_update(bad)
    forever = Guards(max_nonfinite=0)
    for _ in range(50):
        forever.after_update(bad)
    assert forever.num_nonfinite == 50


@pytest.mark.parametrize("choices", [{}, {"entropy_coef": 0.01}])
def test_an_update_whose_tokens_are_all_masked_does_not_move_the_weights_by_momentum(
    choices: dict[str, float], make_policy: Callable[..., TrainedPolicy], small_run: Callable[..., Run]
) -> None:
    policy: TrainedPolicy = make_policy()
    small_run(policy, steps=2, folder="first", choices=choices)
    assert policy.num_updates == 2, "there is momentum now"
    before = weights(policy)
    endless = SamplingParams(max_completion_tokens=8, min_completion_tokens=9)
    run = small_run(policy, steps=2, folder="masked", mask_truncated=True, choices=choices, sampling=endless)
    rows = read_metrics(run.log.folder.path)
    assert [row["completion/truncated_fraction"] for row in rows] == [1.0, 1.0], "so that every token is masked"
    assert [row["policy/skipped_updates"] for row in rows] == [1.0, 1.0]
    assert are_equal(weights(policy), before)
    assert policy.num_updates == 2


def test_a_microbatch_that_does_not_fit_is_cut_in_half_and_the_gradient_stays(
    make_policy: Callable[..., TrainedPolicy], small_run: Callable[..., Run]
) -> None:
    roomy, tight = make_policy(), make_policy()
    limit, logprobs, sizes = 120, tight.logprobs, []

    def choking(batch: Any) -> Any:
        sizes.append(int(batch.row_lengths.sum()))
        if sizes[-1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return logprobs(batch)

    tight.logprobs = choking  # type: ignore[method-assign]
    clean = small_run(roomy, steps=2, folder="roomy")
    run = small_run(tight, steps=2, folder="tight")
    said = run.log.progress.console.file.getvalue()  # type: ignore[attr-defined]
    assert "OUT OF MEMORY in a microbatch: from now on at most" in said
    assert sizes[0] > limit >= sizes[-1]
    assert tight.tokens_per_microbatch < roomy.tokens_per_microbatch
    kept = [key for key in read_metrics(run.log.folder.path)[0] if not key.startswith(("time/", "speed/", "memory/"))]
    for ours, theirs in zip(read_metrics(run.log.folder.path), read_metrics(clean.log.folder.path), strict=True):
        assert {k: ours[k] for k in kept} == pytest.approx({k: theirs[k] for k in kept}, rel=1e-3, abs=1e-5)
    for one, other in zip(weights(tight), weights(roomy), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.nightly
def test_a_completion_that_does_not_fit_by_itself_ends_the_run(
    make_policy: Callable[..., TrainedPolicy], small_run: Callable[..., Run]
) -> None:
    policy: TrainedPolicy = make_policy()

    def choking(batch: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    policy.logprobs = choking  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="not enough memory for a single completion"):
        small_run(policy)


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    make_policy: Callable[..., TrainedPolicy], small_run: Callable[..., Run]
) -> None:
    policy: TrainedPolicy = make_policy()

    def broken(batch: Any) -> Any:
        raise RuntimeError("a shape is wrong")

    policy.logprobs = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        small_run(policy)
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("out of memory"))


def alarms(rows: list[dict[str, float]], **options: Any) -> list[str]:
    said: list[str] = []
    guards = Guards(notify=said.append, **options)
    for step, row in enumerate(rows, start=1):
        guards.after_step(step, row)
    return said


@pytest.mark.proves("F126", "D22")
def test_the_kl_alarm_comes_once_per_excursion_and_asks_for_a_higher_coefficient() -> None:
    rising = [0.01 * step for step in range(1, 25)]
    said = alarms([{"policy/kl": kl} for kl in [*rising, 0.05, *rising]])
    assert len(said) == 2
    assert said[0].startswith("ALARM step 11: the KL to the reference is 0.11 nats")
    assert "Raise algorithm.kl_coef" in said[0]
    assert alarms([{"policy/kl": 0.3}] * 30) == [], "high but steady"
    assert alarms([{"policy/kl": 0.001 * 1.3**step} for step in range(15)]) == [], "growing but low"
    assert len(alarms([{"policy/kl": kl} for kl in (0.01, math.nan, 5.0)])) == 1, "a jump need not wait for ten records"


@pytest.mark.parametrize(
    ("records", "steps"),
    [
        ([0.01, 0.1], []),  # at the limit
        ([0.01, 0.1001], [2]),
        ([0.25, 0.375], []),  # at the growth
        ([0.25, 0.376], [2]),
        ([0.01, 0.2, 0.1, 0.2], [2, 4]),  # an excursion ends at the limit
        ([0.01, 0.2, 0.101, 0.2], [2]),
        ([0.01, *[0.09] * 9, 0.12], [11]),  # ten records ago it was 0.01
        ([0.01, *[0.09] * 10, 0.12], []),
    ],
)
def test_the_kl_alarm_has_a_limit_a_growth_and_ten_records(records: list[float], steps: list[int]) -> None:
    said = alarms([{"policy/kl": kl} for kl in records])
    assert [int(text.split()[2].rstrip(":")) for text in said] == steps


@pytest.mark.parametrize(
    ("norms", "steps"),
    [
        ([1.0] * 4 + [99.0], []),
        ([1.0] * 5 + [5.0], []),
        ([1.0] * 5 + [5.1], [6]),
        ([1.0] * 5 + [5.1, 5.0, 5.1], [6, 8]),
        ([1.0] * 11 + [4.0] * 10 + [6.0], []),  # of the last twenty, ten are 1 and ten are 4
        ([1.0] * 11 + [4.0] * 9 + [6.0], [21]),
    ],
)
def test_the_gradient_alarm_has_a_growth_and_a_median_of_twenty(norms: list[float], steps: list[int]) -> None:
    said = alarms([{"policy/gradient_norm": norm} for norm in norms])
    assert [int(text.split()[2].rstrip(":")) for text in said] == steps


@pytest.mark.parametrize(
    ("mismatches", "is_exact", "is_refused"),
    [
        ([], False, False), ([math.nan], False, False), ([0.3], False, False), ([0.1, 0.301], False, True),
        ([0.0099], True, False), ([0.0101, math.inf], True, True), ([0.301, 0.1], False, True),
    ],
)  # fmt: skip
def test_sampler_and_trainer_may_differ_by_as_much_as_rounding(
    mismatches: list[float], is_exact: bool, is_refused: bool
) -> None:
    guards = Guards(is_exact=is_exact)
    if not is_refused:
        guards.before_first_update(mismatches)
        return
    with pytest.raises(TrainingError, match=f"differ by {max(m for m in mismatches if m < 1):.2g} nats"):
        guards.before_first_update(mismatches)


def test_a_run_that_is_to_return_ends_at_the_kl_alarm() -> None:
    guards = Guards(returns_on_kl=True)
    guards.after_step(1, {"policy/kl": 0.02})
    with pytest.raises(KlAlarm, match="step 2"):
        guards.after_step(2, {"policy/kl": 0.4})


def test_the_gradient_alarm_compares_with_the_median_and_comes_once() -> None:
    norms = [1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 9.0, 9.5, 1.0, 8.0, 1.0]
    said = alarms([{"policy/gradient_norm": norm} for norm in norms])
    assert [text.split(":")[0] for text in said] == ["ALARM step 7", "ALARM step 10"]
    assert alarms([{"policy/gradient_norm": norm} for norm in (1.0, 50.0, 1.0)]) == [], "too few records to judge"


@pytest.mark.proves("F29")
def test_a_run_that_learns_nothing_for_long_is_told_once() -> None:
    silent, other = {"group/zero_signal_fraction": 1.0}, {"group/zero_signal_fraction": 0.9}
    assert [text.split(":")[0] for text in alarms([silent] * 25)] == ["ALARM step 10"]
    assert alarms([silent] * 9) == []
    assert alarms([*[silent] * 9, other] * 3) == []


@pytest.mark.proves("F125", "D14")
def test_alarms_go_on_in_a_resumed_run_as_if_it_had_not_stopped() -> None:
    rows = [{"policy/kl": 0.02 * step, "policy/gradient_norm": 1.0 + 7 * (step == 14)} for step in range(1, 20)]
    whole = alarms(rows)
    for cut in range(1, len(rows)):
        said: list[str] = []
        first = Guards(notify=said.append)
        for step, row in enumerate(rows[:cut], start=1):
            first.after_step(step, row)
        second = Guards(notify=said.append)
        second.load_state(first.state())
        for step, row in enumerate(rows[cut:], start=cut + 1):
            second.after_step(step, row)
        assert said == whole
