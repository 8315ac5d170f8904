"""Guards of a run: limits on KL and on updates that are not finite, and retries when memory runs out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from oncurve.algorithm.settings import KL_RAISED
from oncurve.core.batch import Batch
from oncurve.core.errors import TrainingError, is_out_of_memory, release
from oncurve.core.policy import DevicePolicy
from oncurve.core.records import Mean
from oncurve.policy.device_memory import check_alone, check_smaller

NONFINITE = "policy/nonfinite_updates"
KL_LIMIT, KL_GROWTH, KL_RECORDS = 0.1, 1.5, 10
"""The KL alarm: above 0.1 nats and 1.5 times its value ten records ago."""
NORM_GROWTH, NORM_RECORDS = 5.0, 20
"""The gradient alarm: above 5 times the median of the last 20 records."""
NORM_FEWEST = 5
"""A median of fewer records says nothing."""
MISMATCH_LIMIT = 0.3
"""Nats a token between the sampler and the trainer of the same weights that no rounding explains."""
EXACT_SHARE = 1 / 30
"""Share of it where both compute in full precision in one process, whose rounding is a millionth of it."""
SAMPLED_LIMIT = 3e-3
"""The same of the first rollouts, as a mean difference of log-probabilities from the model's own forward pass."""
SILENT_STEPS = 10
"""Steps in a row without any signal until it is said."""


class KlAlarm(TrainingError):
    """The policy ran away from its reference, and the recipe asks to return to a checkpoint."""


