"""Mistakes in settings and graders that other GRPO programs have made: one test for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oncurve.core.errors import ConfigError
from oncurve.core.records import Completion, Prompt
from oncurve.policy.deepspeed_settings import resolve
from oncurve.policy.distributed import ALONE
from oncurve.policy.from_settings import make_sharding
from oncurve.policy.settings import OptimizerSettings
from oncurve.policy.sharding import ZeroSettings
from oncurve.recipe.load import parse_config
from oncurve.rewards.terms import make_reward_function

RECIPE = "{model: embedded, data: {type: word_problems}}"


def grades(reward: dict[str, Any], *texts: str, answer: str = "42") -> list[float | None]:
    function = make_reward_function(parse_config(RECIPE, [f"rewards=[{reward}]"]).rewards)
    try:
        prompt = Prompt(text="q", prompt_ids=(1,), index=0, row={"question": "q", "answer": answer})
        completions = [Completion((1,), (2,), text, (-1.0,), "stop", 0, n) for n, text in enumerate(texts)]
        return [reward.value for reward in function([prompt] * len(texts), completions)]
    finally:
        function.close()


@pytest.mark.proves("F70", "D12")
def test_data_parallel_is_one_whole_model_in_each_process() -> None:
    """torch's DataParallel would split a batch inside one process and add up gradients."""
    two = replace(ALONE, count=2)
    names = ("data_parallel", "ddp")
    config = parse_config(RECIPE, ["policy.parallel=fsdp"])
    made = [
        make_sharding(parse_config(RECIPE, [f"policy.parallel={name}"]).policy, config.optimizer, two) for name in names
    ]
    assert made == [None, None], "nothing is cut into parts; processes add up gradients of their own rows"
    assert make_sharding(config.policy, config.optimizer, two) is not None


@pytest.mark.parametrize(("parallel", "count"), [("fsdp", 6), ("ddp", 4), ("none", 1)])
def test_weights_are_cut_over_rows_of_processes_or_refused(parallel: str, count: int) -> None:
    config = parse_config(RECIPE, [f"policy.parallel={parallel}", "policy.shard_degree=4"])
    with pytest.raises(ConfigError, match=rf"shard_degree is 4, .* \(here {parallel}\) .* \(here {count}\)"):
        make_sharding(config.policy, config.optimizer, replace(ALONE, count=count))


@pytest.mark.proves("F48", "D47")
def test_deepspeed_gets_what_its_file_says_beside_the_numbers_of_the_recipe() -> None:
    tree = {
        "zero_optimization": {
            "stage": 2, "overlap_comm": True, "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "gradient_clipping": "auto",
    }  # fmt: skip
    settings = ZeroSettings(tree, "ds.json", True)
    found = resolve(settings, OptimizerSettings(max_gradient_norm=0.3), hidden_size=8, half=False, world_size=2)
    assert found["zero_optimization"] == tree["zero_optimization"]
    assert found["gradient_clipping"] == 0.3


@pytest.mark.proves("D30")
@pytest.mark.parametrize("between", [" ", "", "\n", "\n\n", "  \t"])
def test_any_space_between_the_tags_is_the_same_form(between: str) -> None:
    """A grader that searches for the tags with exactly one space between them pays the space."""
    assert grades({"type": "r1_zero"}, f"so it is </think>{between}<answer> 42 </answer>") == [1.0]


@pytest.mark.proves("D30")
def test_what_follows_the_answer_is_not_part_of_it() -> None:
    """Without a stop string a model goes on, and its right answer must stay right."""
    right = "so </think> <answer> 42 </answer>"
    said = grades({"type": "r1_zero"}, right, f"{right}\nUser: another question", f"{right} </s> more text")
    assert said == [1.0, 1.0, 1.0]


@pytest.mark.proves("D29", "D31")
def test_a_right_answer_pays_whatever_its_number_looks_like() -> None:
    boxed = {"type": "mathematics", "answer_from": "boxed"}
    assert grades(boxed, r"\boxed{1,000}", r"\boxed{1000.00}", r"\boxed{\$1000}", answer="1000") == [1.0, 1.0, 1.0]
    assert (
        grades(boxed, r"\boxed{\frac{1}{2}}", r"\boxed{\frac{2}{4}}", r"\boxed{0.5}", answer=r"\frac{1}{2}") == [1] * 3
    )
    assert grades(boxed, r"first \boxed{3}, no: \boxed{42}", r"\boxed{42}, no: \boxed{3}") == [1.0, 0.0]


@pytest.mark.proves("D30")
def test_a_letter_for_another_letter_is_wrong() -> None:
    assert grades({"type": "mathematics"}, r"\boxed{3+c}", r"\boxed{3+d}", answer="3+d") == [0.0, 1.0]
