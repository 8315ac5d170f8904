"""Do servers that are sent an adapter alone sample from the policy that has it?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from served import FAST, LocalServer, make_server_sampler

from oncurve.core.errors import ConfigError
from oncurve.core.records import Completion, Group, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.fleet.servers.server_sampler import ServerSampler
from oncurve.fleet.serving.weight_update import WeightUpdate
from oncurve.model.lora_weights import FILE
from oncurve.policy.lora import add_adapter
from oncurve.policy.settings import LoraSettings
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.engine import InProcessEngine

PARAMS = SamplingParams(max_completion_tokens=12, seed=3)


@pytest.fixture
def with_adapter(
    make_policy: Callable[..., TrainedPolicy], tiny_model: Callable[..., Any]
) -> Callable[..., TrainedPolicy]:
    def make(architecture: str = "qwen2", *, seed: int = 0, **settings: Any) -> TrainedPolicy:
        model = tiny_model(architecture, seed=seed)
        return make_policy(model, adapter=add_adapter(model, LoraSettings(rank=4, **settings), base=""))

    return make


@pytest.fixture
def served(make_policy: Callable[..., TrainedPolicy], tmp_path: Path) -> Iterator[Callable[..., ServerSampler]]:
    """A sampler over two servers that were started with the base."""
    opened: list[Any] = []

    def start(architecture: str = "qwen2", *, merges: bool = False) -> ServerSampler:
        opened.extend(LocalServer(make_policy(architecture)) for _ in range(2))
        urls = [server.url for server in opened[-2:]]
        opened.append(
            make_server_sampler(
                PARAMS, urls=urls, weights_folder=tmp_path, deadlines=FAST, adapter="merged" if merges else "apart"
            )
        )
        return opened[-1]

    yield start
    for one in reversed(opened):
        one.close()


@torch.no_grad()
def train(policy: TrainedPolicy, seed: int) -> None:
    """Move the adapter."""
    torch.manual_seed(seed)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)


def completions(groups: list[Group]) -> list[Completion]:
    return [one for group in groups for one in group.completions]


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_servers_put_each_adapter_beside_their_base_and_beside_nothing_before_it(
    architecture: str,
    with_adapter: Callable[..., TrainedPolicy],
    served: Callable[..., ServerSampler],
    make_prompts: Callable[..., list[Prompt]],
) -> None:
    policy, sampler, prompts = with_adapter(architecture), served(architecture), make_prompts("a tan", "an ant", "t")
    engine, texts = InProcessEngine(PARAMS), set()
    for version in range(4):
        train(policy, seed=version)
        sampler.load_weights(policy, version)
        engine.load_weights(policy, version)
        ours, theirs = (completions(one.sample(SamplingRequest(prompts, 4, step=version))) for one in (sampler, engine))
        same = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.token_ids == b.token_ids]
        assert len(same) >= len(ours) - 1, (
            "adding before or after the product rounds otherwise, which a draw may notice"
        )
        for mine, other in same:
            assert mine.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-3)
        texts.add(tuple(one.token_ids for one in ours))
    assert len(texts) == 4, "every version was another one"


def test_only_the_adapter_travels_under_the_names_of_peft(
    with_adapter: Callable[..., TrainedPolicy], served: Callable[..., ServerSampler], tmp_path: Path
) -> None:
    sampler, policy = served(), with_adapter()
    sampler.load_weights(policy, 7)
    [folder] = tmp_path.glob("weights-*/*:7:*")
    assert sorted(path.name for path in folder.iterdir()) == [FILE]
    sizes = [tensor.numel() for tensor in load_file(folder / FILE).values()]
    assert sum(sizes) == sum(one.numel() for one in policy.model.parameters() if one.requires_grad)
    assert all(key.startswith("base_model.model.model.layers.") for key in load_file(folder / FILE))


def announced(policy: TrainedPolicy, folder: Path) -> dict[str, Any]:
    """What a server is told of a policy's weights."""
    sampler = make_server_sampler(PARAMS, urls=[], weights_folder=folder)
    manifest = sampler._write(policy, 1)
    return json.loads(json.dumps(manifest.message(address=None, token=None)))


def test_an_adapter_over_another_base_is_refused_and_changes_nothing(
    with_adapter: Callable[..., TrainedPolicy], tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_model("qwen2")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    update = WeightUpdate(model)
    with pytest.raises(ValueError, match="another base"):
        update.stage(announced(with_adapter("qwen2", seed=1), tmp_path))
    with pytest.raises(ValueError, match="to which the adapter belongs"):
        update.stage(announced(with_adapter("gpt2"), tmp_path))
    assert not update.is_staged
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_an_adapter_after_whole_weights_takes_them_for_its_base_or_refuses(
    make_policy: Callable[..., TrainedPolicy],
    with_adapter: Callable[..., TrainedPolicy],
    tiny_model: Callable[..., Any],
    tmp_path: Path,
) -> None:
    update = WeightUpdate(tiny_model("qwen2"))
    adapter = announced(with_adapter(), tmp_path)
    update.stage(adapter)
    update.apply()
    for seed, fits in ((0, True), (1, False)):  # the base itself, and another model in its place
        update.stage(announced(make_policy(tiny_model("qwen2", seed=seed)), tmp_path))
        update.apply()
        if fits:
            update.stage(adapter)
            update.apply()
    with pytest.raises(ValueError, match="start it again"):
        update.stage(adapter)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"bias": "all"}, "policy.lora.bias to none"), ({}, "use_dora in peft")],
)
def test_an_adapter_that_servers_cannot_apply_is_refused_before_anything_is_sent(
    settings: dict[str, Any],
    words: str,
    with_adapter: Callable[..., TrainedPolicy],
    served: Callable[..., ServerSampler],
    tmp_path: Path,
) -> None:
    policy = with_adapter("gpt2", **settings)
    if not settings:
        for part in policy.model.modules():
            if hasattr(part, "use_dora"):
                part.use_dora["default"] = True
    with pytest.raises(ConfigError, match=f"{words}.*rollouts.adapter=merged"):
        served("gpt2").load_weights(policy, 0)
    assert not list(tmp_path.glob("weights-*/*"))


def test_whole_weights_travel_where_the_user_says_so(
    with_adapter: Callable[..., TrainedPolicy],
    served: Callable[..., ServerSampler],
    make_prompts: Callable[..., list[Prompt]],
) -> None:
    policy, sampler, engine = with_adapter("gpt2", bias="all"), served("gpt2", merges=True), InProcessEngine(PARAMS)
    assert policy.adapter_weights() is None
    train(policy, seed=0)
    prompts = make_prompts("a tan")
    for one in (sampler, engine):
        one.load_weights(policy, 0)
    ours, theirs = (completions(one.sample(SamplingRequest(prompts, 4))) for one in (sampler, engine))
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
