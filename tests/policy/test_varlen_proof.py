"""Is the kernel for runs proven when a policy is made, and left for blocks where it fails?"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from runs_reference import Reference
from torch import Tensor

from oncurve.core.batch import Batch, Size
from oncurve.core.logprobs import join_rows
from oncurve.model.packing import Runs
from oncurve.model.weights import Trust, trust_of
from oncurve.policy import forward, packed_attention, scoring_path
from oncurve.run_errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oncurve.policy.trained_policy import TrainedPolicy

MakePolicy = Callable[..., "TrainedPolicy"]
MakeModel = Callable[..., "PreTrainedModel"]
MakeBatch = Callable[[str], Batch]


class Wrong(Reference):
    """A kernel with a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, q: Tensor, k: Tensor, v: Tensor, runs: Runs, **options: Any) -> tuple[Tensor, Tensor]:
        if self.fault == "raises":
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nand more")
        out, logs = super().forward(q, k, v, runs, **options)
        if self.fault == "logarithms":
            logs += 1.0 if options["causal"] else 0.0
        return (torch.full_like(out, torch.nan), logs) if self.fault == "nan" else (out, logs)

    def backward(self, grad: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = super().backward(grad, *given, **options)
        if self.fault == "gradient of keys" and not options["causal"]:
            grad_k = torch.zeros_like(grad_k)
        return grad_q, grad_k, grad_v


@pytest.mark.parametrize("compute_type", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_right_kernel_is_proven_and_used_in_the_compute_type(
    architecture: str,
    compute_type: str,
    make_policy: MakePolicy,
    make_batch: MakeBatch,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(scoring_path, "kernel_for", packed_attention.kernel_for)
    policy = make_policy(architecture, compute_type=compute_type)
    assert policy.is_packed
    assert not [record for record in caplog.records if record.name.startswith("oncurve")]
    reference.seen.clear()
    logprobs, _ = policy.logprobs(make_batch("ragged"))
    policy.backward(-logprobs.mean())
    assert {kind for _, kind in reference.seen} == {getattr(torch, compute_type)}
    assert {part.grad.dtype for part in policy.model.parameters() if part.grad is not None} == {torch.float32}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", "raised RuntimeError: FlashAttention only supports Ampere GPUs or newer."),
        ("logarithms", "gives log-probabilities that differ"),
        ("nan", "gives log-probabilities that differ"),
        ("gradient of keys", "gives gradients that differ"),
    ],
)
def test_a_kernel_that_fails_or_differs_is_left_for_blocks_with_a_warning(
    fault: str,
    reason: str,
    make_policy: MakePolicy,
    make_batch: MakeBatch,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = Wrong(fault)
    for module in (packed_attention, scoring_path):
        monkeypatch.setattr(module, "kernel_for", lambda device, kind: wrong)
    policy = make_policy(compute_type="bfloat16")
    assert policy.is_packed
    [record] = [record for record in caplog.records if record.name.startswith("oncurve")]
    assert record.levelno == logging.WARNING
    assert "goes on in blocks" in record.getMessage()
    assert reason in record.getMessage()
    assert "\n" not in record.getMessage()
    wrong.seen.clear()
    logprobs, _ = policy.logprobs(make_batch("ragged"))
    assert not wrong.seen
    padded, _ = make_policy(compute_type="bfloat16", packing=False).logprobs(make_batch("ragged"))
    torch.testing.assert_close(logprobs, padded, atol=0.3, rtol=0.05)


def test_the_proof_leaves_no_gradient_and_no_hook(
    tiny_model: MakeModel, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_path, "kernel_for", packed_attention.kernel_for)
    model = tiny_model()
    assert scoring_path.find_scoring_path(model, torch.bfloat16).is_packed
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


def test_packing_that_computes_something_else_is_switched_off_with_both_numbers(
    make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = forward.packed_hidden
    monkeypatch.setattr(forward, "backbone_of", lambda model: None)
    monkeypatch.setattr(forward, "packed_hidden", lambda *given: right(*given) * 1.02)
    policy = make_policy("llama")
    assert not policy.is_packed
    said = str(policy.scoring_path)
    assert said.startswith("padded rows through the model's modules, since packed rows through")
    assert "from the model's own (at most" in said


def test_packing_that_rounds_as_padded_rows_do_stays(make_policy: MakePolicy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert make_policy("llama").is_packed
    assert "the model is trained with packed rows through our own layers" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("context", "longest_tokens", "prompts", "completions"),
    [
        (4096, 0, [3, 3, 21, 21], [5, 24, 4, 9]),
        (4096, 30, [3, 3, 21, 21], [5, 24, 4, 9]),
        (4096, 31, [3, 3, 21, 21], [5, 24, 4, 10]),
        (25, 31, [3, 3, 21, 21], [5, 22, 4, 4]),
        (10, 0, [3, 3, 8, 8], [5, 7, 2, 2]),
    ],
)
def test_a_model_is_looked_at_in_rows_of_its_special_tokens_within_its_context(
    context: int, longest_tokens: int, prompts: list[int], completions: list[int], tiny_model: MakeModel
) -> None:
    model = tiny_model("llama", max_position_embeddings=context)
    model.config.pad_token_id, model.config.eos_token_id = 7, [8, 7, 9, 261]
    rows = scoring_path.example_batch(model, longest_tokens)
    assert (rows.prompt_lengths.tolist(), rows.completion_lengths.tolist()) == (prompts, completions)
    assert (rows.group_ids.tolist(), rows.mask.sum(1).tolist()) == ([0, 0, 1, 1], completions)
    assert rows.size == Size(4, sum(completions), 2)
    assert torch.equal(rows.prompt_ids[0], rows.prompt_ids[1])
    places = ((rows.prompt_ids, (0, 2, 4)), (rows.completion_ids, (1, 3, 5)))
    for ids, columns in places:
        assert ids[2:, columns].tolist() == [[7, 8, 9]] * 2
        assert ids[:2, columns].tolist() != [[7, 8, 9]] * 2
    assert max(int(ids.max()) for ids, _ in places) < model.config.vocab_size


@contextmanager
def cooled(model: Any, temperature: float) -> Iterator[None]:
    """While it lasts, the model's logits are divided by the temperature."""
    hook = model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: output / temperature)
    yield
    hook.remove()


def test_the_first_rollouts_are_compared_in_the_longest_row_that_is_trained_and_its_neighbour(
    tiny_model: MakeModel, make_batch: MakeBatch
) -> None:
    model, batch = tiny_model("llama"), make_batch("ragged")
    batch = batch.select(torch.argsort(batch.row_lengths))
    batch.mask[-1] = False  # the longest is not trained
    first = len(batch) - 2
    for temperature in (1.0, 0.0, 0.5):
        with cooled(model, temperature or 1.0):
            own = scoring_path.own_logprobs(model, batch)
        offsets = torch.arange(1.0, len(batch) + 1)[:, None]
        found = scoring_path.compare_with_own_pass(
            model, replace(batch, sampler_logprobs=own.detach() - offsets), packed=False, temperature=temperature
        )
        assert found.sampler_error == pytest.approx(first + 1, abs=1e-4)
        assert found.num_tokens == int(batch.row_lengths[-1])
        assert found.error <= found.allowed < 1e-2
    batch.mask[first - 1] = False
    batch = batch.select(torch.tensor([0, 1, first]))  # the neighbour of the last is the first
    own = scoring_path.own_logprobs(model, batch).detach() - torch.tensor([[1.0], [5.0], [3.0]])
    found = scoring_path.compare_with_own_pass(model, replace(batch, sampler_logprobs=own), packed=False)
    counts = batch.mask.sum(1).tolist()
    assert found.sampler_error == pytest.approx((counts[0] + 3 * counts[2]) / (counts[0] + counts[2]), abs=1e-4)
    prompt = batch.prompt_ids[0, : int(batch.prompt_lengths[0])]
    logprobs = model(input_ids=prompt[None]).logits[0, :-1].detach().log_softmax(-1).gather(1, prompt[1:, None])
    assert found.prompt_nats == pytest.approx(-float(logprobs.mean()), rel=1e-4)
    assert found.chance_nats == math.log(model.config.vocab_size)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_is_sure_of_its_completions_rounds_as_much_as_its_prompts_say(
    tiny_model: MakeModel, make_batch: MakeBatch
) -> None:
    model, batch = tiny_model("llama"), make_batch("ragged")
    with torch.no_grad():
        model.get_output_embeddings().weight *= 2000  # type: ignore[union-attr, operator]
    batch = batch.select(torch.argsort(batch.row_lengths, descending=True)[:1])
    for position in range(int(batch.completion_lengths[0])):
        ids, predicts = join_rows(batch)
        logits = model(input_ids=ids).logits
        batch.completion_ids[0, position] = logits[predicts][position].argmax()
    own, near = (scoring_path.own_logprobs(model, batch, is_nudged=nudge).detach() for nudge in (False, True))
    assert 30 * float((own - near).abs().max()) < 1e-2
    assert scoring_path.compare_with_own_pass(model, batch, packed=False).allowed > 1e-1


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (math.nan, "(a row of 16 tokens)"),
        (1.99, "nats a token, chance is 4.0"),
        (
            2.0,
            "so does a model that never learned to write prompts, or whose weights or tokens are misplaced",
        ),
    ],
)
def test_a_model_that_reads_prompts_as_badly_as_chance_is_told_of(prompt: float, said: str) -> None:
    text = str(scoring_path.OwnPass(1e-6, 2e-5, 0.0, 16, prompt, 4.0))
    assert text.startswith("your model's own pass: 1e-06 on the first rollouts (a row of 16 tokens)")
    assert text.endswith(said)


