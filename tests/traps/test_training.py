"""Mistakes in the loop that other GRPO programs have made, each planted nowhere here: one test for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import make_tokenizer

from oncurve.algorithm.presets import build
from oncurve.core.batch import collate
from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.observe.record import read_metrics, read_rollouts
from oncurve.policy.lora import add_adapter
from oncurve.policy.settings import LoraSettings, OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.load import parse_config
from oncurve.run.builder import make_policy as policy_of_recipe
from oncurve.sample.engine import InProcessEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oncurve.core.batch import Batch
    from oncurve.run.services import Run

MakePolicy = Callable[..., TrainedPolicy]
MakePrompts = Callable[..., list[Prompt]]
TEXTS = ("a b", "cat", "d e f", "12 and 7")
LIMIT = 8
SAMPLING = SamplingParams(max_completion_tokens=LIMIT)


def odd(prompt: Prompt, completion: Completion) -> bool:
    return sum(completion.token_ids) % 2 == 1


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Every microbatch whose loss is differentiated, in the order of the run."""
    batches: list[Batch] = []
    computed = TrainedPolicy.logprobs

    def watched(self: TrainedPolicy, batch: Batch) -> Any:
        batches.append(batch)
        return computed(self, batch)

    monkeypatch.setattr(TrainedPolicy, "logprobs", watched)
    return batches


@pytest.fixture
def trained(make_policy: MakePolicy, make_prompts: MakePrompts, train_in: Callable[..., Run]) -> Callable[..., Run]:
    """A run of one step over four prompts with six completions each; keywords change it."""

    def start(**changes: Any) -> Run:
        policy = changes.pop("policy", None) or make_policy()
        choices = changes.pop("algorithm", {})
        algorithm = build("grpo", group_size=6, max_completion_tokens=LIMIT, **choices)
        options: dict[str, Any] = {"steps": 1, "prompts_per_step": 4} | changes
        return train_in(policy, make_prompts(*TEXTS), odd, algorithm, SAMPLING, **options)

    return start


def rows_of(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompt and trained tokens of every row."""
    return [
        (
            tuple(batch.prompt_ids[row, : batch.prompt_lengths[row]].tolist()),
            tuple(batch.completion_ids[row][batch.mask[row]].tolist()),
        )
        for row in range(len(batch))
    ]


@pytest.fixture
def groups_of_run(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups as they left the sampler."""
    from oncurve.sample.engine import InProcessEngine

    found: list[Group] = []
    computed = InProcessEngine.sample

    def watched(self: InProcessEngine, *arguments: Any, **options: Any) -> list[Group]:
        groups = computed(self, *arguments, **options)
        found.extend(groups)
        return groups

    monkeypatch.setattr(InProcessEngine, "sample", watched)
    return found


@pytest.mark.proves("D0")
def test_completions_are_trained_on_their_own_prompt(
    trained: Callable[..., Run], seen: list[Batch], groups_of_run: list[Group]
) -> None:
    """Prompts repeated as p0, p1, p0, p1 beside completions in the order p0, p0, p1, p1 train on foreign prompts."""
    trained()
    pairs = Counter(
        (group.prompt.prompt_ids, completion.token_ids) for group in groups_of_run for completion in group.completions
    )
    found = Counter(row for batch in seen for row in rows_of(batch))
    assert len({prompt for prompt, _ in found}) >= 3
    assert found <= pairs, "a row pairs a prompt with tokens that were sampled for another"


@pytest.mark.proves("D0")
def test_each_completion_is_trained_with_its_own_advantage(
    trained: Callable[..., Run], seen: list[Batch], groups_of_run: list[Group]
) -> None:
    trained()
    expected: dict[Any, float] = {}
    for group in groups_of_run:
        rewards = torch.tensor([float(odd(group.prompt, one)) for one in group.completions], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6) if rewards.std() > 0 else 0 * rewards
        for completion, advantage in zip(group.completions, advantages.tolist(), strict=True):
            expected[group.prompt.prompt_ids, completion.token_ids] = advantage
    checked = 0
    for batch in seen:
        for row, advantage in zip(rows_of(batch), batch.advantages.tolist(), strict=True):
            assert advantage == pytest.approx(expected[row], abs=1e-5)
            checked += advantage != 0
    assert checked >= 6


@pytest.mark.proves("D38")
def test_the_tokens_that_were_sampled_are_trained_on_even_where_their_text_has_other_tokens(
    trained: Callable[..., Run], seen: list[Batch], groups_of_run: list[Group], make_policy: MakePolicy
) -> None:
    """Text that is tokenized again has other tokens, and loses the end token."""
    policy = make_policy()
    trained(policy=policy, steps=4)
    found = {row for batch in seen for row in rows_of(batch)}
    again = 0
    for group in groups_of_run:
        for completion in group.completions:
            if (group.prompt.prompt_ids, completion.token_ids) in found:
                again += tuple(policy.tokenizer(completion.text)["input_ids"]) != completion.token_ids
    assert again >= 5
    ends = {ids[-1] for _, ids in found}
    assert policy.tokenizer.eos_token_id in ends


@pytest.mark.proves("F116")
def test_the_advantages_that_are_logged_are_those_that_are_trained_on(trained: Callable[..., Run]) -> None:
    run = trained()
    [row] = read_metrics(run.log.folder.path)
    written = [one["advantage"] for group in read_rollouts(run.log.folder.path, 1) for one in group["completions"]]
    assert len(written) == 24
    assert row["advantage/mean"] == pytest.approx(sum(written) / 24, abs=1e-6)
    assert row["advantage/std"] == pytest.approx(torch.tensor(written).std().item(), rel=1e-5)


@pytest.mark.proves("F156")
def test_rewards_and_advantages_stay_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    trained: Callable[..., Run],
    make_policy: MakePolicy,
    tiny_model: Callable[..., PreTrainedModel],
) -> None:
    from oncurve.core.algorithm import Algorithm

    asked: list[torch.device] = []
    computed = Algorithm.advantages

    def watched(self: Algorithm, rewards: Any) -> torch.Tensor:
        advantages = computed(self, rewards)
        asked.extend((rewards.values.device, advantages.device))
        return advantages

    monkeypatch.setattr(Algorithm, "advantages", watched)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # only with a GPU is there another place to be
    trained(policy=make_policy(tiny_model("qwen2").to(device)))
    assert asked
    assert {device.type for device in asked} == {"cpu"}


