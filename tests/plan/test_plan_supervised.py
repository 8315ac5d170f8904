"""The plan of a supervised stage: rows are trained on, and nothing is sampled but evaluations."""

from __future__ import annotations

from oncurve.cli.plan import plan_inputs
from oncurve.plan.report import Plan, as_text, make_plan
from oncurve.recipe.files import find_recipe


def planned(recipe: str, *overrides: str) -> Plan:
    found = plan_inputs(find_recipe(recipe), overrides)
    return make_plan(found.run, found.device, devices=found.devices, network_gbit=10.0)


def test_a_supervised_step_samples_nothing_and_its_plan_names_no_other_trainer() -> None:
    plan = planned("gsm8k_lora_8gb/sft")
    text = as_text(plan)
    assert "trained with packed rows through " in text, "the way, by its configuration"
    assert plan.time.total == plan.time.train > 0
    assert [one.name for one in plan.trainers] == ["SFT"]
    assert "a step: 16 rows" in text
    assert "sampling" not in text.partition("a step: about")[2]
    assert "evaluate" in text
    assert "DPO" not in text


def test_epochs_over_generated_rows_are_steps_and_over_others_they_are_said() -> None:
    counted = planned("word_problems/base", "model=embedded", "sft.epochs=2")
    assert counted.run.steps == 2 * 12_800 // 16
    assert "sft.epochs" not in as_text(counted)
    assert "sft.epochs=2 sets other ones" in as_text(planned("gsm8k_lora_8gb/sft", "sft.epochs=2"))
