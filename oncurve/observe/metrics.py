"""Glossary of every number in metrics.jsonl, as data that pages, summaries and documents read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from oncurve.wording import number, percent


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the glossary.

    Example: ``Metric("reward/mean", "reward", "mean over the graded completions of the step", "rises, noisily")``
    """

    key: str
    """``group/name_unit`` in lower case; ``<name>`` stands for any one name, as in ``reward/<part>``."""
    unit: str
    """Unit; "fraction" is a share in [0, 1]."""
    meaning: str
    """The measured quantity, and over what."""
    healthy: str
    """Values in a run that learns, or what to suspect otherwise; "-" where no value is better."""
    label: str = ""
    """Its name in tables for people; empty for one that stands in none."""

    @property
    def is_pattern(self) -> bool:
        """The entry stands for a family of keys."""
        return "<" in self.key

    def text(self, value: float) -> str:
        """A value as tables show it."""
        return percent(value) if self.unit == "fraction" else number(value)

    def matches(self, key: str) -> bool:
        """Whether this entry explains the key."""
        return _pattern(self.key).fullmatch(key) is not None


@cache
def _pattern(key: str) -> re.Pattern[str]:
    pieces = re.split(r"<[^>]+>", key)
    return re.compile("[^/\\s]+".join(re.escape(piece) for piece in pieces))


_REWARD = (
    Metric("reward/mean", "reward", "mean over the graded completions of the step", "rises, noisily", label="reward"),
    Metric(
        "reward/std",
        "reward",
        "standard deviation over all graded completions of the step, n - 1",
        "says nothing about groups; read group/std_mean",
    ),
    Metric("reward/min", "reward", "lowest reward of the step", "-"),
    Metric("reward/max", "reward", "highest reward of the step", "-"),
    Metric(
        "reward/correct",
        "fraction",
        "completions whose answer is right, as the reward function reads it",
        "rises; the number to follow on training prompts",
        label="correct",
    ),
    Metric(
        "reward/format",
        "fraction",
        "completions in the required format, right or wrong",
        "rises early, then stays near 1; if it rises alone, only the format is learned",
        label="required format",
    ),
    Metric(
        "reward/error_fraction",
        "fraction",
        "completions whose grading failed: they have no reward",
        "0; more than 0.01 is a bug in the grader or the data",
    ),
    Metric(
        "reward/not_applicable_fraction",
        "fraction",
        "completions for which the reward function returned None: left out, not an error",
        "depends on the data; missing where it is 0",
    ),
    Metric("reward/timeout_fraction", "fraction", "completions whose grading timed out; part of error_fraction", "0"),
    Metric(
        "reward/held_out/<name>",
        "reward",
        "mean of a reward that is graded and never trained on",
        "rises with reward/mean; flat or falling while that rises is reward hacking",
    ),
    *(
        Metric(
            f"reward/found_in_{location}",
            "fraction",
            f"completions whose answer stands here, asked for or not: {location}",
            "the place that the reward asks for",
        )
        for location in ("box", "tag", "hash", "statement", "prose", "nowhere")
    ),
    Metric("reward/<part>", "reward", "mean of one named part of the reward before weighting", "-"),
)

_GROUP = (
    Metric(
        "group/zero_signal_fraction",
        "fraction",
        "groups whose rewards are all equal (or of which fewer than two were graded): their advantages are 0",
        "below 0.5; near 1 nothing is learned: the prompts are too hard or too easy",
        label="groups without signal",
    ),
    Metric(
        "group/std_mean",
        "reward",
        "standard deviation inside a group (n - 1), mean over groups",
        "above 0; this, not reward/std, is what advantages are made of",
        label="deviation inside a group",
    ),
    Metric("group/mean_min", "reward", "mean reward of the group that earned least", "-"),
    Metric("group/mean_max", "reward", "mean reward of the group that earned most", "-"),
    Metric(
        "group/solved_fraction",
        "fraction",
        "groups in which every graded completion is correct",
        "rises; near 1 the prompts are too easy",
    ),
    Metric(
        "group/unsolved_fraction",
        "fraction",
        "groups in which no graded completion is correct",
        "falls; near 1 the prompts are too hard",
    ),
)

