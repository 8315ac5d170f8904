"""Does `oncurve trl` run a script as it is, and with --recipe write the recipe that it asks for?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.recipe.load import load_config
from oncurve.trl.run_script import NEVER_TRAINED

Run = Callable[..., Result]
RECIPE = ("--recipe", "recipe.yaml")
TRAIN = """
import argparse

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--beta", type=float, default=0.0)
    given = parser.parse_args()
    args = GRPOConfig(**SHORT, beta=given.beta)
    trainer = GRPOTrainer("embedded", correct, args, rows())
    trainer.train()
    trainer.save_model("saved")
"""


def test_an_unchanged_script_runs_with_its_arguments(trl: Run) -> None:
    done = trl(TRAIN, "--beta", "0.04")
    assert done.exit_code == 0, done.output
    assert Path("saved/model.safetensors").is_file()
    [run] = Path("out").glob("*/config.yaml")
    assert "kl_coef: 0.04" in run.read_text()


@pytest.mark.filterwarnings("ignore")  # of what TRL calls in transformers
def test_names_are_found_wherever_trl_keeps_them_and_a_supervised_stage_is_its_own(trl: Run) -> None:
    done = trl(
        """
        import trl
        from trl.trainer.grpo_trainer import GRPOTrainer as same
        from trl.trainer import GRPOConfig as config
        from trl.rewards import think_format_reward
        from trl import ModelConfig, OnlineDPOConfig, SFTConfig, SFTTrainer
        from oncurve.observe.run_model import EMBEDDED
        assert (same, config, trl.__version__) == (GRPOTrainer, GRPOConfig, "1.16.0")
        told = Dataset.from_list([{"prompt": "1 + 1?", "completion": "2"}] * 4)
        args = SFTConfig("warm", max_steps=1, use_cpu=True, bf16=False, report_to="none")
        sft = SFTTrainer(str(EMBEDDED), args, train_dataset=told)
        before = sft.model.lm_head.weight.detach().clone()
        sft.train()
        assert (sft.model.lm_head.weight != before).any()
        trainer = GRPOTrainer(sft.model, correct, GRPOConfig(**SHORT), rows(), processing_class=sft.processing_class)
        trainer.train()
        assert trainer.model is sft.model
        print("all found")
        """.replace("\n        ", "\n")
    )
    assert "all found" in done.output


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import not_installed_anywhere", "train.py, line 14: it needs the package not_installed_anywhere"),
        ("from trl import PPOTrainer\nPPOTrainer()", "the script uses trl.PPOTrainer, which is not imitated here. Run"),
        ("from trl.trainer.utils import pad", "imports 'pad' from trl.trainer.utils"),
        ("GRPOConfig(num_generation=3)", "Did you mean 'num_generations'"),
        ("GRPOTrainer('embedded', correct, GRPOConfig(**SHORT, neftune_noise_alpha=1.0), rows())", "--accept neftune"),
    ],
)
def test_what_is_not_there_is_one_message(trl: Run, text: str, expected: str) -> None:
    done = trl(text)
    assert done.exit_code != 0
    assert expected in str(done.exception)
    assert "Traceback" not in done.output


def test_a_script_may_import_from_the_package_that_it_is_in() -> None:
    Path("own_package").mkdir()
    Path("own_package/other.py").write_text("X = 3\n")
    Path("own_package/train.py").write_text("from .other import X\nprint('got', X)\n1 / 0\n")
    done = CliRunner().invoke(app, ["trl", "own_package/train.py"])
    assert "got 3" in done.output
    assert "own_package/train.py, line 3: the script raised ZeroDivisionError" in str(done.exception)


def test_an_error_of_the_script_shows_the_scripts_lines_alone(trl: Run, capfd: pytest.CaptureFixture[str]) -> None:
    done = trl("def f():\n    return 1 / 0\n\nf()\n")
    assert "the script raised ZeroDivisionError" in str(done.exception)
    output = done.output + capfd.readouterr().err
    assert 'File "train.py"' in output
    assert "run_script.py" not in output


def test_a_loss_can_be_accepted_on_the_command_line(trl: Run) -> None:
    text = "GRPOTrainer('embedded', correct, GRPOConfig(**SHORT, neftune_noise_alpha=1.0), rows())\nprint('made')"
    assert "made" in trl(text, before=("--accept", "neftune_noise_alpha")).output


def test_the_version_can_be_named_on_the_command_line(trl: Run) -> None:
    done = trl("print(GRPOConfig().beta)", before=("--trl-version", "0.15"))
    assert done.stdout.strip() == "0.04"


def test_converting_runs_up_to_the_training_and_the_recipe_trains(trl: Run) -> None:
    done = trl(TRAIN + "    raise SystemExit('never reached')\n", "--beta", "0.04", before=RECIPE)
    assert done.exit_code == 0, done.output
    assert not Path("out").exists()
    config = load_config("recipe.yaml")
    assert (config.algorithm.kl_coef, config.run.steps, config.run.prompts_per_step) == (0.04, 2, 2)
    assert [reward.function for reward in config.rewards] == ["train.py:correct"]
    row = json.loads(Path("recipe_rows.jsonl").read_text().splitlines()[0])
    assert row["source_row"] == {"prompt": "How much is 0 + 1?", "gold": 1}
    done = CliRunner().invoke(app, ["train", "recipe.yaml", "run.name=short"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    metrics = [json.loads(line) for line in Path("out/short/metrics.jsonl").read_text().splitlines()]
    assert all(
        0 <= row["reward/mean"] <= 1 and not row["reward/error_fraction"] for row in metrics if "reward/mean" in row
    )


def test_a_converted_recipe_trains_the_weights_that_the_script_trains(trl: Run) -> None:
    import hashlib

    assert trl(TRAIN).exit_code == 0
    assert trl(TRAIN, before=RECIPE).exit_code == 0
    assert CliRunner().invoke(app, ["train", "recipe.yaml", "run.name=short"]).exit_code == 0
    [script] = Path("out").glob("embedded*/model/model.safetensors")
    digests = [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in (script, Path("out/short/model/model.safetensors"))
    ]
    assert digests[0] == digests[1]


def test_what_a_recipe_cannot_hold_is_named(trl: Run) -> None:
    text = """
    equal = lambda completions, **_: [1.0] * len(completions)
    GRPOTrainer('embedded', equal, GRPOConfig(**SHORT), rows()).train()
    """
    done = trl(text, before=("--recipe", "-"))
    assert done.exit_code == 1
    assert "reward <lambda>: it has no name at the top of a file" in done.output


def test_a_recipe_that_lacks_only_what_is_accepted_is_whole(trl: Run) -> None:
    text = TRAIN.replace("**SHORT", "**SHORT, neftune_noise_alpha=1.0")
    assert text != TRAIN
    done = trl(text, before=RECIPE)
    assert (done.exit_code, "neftune_noise_alpha = 1.0" in Path("recipe.yaml").read_text()) == (1, True)
    assert trl(text, before=(*RECIPE, "--overwrite", "--accept", "neftune_noise_alpha")).exit_code == 0


def test_a_recipe_gets_the_defaults_of_the_version_that_is_named(trl: Run) -> None:
    text = TRAIN.replace(", beta=given.beta", "")
    assert trl(text, before=(*RECIPE, "--trl-version", "0.15")).exit_code == 0
    assert load_config("recipe.yaml").algorithm.kl_coef == 0.04


def test_a_script_that_never_trains_says_so(trl: Run) -> None:
    done = trl("GRPOConfig(**SHORT)")
    assert done.exit_code == 1
    assert str(done.exception) == f"train.py ended without {NEVER_TRAINED}"
    assert trl(TRAIN).exit_code == 0


def test_a_script_that_never_trains_gives_no_recipe(trl: Run) -> None:
    done = trl("GRPOConfig(**SHORT)", before=RECIPE)
    assert "ended without GRPOTrainer(...).train()" in str(done.exception)


def test_an_argument_that_the_trainer_does_not_know_is_the_mistake_of_the_script(trl: Callable[..., Any]) -> None:
    done = trl("GRPOTrainer('embedded', correct, GRPOConfig(**SHORT), rows(), generation_kwargs={})")
    assert done.exit_code == 1
    assert "the script raised TypeError" in str(done.exception) + done.output
