"""Does a run that is ahead of its trainer stop and go on without losing, repeating or ageing anything?"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lanes import gate
from rich.console import Console
from transformers import AutoModelForCausalLM

HISTORY = Path(__file__).resolve().parents[1] / "history"
sys.path.insert(0, str(HISTORY))

from past_runs import recorded_recipe, recorded_run  # noqa: E402

from oncurve.history.past import open_run  # noqa: E402
from oncurve.history.replay import replay  # noqa: E402
from oncurve.model.ops_native import library  # noqa: E402
from oncurve.observe.step_record import read_step, step_path, write_step  # noqa: E402
from oncurve.policy.distributed import ALONE  # noqa: E402
from oncurve.recipe.schema import Config  # noqa: E402
from oncurve.run.checkpoint_manifest import read_manifest  # noqa: E402
from oncurve.run.resume import ResumeRequest, resume  # noqa: E402
from oncurve.run.training import recipe_steps  # noqa: E402

needs_kernels = pytest.mark.skipif(
    library() is None, reason="what servers sampled is sampled again by compiled kernels, and there is no compiler"
)


def weights_of(run: Path, step: int) -> str:
    return read_manifest(run / "checkpoints" / f"step_{step:06d}")["files"]["model.safetensors"]["sha256"]


def ages(run: Path) -> dict[int, set[int]]:
    past = open_run(run)
    return {
        step: {step - 1 - one.policy_version for group in past.step(step).groups for one in group.completions}
        for step in past.steps
    }


@pytest.mark.parametrize("stopped_after", gate([3, 4], 3))
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path, stopped_after: int) -> None:
    run = recorded_run(tmp_path, steps=7, rollouts={"max_completion_tokens": 12, "staleness": 3})
    assert ages(run) == {1: {0}, 2: {1}, 3: {2}, 4: {3}, 5: {2}, 6: {3}, 7: {2}}
    expected = weights_of(run, 7)
    for step in range(stopped_after + 1, 8):
        shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
    shutil.rmtree(run / "model")
    (run / "evaluations" / "trained.json").unlink()
    request = ResumeRequest(run, (), False, False, Console(file=io.StringIO()), owns_process=False)
    assert len(list(resume(request, ALONE))) == 7 - stopped_after
    assert weights_of(run, 7) == expected
    assert "were finished and are kept" in (run / "log.txt").read_text()


@pytest.mark.nightly
@needs_kernels
@pytest.mark.usefixtures("starts_forks")
def test_what_two_servers_sampled_ahead_in_flight_is_sampled_again_to_the_same_bits(tmp_path: Path) -> None:
    rollouts = {"type": "servers", "own_servers": 2, "staleness": 3, "in_flight": True}
    sizes = {"max_completion_tokens": 24, **rollouts}
    run = recorded_run(tmp_path, steps=6, rollouts=sizes, run={"prompts_per_step": 2})
    assert max(age for found in ages(run).values() for age in found) <= 3
    found = replay(run, 6)
    assert found.is_same, found.differences
    assert found.is_sampled
    assert any("sampled again" in line for line in found.compared)
    step = read_step(run, 6)
    one = step.groups[0].completions[0]
    other = replace(one, token_ids=[(one.token_ids[0] + 1) % 20, *one.token_ids[1:]])
    groups = (replace(step.groups[0], completions=(other, *step.groups[0].completions[1:])), *step.groups[1:])
    write_step(step_path(run, 6), groups, step.rewards, step.advantages)
    assert "token 0 is" in replay(run, 6).differences[0]


def servers_of(model: str) -> list[int]:
    """The servers that this process started for a model."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            line = path.read_bytes()
            if b"-m\0oncurve\0serve" in line and model.encode() in line:
                found.append(int(path.parent.name))
    return sorted(found)


@pytest.mark.nightly
@needs_kernels
@pytest.mark.usefixtures("starts_forks")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_sampled_in_flight_before_and_after_losses_is_sampled_again_to_the_same_bits(tmp_path: Path) -> None:
    rollouts = {"type": "servers", "own_servers": 2, "staleness": 4, "in_flight": True, "max_completion_tokens": 24}
    tree = recorded_recipe(tmp_path, steps=9, rollouts=rollouts, run={"prompts_per_step": 2})
    run, config = tmp_path / "run", Config.model_validate(tree)
    steps = recipe_steps(config, "", console=Console(file=io.StringIO()), owns_process=False)
    for each in steps:
        if each.number == 2:
            os.kill(servers_of(tree["model"])[0], signal.SIGKILL)
        if each.number == 5:
            break
    steps.close()
    for step in (4, 5):  # as if the trainer had been killed before these were saved
        shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
    request = ResumeRequest(run, (), False, False, Console(file=io.StringIO()), owns_process=False)
    assert len(list(resume(request, ALONE))) == 6
    assert max(age for found in ages(run).values() for age in found) <= 4
    assert (
        len({weights_of(run, step) for step in range(1, 10) if (run / "checkpoints" / f"step_{step:06d}").is_dir()}) > 1
    )
    for step in (4, 9):
        found = replay(run, step)
        assert found.is_same, found.differences
        assert found.is_sampled


