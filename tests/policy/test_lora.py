"""Does an adapter train, save and come back as peft's own, and does everything else stay what it was?"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.core.batch import Batch, collate
from oncurve.core.errors import ConfigError
from oncurve.core.records import Group, Prompt, SamplingParams
from oncurve.core.sampler import Sampler, SamplingRequest
from oncurve.policy.backend import make_adamw
from oncurve.policy.final_model import write_model
from oncurve.policy.half_precision import halve_frozen_matrices
from oncurve.policy.lora import Adapter, Quantization, add_adapter, open_adapter
from oncurve.policy.lora_targets import describe, unreached
from oncurve.policy.model_folder import load_model, merge_adapter, save_model
from oncurve.policy.settings import LoraSettings, OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.run.state import checksum
from oncurve.run_errors import CheckpointError
from oncurve.sample.engine import InProcessEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MakePolicy = Callable[..., TrainedPolicy]
MakeModel = Callable[..., "PreTrainedModel"]

without_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is not None, reason="what happens without bitsandbytes"
)
with_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes, which is not installed"
)


@pytest.fixture
def batch(random_groups: Callable[..., list[Group]]) -> Batch:
    groups = random_groups()
    advantages = torch.randn(len(groups), 4, generator=torch.Generator().manual_seed(1))
    return collate(groups, advantages)


def update(policy: TrainedPolicy, batch: Batch) -> None:
    """One optimizer update that raises the log-probability of every token."""
    policy.backward(-policy.logprobs(batch)[0].sum())
    policy.update()


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_frozen_matrices_that_bfloat16_holds_are_kept_in_it_and_nothing_changes(
    architecture: str, tiny_model: MakeModel, batch: Batch, make_policy: MakePolicy
) -> None:
    model = tiny_model(architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.1.mlp.up_proj" not in name:  # whose numbers need more than 8 bits
                parameter.copy_(parameter.bfloat16())
    adapter = add_adapter(model, LoraSettings(rank=4), base="tiny", seed=0)
    policy = make_policy(model, compute_type="bfloat16", packing=False, adapter=adapter)
    expected, _ = policy.logprobs(batch)
    halve_frozen_matrices(model)
    found, _ = policy.logprobs(batch)
    assert torch.equal(found, expected)
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    half = {name for name, kind in kinds.items() if kind == torch.bfloat16}
    assert "model.layers.0.mlp.up_proj.base_layer.weight" in half
    assert not {
        name for name in half if "lora" in name or "norm" in name or "embed" in name or "layers.1.mlp.up" in name
    }
    update(policy, batch)
    assert all(p.dtype == torch.float32 for p in trained(model).values())


def trained(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_fresh_adapter_changes_nothing_and_is_all_that_is_trained(
    architecture: str, make_policy: MakePolicy, tiny_model: MakeModel, batch: Batch
) -> None:
    model = tiny_model(architecture)
    before = logits(model)
    adapter = add_adapter(model, LoraSettings(rank=4), base="")
    assert adapter.model is model
    assert not adapter.has_dropout
    assert not any(part.training for part in model.modules())
    with adapter.dropping_out():
        assert {name.partition(".lora_")[1] for name, part in model.named_modules() if part.training} == {".lora_", ""}
        assert not any(part.training for name, part in model.named_modules() if "base_layer" in name)
    assert torch.equal(logits(model), before)
    assert all(".lora_" in name for name in trained(model))
    policy = make_policy(model, adapter=adapter)
    assert policy.is_packed
    held = [parameter for group in policy.backend.optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in trained(model).values()}
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    update(policy, batch)
    assert (logits(model) - before).abs().max() > 1e-4
    for name, parameter in model.named_parameters():
        assert name not in frozen or torch.equal(parameter, frozen[name])


def test_the_same_seed_gives_the_same_adapter(tiny_model: MakeModel) -> None:
    torch.manual_seed(11)
    first, second, other = (
        add_adapter(tiny_model(), LoraSettings(rank=4), base="", seed=seed).model for seed in (3, 3, 4)
    )
    for name, parameter in trained(first).items():
        assert torch.equal(parameter, trained(second)[name])
    assert any(not torch.equal(parameter, trained(other)[name]) for name, parameter in trained(first).items())


@pytest.mark.proves("F46")
def test_named_layers_get_the_adapter_and_strange_names_are_refused(tiny_model: MakeModel) -> None:
    adapter = add_adapter(tiny_model(), LoraSettings(rank=2, target_modules=("q_proj", "v_proj")), base="")
    layers = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained(adapter.model)}
    assert layers == {"q_proj", "v_proj"}
    assert describe(adapter.model) == (
        "adapters on q_proj (2), v_proj (2); none on model.embed_tokens (1), self_attn.k_proj (2), self_attn.o_proj "
        "(2), mlp.gate_proj (2), mlp.up_proj (2), mlp.down_proj (2)"
    )
    assert unreached(adapter.model) == set()
    settings = LoraSettings(rank=3, alpha=5.0, dropout=0.25, bias="lora_only", target_modules=("k_proj",))
    given = (
        add_adapter(tiny_model("gpt2"), LoraSettings(), base="b"),
        add_adapter(tiny_model(), settings, base="c", revision="r"),
    )
    configs = [one.peft_model.peft_config["default"] for one in given]
    assert [(c.fan_in_fan_out, c.base_model_name_or_path, c.revision, c.task_type) for c in configs] == [
        (True, "b", None, "CAUSAL_LM"),
        (False, "c", "r", "CAUSAL_LM"),
    ]
    chosen = configs[1]
    assert (chosen.r, chosen.lora_alpha, chosen.lora_dropout, chosen.bias) == (3, 5.0, 0.25, "lora_only")
    assert [one.has_dropout for one in given] == [False, True]
    with pytest.raises(ConfigError, match=r"q_projection.*q_proj"):
        add_adapter(tiny_model(), LoraSettings(target_modules=("q_projection",)), base="")
    for end in ("lm_head", "embed_tokens"):
        with pytest.raises(ConfigError, match=f"{end}.*take no adapter"):
            add_adapter(tiny_model("llama"), LoraSettings(target_modules=("q_proj", end)), base="")


@pytest.fixture
def saved(
    checkpoints: dict[str, Path],
    make_policy: MakePolicy,
    tokenizer: PreTrainedTokenizerFast,
    batch: Batch,
    tmp_path: Path,
) -> tuple[Path, Tensor]:
    """The folder of a trained adapter, and the logits of the model with it."""
    model, _ = load_model(str(checkpoints["qwen2"]))
    adapter = add_adapter(model, LoraSettings(rank=4, alpha=8.0), base=str(checkpoints["qwen2"]))
    policy = make_policy(model, adapter=adapter, optimizer=OptimizerSettings(learning_rate=0.05))
    update(policy, batch)
    write_model(policy, tmp_path / "adapter")
    return tmp_path / "adapter", logits(model)


@pytest.mark.proves("F47")
def test_a_saved_adapter_comes_back_with_the_same_logits(saved: tuple[Path, Tensor]) -> None:
    folder, expected = saved
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "model.safetensors").exists()
    model, _ = load_model(str(folder))
    assert torch.equal(logits(model), expected)
    assert not model.training


@pytest.mark.proves("F46")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_itself_reads_the_adapter(saved: tuple[Path, Tensor], tiny_model: MakeModel) -> None:
    from peft import PeftModel

    folder, expected = saved
    base = tiny_model("qwen2")
    assert (logits(base) - expected).abs().max() > 1e-3
    model = PeftModel.from_pretrained(base, str(folder))
    assert torch.equal(logits(model), expected)


@pytest.mark.proves("F47")
def test_a_merged_adapter_is_an_ordinary_model(saved: tuple[Path, Tensor], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, expected = saved
    merged, share = merge_adapter(folder, tmp_path / "merged")
    assert share == 1.0
    assert not (merged / "adapter_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=0)
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_merging_says_how_much_rounding_leaves_and_float32_keeps_all(
    tiny_model: MakeModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    base = save_model(tiny_model("llama").bfloat16(), tokenizer, tmp_path / "base")
    adapter = stirred(add_adapter(load_model(str(base))[0], LoraSettings(rank=2, alpha=0.1), base=str(base)))
    expected = logits(adapter.model)
    save_model(adapter, tokenizer, tmp_path / "adapter")

    def merge(name: str, *options: str) -> tuple[dict[str, Tensor], str]:
        words = ["merge", str(tmp_path / "adapter"), "--output", str(tmp_path / name), *options]
        said = CliRunner().invoke(app, words, catch_exceptions=False).output
        return load_file(tmp_path / name / "model.safetensors"), said

    rounded, whole = merge("rounded"), merge("whole", "--type", "float32")
    first, shown, changes = load_file(base / "model.safetensors"), 0.0, 0.0
    for name, weight in whole[0].items():
        assert (weight.dtype, rounded[0][name].dtype) == (torch.float32, torch.bfloat16)
        change = weight.double() - first[name].double()
        shown += float(((rounded[0][name].double() - first[name].double()) * change).sum())
        changes += float(change.square().sum())
    assert f"show {shown / changes:.3f} of what the adapter adds" in " ".join(rounded[1].split())
    assert shown / changes == pytest.approx(1, abs=0.1)
    assert "Rounded" not in whole[1]
    torch.testing.assert_close(logits(load_model(str(tmp_path / "whole"))[0]), expected, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="choose one of float32, bfloat16, float16"):
        merge("other", "--type", "int8")


def test_a_folder_that_is_no_adapter_is_named(
    checkpoints: dict[str, Path], saved: tuple[Path, Tensor], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="is a whole model, not an adapter"):
        merge_adapter(checkpoints["qwen2"], tmp_path / "merged")
    folder, _ = saved
    with pytest.raises(CheckpointError, match="does not fit its base model"):
        open_adapter(load_model(str(checkpoints["gpt2"]))[0], folder)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"LORA"', '"IA3"'))
    with pytest.warns(UserWarning, match="Unexpected"), pytest.raises(CheckpointError, match="are in no file"):
        load_model(str(folder))
    config.write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: cannot be read"):
        load_model(str(folder))


def stirred(adapter: Adapter) -> Adapter:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trained(adapter.model).values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return adapter


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_both_samplers_take_the_same_most_likely_tokens_with_an_adapter(
    architecture: str, make_policy: MakePolicy, tiny_model: MakeModel, make_prompts: Callable[..., list[Prompt]]
) -> None:
    adapter = stirred(add_adapter(tiny_model(architecture), LoraSettings(rank=4), base=""))
    policy, params = (
        make_policy(adapter.model, adapter=adapter),
        SamplingParams(temperature=0, max_completion_tokens=12),
    )
    prompts = make_prompts("a man and a tan", "b", "the ant")

    def tokens(sampler: Sampler) -> list[tuple[int, ...]]:
        sampler.load_weights(policy, version=0)
        return [group.completions[0].token_ids for group in sampler.sample(SamplingRequest(prompts, 1))]

    engine = tokens(InProcessEngine(params))
    assert engine == tokens(InProcessEngine(params, own_layers=False))
    with adapter.off():
        assert engine != tokens(InProcessEngine(params))


@pytest.mark.proves("F46", "F156")
def test_dropout_is_active_in_training_passes_only(
    make_policy: MakePolicy, tiny_model: MakeModel, batch: Batch
) -> None:
    adapter = stirred(add_adapter(tiny_model(), LoraSettings(rank=4, dropout=0.5), base=""))
    policy = make_policy(adapter.model, adapter=adapter)
    fixed = [policy.annotate(batch, old=True, entropy=False, reference=False).old_logprobs for _ in range(2)]
    assert torch.equal(fixed[0], fixed[1])
    assert not torch.equal(policy.logprobs(batch)[0], policy.logprobs(batch)[0])
    assert not any(part.training for part in adapter.model.modules())


@pytest.mark.proves("F41")
def test_recomputed_layers_drop_the_same_again(make_policy: MakePolicy, tiny_model: MakeModel, batch: Batch) -> None:
    gradients = []
    for checkpointing in (False, True):
        adapter = stirred(add_adapter(tiny_model(), LoraSettings(rank=4, dropout=0.5), base=""))
        policy = make_policy(adapter.model, adapter=adapter, gradient_checkpointing=checkpointing)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            policy.backward(policy.logprobs(batch)[0].sum())
        gradients.append(torch.cat([p.grad.flatten() for p in trained(adapter.model).values() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_offloaded_activations_give_the_same_gradient(make_policy: MakePolicy, batch: Batch) -> None:
    gradients = []
    for offloads in (False, True):
        policy = make_policy("llama", offload_activations=offloads)
        policy.backward(policy.logprobs(batch)[0].sum())
        gradients.append([p.grad for p in policy.model.parameters()])
    for kept, offloaded in zip(*gradients, strict=True):
        assert torch.equal(kept, offloaded)


def test_switching_the_adapter_off_does_not_unfreeze_a_part_of_it(tiny_model: MakeModel) -> None:
    adapter = add_adapter(tiny_model(), LoraSettings(rank=4), base="")
    for name, parameter in adapter.model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    before = set(trained(adapter.model))
    with adapter.off():
        assert set(trained(adapter.model)) == before
    assert set(trained(adapter.model)) == before


@without_bitsandbytes
def test_what_needs_bitsandbytes_says_so(checkpoints: dict[str, Path]) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match=r"optimizer\.type is adamw_8bit.*pip install bitsandbytes"):
        make_adamw(torch.nn.Module(), [[weight]], OptimizerSettings(type="adamw_8bit"))
    with pytest.raises(ConfigError, match=r"policy\.quantization is nf4.*pip install bitsandbytes"):
        load_model(str(checkpoints["qwen2"]), quantization="nf4")


def test_norms_and_biases_do_not_decay_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's AdamW in the place of that of bitsandbytes, whose groups are the same."""
    stand_in = SimpleNamespace(AdamW8bit=torch.optim.AdamW)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(optim=stand_in))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", stand_in)
    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(3, 3), "norm": torch.nn.RMSNorm(3)})
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    settings = OptimizerSettings(type="adamw_8bit", learning_rate=0.1, weight_decay=0.5)
    optimizer = make_adamw(model, [list(model.parameters())], settings)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        assert torch.allclose(weight, before[name] * (0.95 if weight.ndim > 1 else 1.0)), name


