"""Copies of weights in 16 bits: right on average, the same wherever they are made, and used by every pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import make_trained_policy
from torch import Tensor, nn

from oncurve.algorithm import precision
from oncurve.algorithm.precision import KERNELS, dithered, dithered_casts, key_of, narrow, saved_name, use_dither
from oncurve.core.batch import collate
from oncurve.core.records import Mean
from oncurve.policy.arrivals import Arrivals
from oncurve.policy.final_model import write_model
from oncurve.policy.forward import completion_logprobs
from oncurve.policy.loss_scale import GROWTH_UPDATES, LossScale
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oncurve.core.batch import Batch
    from oncurve.core.records import Group

MakeModel = Callable[..., "PreTrainedModel"]
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
KEY = key_of(3, "model.layers.0.mlp.up_proj.weight")


@pytest.fixture
def batch(random_groups: Callable[..., list[Group]]) -> Batch:
    return collate(random_groups(), torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return 0.05 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off_grid(model: PreTrainedModel) -> PreTrainedModel:
    """As after some training: no number of it fits into 16 bits."""
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.01 * torch.randn(weight.shape, generator=draw))
    return model


@HALF
def test_the_mean_copy_is_the_weight(dtype: torch.dtype) -> None:
    for value in (0.0123456, -0.7, 3.2e-4):
        copies = dithered(torch.full((1000, 1000), value), dtype, KEY).double()
        low, high = copies.min(), copies.max()
        assert low < value < high
        assert len(copies.unique()) == 2
        assert float(copies.mean()) == pytest.approx(value, abs=float(high - low) * 0.002)


@HALF
def test_a_weight_on_the_grid_stays_and_what_is_not_finite_too(dtype: torch.dtype) -> None:
    on_grid = torch.cat([numbers(500).bfloat16().float(), torch.tensor([0.0, -0.0, 1.0])])
    assert torch.equal(dithered(on_grid, dtype, KEY).float(), on_grid)
    strange = dithered(torch.tensor([torch.inf, -torch.inf, torch.nan]), dtype, KEY)
    assert strange[0] == torch.inf
    assert strange[1] == -torch.inf
    assert strange[2].isnan()


def test_a_weight_that_moves_one_way_crosses_once_and_after_the_share_that_its_threshold_asks_for() -> None:
    low, high = torch.tensor(0.01).bfloat16(), torch.tensor(0.0101).bfloat16()
    ways = [
        dithered(torch.full((4000,), float(low + share * (high - low))), torch.bfloat16, KEY)
        for share in torch.linspace(0, 1, 33)
    ]
    crossed = torch.stack([way == high for way in ways])
    assert (crossed[1:] >= crossed[:-1]).all()
    assert torch.allclose(crossed.double().mean(dim=1), torch.linspace(0, 1, 33).double(), atol=0.03)


@HALF
def test_a_part_is_copied_as_in_the_whole_and_seeds_and_names_have_thresholds_of_their_own(dtype: torch.dtype) -> None:
    whole = numbers(40, 33)
    copy = dithered(whole, dtype, KEY)
    assert torch.equal(dithered(whole[13:29], dtype, KEY, 13 * 33), copy[13:29])
    assert not torch.equal(dithered(whole[13:29], dtype, KEY), copy[13:29])
    for other in (key_of(4, "model.layers.0.mlp.up_proj.weight"), key_of(3, "model.layers.1.mlp.up_proj.weight")):
        differ = (dithered(whole, dtype, other) != copy).double().mean()
        assert 0.25 < differ < 0.42  # two independent thresholds, on both sides of a share uniform on 0 .. 1: a third


def test_the_compiled_kernel_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if KERNELS["cpu"]() is None:
        pytest.skip("no C++ compiler: sudo apt-get install g++")
    whole = torch.cat([numbers(100_003), torch.tensor([torch.inf, -torch.inf, 0.0, 1e-40, -3e38])])
    compiled = dithered(whole, torch.bfloat16, KEY, 2**32 - 50)
    monkeypatch.setitem(KERNELS, "cpu", lambda: None)
    assert torch.equal(dithered(whole, torch.bfloat16, KEY, 2**32 - 50), compiled)


def test_packed_matrices_are_the_copies() -> None:
    from oncurve.model.ops_native import NativeOps, operations

    ops = operations(torch.bfloat16)
    if not isinstance(ops, NativeOps):
        pytest.skip("no C++ compiler: sudo apt-get install g++")
    first, second = numbers(37, 51), numbers(20, 51, seed=1)
    keys = [KEY, key_of(0, "other")]
    copies = [dithered(one, torch.bfloat16, key).float() for one, key in zip((first, second), keys, strict=True)]
    assert torch.equal(ops.pack([first, second], keys), ops.pack(copies))
    assert not torch.equal(ops.pack([first, second], keys), ops.pack([first, second]))


def copied_model(model: PreTrainedModel, seed: int, *, head: bool) -> None:
    """The matrices of linear layers as their copies, in float32."""
    known: set[int] = set()
    names = {id(weight): name for name, weight in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and (head or module is not model.get_output_embeddings()):
            for weight in module.parameters():
                if id(weight) not in known:
                    known.add(id(weight))
                    weight.data = dithered(weight.data, torch.bfloat16, key_of(seed, names[id(weight)])).float()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("packed", [True, False])
def test_every_pass_multiplies_with_the_copies(
    architecture: str, packed: bool, tiny_model: MakeModel, batch: Batch
) -> None:
    """In our own layers and through the model's modules, where autocast would round to the nearest."""
    model, copied = (off_grid(tiny_model(architecture)) for _ in range(2))
    use_dither(model, 7)
    copied_model(copied, 7, head=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = completion_logprobs(model, batch, temperature=1.0, packed=packed)[0]
        expected = completion_logprobs(copied, batch, temperature=1.0, packed=packed)[0]
        nearest = completion_logprobs(off_grid(tiny_model(architecture)), batch, temperature=1.0, packed=packed)[0]
    is_own = packed and KERNELS["cpu"]() is not None
    rounds_head = is_own or architecture == "gemma2"  # compiled kernels do, and autocast where its logits are capped
    assert float((found - expected).abs().max()) <= (0.03 if rounds_head else 0)
    assert float((found - nearest).abs().mean()) > 1e-3


def test_the_gradient_passes_straight_through_and_recomputed_layers_use_the_same_copies(
    tiny_model: MakeModel, batch: Batch
) -> None:
    gradients = []
    for again in (False, True):
        model = off_grid(tiny_model("llama"))
        use_dither(model, 7)
        options = {"compute_type": "bfloat16", "packing": False, "gradient_checkpointing": again}
        policy = make_trained_policy(model, None, **options)
        policy.logprobs(batch)[0].sum().backward()
        gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, gradients[1][name]), name


