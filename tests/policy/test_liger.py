"""Are Liger's kernels used where they compute the same, and is everything as it was where they do not?

A stand-in takes the place of the library, which needs a GPU; where it is installed, Triton's interpreter runs its own
kernels on a CPU.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from oncurve.config.load import load_config
from oncurve.errors import ConfigError
from oncurve.policy import liger
from oncurve.policy.distributed import ALONE
from oncurve.policy.liger import ByDevice, use_liger
from oncurve.policy.policy import TrainedPolicy
from oncurve.wiring.policy import make_policy as policy_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeModel = Callable[..., "PreTrainedModel"]
SCRIPT = Path(__file__).with_name("liger_interpreted.py")
is_installed = all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton"))
needs_liger = pytest.mark.skipif(
    not is_installed, reason="needs liger-kernel and triton: they come with the extra liger"
)


class Library:
    """In the place of the library: binds methods and replaces names as it does, and computes what a test wants."""

    def __init__(self) -> None:
        self.asked: list[dict[str, bool]] = []
        self.change: Callable[[Tensor], Tensor] = lambda output: output
        """Applied to what its norms compute."""

    def apply(
        self,
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        geglu: bool = True,
        model: Any = None,
    ) -> None:
        others = {"cross_entropy": cross_entropy, "fused": fused_linear_cross_entropy, "geglu": geglu}
        self.asked.append({"rope": rope, "rms_norm": rms_norm, **others})
        file: Any = sys.modules[type(model).__module__]
        file.apply_rotary_pos_emb, file.Qwen2RMSNorm = self.rotate, nn.RMSNorm
        for part in model.modules():
            if type(part).__name__ == "Qwen2RMSNorm":
                part.in_place, part.forward = True, MethodType(self.norm, part)

    def norm(self, part: Any, hidden: Tensor) -> Tensor:
        return self.change(type(part).forward(part, hidden))

    @staticmethod
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos[:, None], sin[:, None]
        turned = [torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) for x in (q, k)]
        return q * cos + turned[0] * sin, k * cos + turned[1] * sin


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The stand-in, installed, on a machine whose kernels run on the CPU."""
    from transformers.models.qwen2 import modeling_qwen2

    made = Library()
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": made.apply}
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(liger, "DEVICES", ("cpu",))
    for name in ("apply_rotary_pos_emb", "Qwen2RMSNorm"):  # put back after the test
        monkeypatch.setattr(modeling_qwen2, name, vars(modeling_qwen2)[name])
    return made


def state(model: PreTrainedModel) -> list[dict[str, Any]]:
    """Everything the library may change."""
    parts = [dict(vars(part)) for part in model.modules()]
    return [*parts, dict(vars(sys.modules[type(model).__module__]))]


def is_fused(model: PreTrainedModel) -> bool:
    return any("forward" in vars(part) for part in model.modules())


def test_on_a_cpu_it_is_never_used_and_true_says_so(tiny_model: MakeModel) -> None:
    model = tiny_model()
    for wanted in ("auto", False):
        assert not use_liger(model, wanted, compute_type="float32")
    with pytest.raises(ConfigError, match=r"policy\.liger is true, but the model is on cpu, .* CUDA device"):
        use_liger(model, True, compute_type="float32")