PLAYERS = '''"""A game and an agent that wait before their second turn, a while, for the end of a step."""

import asyncio
import time
from pathlib import Path

ENDS = Path(__file__).parent / "ends"


def looks(pause=0.05):
    """Pauses until another step has ended and servers have its weights, or six seconds."""
    seen = len(list(ENDS.iterdir()))
    (ENDS.parent / "waits").touch()
    for _ in range(120):
        yield pause
        if len(list(ENDS.iterdir())) > seen:
            yield 0.5
            return


class Echo:
    def reset(self, seed=None):
        self.turns = 0
        return " begin", {}

    def step(self, action):
        self.turns += 1
        for pause in looks() if self.turns == 1 else ():
            time.sleep(pause)
        return f"heard {len(action)}", sum(map(str.isdigit, action)) / 10, self.turns == 3, False, {}


async def agent(row, client):
    said = [{"role": "user", "content": "count"}]
    for words in ("go on", "stop"):
        answer = await client.chat.completions.create(model="policy", messages=said, max_tokens=24)
        said += [answer.choices[0].message, {"role": "user", "content": words}]
        for pause in looks() if words == "go on" else ():
            await asyncio.sleep(pause)
    other = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "again"}])
    return sum(map(str.isdigit, other.choices[0].message.content)) / 10
'''


@pytest.mark.nightly
@pytest.mark.usefixtures("starts_forks")
@pytest.mark.parametrize("kind", ["environment", "agent"])
def test_every_turn_of_an_episode_in_flight_is_known_by_its_weights_and_replayed(tmp_path: Path, kind: str) -> None:
    (tmp_path / "players.py").write_text(PLAYERS, encoding="utf-8")
    rollouts = {"type": "servers", "own_servers": 1, "staleness": 3, "in_flight": True, "max_completion_tokens": 60}
    game = {"environments": {"echo": f"{tmp_path}/players.py:Echo"}}
    of_kind = {"environment": game, "agent": {"agent": f"{tmp_path}/players.py:agent"}}
    paid = [{"type": "environment"}]
    tree = recorded_recipe(tmp_path, steps=7, calls=True, rollouts={**rollouts, **of_kind[kind]}, rewards=paid)
    run, config, waits = tmp_path / "run", Config.model_validate(tree), tmp_path / "waits"
    (tmp_path / "ends").mkdir()
    for each in recipe_steps(config, "", console=Console(file=io.StringIO()), owns_process=False):
        waits.unlink(missing_ok=True)
        deadline = time.monotonic() + (5.0 if each.number < 7 else 0.0)
        while not waits.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        (tmp_path / "ends" / str(each.number)).touch()
    assert max(age for found in ages(run).values() for age in found) <= 3
    models = {
        step: AutoModelForCausalLM.from_pretrained(run / "checkpoints" / f"step_{step:06d}", dtype=torch.float32)
        for step in range(1, 8)
    }
    models[0] = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    past, num_later = open_run(run), 0
    for step in past.steps:
        whole = [each for group in past.step(step).groups for each in group.completions]
        for one in (row for each in whole for row in (each, *each.branches)):
            spans = one.versions or ((0, one.policy_version),)
            assert one.policy_version == min(version for _, version in spans)
            for part in (part for part in one.segments if part.is_policy):
                inside = {version for start, version in spans if part.start < start < part.end}
                first = [version for start, version in spans if start <= part.start][-1]
                if inside:  # weights changed within the turn: its keys and values are of both
                    continue
                num_later += first != one.policy_version
                ids = torch.tensor([[*one.prompt_ids, *one.token_ids[: part.end]]])
                with torch.no_grad():
                    logits = models[first](input_ids=ids).logits[0, len(one.prompt_ids) + part.start - 1 : -1]
                own = torch.tensor(one.token_ids[part.start : part.end])
                expected = torch.log_softmax(logits, dim=-1).gather(1, own[:, None])[:, 0]
                found = torch.tensor(one.sampler_logprobs[part.start : part.end])
                torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert num_later, "no turn was sampled by newer weights than the first of its row"
    again = replay(run, 5)
    assert again.is_same, again.differences


MEETING = '''"""A game that waits in its first turn until more of its kind have begun than one step has."""

import threading
from pathlib import Path

begun, lock = [], threading.Condition()


class Meeting:
    def reset(self, seed=None):
        with lock:
            begun.append(self)
            lock.notify_all()
        return " begin", {}

    def step(self, action):
        with lock:
            if not lock.wait_for(lambda: len(begun) >= 2 * ONE_STEP, timeout=20):
                (Path(__file__).parent / "alone").touch()
        return "over", 1.0, True, False, {}
'''


@pytest.mark.usefixtures("starts_forks")
def test_episodes_of_two_steps_are_under_way_at_the_same_time(tmp_path: Path) -> None:
    rollouts = {"type": "servers", "own_servers": 1, "staleness": 1, "max_completion_tokens": 12}
    game = {"environments": {"meeting": f"{tmp_path}/meeting.py:Meeting"}, "episodes": {"threads": 64}}
    tree = recorded_recipe(
        tmp_path, steps=2, calls=True, rollouts={**rollouts, **game}, rewards=[{"type": "environment"}]
    )
    one_step = tree["run"]["prompts_per_step"] * tree["algorithm"]["group_size"]
    (tmp_path / "meeting.py").write_text(MEETING.replace("ONE_STEP", str(one_step)), encoding="utf-8")
    config = Config.model_validate(tree)
    assert len(list(recipe_steps(config, "", console=Console(file=io.StringIO()), owns_process=False))) == 2
    assert not (tmp_path / "alone").exists(), "the episodes of a step waited for those of the step before"
