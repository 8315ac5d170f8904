"""The part of a recipe's section ``rollouts`` about tools, environments and agents."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.section import Section

SANDBOX = "sandbox:"
"""Stands before a tool that runs in the sandbox."""
OPENENV, VERIFIERS = "openenv:", "verifiers:"
"""Stand before the address of an environment's server, and the name of a taskset."""
NO_QUESTION = "..."
"""Begins the question of rows of which the environment alone says what they ask; a number follows."""


class EpisodeSection(Section):
    """Limits of completions in which tools or an environment answer; each ends them in a way of its own."""

    max_turns: PositiveInt = 8
    """How often the policy may write. rollouts.max_completion_tokens limits all turns together."""
    max_answer_tokens: PositiveInt = 256
    """Tokens of one tool or environment answer; longer ones are truncated and marked."""
    max_malformed_calls: PositiveInt = 3
    """Malformed calls are answered with the error; so many end the episode."""
    max_seconds: PositiveFloat | None = None
    """Time limit of an episode, checked between turns; None: no limit."""
    tool_seconds: PositiveFloat = 10.0
    """Time limit of a tool call; the policy is told about a timeout."""
    environment_seconds: PositiveFloat = 60.0
    """Time limit of an environment call; a timeout leaves the completion ungraded."""
    agent_seconds: PositiveFloat = 600.0
    """Time limit of an agent, not counting its waits for the policy; a timeout leaves the completion ungraded."""
    forks: Literal["rows", "refuse"] = "rows"
    """An agent's second conversation, or one continued from an earlier or edited message. rows: a row of its own, with
    the episode's advantage. refuse: an error."""
    threads: PositiveInt = 64
    """Tool and environment calls, and agents, running at the same time."""


class AgentProgram(Section):
    """A program that is started for each completion and talks to the policy as to a chat server."""

    command: tuple[str, ...] = Field(min_length=1)
    """The program with its arguments. It gets OPENAI_BASE_URL and OPENAI_API_KEY, reads the row as JSON from standard
    input and prints the reward as its last line."""
    deterministic: bool = False
    """The same answers lead to the same requests, so that a resumed run is bit-identical."""


class EpisodeKeys(Section):
    """Settings of completions with several turns."""

    tools: tuple[str, ...] = ()
    """Tools of the policy: calculator, python, or functions as module:name or file.py:name; with sandbox: before it, a
    function runs in the sandbox."""
    environments: dict[str, str] = Field(default_factory=dict)
    """Environments by name, as module:name or file.py:name. With several, each row names one in the column
    environment."""
    agent: str | AgentProgram | None = None
    """A function `async def agent(row, client) -> reward`, as module:name or file.py:name, or a program that uses the
    policy through OpenAI's chat protocol."""
    episodes: EpisodeSection = EpisodeSection()
    """Limits of completions with tools, environments or an agent."""

    @property
    def has_episodes(self) -> bool:
        """Completions have turns."""
        return bool(self.tools or self.environments or self.agent)

    @property
    def plays_rows(self) -> bool:
        """An environment or agent gets all columns of a row, so that rows of one question are different problems."""
        return bool(self.environments or self.agent)

    @model_validator(mode="after")
    def _check_agent(self) -> EpisodeKeys:
        if self.agent is not None and (self.tools or self.environments):
            other = "tools" if self.tools else "environments"
            raise ValueError(
                f"rollouts.agent and rollouts.{other} are both set, and an agent brings its own tools. Leave one out"
            )
        return self
