"""Are log-probabilities right, and do weights move as they should?"""

from __future__ import annotations

import copy
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import make_trained_policy
from torch import Tensor

from oncurve.core.batch import Batch, collate
from oncurve.core.errors import SamplerError, Shortage, TrainingError, first_line, is_out_of_memory, single_line
from oncurve.core.policy import OneProcess, compute_context
from oncurve.core.records import Group, Mean
from oncurve.model.forward_backward import LayerPass
from oncurve.policy import trained_policy
from oncurve.policy.distributed import ALONE
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.sharding import Sharding, ZeroSettings
from oncurve.policy.trained_policy import Parallelism, TrainedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MakePolicy = Callable[..., TrainedPolicy]
MakeModel = Callable[..., "PreTrainedModel"]
RandomGroups = Callable[..., list[Group]]
MakeBatch = Callable[[str], Batch]
SAID = "CUDA out of memory. Tried to allocate 3.00 GiB"


@pytest.fixture
def groups(random_groups: RandomGroups) -> list[Group]:
    return random_groups()


@pytest.fixture
def batch(groups: list[Group]) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return collate(groups, torch.randn(len(groups), len(groups[0].completions), generator=generator))


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def step(policy: TrainedPolicy, batch: Batch, *, scale: float = 1.0) -> dict[str, float]:
    """One optimizer update that raises the log-probability of every token."""
    logprobs, _ = policy.logprobs(batch)
    policy.backward(-scale * logprobs.sum())
    return {key: mean.value for key, mean in policy.update().items()}


def whole_logits(model: PreTrainedModel, groups: list[Group], temperature: float) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities and entropies of each completion from the model's own full logits, one row at a time."""
    logprobs, entropies = [], []
    for completion in (completion for group in groups for completion in group.completions):
        ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1].double() / temperature
        log_p = torch.log_softmax(logits, dim=-1)
        logprobs.append(log_p.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(dim=-1))
    return logprobs, entropies


@pytest.mark.proves("F25", "F28")
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "gemma2"])
def test_log_probabilities_and_entropies_are_those_of_the_models_own_logits(
    architecture: str,
    temperature: float,
    packing: bool,
    tiny_model: MakeModel,
    make_policy: MakePolicy,
    groups: list[Group],
) -> None:
    expected_logprobs, expected_entropies = whole_logits(tiny_model(architecture), groups, temperature)
    policy = make_policy(architecture, temperature=temperature, packing=packing)
    batch = collate(groups, torch.zeros(len(groups), len(groups[0].completions)))
    logprobs, entropies = policy.logprobs(batch)
    assert logprobs.shape == entropies.shape == batch.mask.shape
    for row in range(len(batch)):
        length = int(batch.completion_lengths[row])
        torch.testing.assert_close(logprobs[row, :length].double(), expected_logprobs[row], atol=2e-5, rtol=0)
        torch.testing.assert_close(entropies[row, :length].double(), expected_entropies[row], atol=2e-5, rtol=0)
        assert not logprobs[row, length:].any()
        assert not entropies[row, length:].any()


@pytest.mark.parametrize(("architecture", "packed"), [("qwen2", True), ("llama", True), ("gemma2", False)])
def test_batches_are_packed_where_the_architecture_allows_it(
    architecture: str, packed: bool, make_policy: MakePolicy
) -> None:
    assert make_policy(architecture).is_packed is packed
    assert not make_policy(architecture, packing=False).is_packed


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_padding_and_masked_completions_have_no_influence(
    packing: bool, make_policy: MakePolicy, groups: list[Group], batch: Batch
) -> None:
    policy = make_policy(packing=packing)
    expected, _ = policy.logprobs(batch)
    prompt_places, places = torch.arange(batch.prompt_ids.shape[1]), torch.arange(batch.mask.shape[1])
    littered = replace(
        batch,
        prompt_ids=torch.where(prompt_places[None] < batch.prompt_lengths[:, None], batch.prompt_ids, 77),
        completion_ids=torch.where(places[None] < batch.completion_lengths[:, None], batch.completion_ids, 88),
    )
    assert torch.equal(policy.logprobs(littered)[0], expected)
    without = collate(groups, batch.advantages.view(len(groups), -1), mask_truncated=True)
    assert not torch.equal(without.mask, batch.mask)
    torch.testing.assert_close(policy.logprobs(without)[0], torch.where(without.mask, expected, 0.0))


