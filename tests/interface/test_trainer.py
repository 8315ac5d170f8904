"""Does a run from Python train, stop, resume, sample and evaluate like one from the command line?"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lanes import gate
from typer.testing import CliRunner

import oncurve
from oncurve.cli.app import app
from oncurve.core.errors import ConfigError
from oncurve.model.ops_native import library
from oncurve.observe.record import read_metrics
from oncurve.recipe.files import find_recipe
from oncurve.recipe.load import read_tree
from oncurve.run.trainer import Trainer

MOST_OF_THE_COMMAND, MOST_OF_A_RUN = 10, 180
"""Modules of oncurve that the command loads before it knows what it is to do, and that a run of the demo loads."""
ROWS = [{"question": f"How much is {a} + {b}?", "answer": a + b} for a in range(1, 9) for b in range(1, 6)]
SMALL: dict[str, Any] = {
    "evaluation": {"num_prompts": 4},
    "algorithm": {"group_size": 4},
    "rollouts": {"max_completion_tokens": 24},
}


def run_of(folder: Path, **more: Any) -> dict[str, Any]:
    return {"steps": 2, "prompts_per_step": 2, "folder": str(folder), "name": "run", **more}


def holds(completion: str, answer: str) -> float:
    return float(answer in completion)


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def scaled(by: float) -> Any:
    def reward(completion: str, answer: str) -> float:
        return by * float(answer in completion)

    return reward


class Counting:
    """An object with state, called like a function."""

    def __init__(self, bonus: float) -> None:
        self.bonus = bonus

    def __call__(self, completion: str, answer: str) -> float:
        return self.bonus + float(answer in completion)

    def method(self, completion: str, answer: str) -> float:
        return self(completion, answer)


async def awaited(completion: str, answer: str) -> float:
    return float(answer in completion)


def as_trl(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


KINDS: dict[str, Any] = {
    "function": holds,
    "lambda": lambda completion, answer: float(answer in completion),
    "closure": scaled(1.0),
    "object": Counting(0.0),
    "method": Counting(0.0).method,
    "async": awaited,
    "trl": as_trl,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights at which a plain function ends."""
    folder = tmp_path_factory.mktemp("plain")
    return weights(Trainer("embedded", ROWS, holds, run=run_of(folder), **SMALL).train().folder)


@pytest.mark.parametrize("kind", gate(sorted(KINDS), "function", "object", "trl"))
def test_every_kind_of_reward_trains_to_the_same_weights(kind: str, plain: str, tmp_path: Path) -> None:
    result = Trainer("embedded", ROWS, KINDS[kind], run=run_of(tmp_path / kind), **SMALL).train()
    assert weights(result.folder) == plain
    assert (result.folder / "report.html").is_file()
    assert len(result.metrics) == 3


def test_the_command_line_the_trainer_and_its_steps_end_with_the_same_weights(tmp_path: Path) -> None:
    keys = ["run.steps=2", "run.prompts_per_step=2", "evaluation.num_prompts=4", "algorithm.group_size=4"]
    keys += ["data.limit=64"]
    words = ["train", "word_problems", *keys, f"run.folder={tmp_path}", "run.name=command"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    from_recipe = Trainer.from_recipe("word_problems", *keys, f"run.folder={tmp_path}", "run.name=recipe").train()
    stepped = Trainer.from_recipe("word_problems", *keys, f"run.folder={tmp_path}", "run.name=steps")
    seen = list(stepped.steps())
    assert [step.number for step in seen] == [1, 2]
    assert stepped.result is not None
    tree = read_tree(find_recipe("word_problems"), keys)  # the same recipe as arguments
    named = {"folder": str(tmp_path), "name": "keys"}
    model, data, rewards = tree.pop("model"), tree.pop("data"), tree.pop("rewards")
    oncurve.train(model, data, rewards, **{**tree, "run": {**tree["run"], **named}})
    runs = ("command", "recipe", "steps", "keys")
    assert {weights(tmp_path / name) for name in runs} == {weights(from_recipe.folder)}
    rows = read_metrics(tmp_path / "steps")
    assert seen[-1].metrics["reward/mean"] == rows[-1]["reward/mean"]
    assert len(seen[0].groups) == 2
    assert len(seen[0].rewards[0]) == len(seen[0].groups[0].completions) == 4


@pytest.mark.parametrize("compute_type", ["float32", "bfloat16"])
def test_a_loop_that_is_left_early_is_saved_and_resumes_to_the_same_weights(tmp_path: Path, compute_type: str) -> None:
    """In bfloat16 with the same dithered copies: each completion that is sampled decides on the weights."""
    kept: dict[str, Any] = {**SMALL, "policy": {"compute_type": compute_type}}
    whole = Trainer("embedded", ROWS, holds, run=run_of(tmp_path / "whole", steps=3), **kept).train()
    trainer = Trainer("embedded", ROWS, holds, run=run_of(tmp_path / "parted", steps=3), **kept)
    for step in trainer.steps():
        if step.number == 1:
            break
    assert trainer.result is None
    text = trainer.sample("How much is 2 + 2?", n=2)[0].completions[1].text  # usable in between
    assert isinstance(text, str)
    result = trainer.resume()
    assert weights(result.folder) == weights(whole.folder)


def test_a_resumed_run_refuses_another_reward(tmp_path: Path) -> None:
    def begun(reward: Any) -> Trainer:
        return Trainer("embedded", ROWS, reward, run=run_of(tmp_path, steps=3), **SMALL)

    steps: Iterator[Any] = begun(scaled(1.0)).steps()
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    for other in (scaled(2.0), Counting(0.0), holds):
        with pytest.raises(ConfigError, match="was saved with other settings"):
            begun(other).resume()
    with pytest.raises(ConfigError, match="was saved with other settings"):
        Trainer("embedded", ROWS[1:], scaled(1.0), run=run_of(tmp_path, steps=3), **SMALL).resume()
    assert not begun(scaled(1.0)).resume().is_interrupted


def test_the_command_line_says_that_rows_and_rewards_came_from_python(tmp_path: Path) -> None:
    steps = Trainer("embedded", ROWS, holds, run=run_of(tmp_path, steps=3), **SMALL).steps()
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"passed from Python.*oncurve\.Trainer"):
        CliRunner().invoke(app, ["resume", str(tmp_path / "run")], catch_exceptions=False)