def test_the_first_way_that_is_further_from_the_exact_result_than_rounding_is_named() -> None:
    one, exact = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])  # of size 5
    off = [exact + torch.tensor([0.0, 5.0 * share]) for share in (0.25, 0.5, 1.0)]
    kinds = [("a", off[1], off[0], exact), ("b", off[2], off[0], exact), ("c", off[2], one, exact)]
    found = scoring_path.disagreement(kinds, "", times=2.0, floor=0.0)
    assert found is not None
    assert (found.name, found.error, found.rounding, found.allowed) == ("b", 1.0, 0.25, 0.5)
    assert scoring_path.disagreement(kinds[:1], "", times=2.0, floor=0.0) is None
    assert scoring_path.disagreement(kinds, "", times=2.0, floor=1.0) is None
    assert scoring_path._distance((one, off[2]), (exact, exact)) == pytest.approx((25 / 50) ** 0.5)
    assert scoring_path._distance((), ()) == 0.0


def test_packed_attention_refuses_what_it_does_not_compute_and_widths_that_the_kernel_lacks() -> None:
    packed_attention._check({"sliding_window": None, "softcap": 0.0, "s_aux": None})
    for key, value in (("sliding_window", 4), ("softcap", 30.0), ("s_aux", torch.zeros(1))):
        with pytest.raises(NotImplementedError, match="caps nothing"):
            packed_attention._check({key: value})
    for size, value_size, is_fit in (
        (64, 64, True),
        (256, 256, True),
        (264, 264, False),
        (12, 12, False),
        (64, 32, False),
    ):
        query, value = torch.zeros(1, 1, 1, size), torch.zeros(1, 1, 1, value_size)
        assert packed_attention.fits(query, value) is is_fit, size
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    kernels = [packed_attention.kernel_for(*of) for of in ((cpu, torch.bfloat16), (cuda, torch.float32))]
    assert kernels == [None, None]
    assert isinstance(packed_attention.kernel_for(cuda, torch.bfloat16), packed_attention.Flash)
    blocks: Any = SimpleNamespace(layer_types=["full_attention", "sliding_attention", "chunked_attention"])
    for kinds, topk, reason in (
        (blocks.layer_types, None, None),
        (["full_attention", "conv"], None, "it has layers of the kind conv"),
        (None, 4, "its attention chooses tokens by an index"),
        (None, None, None),
    ):
        config = SimpleNamespace(layer_types=kinds, index_topk=topk)
        model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda config=config: config))
        assert scoring_path.packing_mismatch(model) == reason