@dataclass
class Guards:
    """Counts and remembers what the alarms need. Its state is saved with the run, so that a resumed run warns alike."""

    max_nonfinite: int = 3
    """Updates in a row without a finite loss and gradient that end the run; 0 never ends it."""
    watches_mismatch: bool = False
    """Sampler and trainer should have the same weights; where they differ, the run ends before it trains."""
    is_exact: bool = False
    """Both compute in full precision in this process."""
    returns_on_kl: bool = False
    """End the run on a KL alarm, for it to go on from an earlier checkpoint."""
    notify: Callable[[str], None] | None = None
    num_nonfinite: int = 0
    """Updates in a row without a finite loss and gradient."""
    kl: list[float] = field(default_factory=list)
    """The last records, newest last."""
    norms: list[float] = field(default_factory=list)
    num_silent: int = 0
    """Steps in a row in which no group had a signal."""
    alarms: set[str] = field(default_factory=set)
    """Excursions that go on and were told of."""

    def before_first_update(self, mismatches: Sequence[float]) -> None:
        """Look at the KL of each process between sampler and trainer, before anything is learned from a step.

        Raises TrainingError where they cannot have computed the same model.
        """
        mismatch = max((value for value in mismatches if math.isfinite(value)), default=0.0)
        if mismatch > MISMATCH_LIMIT * (EXACT_SHARE if self.is_exact else 1.0):
            raise TrainingError(
                f"sampler and trainer differ by {mismatch:.2g} nats a token (mismatch/kl) in the probabilities of "
                f"the sampled tokens, which rounding does not explain: one of them computes another model. Nothing "
                f"was trained on them. Give both the same weights and precision; rollouts.type=engine samples in "
                f"this process, in a way that was compared with the model's own forward pass"
            )

    def after_update(self, statistics: Mapping[str, Mean]) -> None:
        """Count updates that were left out because loss or gradient was not finite.

        Raises TrainingError after ``max_nonfinite`` in a row.
        """
        if NONFINITE not in statistics:
            return
        if not statistics[NONFINITE].total:
            self.num_nonfinite = 0
            return
        self.num_nonfinite += 1
        self._tell(f"the loss or gradient of an update is not finite; the weights stay ({self.num_nonfinite} in a row)")
        if self.max_nonfinite and self.num_nonfinite >= self.max_nonfinite:
            raise TrainingError(
                f"{self.num_nonfinite} updates in a row had a loss or gradient that is not finite; the weights and the "
                f"last checkpoint are from before them. Lower optimizer.learning_rate, or look for a reward that is "
                f"not finite, then resume the run"
            )

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at the record of a step; each alarm is told of once per excursion.

        Raises KlAlarm if the recipe asks to return.
        """
        self._watch_gradient(step, metrics.get("policy/gradient_norm"))
        self._watch_signal(step, metrics.get("group/zero_signal_fraction"))
        self._watch_kl(step, metrics.get("policy/kl"))

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {
            "num_nonfinite": self.num_nonfinite,
            "kl": list(self.kl),
            "norms": list(self.norms),
            "num_silent": self.num_silent,
            "alarms": sorted(self.alarms),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.num_nonfinite, self.num_silent = int(state["num_nonfinite"]), int(state["num_silent"])
        self.kl, self.norms = [float(x) for x in state["kl"]], [float(x) for x in state["norms"]]
        self.alarms = set(state["alarms"])

    def _watch_kl(self, step: int, kl: float | None) -> None:
        if kl is None or not math.isfinite(kl):
            return
        ago, before = len(self.kl), self.kl[0] if self.kl else kl
        self.kl = [*self.kl, kl][-KL_RECORDS:]
        if kl <= KL_LIMIT:
            self.alarms.discard("kl")
        elif kl > KL_GROWTH * before and "kl" not in self.alarms:
            message = (
                f"step {step}: the KL to the reference is {kl:.3g} nats, and was {before:.3g} {ago} records ago. "
                f"{KL_RAISED}, or lower optimizer.learning_rate"
            )
            self.alarms.add("kl")
            self._tell(message)
            if self.returns_on_kl:
                raise KlAlarm(message)

    def _watch_gradient(self, step: int, norm: float | None) -> None:
        if norm is None or not math.isfinite(norm):
            return
        usual = statistics.median(self.norms) if len(self.norms) >= NORM_FEWEST else math.inf
        self.norms = [*self.norms, norm][-NORM_RECORDS:]
        if norm <= NORM_GROWTH * usual:
            self.alarms.discard("gradient")
        elif "gradient" not in self.alarms:
            self.alarms.add("gradient")
            self._tell(
                f"step {step}: the gradient's norm is {norm:.3g}, and its median over the steps before is {usual:.3g}. "
                f"If this comes often, lower optimizer.learning_rate"
            )

    def _watch_signal(self, step: int, fraction: float | None) -> None:
        if fraction is None:
            return
        self.num_silent = self.num_silent + 1 if fraction >= 1 else 0
        if self.num_silent == SILENT_STEPS:
            self._tell(
                f"step {step}: no group of the last {SILENT_STEPS} steps had a signal, so nothing was learned. The "
                f"prompts are too easy or too hard for the model, or the reward always says the same"
            )

    def _tell(self, text: str) -> None:
        if self.notify is not None:
            self.notify(f"ALARM {text}")


@dataclass
class OomRetry:
    """One try at the gradient of an update, as a context: it forgives running out of memory, and nothing else."""

    policy: DevicePolicy
    longest: int
    """Tokens of the longest row: a smaller budget would change nothing."""
    sums: dict[str, Mean]
    """The statistics of the step before the try."""
    has_failed: bool = False

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and not is_out_of_memory(error):
            return False
        if error is not None:
            check_alone(self.policy)
        if not any(self.policy.processes.all_gather(error is not None)):  # all go back together
            return False
        self.policy.backend.optimizer.zero_grad(set_to_none=True)
        check_smaller(self.policy, self.longest)
        self.has_failed = True
        return True


def attempts(
    policy: DevicePolicy, update: Batch, sums: dict[str, Mean], notify: Callable[[str], None]
) -> Iterator[OomRetry]:
    """Tries at the gradient of an update, each with half the token budget of the one before, until memory suffices.

    A try that failed leaves nothing behind: the gradient is made anew from all rows, and ``sums`` is put back. The
    denominators are those of the update, so the gradient is the same sum in other parts.
    """
    longest = int(update.row_lengths.max()) if len(update) else 0
    while True:
        attempt = OomRetry(policy, longest, dict(sums))
        yield attempt
        if not attempt.has_failed:
            return
        sums.clear()
        sums.update(attempt.sums)
        policy.tokens_per_microbatch = max(policy.tokens_per_microbatch // 2, 1)
        release()
        notify(
            f"OUT OF MEMORY in a microbatch: from now on at most {policy.tokens_per_microbatch} tokens in one. "
            f"The gradient is the same; set policy.tokens_per_microbatch to it in the recipe"
        )


def compare_policy(
    policy: DevicePolicy,
    rows: Batch,
    *,
    is_exact: bool,
    is_quiet: bool,
    notify: Callable[[str], None],
    write: Callable[[str], None],
) -> None:
    """Score the longest of the rows, as in training, beside the model's own forward pass; say by how much they differ.

    Where sampler and trainer are ``is_exact``, the sampler's numbers are compared with it too. A model in parts has no
    forward pass of its own in one process, and no rows have nothing to compare. Its pass makes all logits of a row,
    for which a device may have no memory: then nothing is compared.

    Raises TrainingError in all processes where rounding does not explain it.
    """
    from oncurve.policy.scoring_path import compare_with_own_pass  # lazy
    from oncurve.policy.trained_policy import TrainedPolicy  # lazy

    if not isinstance(policy, TrainedPolicy) or policy.backend.is_divided:
        return
    errors, say = {"training": 0.0, "the sampler": 0.0}, write if is_quiet else notify
    if bool(rows.mask.any()):
        options: dict[str, Any] = {"packed": policy.is_packed, "temperature": policy.temperature}
        try:
            compared = compare_with_own_pass(policy.model, rows, **options)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            release()
            say("the first rollouts are not compared with your model's own pass: there is no memory for its logits")
        else:
            if not compared.error <= compared.allowed:
                errors["training"] = compared.error
            if is_exact and not compared.sampler_error <= SAMPLED_LIMIT:
                errors["the sampler"] = compared.sampler_error
            say(str(compared))
    for who, error in ((who, error) for every in policy.processes.all_gather(errors) for who, error in every.items()):
        if error != 0:
            raise TrainingError(
                f"{who} computes another model than its own forward pass: on the first rollouts a log-probability "
                f"differs by {error:.2g}, which rounding does not explain. Nothing was trained on them. A likely cause "
                f"is code of the model that treats long rows or certain tokens in another way: set "
                f"policy.packing=false and rollouts.type=transformers, and report it"
            )