_ADVANTAGE = (
    Metric("advantage/mean", "1", "mean advantage over completions", "0 within rounding for group-relative advantages"),
    Metric(
        "advantage/std",
        "1",
        "standard deviation of the advantage over completions",
        "below 1 when scaled by the group's standard deviation: groups without signal pull it down",
    ),
)

_COMPLETION = (
    Metric("prompt/mean_tokens", "tokens", "mean length of a prompt", "-"),
    Metric(
        "completion/mean_tokens",
        "tokens",
        "mean length of a completion, end token included",
        "changes slowly; a jump to the limit or to a few tokens is a collapse",
        label="completion tokens",
    ),
    Metric("completion/min_tokens", "tokens", "shortest completion of the step", "above 1"),
    Metric("completion/max_tokens", "tokens", "longest completion of the step", "below the limit"),
    Metric(
        "completion/truncated_fraction",
        "fraction",
        "truncated completions",
        "below 0.1; otherwise raise the token limit",
        label="cut off at the limit",
    ),
    Metric(
        "completion/mean_staleness_steps",
        "steps",
        "age in steps of the weights that sampled a completion",
        "0, or up to rollouts.staleness",
    ),
    Metric(
        "completion/max_staleness_steps", "steps", "the same of the oldest completion", "at most rollouts.staleness"
    ),
)

_POLICY = (
    Metric(
        "policy/loss",
        "1",
        "the surrogate loss that was differentiated, KL term included",
        "about 0 when on policy; no measure of progress: only a value that is not finite means something",
    ),
    Metric(
        "policy/entropy",
        "nats",
        "entropy of the next-token distribution, mean over trained tokens",
        "falls slowly; near 0 means that the completions of a group have become the same",
        label="entropy, nats",
    ),
    Metric(
        "policy/kl",
        "nats",
        "k3 estimate of KL(policy || reference), mean over completion tokens",
        "rises slowly; a sudden rise means that the policy runs away",
        label="KL to the reference, nats",
    ),
    Metric(
        "distillation/reverse_kl",
        "nats",
        "log-probability of a token less that under the teacher, mean over completion tokens: an estimate of "
        "KL(policy || teacher)",
        "falls toward 0; a level that stays means that the policy cannot follow its teacher",
    ),
    Metric(
        "policy/ratio_mean",
        "1",
        "probability of a token now over that at sampling, mean over tokens",
        "1.0 within a few percent",
    ),
    Metric(
        "policy/clip_fraction",
        "fraction",
        "trained tokens whose gradient the clipping removed; for a capped loss such as cispo, tokens at the cap",
        "0 with one update per batch; below 0.2 otherwise",
        label="clipped tokens",
    ),
    Metric(
        "policy/clip_high_fraction",
        "fraction",
        "the part of policy/clip_fraction in completions with a positive advantage, whose ratio was above the bound",
        "0 with one update per batch; about half of policy/clip_fraction otherwise",
    ),
    Metric(
        "loss/<statistic>",
        "1",
        "mean over the trained tokens of a statistic that algorithm.function returned beside its loss",
        "-",
    ),
    Metric(
        "policy/gradient_norm",
        "1",
        "global norm of the gradient before clipping, mean over the step's updates",
        "steady; spikes ask for a lower learning rate",
        label="gradient norm",
    ),
    Metric("policy/learning_rate", "1", "learning rate, mean over the updates of the step", "-"),
    Metric(
        "policy/arrived",
        "1",
        "projection of the change of the 16-bit copies since the start of the run on that of the float32 weights, over "
        "a sample of the trained matrices: the part of what was taught that the policy shows which samples",
        "1, within the noise of the first steps; below 0.9 updates are lost to rounding: policy.rounding=dither",
    ),
    Metric(
        "policy/loss_scale",
        "1",
        "factor of the loss that keeps small gradients in float16 from becoming zero; halved when one overflows",
        "any power of two; one that keeps falling says that gradients are not finite for another reason",
    ),
    Metric(
        "policy/moved_fraction",
        "fraction",
        "sampled weights whose 16-bit copy changed with the last update",
        "with the dither about the learning rate by the distance of two neighbors on the grid: a few in a thousand at "
        "1e-6, a tenth at 2e-5",
    ),
    Metric(
        "policy/skipped_updates",
        "fraction",
        "updates skipped for lack of a signal or of a finite gradient",
        "0; above it, nothing is learned from those groups",
    ),
    Metric(
        "policy/nonfinite_updates",
        "fraction",
        "updates skipped because loss or gradient was not finite",
        "0; run.max_nonfinite_updates in a row end the run",
    ),
    Metric("policy/entropy_coef", "1", "weight of the entropy bonus that was applied", "-"),
)