def shaken(model: Any, by: Callable[[Tensor, int], Tensor | float]) -> Any:
    """The model with something added behind its last layer, by its output and the number of the call."""
    calls = [0]

    def add(_: Any, given: Any, hidden: Tensor) -> Tensor:
        calls[0] += 1
        return hidden + by(hidden, calls[0])

    model.model.norm.register_forward_hook(add)
    return model


NOISE = torch.linspace(-1, 1, 32)


@pytest.mark.parametrize(
    ("by", "refusal"),
    [
        (lambda hidden, call: call * 0.01 * NOISE, "gives other log-probabilities in a second call"),
        (lambda hidden, call: call * 0.01 * NOISE * (hidden.shape[1] in (8, 27)), "in a second call"),
        (lambda hidden, call: call * 0.01 * NOISE * (hidden.shape[1] == 8), None),  # one row alone may be rounding
        (lambda hidden, call: NOISE * (len(hidden) == 9), "gives a row other log-probabilities among 9 of it"),
        (lambda hidden, call: 1e-7 * NOISE * (len(hidden) == 9), None),
        (lambda hidden, call: NOISE * (len(hidden) == 9) * (hidden.shape[1] in (8, 27)), "among 9 of it"),
        (lambda hidden, call: NOISE * (len(hidden) == 9) * (hidden.shape[1] == 8), None),
        (lambda hidden, call: hidden.mean(1, keepdim=True), "is no causal language model"),
        (lambda hidden, call: torch.zeros(hidden.shape[1] + 1), "cannot compute a row of 4 short ones: RuntimeError"),
    ],
)
def test_a_model_that_cannot_be_compared_with_is_refused(
    by: Callable[[Tensor, int], Tensor | float], refusal: str | None, tiny_model: MakeModel
) -> None:
    model = shaken(tiny_model("llama"), by)
    subject: Callable[[], Any] = lambda: scoring_path._Subject(model, has_gradient=False)  # noqa: E731
    if refusal is None:
        subject().refuse_company()
        return
    with pytest.raises(CheckpointError, match=refusal):
        subject().refuse_company()


