"""Does a teacher behind `oncurve serve` teach what one in process does, and one that reads a hint its own base?"""

from __future__ import annotations

import copy
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import oncurve
from oncurve.core.errors import ConfigError, DataError, SamplerError
from oncurve.fleet.servers.teacher_server import TeacherServer
from oncurve.fleet.settings import Deadlines
from oncurve.model.context import context_of
from oncurve.observe.record import read_metrics
from oncurve.policy.model_folder import load_model
from oncurve.recipe.load import load_config
from oncurve.run.builder import make_policy
from oncurve.run.rendered import make_prompts

if TYPE_CHECKING:
    from nursery import Nursery

HINT = "The answer is {answer}."


def distilled(folder: Path, name: str, **algorithm: Any) -> dict[str, Any]:
    return {
        "algorithm": {"type": "distil", "group_size": 2, **algorithm},
        "data": {"type": "word_problems", "limit": 200},
        "evaluation": {"num_prompts": 4},
        "rollouts": {"max_completion_tokens": 24},
        "optimizer": {"learning_rate": 1e-4},
        "run": {"steps": 2, "prompts_per_step": 4, "folder": str(folder / "runs"), "name": name, "save_every_steps": 0},
    }


def kls(run: Path) -> list[float]:
    return [row["distillation/reverse_kl"] for row in read_metrics(run) if "distillation/reverse_kl" in row]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is not the student."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    model, tokenizer = load_model("embedded")
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=draw))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(nursery: Nursery, teacher: Path) -> Iterator[str]:
    child = nursery.start("serve", teacher, "--port", 0)
    while not (found := re.search(r"http://[\d.]+:\d+", child.output)):
        assert child.is_running(), child.output
        time.sleep(0.01)
    yield found[0]
    child.kill(signal.SIGTERM)
    assert child.wait() == 0, child.output


def test_a_teacher_behind_a_server_teaches_what_one_in_process_does(teacher: Path, served: str, tmp_path: Path) -> None:
    inside = oncurve.train("embedded", **distilled(tmp_path, "inside", teacher=str(teacher)))
    outside = oncurve.train("embedded", **distilled(tmp_path, "outside", teacher=served))
    first, second = kls(inside.folder), kls(outside.folder)
    assert first[0] > 0.02
    assert first == pytest.approx(second, abs=1e-5)


def test_a_served_teacher_scores_each_token_as_the_model_does(teacher: Path, served: str) -> None:
    model, _ = load_model(str(teacher))
    rows = [([5, 6, 7], [8, 9]), ([10], [11, 12, 13, 14]), (list(range(40)), [3])]
    server = TeacherServer(served)
    found = server.logprobs(rows)
    server.close()
    for (prompt, completion), scores in zip(rows, found, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([[*prompt, *completion]])).logits[0].log_softmax(-1)
        expected = [float(logprobs[len(prompt) - 1 + at, token]) for at, token in enumerate(completion)]
        assert scores == pytest.approx(expected, abs=1e-5)


def test_a_served_teacher_with_another_tokenizer_is_refused(served: str) -> None:
    _, tokenizer = load_model("embedded")
    other: Any = copy.deepcopy(tokenizer)
    other.add_tokens([" apples"])
    server = TeacherServer(served)
    try:
        server.check_tokenizer(tokenizer, "embedded")
        with pytest.raises(ConfigError, match=r"whose tokenizer is not that of 'other': ' apples' is \[\d+\] there"):
            server.check_tokenizer(other, "other")
    finally:
        server.close()


def test_a_teacher_that_is_not_there_is_one_message() -> None:
    server = TeacherServer("http://127.0.0.1:9", deadlines=Deadlines(gone_seconds=0.1))
    try:
        with pytest.raises(SamplerError, match=r"http://127.0.0.1:9 is lost.*Start the server again"):
            server.logprobs([([1], [2])])
    finally:
        server.close()


def test_a_served_teacher_is_asked_at_temperature_one(tmp_path: Path) -> None:
    sections = distilled(tmp_path, "warm", teacher="http://127.0.0.1:9")
    sections["rollouts"]["temperature"] = 0.7
    with pytest.raises(ConfigError, match=r"servers score tokens at temperature 1, but rollouts.temperature is 0.7"):
        oncurve.train("embedded", **sections)


def test_a_base_that_reads_a_hint_teaches_its_adapter(tmp_path: Path) -> None:
    sections = distilled(tmp_path, "hint", reference="base", teacher_hint=HINT)
    result = oncurve.train("embedded", policy={"lora": {"rank": 4}}, **sections)
    assert kls(result.folder)[0] > 0.01  # without the hint it is 0
    config = load_config(result.folder / "config.yaml")
    policy = make_policy(config, with_reference=True)
    assert policy.reference is None
    context = context_of(policy.model.config)
    made = make_prompts(config, policy.tokenizer, context_tokens=context)
    first = made.train[0]
    seen = policy.tokenizer.decode(made.hinted[first.prompt_ids])
    assert seen == first.text.replace("\nAssistant", f"\nThe answer is {first.row['answer']}.\nAssistant")


@pytest.mark.parametrize(
    ("algorithm", "kind", "said"),
    [
        (
            {"reference": "frozen", "teacher_hint": "{proof}"},
            DataError,
            r"asks for \{proof\}, and there is no such column",
        ),
        ({"type": "grpo", "teacher_hint": HINT}, ConfigError, r"teacher_hint is a text for a reference that teaches"),
        ({"reference": "frozen", "teacher_hint": HINT * 99}, DataError, r"Write a shorter hint"),
    ],
)
def test_a_hint_that_cannot_be_read_is_refused(
    algorithm: dict[str, Any], kind: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=said):
        oncurve.train("embedded", **distilled(tmp_path, "refused", **algorithm))