_MISMATCH = (
    Metric(
        "mismatch/kl",
        "nats",
        "k3 estimate of KL(sampler || trainer) on the sampled tokens",
        "below 0.001; more means that sampler and trainer disagree about the same weights",
        label="sampler/trainer KL, nats",
    ),
    Metric(
        "mismatch/effective_sample_fraction",
        "fraction",
        "effective sample size of the trainer/sampler weights over the number of tokens",
        "above 0.9",
    ),
    Metric("mismatch/max_ratio", "1", "largest trainer/sampler probability ratio of a token", "below 2"),
    Metric("mismatch/weight_mean", "1", "mean weight of correction and off-policy mask; only with one", "near 1"),
    Metric(
        "mismatch/dropped_fraction",
        "fraction",
        "tokens that correction or off-policy mask left out; only with one",
        "below 0.05",
    ),
    Metric(
        "mismatch/adapter_fraction",
        "fraction",
        "part that rollout servers have of what the LoRA adapter changes in the log-probabilities of 64 stored tokens; "
        "from the version on whose change is above the noise of the arithmetic",
        "1; a server that is off by more than 0.1 and five standard errors is refused",
    ),
)

_EVALUATION = (
    Metric(
        "evaluation/mean_reward",
        "reward",
        "mean reward of the validation examples that were graded",
        "rises with reward/mean; flat while that rises means overfitting or reward hacking",
        label="mean reward",
    ),
    Metric("evaluation/mean_reward_low", "reward", "lower end of the 95% interval of mean_reward", "-"),
    Metric("evaluation/mean_reward_high", "reward", "upper end of the 95% interval of mean_reward", "-"),
    Metric(
        "evaluation/correct_fraction",
        "fraction",
        "graded validation examples, right answer in the right format; missing if no reward says what is correct",
        "rises with reward/correct; flat while that rises means overfitting or reward hacking",
        label="correct",
    ),
    Metric("evaluation/correct_low_fraction", "fraction", "lower end of the 95% interval of correct_fraction", "-"),
    Metric("evaluation/correct_high_fraction", "fraction", "upper end of the 95% interval of correct_fraction", "-"),
    Metric(
        "evaluation/any_format_fraction",
        "fraction",
        "validation examples with the right answer in any format",
        "rises; if it is flat while correct_fraction rises, only the format is learned",
        label="correct in any format",
    ),
    Metric(
        "evaluation/wrong_fraction", "fraction", "validation examples with a wrong answer in the right format", "falls"
    ),
    Metric(
        "evaluation/bad_format_fraction",
        "fraction",
        "validation examples in the wrong format",
        "falls",
        label="bad format",
    ),
    Metric("evaluation/error_fraction", "fraction", "validation examples whose grading failed", "0"),
    Metric("evaluation/truncated_fraction", "fraction", "truncated validation completions", "below 0.1"),
    Metric("evaluation/mean_tokens", "tokens", "mean length of a validation completion", "-"),
    Metric("evaluation/num_examples", "count", "validation completions that were sampled", "500 or more"),
)