def test_the_way_of_a_model_says_which_of_ours_compute_it(tiny_model: MakeModel) -> None:
    ways = {
        "packed": ({}, "packed rows through our own layers", True),
        "padded": ({"packing": False}, "padded rows through the model's modules", False),
        "in parts": ({"in_parts": True}, "packed rows through the model's modules", True),
        "padded, in parts": ({"packing": False, "in_parts": True}, "padded rows through the model's modules", False),
    }
    for options, method, is_packed in ways.values():
        model = tiny_model("llama")
        found = scoring_path.find_scoring_path(model, **options)  # type: ignore[arg-type]
        assert (found.method, found.is_packed, found.reasons) == (method, is_packed, ())
        assert str(found) == method
        assert trust_of(model) == Trust(layers=True, head=True, padding=True)
        assert (model.config._attn_implementation == "sdpa") is not is_packed
    broken = tiny_model("llama")
    torch.nn.init.constant_(broken.model.norm.weight, math.nan)
    assert not scoring_path.find_scoring_path(broken).is_packed
    assert str(scoring_path.ScoringPath("a", is_packed=False, reasons=("b", "c"))) == "a, since b; c"
    assert not scoring_path.has_own_code(tiny_model("llama"))

    class Own(torch.nn.Linear):
        """Of nobody's library."""

    broken.lm_head = Own(32, 261)
    assert scoring_path.has_own_code(broken)
