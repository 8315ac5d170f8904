"""Forty changes between a stop and a resume: each is noticed, or changes nothing that is trained."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lanes import gate
from rich.console import Console

import oncurve
from oncurve.core.errors import ConfigError, OncurveError
from oncurve.observe.run_model import EMBEDDED
from oncurve.recipe.load import load_config
from oncurve.run.identity import code_fingerprints
from oncurve.run.resume import finished
from oncurve.run.training import recipe_steps, resume_run

RECIPE = """
model: base
data: {type: jsonl, path: rows.jsonl, template: ask.txt}
rewards:
  - {type: custom, function: "mine.py:good", name: good}
algorithm: {type: custom, group_size: 4, function: "algo.py:loss", advantage_function: "algo.py:advantage"}
rollouts: {max_completion_tokens: 4}
evaluation: {num_prompts: 4}
run: {steps: 2, prompts_per_step: 2, name: kept, save_every_steps: 1, folder: runs}
"""
FILES = {
    "mine.py": "import helper\n\ndef good(completion, target):\n    return helper.worth(completion, target)\n",
    "helper.py": "from inner.deep import SIGN\n\ndef worth(text, target):\n"
    "    return SIGN * (len(text) % (2 + len(target)))\n",
    "inner/__init__.py": "",
    "inner/deep.py": "import os\n\nSIGN = float(os.getenv('SIGN_OF_REWARD', '1'))\n",
    "algo.py": "import torch\nfrom factors import TIMES\n\n"
    "def loss(logprobs, old_logprobs, advantages, mask):\n    return -TIMES * advantages[:, None] * logprobs\n\n"
    "def advantage(rewards):\n    return rewards.values - rewards.values.mean(dim=1, keepdim=True)\n",
    "factors.py": "TIMES = 1.0\n",
    "ask.txt": "Q: {question}\nA: <answer>",
}


def rows(**changed: Any) -> str:
    made = [{"question": f"{n} + 1?", "answer": str(n + 1), "target": "ab" * (n % 3)} for n in range(24)]
    return "".join(json.dumps({**row, **changed}) + "\n" for row in made)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe of files and its run of one step."""
    folder, before = tmp_path_factory.mktemp("stopped"), Path.cwd()
    for name, text in {**FILES, "rows.jsonl": rows(), "recipe.yaml": RECIPE}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    os.chdir(folder)
    shutil.copytree(EMBEDDED, "base")
    try:
        quiet = Console(file=io.StringIO())
        steps = recipe_steps(load_config("recipe.yaml"), RECIPE, console=quiet, owns_process=False)
        next(steps)
        steps.close()
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def again(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of it to change, in which modules are imported anew."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    import sys

    for name in ("helper", "inner", "inner.deep", "factors"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(place for place in sys.path if "stopped" not in place)])


def edit(name: str, old: str, new: str) -> Callable[[], None]:
    def change() -> None:
        text = Path(name).read_text()
        assert old in text
        Path(name).write_text(text.replace(old, new))

    return change


def put(name: str, text: str) -> Callable[[], None]:
    return lambda: Path(name).write_text(text) and None


def swap(name: str, **changed: Any) -> Callable[[], None]:
    """Other values in a file of the model."""
    path = Path("base", name)
    return lambda: path.write_text(json.dumps({**json.loads(path.read_text()), **changed})) and None


def other_tokens() -> None:
    """Two words of the tokenizer change places."""
    path = Path("base/tokenizer.json")
    made = json.loads(path.read_text())
    words = made["model"]["vocab"]
    one, other = [word for word in words if word.isalpha()][:2]
    words[one], words[other] = words[other], words[one]
    path.write_text(json.dumps(made))


