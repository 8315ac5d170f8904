"""Agents around a scripted policy."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
from scripted import Script, ScriptedSampler

from oncurve.agents.agent_programs import Agent, FunctionAgent
from oncurve.agents.agent_sampler import AgentSampler
from oncurve.agents.agent_setup import AgentSetup
from oncurve.agents.conversation_frames import ChatFrames, Frames, TagFrames
from oncurve.core.records import Completion, Prompt, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.episodes.settings import EpisodeSection

if TYPE_CHECKING:
    from oncurve.policy.trained_policy import TrainedPolicy

HERMES = """{% if tools %}<tools>{{ tools | tojson }}<|end|>
{% endif %}{% for m in messages %}\
{% if m.role == 'tool' %}<user><tool_response>
{{ m.content }}
</tool_response><|end|>
{% elif m.role == 'assistant' %}<assistant>{{ m.content }}{% for c in m.tool_calls or [] %}\
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% else %}<{{ m.role }}>{{ m.content }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}}},
    },
}


def plain(tokenizer: Any) -> Frames:
    return TagFrames(tokenizer, turn="U: {user}\nA:")


def hermes(tokenizer: Any) -> Frames:
    made = copy.deepcopy(tokenizer)
    made.chat_template = HERMES
    return ChatFrames(made)


def play(
    policy: TrainedPolicy,
    script: Script,
    agent: Callable[..., Any] | Agent,
    prompts: list[Prompt],
    *,
    group_size: int = 1,
    make_frames: Callable[[Any], Frames] = plain,
    limits: EpisodeSection | None = None,
    needs_reward: bool = False,
) -> list[Completion]:
    """What becomes of the episodes of an agent."""
    made = agent if hasattr(agent, "start") else FunctionAgent(agent, "agent")
    sampler = AgentSampler(
        ScriptedSampler(script),
        SamplingParams(max_completion_tokens=200),
        AgentSetup(agent=made, make_frames=make_frames, limits=limits or EpisodeSection(), needs_reward=needs_reward),
    )
    sampler.load_weights(policy, version=3)
    try:
        return [one for group in sampler.sample(SamplingRequest(prompts, group_size)) for one in group.completions]
    finally:
        sampler.close()


def post(base_url: str, body: Any, **options: Any) -> httpx.Response:
    """A request as it goes over the wire."""
    text = body if isinstance(body, str) else json.dumps(body)
    with httpx.Client(trust_env=False, timeout=None) as client:
        return client.post(f"{base_url}/chat/completions", content=text, **options)


def say(*words: str) -> list[dict[str, str]]:
    """Messages in turns, the user's first."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(words)]