@pytest.mark.proves("D35")
def test_old_log_probabilities_are_computed_in_microbatches(
    make_policy: MakePolicy, random_groups: Callable[..., list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rollouts in one forward pass would make logits of many gigabytes."""
    from oncurve.policy import trained_policy as module

    policy = make_policy(tokens_per_microbatch=40)
    batch = collate(random_groups(6, 4), torch.ones(6, 4))
    sizes: list[int] = []
    computed = module.completion_logprobs

    def watched(model: Any, part: Batch, **options: Any) -> Any:
        sizes.append(int(part.row_lengths.sum()) if len(part) > 1 else 0)
        return computed(model, part, **options)

    monkeypatch.setattr(module, "completion_logprobs", watched)
    annotated = policy.annotate(batch, old=True, entropy=False, reference=False)
    assert len(sizes) > 4
    shared = 4 * 9  # a prompt that four rows share is computed once
    assert max(sizes) <= 40 + shared
    assert annotated.old_logprobs is not None
    assert (annotated.old_logprobs[batch.mask] < 0).all()


@pytest.mark.proves("D50")
def test_rewards_are_computed_once_however_many_passes_are_made(
    make_policy: MakePolicy, make_prompts: MakePrompts, train_in: Callable[..., Run]
) -> None:
    asked: list[tuple[int, ...]] = []

    def counted(prompt: Prompt, completion: Completion) -> bool:
        asked.append(completion.token_ids)
        return odd(prompt, completion)

    algorithm = build("grpo", group_size=6, max_completion_tokens=LIMIT)
    train_in(
        make_policy(),
        make_prompts(*TEXTS),
        counted,
        algorithm,
        SAMPLING,
        steps=2,
        prompts_per_step=4,
        passes_per_step=3,
    )
    assert len(asked) == 2 * 24


@pytest.mark.proves("D50")
def test_the_optimizer_keeps_its_moments_when_the_reference_follows(
    make_policy: MakePolicy, tiny_model: Callable[..., PreTrainedModel], trained: Callable[..., Run]
) -> None:
    policy = make_policy(reference=tiny_model("qwen2").requires_grad_(False))
    optimizer = policy.backend.optimizer
    choices = {"kl_coef": 0.04, "reference": "refreshed", "reference_every_steps": 1}
    run = trained(policy=policy, algorithm=choices, steps=3)
    assert policy.backend.optimizer is optimizer
    assert {int(state["step"]) for state in optimizer.state.values()} == {policy.num_updates}
    assert policy.num_updates == 3
    rows = read_metrics(run.log.folder.path)
    assert all("policy/kl" in row for row in rows)
    pairs = zip(policy.trained_model.parameters(), policy.reference.parameters(), strict=True)  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in pairs), "the reference has followed"


@pytest.mark.proves("D9")
def test_what_is_trained_is_float32_whatever_the_arithmetic(tiny_model: Callable[..., PreTrainedModel]) -> None:
    """AdamW on bfloat16 weights loses most updates at usual learning rates."""
    recipe = "{model: embedded, data: {type: word_problems}, policy: {compute_type: bfloat16}}"
    for words in ([], ["policy.lora={}"]):
        policy = policy_of_recipe(parse_config(recipe, words))
        moved = [parameter for parameter in policy.trained_model.parameters() if parameter.requires_grad]
        assert {parameter.dtype for parameter in moved} == {torch.float32}
    half = tiny_model("llama").to(torch.bfloat16)
    add_adapter(half, LoraSettings(rank=2), base="embedded", seed=0)
    assert {p.dtype for p in half.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.proves("F32")
def test_every_number_of_the_optimizer_is_that_of_the_recipe() -> None:
    words = [
        "optimizer.learning_rate=5e-5", "optimizer.beta1=0.8", "optimizer.beta2=0.95", "optimizer.weight_decay=0.1",
        "optimizer.epsilon=1e-6", "optimizer.warmup_updates=100", "optimizer.schedule=cosine", "run.steps=300",
    ]  # fmt: skip
    policy = policy_of_recipe(parse_config("{model: embedded, data: {type: word_problems}}", words))
    group, norms = policy.backend.optimizer.param_groups
    assert norms["weight_decay"] == 0
    assert isinstance(policy.backend.optimizer, torch.optim.AdamW)
    assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (5e-5, (0.8, 0.95), 0.1, 1e-6)
    expected = OptimizerSettings(learning_rate=5e-5, warmup_updates=100, schedule="cosine")
    assert [policy.settings.rate(n, policy.total_updates) for n in (0, 99, 100, 200, 299)] == [
        expected.rate(n, 300) for n in (0, 99, 100, 200, 299)
    ]


@pytest.mark.proves("D13")
def test_sampling_uses_its_cache_although_training_recomputes_its_activations(
    make_policy: MakePolicy, make_prompts: MakePrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where checkpointing switches the cache off, every new token costs a pass over the whole row."""
    policy = make_policy("llama", gradient_checkpointing=True)
    policy.model.train()
    sampler = InProcessEngine(replace(SAMPLING, min_completion_tokens=LIMIT), own_layers=False)
    sampler.load_weights(policy, version=0)
    sampler.sample(SamplingRequest(make_prompts("a long prompt"), 2))  # finds the way to sample
    widths: list[int] = []
    embedding = policy.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, given, output: widths.append(given[0].shape[1]))
    sampler.sample(SamplingRequest(make_prompts("a long prompt"), 2))
    hook.remove()
    assert widths[1:] == [1] * (LIMIT - 1)


@pytest.mark.proves("D51")
@pytest.mark.parametrize("padding", ["the end token", "a token that only the tokenizer has"])
def test_rows_of_unequal_length_sample_what_they_sample_alone(
    padding: str, tiny_model: Callable[..., PreTrainedModel], make_prompts: MakePrompts
) -> None:
    """Padding that attention sees changes completions; scripts that add a [PAD] token often leave the model alone."""
    tokenizer = make_tokenizer()
    if padding == "the end token":
        tokenizer.pad_token = tokenizer.eos_token
    else:
        tokenizer.add_special_tokens({"pad_token": "[ADDED]"})
    sampler = InProcessEngine(replace(SAMPLING, temperature=0), own_layers=False)
    sampler.load_weights(TrainedPolicy(tiny_model("qwen2"), tokenizer, optimizer=OptimizerSettings()), version=0)
    together = sampler.sample(SamplingRequest(make_prompts("a", "a very much longer prompt than that"), 1))
    alone = [
        sampler.sample(SamplingRequest(make_prompts(text), 1))[0]
        for text in ("a", "a very much longer prompt than that")
    ]
    assert [group.completions[0].token_ids for group in together] == [g.completions[0].token_ids for g in alone]