LINES = rows().splitlines(keepends=True)
FILE_CHANGES = {
    "the reward's own file": (edit("mine.py", "return helper", "return 1 - helper"), "reward good: mine.py"),
    "a module beside the reward": (edit("helper.py", "SIGN *", "3 *"), "reward good: helper.py"),
    "a package beside the module": (edit("inner/deep.py", "'1'", "'-1'"), "reward good: inner/deep.py"),
    "the loss": (edit("algo.py", "-TIMES", "TIMES"), "loss: algo.py"),
    "the advantage": (edit("algo.py", "rewards.values -", "5 * rewards.values -"), "advantage: algo.py"),
    "a constant beside the loss": (edit("factors.py", "1.0", "5.0"), "loss: factors.py"),
    "the template": (edit("ask.txt", "Q:", "Question:"), "the training prompts"),
    "the model's shape": (swap("config.json", rms_norm_eps=0.5), r"the model's config.json: not as when"),
    "the end tokens": (swap("generation_config.json", eos_token_id=[5, 6]), "the model's generation_config.json"),
    "the tokenizer": (other_tokens, "the model's tokenizer.json"),
    "the settings of the tokenizer": (swap("tokenizer_config.json", model_max_length=7), "tokenizer_config.json"),
    "the model's place": (lambda: os.rename("base", "away"), "no such folder"),
    "the place of the rows": (lambda: os.rename("rows.jsonl", "away.jsonl"), "Correct data.path"),
    "the name of the reward": (edit("mine.py", "def good", "def best"), "has no 'good'. It has: best"),
    "a column that the reward reads": (put("rows.jsonl", rows(target="x")), "the column 'target'"),
    "the answers": (put("rows.jsonl", rows(answer="7")), "the training prompts"),
    "the questions": (put("rows.jsonl", rows(question="8?")), "rows have the same question|the training prompts"),
    "the order of rows": (put("rows.jsonl", "".join(LINES[::-1])), "the training prompts"),
    "a row less": (put("rows.jsonl", "".join(LINES[1:])), "the training prompts"),
    "a row more": (
        put("rows.jsonl", rows() + json.dumps({"question": "new?", "answer": "1", "target": ""}) + "\n"),
        "the training prompts",
    ),
}  # fmt: skip
ALIKE = (
    "a row less", "a row more", "the questions", "the loss", "the settings of the tokenizer", "blank lines in a module",
    "a comment in the recipe", "a file that nothing imports",
)  # fmt: skip
"""Changes that are looked at as others here are; the gate leaves them to the night."""
SETTINGS = {
    "optimizer.learning_rate=1e-3": "optimizer.learning_rate",
    "optimizer.schedule=linear": "optimizer.schedule",
    "optimizer.beta2=0.9": "optimizer.beta2",
    "optimizer.warmup_updates=2": "optimizer.warmup_updates",
    "algorithm.group_size=8": "algorithm.group_size",
    "algorithm.kl_coef=0.1": "algorithm.kl_coef",
    "algorithm.normalize=token_mean": "algorithm.normalize",
    "rollouts.temperature=0.7": "rollouts.temperature",
    "rollouts.max_completion_tokens=6": "rollouts.max_completion_tokens",
    "rewards.0.weight=2.0": "rewards",
    "run.seed=3": "run.seed",
    "run.prompts_per_step=4": "run.prompts_per_step",
    "data.template=as_is": "data.template",
}
HARMLESS = {
    "a comment in the reward": (edit("mine.py", "import helper", "# why\nimport helper"), ()),
    "blank lines in a module": (edit("helper.py", "def worth", "\n\ndef worth"), ()),
    "a file that nothing imports": (put("other.py", "SIGN = 9\n"), ()),
    "a new column": (put("rows.jsonl", rows(note="seen")), ()),
    "a comment in the recipe": (edit("runs/kept/config.yaml", "model:", "# why\nmodel:"), ()),
    "ends of lines": (lambda: Path("rows.jsonl").write_bytes(rows().replace("\n", "\r\n").encode()) and None, ()),
    "how often it is saved": (put("other.py", ""), ("run.save_every_steps=2", "run.keep_checkpoints=5")),
}