def test_without_the_package_auto_goes_on_and_true_says_what_to_install(
    tiny_model: MakeModel, library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    assert not use_liger(tiny_model(), "auto", compute_type="float32")
    assert not caplog.records, "nobody asked for it"
    with pytest.raises(ConfigError, match=r"not installed \(`pip install 'oncurve\[liger\]'`\)"):
        use_liger(tiny_model(), True, compute_type="float32")
    assert not library.asked


def test_a_package_that_cannot_be_loaded_is_told_of(
    tiny_model: MakeModel, library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", None)
    assert not use_liger(tiny_model(), "auto", compute_type="float32")
    assert "liger-kernel cannot be loaded: ModuleNotFoundError" in caplog.text
    assert not library.asked


def test_a_family_without_kernels_stays_as_it_is(
    tiny_model: MakeModel, library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    assert not use_liger(tiny_model("gpt2"), "auto", compute_type="float32")
    assert not caplog.records
    with pytest.raises(ConfigError, match="no kernels for models of type gpt2"):
        use_liger(tiny_model("gpt2"), True, compute_type="float32")
    assert not library.asked


def test_false_asks_nothing(tiny_model: MakeModel, library: Library) -> None:
    assert not use_liger(tiny_model(), False, compute_type="float32")
    assert not library.asked


@pytest.mark.parametrize("wanted", ["auto", True])
@pytest.mark.parametrize("compute_type", ["float32", "bfloat16"])
def test_kernels_that_compute_the_same_stay(
    tiny_model: MakeModel, library: Library, wanted: Any, compute_type: Any
) -> None:
    model = tiny_model()
    assert use_liger(model, wanted, compute_type=compute_type)
    assert is_fused(model)
    losses = {"cross_entropy": False, "fused": False, "geglu": False}
    assert library.asked == [{"rope": True, "rms_norm": True, **losses}], "no loss, no forward pass of its own"


def test_only_this_model_and_the_rotary_embedding_on_its_device_are_changed(
    tiny_model: MakeModel, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    norm, rotary = modeling_qwen2.Qwen2RMSNorm, modeling_qwen2.apply_rotary_pos_emb
    assert use_liger(tiny_model(), "auto", compute_type="float32")
    assert modeling_qwen2.Qwen2RMSNorm is norm
    assert not is_fused(tiny_model())
    assert use_liger(tiny_model(), "auto", compute_type="float32"), "a second model of the family"
    replaced = modeling_qwen2.apply_rotary_pos_emb
    assert isinstance(replaced, ByDevice)
    assert (replaced.ordinary, replaced.fused) == (rotary, library.rotate)
    monkeypatch.setattr(liger, "DEVICES", ("cuda",))
    monkeypatch.setattr(library, "rotate", None)
    tiny_model()(input_ids=torch.arange(5)[None])


def test_a_copy_has_the_kernels_and_its_own_weights(tiny_model: MakeModel, library: Library) -> None:
    model = tiny_model()
    use_liger(model, True, compute_type="float32")
    reference, ids = copy.deepcopy(model), torch.arange(5)[None]
    before = reference(input_ids=ids).logits
    assert is_fused(reference)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(reference(input_ids=ids).logits, before)
    assert not torch.equal(model(input_ids=ids).logits, before)


def broken(output: Tensor) -> Tensor:
    raise RuntimeError("no kernel image is available")


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "norms off by a hundredth": lambda output: output * 1.01 + 0.01,
    "nan": lambda output: output * torch.nan,
    "a gradient off by a tenth": lambda output: output + 0.1 * (output - output.detach()),
    "many rows": lambda output: output * (1.1 if output.ndim == 2 and len(output) >= 2**15 else 1.0),
    "an error": broken,
}


@pytest.mark.parametrize("what", WRONG)
def test_what_computes_something_else_is_undone_with_a_warning(
    what: str, tiny_model: MakeModel, library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    model, library.change = tiny_model(), WRONG[what]
    before = state(model)
    assert not use_liger(model, "auto", compute_type="float32")
    assert state(model) == before
    [warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert "trained without Liger's kernels" in warning.getMessage()
    reason = "trying them raises RuntimeError: no kernel image" if what == "an error" else "(at most 0.001 is rounding)"
    assert reason in warning.getMessage()
    with pytest.raises(ConfigError, match=r"Set policy\.liger to auto or false"):
        use_liger(model, True, compute_type="float32")
    assert state(model) == before


def test_in_half_width_rounding_is_allowed_and_errors_are_not(tiny_model: MakeModel, library: Library) -> None:
    library.change = lambda output: output * (1 + 2**-9)
    assert use_liger(tiny_model(), "auto", compute_type="bfloat16")
    library.change = lambda output: output * 1.2 + 0.1
    assert not use_liger(tiny_model(), "auto", compute_type="bfloat16")


def test_packed_rows_an_adapter_and_checkpointing_go_on_with_it(
    make_policy: Callable[..., TrainedPolicy], tiny_model: MakeModel, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oncurve.policy import forward, self_check
    from oncurve.policy.lora import add_adapter
    from oncurve.settings import LoraSettings

    monkeypatch.setattr(forward, "backbone_of", lambda model: None)
    batch, found = self_check.example_batch(64), []
    for wanted in (False, True):
        model = tiny_model()
        adapter = add_adapter(model, LoraSettings(rank=2), base="tiny")
        use_liger(model, wanted, compute_type="float32")
        policy = make_policy(model, adapter=adapter, gradient_checkpointing=True)
        assert policy.is_packed
        logprobs, _ = policy.logprobs(batch)
        policy.backward(logprobs.sum())
        found.append([logprobs, *(p.grad for p in model.parameters() if p.requires_grad)])
    for ordinary, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, ordinary)


def test_the_key_of_a_recipe_reaches_the_model_that_is_trained(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {checkpoints['qwen2']}\ndata: {{type: word_problems}}\npolicy: {{device: cpu}}\n")
    assert load_config(recipe).policy.liger == "auto"
    policy_of(load_config(recipe), processes=ALONE)
    wanted = load_config(recipe, ["policy.liger=true"])
    with pytest.raises(ConfigError, match=r"policy\.liger is true"):
        policy_of(wanted, processes=ALONE)
    policy_of(wanted)  # only to be sampled from
    policy_of(load_config(recipe, ["policy.liger=false"]), processes=ALONE)


@needs_liger
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_its_own_kernels_give_the_same_log_probabilities_and_gradients(family: str) -> None:
    """Padded, packed, recomputed and with an adapter, as Triton's interpreter computes them."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), family], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert max(found["differences"].values()) < 2e-5, found
    names = ("rms_norm", "swiglu", *(["block_rms_norm"] if family == "qwen3" else []))
    launched = {f"_{name}_{way}_kernel" for name in names for way in ("forward", "backward")} | {"_triton_rope"}
    assert set(found["kernels"]) == launched
    assert found["in_half"]


@pytest.mark.gpu
@needs_liger
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compute_type", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_its_kernels_are_used_on_a_gpu(family: str, compute_type: Any, tiny_model: Callable[..., Any]) -> None:
    assert use_liger(tiny_model(family).cuda(), True, compute_type=compute_type)