def test_a_trainer_is_made_from_a_recipe_file_with_rows_and_rewards_in_the_place_of_its_own(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: embedded\ndata: {type: gsm8k, template: plain}\nrewards: [{type: mathematics}]\n")
    trainer = Trainer(str(recipe), ROWS, [holds, ("format", 0.5)], run=run_of(tmp_path), **SMALL)
    assert trainer.config.data.template == "plain"
    assert [reward.weight for reward in trainer.config.rewards] == [1.0, 0.5]
    found = trainer.evaluate([{"question": "1 + 1?", "answer": 2}, {"question": "2 + 3?", "answer": 5}])
    assert len(found.examples) == 2


def test_a_dataset_a_data_frame_and_a_generator_are_rows(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict
    from pandas import DataFrame

    renamed = [{"prompt": row["question"], "label": str(row["answer"])} for row in ROWS]
    for place, data in enumerate([Dataset.from_list(renamed), DataFrame(renamed), (row for row in renamed)]):
        trainer = Trainer("embedded", data, holds, run=run_of(tmp_path / str(place), steps=1), **SMALL)
        assert trainer.train().metrics[-1]["reward/mean"] >= 0
    with pytest.raises(ConfigError, match=r"holds the splits train, test. Pass one of them, such as data\['train'\]"):
        Trainer("embedded", DatasetDict(train=Dataset.from_list(renamed), test=Dataset.from_list(renamed)), holds)


def test_a_trained_model_is_saved_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer("embedded", ROWS, holds, run=run_of(tmp_path, steps=1), **SMALL)
    result = trainer.train()
    assert (
        weights(result.folder)
        == hashlib.sha256((trainer.save(tmp_path / "kept") / "model.safetensors").read_bytes()).hexdigest()
    )
    assert "% correct" in repr(result)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook's kernel does
    page = result._repr_html_()
    assert "report.html" in page
    assert "\x1b" not in page
    assert "base" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"data": ROWS, "rewards": 3}, "rewards: int cannot be called"),
        ({"data": 3, "rewards": holds}, "data: int is not a kind of data"),
        ({"data": ["2+3?"], "rewards": holds}, "row 0 is str, not a dictionary"),
        ({"data": [], "rewards": holds}, "there are no rows"),
        ({"data": {"question": ["2+3?"]}, "rewards": holds}, "Pass rows as a list of dictionaries"),
        ({"rewards": holds}, "data: there is none"),
        ({"data": ROWS, "rewards": "maths"}, "Did you mean 'mathematics'?"),
        ({"data": ROWS, "rewards": holds, "runs": {"steps": 3}}, "Did you mean 'run.steps'?"),
    ],
)
def test_a_mistake_in_the_arguments_gets_one_message(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer("embedded", **arguments)
    assert said in str(caught.value)


def test_importing_the_package_loads_nothing_heavy_and_every_public_name_is_there() -> None:
    program = "import sys, json, oncurve; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "rich", "pydantic"} & set(json.loads(ended.stdout))
    for name in oncurve.__all__:
        assert getattr(oncurve, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        oncurve.trian  # type: ignore[attr-defined]  # noqa: B018


def test_the_help_of_the_command_loads_nothing_that_trains() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "oncurve", "--help"]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    loaded = {line.rsplit("|", 1)[1].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")}
    assert not {"torch", "transformers", "numpy", "pydantic", "yaml", "datasets", "jinja2"} & loaded
    assert len(loaded) < 500, "modules of Python, typer and rich are about 340"


def test_a_run_on_one_processor_loads_only_modules_that_it_uses(tmp_path: Path) -> None:
    few = (
        "run.steps=1",
        "run.prompts_per_step=4",
        "data.limit=64",
        "evaluation.num_prompts=4",
        f"run.folder={tmp_path}",
    )
    words = ["oncurve", "train", "word_problems", *few]
    program = (
        "import sys, oncurve\n"
        "def own(): return sorted(name for name in sys.modules if name.split('.')[0] == 'oncurve')\n"
        "counts = [len(own())]\n"
        "from oncurve.cli.app import main\n"
        "counts.append(len(own()))\n"
        f"sys.argv = {words!r}\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "import json; print(json.dumps([counts, own()]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (package, command), run = json.loads(ended.stdout.splitlines()[-1])
    assert package == 1
    assert command <= MOST_OF_THE_COMMAND
    without_compiler = {"oncurve.model.decode_torch"} if library() is None else set()
    assert len({*run} - without_compiler) <= MOST_OF_A_RUN, run
    unused = {
        "fleet.servers", "policy.lora", "policy.heartbeat", "run.resume", "model.decode_cuda_graph",
        "rewards.worker_pool", "data.demonstrations",
    }  # fmt: skip
    assert not unused & {name.removeprefix("oncurve.") for name in run}