_TIME = (
    Metric("time/step_seconds", "seconds", "one step, evaluation and saving left out", "steady"),
    Metric("time/sample_seconds", "seconds", "sampling completions", "usually the largest part"),
    Metric("time/grade_seconds", "seconds", "waiting for rewards after the last group is sampled", "a small part"),
    Metric("time/refill_seconds", "seconds", "replacing groups without signal", "-"),
    Metric("time/train_seconds", "seconds", "forward, backward and optimizer", "-"),
    Metric("time/evaluate_seconds", "seconds", "evaluation after the step", "-"),
    Metric("time/save_seconds", "seconds", "waiting for a checkpoint before the step", "a small part"),
    Metric("time/elapsed_seconds", "seconds", "since the run started", "-"),
    Metric("speed/sampled_tokens_per_second", "tokens/s", "completion tokens over time/sample_seconds", "steady"),
    Metric(
        "speed/trained_tokens_per_second", "tokens/s", "trained completion tokens over time/train_seconds", "steady"
    ),
    Metric(
        "speed/tokens_per_second",
        "tokens/s",
        "completion tokens over time/step_seconds",
        "steady",
        label="completion tokens per second",
    ),
)

_WEIGHTS = (
    Metric(
        "weights/changed_fraction",
        "fraction",
        "numbers of the weights that differ from the last version, as rollout servers get them (rollouts.deltas)",
        "0.01 at a learning rate of 1e-6, 0.3 at 1e-4",
    ),
    Metric(
        "weights/sent_fraction",
        "fraction",
        "bytes that a server fetches which has the last version, of those of all weights",
        "well below 0.5; otherwise rollouts.deltas does not pay",
    ),
    Metric("weights/sent_mb", "MB", "the same in millions of bytes", "-"),
    Metric("weights/publish_seconds", "seconds", "until new weights could be fetched", "a small part of the step"),
    Metric("weights/coding_seconds", "seconds", "of that, in all threads together: finding what changed", "-"),
    Metric(
        "weights/held_seconds",
        "seconds",
        "for which training stood still to copy or to publish the weights",
        "with rollouts.staleness, a small part of weights/publish_seconds",
    ),
    Metric(
        "weights/sync_seconds",
        "seconds",
        "from telling a server of new weights until it samples from them; the slowest server",
        "a small part of the step",
    ),
    Metric(
        "speed/server_idle_fraction",
        "fraction",
        "time of living servers without a completion to sample, since the step before",
        "below 0.2; otherwise more rollouts.staleness, or fewer servers",
    ),
    Metric(
        "weights/stood_seconds",
        "seconds",
        "a server sampled nothing while it took the newest weights; the slowest server",
        "a small part of the step",
    ),
    Metric(
        "weights/late_servers",
        "count",
        "living servers that did not have the weights when the step began to sample",
        "0; a server that is always late gives the run nothing",
    ),
)

_AMOUNT = (
    Metric("tokens/sampled", "tokens", "completion tokens sampled in the step", "-"),
    Metric(
        "tokens/mean_age_steps",
        "steps",
        "age in steps of the weights that sampled a token",
        "0, or up to rollouts.staleness",
    ),
    Metric("tokens/max_age_steps", "steps", "the same of the oldest token", "at most rollouts.staleness"),
    Metric("tokens/newest_fraction", "fraction", "tokens sampled by the weights that are trained", "-"),
    Metric(
        "tokens/mixed_fraction",
        "fraction",
        "completions whose tokens are of several versions",
        "above 0 with rollouts.in_flight",
    ),
    Metric("tokens/trained", "tokens", "completion tokens that entered the loss", "-"),
    Metric("memory/process_gib", "GiB", "resident memory of the process", "steady; steady growth is a leak"),
    Metric("memory/gpu_gib", "GiB", "largest GPU memory in use during the step", "steady"),
    Metric(
        "memory/<point>_gpu<number>_allocated_gib",
        "GiB",
        "tensors on a GPU after sample, grade, refill or train",
        "steady",
    ),
    Metric(
        "memory/<point>_gpu<number>_reserved_gib",
        "GiB",
        "the same with memory kept for reuse; nvidia-smi shows this and the CUDA context",
        "steady; far above allocated means fragmentation",
    ),
    Metric("memory/<point>_gib", "GiB", "memory in use at a named point of the step", "steady"),
)