def test_views_of_a_weight_are_cast_as_the_weight_is() -> None:
    """Experts are slices of one parameter, and some modules transpose."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(numbers(3, 8, 5))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [x @ self.weight[1], x @ self.weight[2, 2:7], (x @ self.weight[0]).float() @ self.weight[0].T]

    experts = Experts()
    use_dither(experts, 1)
    copy = dithered(experts.weight, torch.bfloat16, key_of(1, "weight"))
    x = numbers(4, 8, seed=3)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with dithered_casts(experts):
            found = [x @ experts.weight[1], x[:, :5] @ experts.weight[2, 2:7], x[:, :5] @ experts.weight[0].T]
        x = x.bfloat16()
        expected = [x @ copy[1], x[:, :5] @ copy[2, 2:7], x[:, :5] @ copy[0].T]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_an_untouched_base_gives_the_same_bits_as_with_rounding_to_the_nearest(
    tiny_model: MakeModel, batch: Batch
) -> None:
    found = []
    for dither in (True, False):
        model = tiny_model("qwen2")
        for weight in model.parameters():
            weight.data = weight.data.bfloat16().float()
        if dither:
            use_dither(model, 5)
        with torch.autocast("cpu", torch.bfloat16):
            found += [completion_logprobs(model, batch, temperature=1.0, packed=packed)[0] for packed in (True, False)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_what_arrives_is_measured(tiny_model: MakeModel, batch: Batch) -> None:
    """A small update of weights on the grid: all of it with the dither, next to nothing to the nearest."""
    shares = {}
    for dither in (True, False):
        model = tiny_model("llama")
        for weight in model.parameters():
            weight.data = weight.data.bfloat16().float()
        if dither:
            use_dither(model, 5)
        settings = OptimizerSettings(learning_rate=2e-5)
        policy = TrainedPolicy(model, None, optimizer=settings, compute_type="bfloat16")  # type: ignore[arg-type]
        policy.backward(-policy.logprobs(batch)[0].sum())
        metrics = policy.update()
        shares[dither] = metrics["policy/arrived"].value, metrics["policy/moved_fraction"].value
        assert isinstance(policy.arrivals, Arrivals)
        assert 1 < (policy.arrivals.steps_until_seen(2e-5) or 0) < 100
    assert shares[True][0] == pytest.approx(1, abs=0.1)
    assert shares[False][0] < 0.2
    assert 0 < shares[False][1] < shares[True][1] < 0.5


def test_names_are_those_of_checkpoints() -> None:
    assert saved_name("model.layers.0.q_proj.base_layer.weight") == "model.layers.0.q_proj.weight"
    assert saved_name("model.layers.0.q_proj.lora_A.default.weight") == "model.layers.0.q_proj.lora_A.weight"


def test_weights_for_servers_are_the_copies(tiny_model: MakeModel, tmp_path: Path) -> None:
    """As files, and tensor by tensor: the bits that the policy itself multiplies with."""
    from safetensors.torch import load_file

    from oncurve.fleet.weights.shards import write_weights
    from oncurve.fleet.weights.weight_stream import make_shipment

    model = off_grid(tiny_model("llama"))
    use_dither(model, 7)
    policy: Any = TrainedPolicy(model, None, optimizer=OptimizerSettings(), compute_type="bfloat16")  # type: ignore[arg-type]
    shipment = make_shipment(policy, "run", 1, matrix_type=torch.bfloat16)
    write_weights(shipment, tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    assert dict(shipment).keys() == files.keys()
    for name, weight in model.named_parameters():
        expected = narrow(weight.detach(), torch.bfloat16, key_of(7, name)) if weight.ndim > 1 else weight.detach()
        assert torch.equal(files[name], expected), name
        assert torch.equal(dict(shipment)[name], expected), name


def test_a_tied_head_has_one_copy_under_the_name_that_is_saved(tiny_model: MakeModel) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    model.tie_weights()
    use_dither(model, 7)
    assert precision.weight_key(model.get_output_embeddings()) == key_of(7, "model.embed_tokens.weight")


def test_a_final_model_in_bfloat16_is_the_policy_that_was_measured(
    tiny_model: MakeModel, make_policy: Callable[..., TrainedPolicy], batch: Batch, tmp_path: Path
) -> None:
    """Read by plain transformers, its matrices are the copies of the policy; to the nearest they would be others."""
    from transformers import AutoModelForCausalLM

    model = off_grid(tiny_model("qwen2"))
    use_dither(model, 7)
    policy = make_policy(model, compute_type="bfloat16")
    write_model(policy, tmp_path / "model", torch.bfloat16)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert saved.dtype == torch.bfloat16
    for name, weight in model.named_parameters():
        copy = dithered(weight, torch.bfloat16, key_of(7, name))
        assert torch.equal(saved.get_parameter(name), copy), name
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        shown = [completion_logprobs(one, batch, temperature=1.0)[0] for one in (model, saved)]
    assert float((shown[0] - shown[1]).abs().mean()) < 0.05  # its norms and embeddings are copies too


def test_a_scale_of_the_loss_is_halved_at_an_overflow_and_doubled_after_many_updates() -> None:
    scale = LossScale(4.0)
    assert scale.adapt(is_finite=False)
    assert scale.value == 2
    assert scale.adapt(is_finite=False)
    assert scale.value == 1
    assert not scale.adapt(is_finite=False)  # at 1 the gradient itself is to blame
    for finite, value in ((GROWTH_UPDATES - 1, 1), (1, 2), (GROWTH_UPDATES - 1, 2), (1, 4), (1, 4)):
        for _ in range(finite):
            assert not scale.adapt(is_finite=True)
        assert scale.value == value
    scale.adapt(is_finite=False)
    for _ in range(GROWTH_UPDATES - 1):
        scale.adapt(is_finite=True)
    assert (scale.value, scale.num_finite) == (2, GROWTH_UPDATES - 1)


def test_a_scaled_loss_moves_the_weights_as_the_loss_itself_and_an_overflow_is_the_scales(
    make_policy: Callable[..., TrainedPolicy], batch: Batch
) -> None:
    policy = make_policy(compute_type="float16", packing=False)
    loss = -policy.logprobs(batch)[0].sum()
    policy.backward(loss)
    assert policy.loss_scale is not None
    assert policy.loss_scale.value == 4096
    scaled = torch.cat([weight.grad.flatten() for weight in policy.model.parameters() if weight.grad is not None])
    metrics = policy.update()
    assert metrics["policy/gradient_norm"].value == pytest.approx(float(scaled.norm()) / 4096, rel=1e-4)
    assert metrics["policy/loss_scale"] == Mean(4096, 1)
    assert metrics["policy/moved_fraction"].count > 0
    policy.backward(policy.logprobs(batch)[0].sum() * torch.inf)
    metrics = policy.update()
    assert (metrics["policy/skipped_updates"], metrics["policy/nonfinite_updates"]) == (Mean(1, 1), Mean(0, 1))
    assert "policy/moved_fraction" not in metrics
    assert (metrics["policy/loss_scale"], policy.loss_scale.value) == (Mean(4096, 1), 2048)


def test_what_arrives_is_counted_in_the_trained_matrices_alone() -> None:
    model = nn.Sequential(nn.Embedding(4, 64), nn.Linear(64, 64), nn.Linear(8, 2).requires_grad_(False))
    nn.init.constant_(model[1].weight, -1.0)  # type: ignore[arg-type]
    found = Arrivals(model, torch.bfloat16)
    assert [sample.matrix for sample in found.samples] == [model[1].weight]
    before, small = found.copies(), 2.0**-7
    with torch.no_grad():
        model[1].weight.copy_(-1.0 - small)  # type: ignore[operator]
    shown = found.measure(before)  # half of the 4,096 weights are looked at, and stand for all
    assert shown == {
        "policy/arrived": Mean(4096 * small**2, 4096 * small**2),
        "policy/moved_fraction": Mean(4096, 4096),
    }
    assert found.measure(found.copies())["policy/moved_fraction"] == Mean(0, 4096)
    for dtype, half_step in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        matrix = nn.Linear(2, 3)
        matrix.weight.data = torch.tensor([[0.0, -1.0], [1.5, 1.0], [0.0, 0.0]])
        measured = Arrivals(matrix, dtype)
        assert measured.steps_until_seen(0.5) == 2 * half_step
        assert measured.steps_until_seen(0.0) is None
    assert Arrivals(model[2], torch.bfloat16).steps_until_seen(0.5) is None
    assert Arrivals(model[2], torch.bfloat16).measure([])["policy/moved_fraction"] == Mean(0, 0)
