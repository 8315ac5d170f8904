"""Does an agent get the same turns whoever samples them?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from served import FAST, LocalServer, make_server_sampler

from oncurve.agents.agent_programs import FunctionAgent
from oncurve.agents.agent_sampler import AgentSampler
from oncurve.agents.agent_setup import AgentSetup
from oncurve.agents.conversation_frames import TagFrames
from oncurve.core.records import Completion, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.sample.engine import InProcessEngine

PARAMS = SamplingParams(max_completion_tokens=24, seed=5)
MakePrompts = Callable[..., list[Prompt]]


async def asks_twice(row: dict[str, Any], client: Any) -> float:
    messages: list[Any] = [{"role": "user", "content": f"q {row['answer']}"}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
        messages += [reply.choices[0].message, {"role": "user", "content": "more"}]
    return 1.0


def play(policy: TrainedPolicy, sampler: Any, prompts: list[Prompt]) -> list[Completion]:
    setup = AgentSetup(
        agent=FunctionAgent(asks_twice, "agent"),
        make_frames=lambda tokenizer: TagFrames(tokenizer, turn="U: {user}\nA:"),
    )
    agents = AgentSampler(sampler, PARAMS, setup)
    agents.load_weights(policy, version=0)
    try:
        return [one for group in agents.sample(SamplingRequest(prompts, 3)) for one in group.completions]
    finally:
        agents.close()


def check(policy: TrainedPolicy, found: list[Completion]) -> None:
    """Nothing failed, and the log-probabilities are those of the model."""
    for one in found:
        assert (one.failure, one.num_turns) == (None, 2), one.failure_detail
        ids = torch.tensor([[*one.prompt_ids, *one.token_ids]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids).logits[0, len(one.prompt_ids) - 1 : -1].float()
        ours = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        own = torch.tensor(one.written)
        torch.testing.assert_close(torch.tensor(one.sampler_logprobs)[own], ours[own], atol=1e-5, rtol=1e-5)


def test_turns_are_the_same_in_this_process_and_over_servers(
    make_policy: Callable[..., TrainedPolicy], make_prompts: MakePrompts, tmp_path: Path
) -> None:
    policy, prompts = make_policy(), make_prompts("a", "b")
    here = play(policy, InProcessEngine(PARAMS), prompts)
    check(policy, here)
    server = LocalServer(policy)
    try:
        over = make_server_sampler(PARAMS, urls=[server.url], weights_folder=tmp_path, deadlines=FAST)
        there = play(policy, over, prompts)
    finally:
        server.close()
    assert [one.token_ids for one in there] == [one.token_ids for one in here]


def test_transformers_samples_for_agents_too(
    make_policy: Callable[..., TrainedPolicy], make_prompts: MakePrompts
) -> None:
    policy = make_policy()
    check(policy, play(policy, InProcessEngine(PARAMS, own_layers=False), make_prompts("a", "b")))
