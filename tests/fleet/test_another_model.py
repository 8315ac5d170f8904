"""Is a server with another model known at once, before a step, whichever way weights go; and the same model by whatever
names its files use?
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file
from served import FAST, LocalServer, Puppet, make_server_sampler
from tiny_models import make_model, model_config
from transformers import AutoConfig, AutoModelForCausalLM

from oncurve.core.errors import SamplerError
from oncurve.core.records import Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.fleet.inside_vllm.own_files import INDEX, OwnFiles
from oncurve.fleet.servers import protocol
from oncurve.fleet.servers.client import ServerClient, ServerFailed
from oncurve.fleet.servers.nccl_group import GroupPush
from oncurve.fleet.serving.weight_update import WeightUpdate
from oncurve.model.lora_weights import AnotherModel
from oncurve.model.same_model import described_config, why_another
from oncurve.policy.lora import add_adapter
from oncurve.policy.settings import LoraSettings, OptimizerSettings
from oncurve.policy.trained_policy import TrainedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PARAMS = SamplingParams(max_completion_tokens=8, seed=3)
FULL = "full_attention"
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another width": ("qwen2", {"intermediate_size": 32}, "intermediate_size is 32 there and 64 here"),
    "another family": ("llama", {}, "it is of the kind llama, and qwen2 is trained"),
    "another vocabulary": ("qwen2", {"vocab_size": 300}, "vocab_size is 300 there"),
    "another depth": (
        "qwen2",
        {"num_hidden_layers": 3, "layer_types": [FULL] * 3},
        "layer_types is .* there.*; num_hidden_layers is 3 there and 2 here",
    ),
    "a head of its own": ("qwen2", {"tie_word_embeddings": False}, "tie_word_embeddings is False there"),
    "another rope": (
        "qwen2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        "rope_parameters is .*77.0.* there",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("way", ["own", "vllm", "nccl"])
def test_a_server_with_another_model_is_told_before_it_gets_any_weights(
    way: str,
    kind: str,
    make_policy: Callable[..., TrainedPolicy],
    tiny_model: Callable[..., PreTrainedModel],
    tmp_path: Path,
) -> None:
    family, changes, said = OTHERS[kind]
    other = make_policy(tiny_model(family, **changes))
    server = LocalServer(other) if way == "own" else puppet_with(other.model)
    push = GroupPush() if way == "nccl" else None
    patient = FAST.model_copy(update={"gone_seconds": 60.0})
    sampler = make_server_sampler(PARAMS, urls=[server.url], weights_folder=tmp_path, deadlines=patient, push=push)
    begin = time.monotonic()
    try:
        with pytest.raises(SamplerError, match=f"has another model than the one in training: .*{said}"):
            sampler.load_weights(make_policy(), version=0)
        assert time.monotonic() - begin < patient.gone_seconds, "it was told at once, not when patience ended"
    finally:
        sampler.close()
        server.close()
    if isinstance(server, Puppet):
        assert not {protocol.PAUSE, protocol.START, protocol.UPDATE} & set(server.calls)


def puppet_with(model: PreTrainedModel) -> Puppet:
    """A server that tells of its model as vLLM's workers do."""
    puppet = Puppet()

    async def tells(request: web.Request) -> web.Response:
        return web.json_response({"results": [described_config(model.config)]})

    async def is_vllm(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": puppet.label})

    puppet.behave = {protocol.CALL_WORKERS: tells, protocol.WEIGHT_INFO: is_vllm}
    return puppet


def test_one_of_two_servers_with_another_model_is_named_and_the_other_samples(
    make_policy: Callable[..., TrainedPolicy],
    tiny_model: Callable[..., PreTrainedModel],
    make_prompts: Callable[..., list[Prompt]],
    tmp_path: Path,
) -> None:
    policy, other = (
        make_policy(),
        LocalServer(make_policy(tiny_model("qwen2", num_hidden_layers=3, layer_types=[FULL] * 3))),
    )
    good, said = LocalServer(policy), list[str]()
    sampler = make_server_sampler(
        PARAMS, urls=[other.url, good.url], weights_folder=tmp_path, deadlines=FAST, notify=said.append
    )
    try:
        for version in range(2):
            sampler.load_weights(policy, version=version)
            sampler.sample(SamplingRequest(make_prompts("a b", "c"), 2))
    finally:
        sampler.close()
        other.close()
        good.close()
    [once] = [text for text in said if "cannot be used" in text]
    assert other.url in once
    assert "num_hidden_layers is 3 there and 2 here" in once


def test_settings_without_a_part_in_what_is_computed_make_no_other_model(tokenizer: PreTrainedTokenizerFast) -> None:
    own, other = model_config("qwen2", tokenizer), model_config("qwen2", tokenizer)
    other.update({"use_cache": False, "attention_dropout": 0.3, "eos_token_id": 1, "initializer_range": 1.0})
    other.dtype = torch.bfloat16
    assert why_another(own, described_config(other)) is None
    other.update({"rms_norm_eps": 1e-3})
    assert why_another(own, described_config(other)) == "rms_norm_eps is 0.001 there and 1e-06 here"
    assert why_another(own, {"model_type": "qwen2", "hidden_size": "wide"}) is not None


def test_what_vllm_found_no_place_for_is_another_model_and_other_failures_are_tried_again() -> None:
    """vLLM answers 500 to both."""
    for text, kind in ((str(AnotherModel("no place")), SamplerError), ("the disk is full", ServerFailed)):
        puppet = Puppet()

        async def fails(request: web.Request, text: str = text) -> web.Response:
            return web.json_response({"error": text}, status=500)

        puppet.behave = dict.fromkeys((protocol.UPDATE, protocol.FINISH), fails)

        async def ask(url: str = puppet.url) -> list[Any]:
            async with aiohttp.ClientSession() as session:
                client = ServerClient(url, session, token=None, connect_seconds=1.0)
                asks = client.send_update({}, within=5.0), client.finish_update("x", within=5.0)
                return await asyncio.gather(*asks, return_exceptions=True)

        try:
            assert [type(one) for one in asyncio.run(ask())] == [kind] * 2
        finally:
            puppet.close()


def renamed(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """The weights of a folder under other names, as other programs leave them."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def with_buffers(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pythia's files have tables beside the weights."""
    tables = {"rotary_emb.inv_freq": torch.ones(4), "bias": torch.ones(1, 1, 8, 8), "masked_bias": torch.tensor(-1e9)}
    return weights | {f"gpt_neox.layers.0.attention.{name}": table for name, table in tables.items()}


def without_prefix(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """GPT-2's files begin with the layers, and have the mask as a table."""
    short = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    return short | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}


def with_head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Many files have a tied head a second time."""
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}


def fused_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts in one tensor for a layer, as the modules have them."""
    found = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for layer in range(2):
        begin = f"model.layers.{layer}.mlp.experts"
        parts = [[weights[f"{begin}.{one}.{part}_proj.weight"] for one in range(4)] for part in ("gate", "up", "down")]
        gates, ups, downs = (torch.stack(part) for part in parts)
        found |= {f"{begin}.gate_up_proj": torch.cat([gates, ups], dim=1), f"{begin}.down_proj": downs}
    return found


def whole(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The part for text in the files of a model that also sees."""
    return {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}


def as_they_are(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return weights


FORMS: dict[str, tuple[str, dict[str, Any], Callable[..., Any]]] = {
    "gpt_neox, tables": ("gpt_neox", {}, with_buffers),
    "gpt2, no prefix": ("gpt2", {}, without_prefix),
    "qwen2, its tied head": ("qwen2", {"tie_word_embeddings": True}, with_head),
    "qwen3_moe, split": ("qwen3_moe", {}, as_they_are),
    "qwen3_moe, fused": ("qwen3_moe", {}, fused_experts),
    "mixtral, split": ("mixtral", {}, as_they_are),
    "qwen3_5_text, of a whole model": ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}, whole),
}
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A model's folder with its weights in one of the forms that are about."""
    family, own, change = FORMS[request.param]
    config = AutoConfig.for_model(family, **SIZES, vocab_size=len(tokenizer), **own)
    config.initializer_range = 0.2
    place = tmp_path / "form"
    make_model(config).save_pretrained(place)
    renamed(place, change)
    return place


def policy_of(place: Path, tokenizer: PreTrainedTokenizerFast, *, lora: bool = False) -> TrainedPolicy:
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(place, dtype=torch.float32).eval()
    adapter = add_adapter(model, LoraSettings(rank=2), base=str(place)) if lora else None
    policy = TrainedPolicy(model, tokenizer, optimizer=OptimizerSettings(), adapter=adapter)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    return policy


@pytest.mark.parametrize("lora", [False, True])
def test_our_server_takes_the_weights_whatever_its_files_call_them(
    form: Path, lora: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    load: Any = AutoModelForCausalLM.from_pretrained
    served, policy = load(form, dtype=torch.float32).eval(), policy_of(form, tokenizer, lora=lora)
    assert why_another(policy.model.config, described_config(served.config)) is None
    manifest = make_server_sampler(PARAMS, urls=[], weights_folder=tmp_path / "weights")._write(policy, 1)
    update = WeightUpdate(served)
    update.stage(manifest.message(address=None, token=None))
    update.apply()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(served(ids).logits, policy.model(ids).logits, atol=2e-5, rtol=1e-5)


def test_an_adapter_finds_its_matrices_in_vllms_files_whatever_they_are_called(
    form: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    policy = policy_of(form, tokenizer, lora=True)
    thin = policy.adapter_weights()
    if thin is None:  # of experts, for which whole weights are sent
        assert "moe" in policy.model.config.model_type or policy.model.config.model_type == "mixtral"
        return
    own, stored = OwnFiles(str(form)), load_file(form / "model.safetensors")
    bases = dict(policy.model.named_modules())
    for name in thin.pairs:
        base: Any = bases[name.removesuffix(".weight")]
        assert torch.equal(stored[own.find(thin.names.get(name, name))], base.get_base_layer().weight)


def test_vllms_files_are_those_of_the_index_and_unclear_names_are_refused(tmp_path: Path) -> None:
    weights = {"a.b.weight": torch.ones(2), "c.b.weight": torch.ones(2), "d.weight": torch.ones(2)}
    save_file(weights, tmp_path / "model.safetensors")
    save_file({"b.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    own = OwnFiles(str(tmp_path))
    assert [path.name for path in own.base_paths()] == ["model.safetensors"]
    assert own.find("model.d.weight") == "d.weight"
    for name, number in (("b.weight", 2), ("e.weight", 0)):
        with pytest.raises(AnotherModel, match=f"{number} of its weights can be {name}"):
            own.find(name)
    shutil.move(tmp_path / "model.safetensors", tmp_path / "part.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"d.weight": "part.safetensors"}}')
    assert [path.name for path in OwnFiles(str(tmp_path)).base_paths()] == ["part.safetensors"]
    with pytest.raises(ValueError, match="no folder with safetensors"):
        OwnFiles(str(tmp_path / "absent")).base_paths()
