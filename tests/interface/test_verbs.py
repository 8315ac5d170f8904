"""Does a loop written with the verbs do what the trainer does?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import oncurve
from oncurve.core.errors import ConfigError
from oncurve.core.records import Completion, Group, Prompt
from oncurve.data.curriculum import Curriculum
from oncurve.run.trainer import Trainer

ROWS = [{"question": f"How much is {a} + {b}?", "answer": a + b} for a in range(1, 9) for b in range(1, 6)]
SECTIONS: dict[str, Any] = {
    "rollouts": {"max_completion_tokens": 24},
    "algorithm": {"group_size": 4},
    "optimizer": {"learning_rate": 1e-4},
}


def holds(completion: str, answer: str) -> float:
    return float(answer in completion)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo"])
def test_a_loop_of_ones_own_ends_with_the_weights_of_the_trainer(algorithm: str, tmp_path: Path) -> None:
    sections = {**SECTIONS, "algorithm": {"type": algorithm, "group_size": 4}}
    run = {"steps": 3, "prompts_per_step": 2, "folder": str(tmp_path), "name": "run"}
    evaluation = {"num_prompts": 4}
    Trainer("embedded", ROWS, holds, run=run, evaluation=evaluation, **sections).train()

    policy = oncurve.load_policy("embedded", run=run, **sections)
    engine = oncurve.Engine(policy)
    trained = Trainer("embedded", ROWS, holds, run=run, evaluation=evaluation, **sections)
    from oncurve.run.rendered import make_prompts

    prompts = make_prompts(trained.config, policy.inner.tokenizer, context_tokens=None, objects=trained._objects)
    order = Curriculum(prompts.train, 2, seed=0)
    for step in range(3):
        groups = engine.sample(order.at(step), group_size=4)
        scores = oncurve.score(groups, holds)
        batch = oncurve.collate(groups, oncurve.advantages(scores, algorithm))
        policy.forward_backward(batch)
        policy.step()
    mine = load_file(policy.save(tmp_path / "mine") / "model.safetensors")
    theirs = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-6


def test_questions_are_sampled_scored_and_learned_from(tmp_path: Path) -> None:
    policy = oncurve.load_policy("embedded", **SECTIONS)
    engine = oncurve.Engine(policy, temperature=0.7)
    before = {name: weight.clone() for name, weight in policy.inner.model.named_parameters()}
    groups = engine.sample(["How much is 2 + 3?", "How much is 4 + 1?"], group_size=6)
    scores = oncurve.score(groups, lambda completion: float(len(completion) % 2))
    assert 0 <= scores.mean <= 1
    statistics = policy.forward_backward(oncurve.collate(groups, oncurve.advantages(scores)), loss="cispo")
    assert statistics["policy/entropy"] > 0
    moved = policy.step()
    assert moved["policy/gradient_norm"] > 0
    assert any(not torch.equal(before[name], weight) for name, weight in policy.inner.model.named_parameters())
    again = engine.sample(["How much is 2 + 3?"], group_size=6)
    assert {c.text for c in again[0].completions} != {c.text for c in groups[0].completions}
    engine.close()


def test_mistakes_get_one_message() -> None:
    policy = oncurve.load_policy("embedded", **SECTIONS)
    groups = oncurve.Engine(policy).sample(["2+3?"], group_size=2)
    scores = oncurve.score(groups, lambda completion, answer: 1.0)
    with pytest.raises(ConfigError, match="advantages: "):
        oncurve.advantages(scores, "gropo")
    batch = oncurve.collate(groups, oncurve.advantages(scores))
    with pytest.raises(ConfigError, match="loss: "):
        policy.forward_backward(batch, loss="gropo")
    with pytest.raises(ConfigError, match=r"Use oncurve\.Trainer"):
        policy.forward_backward(batch, loss="high_entropy")
    with pytest.raises(ConfigError, match="there is no 'temprature'"):
        oncurve.Engine(policy, temprature=1.0)


def test_what_is_scored_is_what_a_run_would_pay(tmp_path: Path) -> None:
    prompt = Prompt("2+3?", (1,), 0, {"question": "2+3?", "answer": "5"})
    texts = ("so </think> <answer> 5 </answer>", "\\boxed{5}", "6")
    groups = [Group(prompt, tuple(Completion((1,), (1,), text, (0.0,), "stop", 0, n) for n, text in enumerate(texts)))]

    def five(prompt: str, completion: str) -> float:
        return float("5" in completion)

    (tmp_path / "mine.py").write_text("def six(completion):\n    return float('6' in completion)\n")
    for reward, values in (
        (five, [1.0, 1.0, 0.0]),
        ("mathematics", [1.0, 1.0, 0.0]),
        ({"type": "mathematics", "answer_from": "boxed"}, [0.0, 1.0, 0.0]),
        (f"{tmp_path / 'mine.py'}:six", [0.0, 0.0, 1.0]),
        ([five, ("r1_zero", 2.0)], [3.0, 1.0, 0.0]),
    ):
        assert [one.value for one in oncurve.score(groups, reward).rewards[0]] == values
    for reward, said in ((lambda completion, levle: 1.0, "parameter 'levle'"), ("mathematic", "rewards"), (5, "int")):
        with pytest.raises(ConfigError, match=said):
            oncurve.score(groups, reward)