def resumed(*overrides: str, allow_change: bool = False) -> str:
    said = io.StringIO()
    resume_run(
        "runs/kept", ["run.steps=2", *overrides], allow_change=allow_change, console=Console(file=said, width=500)
    )
    return said.getvalue()


@pytest.mark.parametrize("what", gate(FILE_CHANGES, *(what for what in FILE_CHANGES if what not in ALIKE)))
def test_a_changed_file_is_named(what: str, again: None) -> None:
    change, named = FILE_CHANGES[what]
    change()
    with pytest.raises(OncurveError, match=named):
        resumed()


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_changed_setting_is_named(setting: str, again: None) -> None:
    with pytest.raises(ConfigError, match=SETTINGS[setting]):
        resumed(setting)


@pytest.mark.parametrize("what", gate(HARMLESS, *(what for what in HARMLESS if what not in ALIKE)))
def test_what_changes_nothing_may_change(what: str, again: None) -> None:
    change, overrides = HARMLESS[what]
    change()
    said = resumed(*overrides)
    assert "environment variable" not in said
    assert "not as when the run began" not in said
    assert "run finished" in said


def test_a_variable_that_a_reward_reads_is_named(again: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGN_OF_REWARD", "-1")
    said = resumed()
    assert "the environment variable SIGN_OF_REWARD: not set when it was saved, and your code reads it" in said
    assert "run finished" in said


def test_a_step_whose_record_is_lost_is_named(again: None) -> None:
    path = Path("runs/kept/metrics.jsonl")
    kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] != 1]
    path.write_text("".join(kept))
    said = resumed()
    assert f"{path} has no record of 1 step, done already, such as 1" in said
    assert "run finished" in said


def test_data_that_changed_skip_the_comparison_with_a_sentence(again: None) -> None:
    Path("rows.jsonl").write_text(rows().replace("+ 1?", "+ 2?"))
    said = resumed(allow_change=True)
    assert "before and after are not compared" in said
    assert "run finished" in said


def test_tools_and_environments_count_with_their_files(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def add(a: int):\n    return a\n")
    tree = RECIPE.replace("max_completion_tokens: 4", f"tools: ['{tmp_path}/tools.py:add']").replace(
        "mine.py", f"{tmp_path}/tools.py"
    )
    (tmp_path / "r.yaml").write_text(tree)
    assert f"tool {tmp_path}/tools.py:add: tools.py" in code_fingerprints(load_config(tmp_path / "r.yaml"))


def test_a_finished_run_proposes_the_steps_that_were_asked_for() -> None:
    assert "oncurve resume runs/a run.steps=5 --allow-change" in finished(Path("runs/a"), 2, requested_steps=5)
    assert "run.steps=4 --allow-change" in finished(Path("runs/a"), 2, requested_steps=2)


@pytest.mark.slow
def test_a_finished_run_of_a_program_says_the_same_in_a_shell_and_in_the_program(tmp_path: Path) -> None:
    rows = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(12)]
    options: dict[str, Any] = {
        "rollouts": {"max_completion_tokens": 4}, "algorithm": {"group_size": 2},
        "evaluation": {"num_prompts": 2, "every_steps": 0},
    }  # fmt: skip
    run = {"steps": 1, "prompts_per_step": 2, "folder": str(tmp_path), "name": "own"}

    def trainer(steps: int) -> oncurve.Trainer:
        return oncurve.Trainer("embedded", rows, lambda completion: 1.0, run={**run, "steps": steps}, **options)

    trainer(1).train()
    said = []
    for again in (lambda: trainer(1).resume(), lambda: resume_run(tmp_path / "own", console=Console(quiet=True))):
        with pytest.raises(ConfigError, match="this run is finished") as refused:
            again()
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "run={'name': 'own', 'steps': 2} and resume(extends=True)" in said[0]
    assert len(trainer(2).resume(extends=True).metrics) == 3
