"""Do environments of OpenEnv servers and tasksets of verifiers happen as their authors wrote them?

Each part needs the real package, and is skipped without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted import make_sampler, one

from oncurve.agents.foreign_environments import environment_of
from oncurve.core.errors import ConfigError
from oncurve.core.records import Prompt, Reward
from oncurve.data.python_objects import PythonObjects
from oncurve.episodes.environments import Kind
from oncurve.episodes.from_settings import make_kinds
from oncurve.policy.trained_policy import TrainedPolicy
from oncurve.recipe.load import parse_config

MakePrompts = Callable[..., list[Prompt]]


@pytest.fixture(scope="module")
def policy(make_policy: Callable[..., TrainedPolicy]) -> TrainedPolicy:
    return make_policy()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An OpenEnv server with a counter, in a thread."""
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        message: str

    class Heard(Observation):
        reply: str = ""

    class Counting(Environment[Say, Heard, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
            self.turns = 0
            return Heard(reply=f" begin {seed is not None}")

        def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
            self.turns += 1
            if "boom" in action.message:
                raise RuntimeError("a bug of the environment")
            return Heard(reply=f"heard {len(action.message)}", reward=0.5, done=self.turns == 2)

        @property
        def state(self) -> State:
            return State(step_count=self.turns)

    app = create_fastapi_app(Counting, Say, Heard, max_concurrent_envs=16)
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        threading.Event().wait(0.02)
    [port] = [one.getsockname()[1] for each in running.servers for one in each.sockets]
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join()


def kind_at(address: str) -> Kind:
    recipe = "{model: embedded, data: {type: word_problems}}"
    config = parse_config(recipe, [f"rollouts.environments={{counting: 'openenv:{address}'}}"])
    return make_kinds(config.rollouts, PythonObjects())["counting"]


def test_the_turn_is_the_action_of_an_openenv_server(
    policy: TrainedPolicy, make_prompts: MakePrompts, server: str
) -> None:
    factory = kind_at(server).factory
    sampler = make_sampler(policy, lambda read: "x" * read.count("U:") + "y<|end|>", environments={"counting": factory})
    completion = one(sampler, make_prompts("q"))
    assert completion.own_prompt == "q begin True"
    assert completion.text == "y<|end|>\nU: heard 1\nA:xy"
    assert (completion.finish_reason, completion.environment_reward) == ("done", Reward(1.0))
    sampler.close()


def test_what_an_openenv_server_does_wrong_is_ungraded(
    policy: TrainedPolicy, make_prompts: MakePrompts, server: str
) -> None:
    sampler = make_sampler(policy, lambda read: "boom<|end|>", environments={"counting": kind_at(server).factory})
    completion = one(sampler, make_prompts("q"))
    assert completion.failure in ("environment_crashed", "environment_died")
    assert completion.environment_reward is not None
    assert completion.environment_reward.value is None
    sampler.close()


def test_a_server_that_is_not_there_is_named_when_the_run_starts() -> None:
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    with pytest.raises(ConfigError, match=r"no OpenEnv server answers at http://127\.0\.0\.1:9/schema"):
        kind_at("http://127.0.0.1:9")


@pytest.fixture(scope="module")
def taskset() -> Any:
    """Sums with a tool, as an author of verifiers writes them."""
    vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")

    class Data(vf.TaskData):
        answer: str

    class Numbers(vf.Toolset[vf.ToolsetConfig, vf.State]):
        TOOL_PREFIX = "numbers"

        @vf.tool
        async def add(self, first: int, second: int = 1) -> str:
            """Adds two numbers."""
            if first < 0:
                raise ValueError("only positive ones")
            return str(first + second)

    class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
        @classmethod
        def toolsets(cls, config: Any) -> list[Any]:
            return [Numbers(vf.ToolsetConfig())]

        @vf.reward(weight=2.0)
        async def right(self, trace: Any) -> float:
            return float(self.data.answer in trace.last_reply)

        @vf.reward
        async def called(self, trace: Any) -> float:
            return 0.25 * len(trace.tool_messages)

    class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
        def load(self) -> Any:
            for number in range(5):
                yield Sum(Data(prompt=f"{number}+2?", answer=str(number + 2)), self.config.task)

    return Sums(vf.TasksetConfig(id="sums"))


def adding(read: str) -> str:
    told = read.count("<result>")
    call = '<tool>{{"name": "numbers_add", "arguments": {{"first": {first}, "second": 2}}}}</tool>'
    return [call.format(first=-1), call.format(first=3), "it is 5<|end|>"][told]


def test_prompts_tools_and_rewards_of_a_taskset(policy: TrainedPolicy, make_prompts: MakePrompts, taskset: Any) -> None:
    sampler = make_sampler(policy, adding, environments={"sums": environment_of(taskset)})
    [prompt] = make_prompts("q")
    prompt.row["task"] = 3
    completion = one(sampler, [prompt])
    assert completion.own_prompt == "q3+2?"
    assert [call.answer for call in completion.calls] == ["error: ValueError: only positive ones", "5"]
    assert completion.environment_reward == Reward(2.5, {"right": 1.0, "called": 0.5})
    sampler.close()


def test_the_schema_of_a_tool_is_that_of_its_types(taskset: Any) -> None:
    tool = Kind.of("sums", environment_of(taskset)).tools["numbers_add"]
    assert tool.schema["function"]["description"] == "Adds two numbers."
    assert tool.parameters["first"]["type"] == "integer"
    assert tool.mismatch({}) == "numbers_add needs the argument first"


def test_a_taskset_trains_through_the_interface(taskset: Any, tmp_path: Any) -> None:
    import oncurve

    trainer = oncurve.Trainer(
        "embedded",
        environments=taskset,
        rollouts={"max_completion_tokens": 24},
        algorithm={"group_size": 4},
        run={"steps": 2, "prompts_per_step": 2, "folder": str(tmp_path), "name": "run"},
        evaluation={"num_prompts": 1},
    )
    steps = list(trainer.steps())
    assert len(steps) == 2
    assert all(step.metrics["reward/error_fraction"] == 0.0 for step in steps)


def test_tasks_that_need_a_container_are_refused_by_name(taskset: Any) -> None:
    task = type(next(iter(taskset)))
    kind = type("InBox", (task,), {"NEEDS_CONTAINER": True})
    other = type("Boxed", (type(taskset),), {"load": lambda self: [kind(next(iter(taskset)).data)]})
    with pytest.raises(ConfigError, match="the tasks of Boxed need a container, which does not run in this process"):
        environment_of(other(taskset.config))
    with pytest.raises(ConfigError, match="verifiers:nowhere cannot be loaded"):
        environment_of("verifiers:nowhere")
