"""Is every number that a run writes explained, and does the glossary explain nothing that no run writes?"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from source import modules

from oncurve.algorithm.presets import build
from oncurve.core.records import Completion, Prompt, SamplingParams
from oncurve.evaluate.evaluate import evaluate
from oncurve.observe.metrics import GLOSSARY, unknown_keys
from oncurve.observe.record import read_metrics
from oncurve.sample.engine import InProcessEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oncurve.policy.trained_policy import TrainedPolicy
    from oncurve.run.services import Run

SAMPLING = SamplingParams(max_completion_tokens=6)


def is_even(prompt: Prompt, completion: Completion) -> bool:
    return completion.token_ids[0] % 2 == 0


@pytest.mark.proves("F120", "D26")
@pytest.mark.parametrize(
    ("preset", "choices"),
    [
        ("grpo", {}),
        ("dr_grpo", {"kl_coef": 0.1}),
        ("gspo", {"kl_coef": 0.1, "kl_in": "reward"}),
        ("cispo", {"correction": "truncate"}),
        ("dapo", {"entropy_coef": 0.01}),
        ("grpo", {"entropy_target": 0.5, "correction": "mask"}),
        ("high_entropy", {}),
    ],
)
def test_every_number_of_a_run_is_in_the_glossary(
    preset: str,
    choices: dict[str, Any],
    make_policy: Callable[..., TrainedPolicy],
    make_prompts: Callable[..., list[Prompt]],
    tiny_model: Callable[..., PreTrainedModel],
    train_in: Callable[..., Run],
) -> None:
    algorithm = build(preset, group_size=4, max_completion_tokens=6, **choices)
    prompts = make_prompts("a b", "c", "d e f", "g")
    run = train_in(
        make_policy(reference=tiny_model("qwen2").requires_grad_(False)),
        prompts,
        is_even,
        algorithm,
        SAMPLING,
        steps=1,
        prompts_per_step=2,
        updates_per_step=2,
        refill_rounds=1,
    )
    [row] = read_metrics(run.log.folder.path)
    assert {"reward/mean", "policy/entropy", "time/refill_seconds", "tokens/trained"} <= set(row)
    assert unknown_keys(row) == []


def test_every_number_of_an_evaluation_is_in_the_glossary(
    make_policy: Callable[..., TrainedPolicy],
    make_prompts: Callable[..., list[Prompt]],
    right_where: Callable[..., Any],
) -> None:
    engine = InProcessEngine(SAMPLING)
    engine.load_weights(make_policy(), version=0)
    reward = right_where(is_even)
    measured = evaluate(
        make_prompts("a", "b", "c"), engine, reward, params=SAMPLING, lenient_reward_function=reward
    ).metrics()
    assert len(measured) > 8
    assert unknown_keys(measured) == []


def test_the_glossary_explains_nothing_that_no_run_writes() -> None:
    trees = [tree for module, tree in modules().items() if module != "observe.metrics"]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    written = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "run.timed"]
    written |= {f"time/{ast.literal_eval(call.args[0])}_seconds" for call in calls}
    written |= {f"speed/{name}_tokens_per_second" for name in ("sampled", "trained")}
    written |= {f"reward/{name}" for name in ("correct", "format")}
    assert [metric.key for metric in GLOSSARY if not metric.is_pattern and metric.key not in written] == []