@with_bitsandbytes
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_adapter_trains_on_weights_of_few_bits(
    kind: Quantization,
    make_policy: MakePolicy,
    tiny_model: MakeModel,
    tokenizer: PreTrainedTokenizerFast,
    batch: Batch,
    tmp_path: Path,
) -> None:
    whole = tiny_model("qwen2", hidden_size=128, intermediate_size=256)  # blocks of 64 weights share a scale
    model, _ = load_model(str(save_model(whole, tokenizer, tmp_path / "base")), quantization=kind)
    adapter = add_adapter(model, LoraSettings(rank=4), base="")
    settings = OptimizerSettings(type="adamw_8bit", learning_rate=0.05)
    policy = make_policy(model, adapter=adapter, optimizer=settings)
    before = logits(model)
    likeness = torch.cosine_similarity(before.flatten(), logits(whole).flatten(), dim=0)
    assert 0.6 < likeness < 0.9999
    update(policy, batch)
    assert (logits(model) - before).abs().max() > 1e-4


@pytest.mark.parametrize("packing", [False, True])
def test_a_policy_takes_a_model_whose_frozen_matrices_are_halved_already(
    packing: bool, tiny_model: MakeModel, batch: Batch, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncurve.policy.forward.backbone_of", lambda model: None)  # as on a GPU, through the modules
    model = tiny_model("qwen2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    adapter = add_adapter(model, LoraSettings(rank=4), base="tiny", seed=0)
    checksums = [checksum(model.named_parameters(), in_full_precision=True)]
    halve_frozen_matrices(model)
    checksums.append(checksum(model.named_parameters(), in_full_precision=True))
    assert checksums[0] == checksums[1], "a checkpoint of the one goes on with the other"
    policy = make_policy(model, compute_type="bfloat16", packing=packing, adapter=adapter)
    assert policy.is_packed is packing
    update(policy, batch)
    assert policy.num_updates == 1