def test_a_batch_without_a_token_to_train_on_has_no_gradient(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy()
    logprobs, _ = policy.logprobs(replace(batch, mask=torch.zeros_like(batch.mask)))
    assert not logprobs.any()
    policy.backward(logprobs.sum())
    gradients = [parameter.grad for parameter in policy.model.parameters() if parameter.grad is not None]
    assert not any(bool(gradient.any()) for gradient in gradients)


@pytest.mark.proves("F41")
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_checkpointing_recomputes_every_layer_and_changes_no_gradient(
    architecture: str, packing: bool, make_policy: MakePolicy, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncurve.policy.forward.backbone_of", lambda model: None)  # through the model's own layers
    plain = make_policy(architecture, packing=packing)
    saving = make_policy(architecture, packing=packing, gradient_checkpointing=True)
    passes: dict[TrainedPolicy, int] = {plain: 0, saving: 0}

    def count(policy: TrainedPolicy) -> None:
        def one_more(*_: object) -> None:
            passes[policy] += 1

        for name, module in policy.model.named_modules():
            if name.endswith((".mlp", ".attn", ".self_attn")):
                module.register_forward_pre_hook(one_more)

    for policy in passes:
        count(policy)
        policy.backward(policy.logprobs(batch)[0].sum())
    assert passes == {plain: 4, saving: 8}
    for one, other in zip(plain.model.parameters(), saving.model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)
    assert not any(module.training for module in saving.model.modules())
    with torch.no_grad():
        saving.model(batch.prompt_ids, use_cache=True)
    assert passes[saving] == 12


def test_checkpointing_recomputes_our_own_layers_too(
    make_policy: MakePolicy, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = [make_policy("qwen2"), make_policy("qwen2", gradient_checkpointing=True)]
    passes: list[int] = []
    forward = LayerPass.forward

    def counted(self: LayerPass, *arguments: Any) -> Any:
        passes[-1] += 1
        return forward(self, *arguments)

    monkeypatch.setattr(LayerPass, "forward", counted)
    for policy in policies:
        passes.append(0)
        policy.backward(policy.logprobs(batch)[0].sum())
    layers = policies[0].model.config.num_hidden_layers
    assert passes == [layers, 2 * layers]
    for one, other in zip(policies[0].model.parameters(), policies[1].model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_model_that_cannot_recompute_says_so(tokenizer: PreTrainedTokenizerFast, tiny_model: MakeModel) -> None:
    model = tiny_model("qwen2")
    model.model.layers = torch.nn.ModuleList()  # type: ignore[assignment]
    with pytest.raises(TrainingError, match="gradient_checkpointing to false"):
        make_trained_policy(model, tokenizer, packing=False, gradient_checkpointing=True)


@pytest.mark.proves("F19")
def test_stored_log_probabilities_are_those_before_the_updates(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy(tokens_per_microbatch=24)
    before, _ = policy.logprobs(batch)
    annotated = policy.annotate(batch, old=True, entropy=False, reference=False)
    assert annotated.old_logprobs is not None
    assert annotated.ref_logprobs is None
    assert not annotated.old_logprobs.requires_grad
    torch.testing.assert_close(annotated.old_logprobs, before.detach(), atol=1e-5, rtol=0)
    step(policy, batch)
    assert not torch.allclose(policy.logprobs(batch)[0], annotated.old_logprobs, atol=1e-3)


@pytest.mark.proves("F16")
def test_the_reference_stays_where_it_was(make_policy: MakePolicy, tiny_model: MakeModel, batch: Batch) -> None:
    policy = make_policy(reference=tiny_model("qwen2").requires_grad_(False))
    first = policy.annotate(batch, old=False, entropy=False, reference=True).ref_logprobs
    step(policy, batch)
    second = policy.annotate(batch, old=False, entropy=False, reference=True).ref_logprobs
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    assert not torch.allclose(first, policy.logprobs(batch)[0], atol=1e-3)
    assert policy.reference is not None
    start, end = weights(policy.reference), weights(policy.model)
    for share, moved in ((0.0, 0.0), (0.25, 0.25), (1.0, 1.0)):
        policy.move_reference(share)
        for name, weight in policy.reference.named_parameters():
            torch.testing.assert_close(weight.detach(), torch.lerp(start[name], end[name], moved))


def test_a_reference_that_does_not_exist_is_asked_for_in_vain(make_policy: MakePolicy, batch: Batch) -> None:
    with pytest.raises(TrainingError, match="made without one"):
        make_policy().annotate(batch, old=False, entropy=False, reference=True)


@pytest.mark.proves("F44")
def test_microbatches_are_cut_by_tokens_and_hold_every_row(make_policy: MakePolicy, batch: Batch) -> None:
    for packing in (True, False):
        policy = make_policy(tokens_per_microbatch=40, packing=packing)
        parts = list(policy.microbatches(batch))
        assert len(parts) > 1
        assert sum(len(part) for part in parts) == len(batch)
        assert sum(int(part.mask.sum()) for part in parts) == batch.size.num_tokens
        assert {part.size for part in parts} == {batch.size}


class OneOfTwo(OneProcess):
    """The first of two processes, of which the other has two microbatches more."""

    count = 2

    def all_gather(self, value: Any) -> list[Any]:
        return [value, value + 2]


def test_one_of_several_processes_makes_as_many_passes_and_counts_an_update_by_its_share(
    make_policy: MakePolicy, batch: Batch
) -> None:
    policy = make_policy(tokens_per_microbatch=40)
    own = len(list(policy.microbatches(batch)))
    policy.processes = OneOfTwo()
    assert len(list(policy.microbatches(batch))) == own
    policy.backend.is_lockstep = True
    *parts, first, second = policy.microbatches(batch)
    assert len(parts) == own
    for idle in (first, second):
        assert idle.row_lengths.tolist() == [int(batch.row_lengths.min())]
        assert not idle.mask.any()
        assert idle.advantages.tolist() == [0.0]
    assert policy.update()["policy/loss"] == Mean(0, 0.5)


def test_a_backend_is_told_when_passes_are_over_and_when_weights_are_published(
    make_policy: MakePolicy, tiny_model: MakeModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, told = make_policy(reference=tiny_model("qwen2").requires_grad_(False)), []
    policy.backend.after_scoring = told.append  # type: ignore[method-assign]
    policy.backend.publish = lambda: told.append("published")  # type: ignore[method-assign]
    policy.annotate(batch, old=False, entropy=True, reference=True)
    policy.publish()
    assert told == [policy.model, policy.reference, "published"]
    given_back: list[int] = []
    monkeypatch.setattr(trained_policy, "give_back", lambda: given_back.append(1))
    step(policy, batch)
    assert given_back == [1]


@pytest.mark.parametrize(
    ("sharding", "counts"),
    [
        (None, (False, False)),
        (Sharding(), (False, True)),
        (ZeroSettings({}), (False, False)),
        (ZeroSettings({"zero_optimization": {"stage": 3}}), (True, True)),
    ],
    ids=["whole", "fsdp", "ZeRO-2", "ZeRO-3"],
)
def test_weights_are_cut_where_each_process_is_to_have_a_part(sharding: Any, counts: tuple[bool, bool]) -> None:
    assert tuple(Parallelism(replace(ALONE, count=count), sharding).cuts_weights for count in (1, 2)) == counts


def test_full_width_types_compute_as_they_are_and_greedy_sampling_is_trained_at_temperature_one(
    make_policy: MakePolicy,
) -> None:
    for name, is_narrowed in (("float32", False), ("float64", False), ("bfloat16", True), ("float16", True)):
        with compute_context(torch.device("cpu"), name):  # type: ignore[arg-type]
            assert torch.is_autocast_enabled("cpu") is is_narrowed, name
            assert not is_narrowed or str(torch.get_autocast_dtype("cpu")) == f"torch.{name}"
    assert [make_policy(temperature=at).temperature for at in (0.0, 0.6)] == [1.0, 0.6]


@pytest.mark.proves("F39", "D9")
@pytest.mark.parametrize("compute_type", ["bfloat16", "float32"])
def test_an_update_of_a_millionth_is_not_lost(compute_type: str, make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy(compute_type=compute_type, optimizer=OptimizerSettings(learning_rate=1e-6))
    before = weights(policy.model)
    step(policy, batch)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    assert {state["exp_avg"].dtype for state in policy.backend.optimizer.state.values()} == {torch.float32}
    moved = torch.cat(
        [(parameter - before[name]).abs().flatten() for name, parameter in policy.model.named_parameters()]
    )
    moved = moved[moved > 0]
    assert moved.median().item() == pytest.approx(1e-6, rel=0.05)  # the first update of AdamW is the learning rate
    for _ in range(4):
        step(policy, batch)
    largest = max((p - before[name]).abs().max().item() for name, p in policy.model.named_parameters())
    assert largest == pytest.approx(5e-6, rel=0.05)


@pytest.mark.proves("F39")
def test_half_width_arithmetic_gives_nearly_the_same_log_probabilities(make_policy: MakePolicy, batch: Batch) -> None:
    exact, _ = make_policy().logprobs(batch)
    rough, entropy = make_policy(compute_type="bfloat16").logprobs(batch)
    assert rough.dtype == entropy.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(exact, rough, atol=0.3, rtol=0.05)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_whose_loss_or_gradient_is_not_finite_is_skipped_counted_and_moves_nothing(
    bad: float, where: str, make_policy: MakePolicy, batch: Batch
) -> None:
    policy = make_policy()
    step(policy, batch)
    before, state = weights(policy.model), copy.deepcopy(policy.backend.optimizer.state_dict())
    logprobs, _ = policy.logprobs(batch)
    policy.backward(logprobs.sum() * (bad if where == "loss" else 1.0))
    if where == "gradient":  # as from a kernel that overflows on the way back
        next(p.grad for p in policy.model.parameters() if p.grad is not None).view(-1)[0] = bad
    statistics = policy.update()
    assert statistics["policy/nonfinite_updates"].value == 1
    assert statistics["policy/skipped_updates"].value == 1
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.model.named_parameters())
    for key, values in policy.backend.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][key][name]) for name, value in values.items())
    assert policy.num_updates == 1


@pytest.mark.proves("F31")
def test_the_gradient_is_clipped_to_the_limit_and_its_norm_reported_before(
    make_policy: MakePolicy, batch: Batch
) -> None:
    norms: dict[float, tuple[float, float]] = {}
    for limit in (0.5, 0.0):
        policy, seen = make_policy(optimizer=OptimizerSettings(max_gradient_norm=limit)), []

        def look(optimizer: torch.optim.Optimizer, *_: object, seen: list[float] = seen) -> None:
            gradients = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]
            seen.append(torch.cat(gradients).norm().item())

        policy.backend.optimizer.register_step_pre_hook(look)
        norms[limit] = step(policy, batch)["policy/gradient_norm"], seen[0]
    assert norms[0.5][0] == norms[0.0][0] == pytest.approx(norms[0.0][1])
    assert norms[0.5][0] > 1
    assert norms[0.5][1] == pytest.approx(0.5)


@pytest.mark.proves("F43")
def test_the_gradient_of_an_update_is_forgotten(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy()
    step(policy, batch)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_without_a_gradient_nothing_moves(make_policy: MakePolicy, batch: Batch) -> None:
    policy = make_policy()
    step(policy, batch)
    before = weights(policy.model)
    assert policy.update() == {
        "policy/skipped_updates": Mean(1, 1), "policy/nonfinite_updates": Mean(0, 1), "policy/loss": Mean(0, 1)
    }  # fmt: skip
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.model.named_parameters())
    assert (policy.num_updates, policy.num_scheduled) == (1, 2)


def test_weights_that_are_frozen_stay_and_have_no_optimizer_state(
    make_policy: MakePolicy, tiny_model: MakeModel, batch: Batch
) -> None:
    model = tiny_model("llama")
    model.get_input_embeddings().requires_grad_(False)
    policy = make_policy(model)
    before = weights(model)
    step(policy, batch)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == set(before) - {"model.embed_tokens.weight"}


def rates(**settings: object) -> list[float]:
    chosen = OptimizerSettings(learning_rate=1.0, **settings)  # type: ignore[arg-type]
    return [chosen.rate(update, 10) for update in range(12)]


@pytest.mark.proves("F32")
def test_a_constant_rate_warms_up_without_a_first_update_of_nothing() -> None:
    assert rates(warmup_updates=3) == [0.25, 0.5, 0.75, *[1.0] * 9]


def test_a_linear_schedule_falls_to_zero_and_stays_there() -> None:
    assert rates(schedule="linear") == pytest.approx([1 - n / 10 for n in range(10)] + [0.0, 0.0])
    assert rates(schedule="linear", warmup_updates=2)[2:10] == pytest.approx([1 - n / 8 for n in range(8)])


def test_a_cosine_schedule_passes_half_in_the_middle() -> None:
    found = rates(schedule="cosine")
    assert (found[0], found[5], found[10]) == pytest.approx((1.0, 0.5, 0.0))
    assert all(later < earlier for earlier, later in pairwise(found[:11]))


def test_a_warm_up_longer_than_the_run_is_no_division_by_zero() -> None:
    settings = OptimizerSettings(learning_rate=1.0, warmup_updates=20, schedule="linear")
    assert [settings.rate(update, 10) for update in (19, 20, 21, 25)] == [20 / 21, 1.0, 0.0, 0.0]
    assert settings.rate(21, 22) == 0.5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"extension": "hold"}, [1 - n / 10 for n in range(10)]),
        ({"extension": "restart"}, [1 - n / 10 for n in range(10)]),
        ({"planned_updates": (4,)}, [1 - n / 10 for n in range(10)]),
        ({"planned_updates": (4,), "extension": "hold"}, [1, 0.75, 0.5, *[0.25] * 7]),
        ({"planned_updates": (4,), "extension": "restart"}, [1, 0.75, 0.5, 0.25, *(1 - n / 6 for n in range(6))]),
        ({"planned_updates": (2, 6), "extension": "restart"}, [1, 0.5, 1, 0.75, 0.5, 0.25, 1, 0.75, 0.5, 0.25]),
    ],
)
def test_an_extended_schedule_goes_on_as_it_was_decided(settings: dict[str, Any], expected: list[float]) -> None:
    assert rates(schedule="linear", **settings)[:10] == pytest.approx(expected)


