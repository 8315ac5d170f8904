"""Are the longest rows that may come tried at the start, and does a try leave everything as it was?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oncurve.algorithm.presets import build
from oncurve.core.batch import Batch, Size, collate
from oncurve.core.errors import SamplerError, TrainingError
from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.observe.record import read_metrics, read_rollouts
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.longest_row import LongestRows, stretched
from oncurve.run.services import Run
from oncurve.sample.engine import InProcessEngine

SAMPLING = SamplingParams(max_completion_tokens=8)
LONGEST = SamplingParams(max_completion_tokens=40)
"""What the try is told: longer than any row of the test's runs."""


@pytest.fixture
def start(
    make_policy: Callable[..., TrainedPolicy], make_prompts: Callable[..., list[Prompt]], train_in: Callable[..., Run]
) -> Callable[..., tuple[TrainedPolicy, Run]]:
    """Two steps, with a try or without; ``change`` may break the policy or the engine that are tried."""

    def train(folder: str, *, is_tried: bool, change: Callable[[Any, Any], None] = lambda policy, engine: None) -> Any:
        policy, engine = make_policy(tokens_per_microbatch=60), InProcessEngine(LONGEST)
        engine.load_weights(policy, version=0)
        algorithm = build("grpo", group_size=4, max_completion_tokens=8, kl_coef=0.0)
        longest = LongestRows(
            policy, algorithm, engine, prompt_tokens=20, completion_tokens=40, prompts_per_step=4, group_size=4,
            completions_per_update=8,
        )  # fmt: skip
        change(policy, engine)
        run = train_in(
            policy, make_prompts(*(f"{'word ' * number}= {number}" for number in range(8))),
            lambda prompt, completion: completion.token_ids[0] % 2 == 0, algorithm, SAMPLING,
            steps=2, prompts_per_step=4, updates_per_step=2, folder=folder, rollouts_every_steps=1,
            try_longest=longest if is_tried else None,
        )  # fmt: skip
        return policy, run

    return train


def test_a_try_computes_the_longest_rows_and_changes_no_bit(start: Callable[..., Any]) -> None:
    computed: list[int] = []

    def watch(policy: Any, engine: Any) -> None:
        real = policy.logprobs

        def logprobs(batch: Batch) -> Any:
            computed.append(int(batch.row_lengths.max()))
            return real(batch)

        policy.logprobs = logprobs

    plain, _ = start("plain", is_tried=False)
    numbers = torch.get_rng_state()
    tried, run = start("tried", is_tried=True, change=watch)
    assert computed.count(60) == 1
    assert torch.equal(torch.get_rng_state(), numbers)
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(tried.model.state_dict()[name], weight), name
    moments = [policy.backend.optimizer.state_dict()["state"] for policy in (plain, tried)]
    for index, state in moments[0].items():
        assert all(torch.equal(moments[1][index][name], value) for name, value in state.items())
    folders = [run.log.folder.path.parent / name for name in ("plain", "tried")]
    assert read_rollouts(folders[0], 2) == read_rollouts(folders[1], 2)
    unmeasured = ("time/", "speed/", "memory/")
    rows = [
        [{k: v for k, v in row.items() if not k.startswith(unmeasured)} for row in read_metrics(f)] for f in folders
    ]
    assert rows[0] == rows[1]


def no_memory_for_training(policy: Any, engine: Any) -> None:
    real = policy.logprobs

    def logprobs(batch: Batch) -> Any:
        if int(batch.row_lengths.max()) > 50:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(batch)

    policy.logprobs = logprobs


def no_memory_for_sampling(policy: Any, engine: Any) -> None:
    def plan(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.decoders.plan = plan


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (no_memory_for_training, TrainingError, "not enough memory for a single completion of 60 tokens"),
        (no_memory_for_sampling, SamplerError, "not enough memory to sample one completion of up to 40 tokens behind"),
    ],
)
def test_memory_that_would_run_out_later_ends_the_run_behind_its_first_step(
    change: Callable[[Any, Any], None], kind: type[Exception], message: str, start: Callable[..., Any]
) -> None:
    with pytest.raises(kind, match=message) as raised:
        start("short", is_tried=True, change=change)
    assert "20 tokens of a prompt and 40 of a completion, were tried after the first update" in str(raised.value)
    assert "Lower rollouts.max_completion_tokens" in str(raised.value)


def test_rows_are_stretched_from_the_longest_completion() -> None:
    prompts = [Prompt("", (1, 2, 3), 0), Prompt("", (4,), 1)]
    rows = [((5, 6), (7,)), ((8, 9, 5), (6, 7))]
    groups = [
        Group(prompt, tuple(Completion(prompt.prompt_ids, ids, "", (-1.0,) * len(ids), "stop", 0, n)
                            for n, ids in enumerate(made)))
        for prompt, made in zip(prompts, rows, strict=True)
    ]  # fmt: skip
    batch = collate(groups, torch.tensor([[1.0, -1.0], [0.5, -0.5]]))
    found = stretched(batch, 5, group_size=2, prompt_tokens=2, completion_tokens=7)
    assert (found.prompt_ids.tolist(), found.prompt_lengths.tolist()) == ([[4, 4]] * 5, [2] * 5)
    assert (found.completion_ids.tolist(), found.completion_lengths.tolist()) == ([[8, 9, 5, 8, 9, 5, 8]] * 5, [7] * 5)
    assert (found.group_ids.tolist(), found.advantages.tolist()) == ([0, 0, 1, 1, 2], [0.5] * 5)
    assert bool(found.mask.all())
    assert not found.sampler_logprobs.any()
    assert found.size == Size(5, 35, 3)
    assert stretched(batch, 1, group_size=2, prompt_tokens=1, completion_tokens=2).completion_ids.tolist() == [[8, 9]]
