"""Does a policy learn from its teacher through the command and from Python, and is a wrong teacher refused?"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import oncurve
from oncurve.cli.app import app
from oncurve.cli.plan import plan_inputs
from oncurve.core.errors import ConfigError
from oncurve.observe.record import read_metrics
from oncurve.plan.find_shape import find_shape
from oncurve.plan.memory import Component, weight_parts
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import load_config
from oncurve.run.builder import make_policy
from oncurve.run.trainer import Trainer

if TYPE_CHECKING:
    from nursery import Nursery

SMALL = ["run.steps=2", "run.prompts_per_step=4", "evaluation.num_prompts=4", "evaluation.every_steps=0",
         "rollouts.max_completion_tokens=24"]  # fmt: skip


def kls(run: Path) -> list[float]:
    return [row["distillation/reverse_kl"] for row in read_metrics(run) if "distillation/reverse_kl" in row]


def taught(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "algorithm": {"type": "distil", "group_size": 2, "teacher": str(folder / "runs" / "teacher")},
        "data": {"type": "word_problems", "limit": 200},
        "evaluation": {"num_prompts": 4},
        "rollouts": {"max_completion_tokens": 32},
        "optimizer": {"learning_rate": 5e-4},
        "run": {"steps": 4, "prompts_per_step": 8, "folder": str(folder / "runs"), "save_every_steps": 1, **more},
    }


def weights(run: Path) -> str:
    files = sorted((run / "model").glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that learned something which the base does not say."""
    folder = tmp_path_factory.mktemp("distillation")
    oncurve.sft(
        "embedded", {"type": "word_problems", "limit": 400}, optimizer={"learning_rate": 1e-3},
        evaluation={"num_prompts": 4, "every_steps": 0},
        run={"steps": 30, "prompts_per_step": 16, "folder": str(folder / "runs"), "name": "teacher"},
    )  # fmt: skip
    return folder


@pytest.mark.nightly
def test_the_recipe_learns_from_a_run_through_the_command(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    words = ["train", "distil_word_problems", *SMALL, "run.name=student", "run.steps=8", "run.prompts_per_step=16",
             "rollouts.max_completion_tokens=48", "optimizer.learning_rate=3e-4"]  # fmt: skip
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = kls(place / "runs" / "student")
    assert len(found) == 8
    assert found[0] > 0.1
    assert found[-1] < found[0] / 2


@pytest.mark.nightly
def test_a_run_that_was_left_ends_at_the_same_bits(place: Path) -> None:
    whole = oncurve.train("embedded", **taught(place, name="whole"))
    trainer = Trainer("embedded", **taught(place, name="left"))
    for step in trainer.steps():
        if step.number == 2:
            break
    assert weights(trainer.resume().folder) == weights(whole.folder)


@pytest.mark.nightly
def test_two_processes_learn_what_one_does(nursery: Nursery, place: Path) -> None:
    found = []
    two = ["--processes", "2"]
    for name, more in (("one", []), ("two", two), ("cut", [*two, "policy.parallel=fsdp"])):
        words = ["train", "distil_word_problems", *SMALL, f"run.name={name}", *more]
        status, said = nursery.run(*words, cwd=place)
        assert status == 0, said
        found.append(kls(place / "runs" / name))
    assert len(found[0]) == 2
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[0] == pytest.approx(found[2], abs=1e-5)


def test_an_adapter_learns_from_its_own_base_without_a_second_model(tmp_path: Path) -> None:
    sections = taught(tmp_path, name="adapter", steps=2) | {"policy": {"lora": {"rank": 4}}}
    sections["algorithm"] = {"type": "distil", "group_size": 2, "reference": "base"}
    result = oncurve.train("embedded", **sections)
    policy = make_policy(load_config(result.folder / "config.yaml"), with_reference=True)
    assert policy.reference is None
    found = kls(result.folder)
    assert found[0] == pytest.approx(0, abs=1e-5)
    assert len(found) == 2


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = Path(shutil.copytree(Path(oncurve.__file__).parent / "assets" / "base_model", tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    sections = taught(tmp_path, name="refused")
    sections["algorithm"]["teacher"] = str(other)
    with pytest.raises(ConfigError, match=r"tokenizer is not that of 'embedded': 2 tokens differ"):
        oncurve.train("embedded", **sections)


@pytest.mark.parametrize("choice", [{"teacher": None}, {"reference": "base"}])
def test_a_teacher_and_the_reference_belong_together(tmp_path: Path, choice: dict[str, Any]) -> None:
    sections = taught(tmp_path, name="refused")
    sections["algorithm"] |= choice
    with pytest.raises(ConfigError, match="a teacher belongs to reference teacher"):
        oncurve.train("embedded", **sections)


def test_the_planner_counts_the_teacher() -> None:
    def teachers_of(*more: str) -> list[Component]:
        found = plan_inputs(find_recipe("distil_word_problems"), ["algorithm.teacher=embedded", *more])
        return [part for part in weight_parts(found.run) if part.name == "teacher"]

    [found] = teachers_of()
    assert found.bytes == 4 * find_shape("embedded").num_parameters
    assert teachers_of("policy.lora.rank=4") == [found]
    assert not teachers_of("algorithm.teacher=null", "algorithm.reference=frozen")