@pytest.mark.proves("F32", "F118", "D42")
def test_every_update_uses_the_rate_of_its_number(make_policy: MakePolicy, batch: Batch) -> None:
    settings = OptimizerSettings(learning_rate=0.1, warmup_updates=1, schedule="linear")
    policy = make_policy(optimizer=settings, total_updates=3)
    made = [step(policy, batch) for _ in range(3)]
    assert [one["policy/learning_rate"] for one in made] == pytest.approx([0.05, 0.1, 0.05])
    assert [(one["policy/skipped_updates"], one["policy/nonfinite_updates"], one["policy/loss"]) for one in made] == [
        (0, 0, 0)
    ] * 3
    assert policy.last_rate == made[-1]["policy/learning_rate"]
    assert policy.backend.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_pass_without_gradients_goes_on_in_smaller_parts(
    make_policy: MakePolicy, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = make_batch("ragged")
    limit = int(batch.row_lengths.max()) + 1
    tight, roomy = make_policy(packing=False), make_policy(packing=False)
    expected = roomy.annotate(batch, old=True, entropy=True, reference=False)
    right = trained_policy.completion_logprobs

    def choking(model: Any, part: Batch, **options: Any) -> Any:
        found = right(model, part, **options)
        if int(part.row_lengths.sum()) > limit:
            raise torch.OutOfMemoryError(SAID)
        return found

    monkeypatch.setattr(trained_policy, "completion_logprobs", choking)
    found = tight.annotate(batch, old=True, entropy=True, reference=False)
    assert tight.tokens_per_microbatch < roomy.tokens_per_microbatch
    assert "OUT OF MEMORY in a pass without gradients" in caplog.text
    assert "set policy.tokens_per_microbatch" in caplog.text
    for name in ("old_logprobs", "old_entropy"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)


def test_a_row_that_does_not_fit_into_a_pass_without_gradients_ends_in_one_message(
    make_policy: MakePolicy, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choking(*given: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError(SAID)

    policy = make_policy(packing=False)
    monkeypatch.setattr(trained_policy, "completion_logprobs", choking)
    with pytest.raises(TrainingError, match=r"a single completion of .* Lower rollouts\.max_completion_tokens"):
        policy.annotate(make_batch("ragged"), old=True, entropy=False, reference=False)


def test_a_shortage_forgives_nothing_else_and_keeps_no_frame() -> None:
    class Held:
        """Something large."""

    held: list[weakref.ref[Held]] = []

    def fails(error: Exception) -> None:
        large = Held()
        held.append(weakref.ref(large))
        raise error

    with Shortage() as shortage:
        fails(torch.OutOfMemoryError(f"{SAID}\nmore"))
    assert shortage.reason == SAID
    assert held[0]() is None
    assert sys.exc_info() == (None, None, None)
    for error in (ValueError("out of memory"), SamplerError("there is not enough memory to sample")):
        with pytest.raises(type(error)), Shortage():
            fails(error)
    assert not is_out_of_memory(TrainingError("there is not enough memory for a microbatch"))
    assert not is_out_of_memory(RuntimeError("a shape is wrong"))
    for text, first in (
        ("", "ValueError"),
        (" one\ntwo", "one"),
        ("a" * 200, "a" * 200),
        ("a" * 201, "a" * 200),
        (f"One. Two. {'a' * 200}", "One. Two"),
    ):
        assert first_line(ValueError(text)) == first
    for length, kept in ((300, 300), (301, 300)):
        assert single_line(ValueError("a" * length)) == f"ValueError: {'a' * kept}"
    assert single_line(ValueError(" \n")) == "ValueError"