_EPISODE = (
    Metric(
        "episode/turns",
        "turns",
        "mean over completions of how often the policy wrote",
        "-",
        label="turns of an episode",
    ),
    Metric("episode/max_turns", "turns", "most turns of a completion", "below rollouts.episodes.max_turns"),
    Metric("episode/rows", "rows", "mean over completions of their rows: conversations and forks of an agent", "-"),
    Metric(
        "episode/calls",
        "calls",
        "calls by the policy, mean over completions that have something to call",
        "above 0",
        label="calls of tools",
    ),
    Metric(
        "episode/calling_fraction",
        "fraction",
        "completions with a call, of those that have something to call",
        "above 0; rises where a tool helps",
    ),
    Metric(
        "episode/tool_errors",
        "fraction",
        "calls that were answered with an error: wrong names or arguments, exceptions, timeouts, unreadable calls",
        "falls; staying high means that the tool is called wrongly, or is broken",
        label="calls that failed",
    ),
    Metric(
        "episode/malformed_calls",
        "fraction",
        "calls that could not be read; part of tool_errors",
        "falls; staying high means that the model does not know the form",
    ),
    Metric(
        "episode/tool_timeouts", "fraction", "calls over rollouts.episodes.tool_seconds; part of tool_errors", "near 0"
    ),
    Metric("episode/answer_tokens", "tokens", "mean over completions of tokens that the policy did not write", "-"),
    Metric(
        "episode/failed_fraction",
        "fraction",
        "completions whose environment crashed, hung or died: they have no reward",
        "0; part of reward/error_fraction",
    ),
    Metric(
        "episode/ended/<reason>",
        "fraction",
        "completions that ended for this reason: stop, length, done, turns, context, seconds, malformed, failed",
        "mostly stop or done",
    ),
)
"""Glossary of what a run with tools or environments writes besides."""
_EPISODE_TIME = (
    Metric(
        "time/tools_seconds",
        "seconds",
        "mean time that a completion waited for tools and its environment",
        "-",
        label="waiting for tools, seconds",
    ),
    Metric(
        "time/tools_max_seconds",
        "seconds",
        "longest time that a completion waited for tools and its environment",
        "a few times time/tools_seconds; one slow call delays the whole step",
    ),
)
"""The same for the time that they take."""

PHASES = ("sample", "grade", "refill", "train", "evaluate", "save")
"""Phases of a step whose times are measured, as ``time/<phase>_seconds``."""

GLOSSARY: tuple[Metric, ...] = (
    *_REWARD,
    *_GROUP,
    *_ADVANTAGE,
    *_COMPLETION,
    *_EPISODE,
    *_POLICY,
    *_MISMATCH,
    Metric(
        "sft/loss",
        "nats",
        "mean of -log p over the tokens of the step's demonstrations",
        "falls",
        label="loss on demonstrations",
    ),
    *_EVALUATION,
    *_EPISODE_TIME,
    *_TIME,
    *_WEIGHTS,
    *_AMOUNT,
)
"""Every key that a run writes, exact keys before the patterns that would also match them."""


def metric(key: str) -> Metric:
    """The entry of a key that is known to have one."""
    entry = explain(key)
    assert entry is not None, key
    return entry


def explain(key: str) -> Metric | None:
    """The entry of the glossary that explains the key; None for a key no one has explained.

    >>> explain("reward/mean").unit, explain("reward/politeness").key, explain("loss")
    ('reward', 'reward/<part>', None)
    """
    return next((metric for metric in GLOSSARY if metric.matches(key)), None)


def unknown_keys(keys: Iterable[str]) -> list[str]:
    """The keys that the glossary does not explain, sorted; "step" is the row's number and no metric."""
    return sorted(key for key in set(keys) if key != "step" and explain(key) is None)
