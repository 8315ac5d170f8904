"""A step of a past run is done again to the same bits, or the first difference is named."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
import yaml
from lanes import gate
from past_runs import REWARD, recorded_recipe, recorded_run

import oncurve
from oncurve.cli.app import app
from oncurve.core.errors import ConfigError, DataError
from oncurve.history.opened import cosine
from oncurve.history.replay import replay
from oncurve.model.ops_native import library
from oncurve.observe.step_record import read_step, step_path, write_step
from oncurve.run.checkpoint_manifest import write_checkpoint_manifest

if TYPE_CHECKING:
    from nursery import Nursery

KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {
        "algorithm": {"group_size": 4, "type": "dapo"},
        "policy": {"device": "cpu", "compute_type": "bfloat16"},
        "run": {"completions_per_update": 8},
    },
    "moving reference": {
        "algorithm": {"group_size": 4, "kl_coef": 0.1, "reference_every_steps": 2},
        "rollouts": {"max_completion_tokens": 12, "temperature": 0.9, "top_p": 0.9},
        "run": {"passes_per_step": 2},
    },
    "lora": {"policy": {"device": "cpu", "lora": {"rank": 4, "dropout": 0.1}}},
    "refilled": {
        "reward": "game.py:even_odds",
        "algorithm": {"group_size": 2},
        "run": {"refill_rounds": 2, "prompts_per_step": 3},
    },
    "environment": {
        "calls": True,
        "rewards": [{"type": "environment"}],
        "rollouts": {"max_completion_tokens": 40, "environments": {"echo": "its own"}},
    },
    "tools": {
        "calls": True,
        "reward": "game.py:many_calls",
        "rollouts": {"max_completion_tokens": 40, "tools": ["calculator"]},
    },
    "supervised": {"sft": {"epochs": 2}},
    "own server, a step ahead": {
        "rollouts": {"max_completion_tokens": 12, "type": "servers", "own_servers": 1, "staleness": 1},
    },
}


@pytest.mark.usefixtures("starts_forks")
@pytest.mark.parametrize("kind", gate(KINDS, "lora", "environment", "moving reference", "own server, a step ahead"))
def test_every_step_has_the_same_bits_when_it_is_done_again(tmp_path: Path, kind: str) -> None:
    run = recorded_run(tmp_path, steps=4, **KINDS[kind])
    for step in (random.Random(kind).choice([1, 2, 3]), 4):
        found = replay(run, step)
        assert found.is_same, found.differences
        assert found.is_sampled == (kind != "own server, a step ahead" or library() is not None)
        assert f"the weights after step {step}" in found.compared
        assert not found.causes
        assert sum(found.step.group_shares) == pytest.approx(1.0, abs=1e-4)


def test_recorded_completions_are_trained_on_where_the_run_was_measured_in_between(tmp_path: Path) -> None:
    kept = {"save_every_steps": 0, "keep_every_steps": 0}
    run = recorded_run(tmp_path, steps=3, evaluation={"num_prompts": 2, "every_steps": 1}, run=kept)
    found = replay(run, 3, recorded=True)
    assert found.is_same, found.differences
    assert not found.is_sampled


IN_FLIGHT = {"type": "servers", "own_servers": 1, "staleness": 2, "in_flight": True, "max_completion_tokens": 24}


@pytest.mark.nightly
@pytest.mark.parametrize("rollouts", [{}, IN_FLIGHT], ids=["sampling themselves", "on a server in flight"])
def test_a_run_of_two_processes_is_done_again_by_two(
    nursery: Nursery, tmp_path: Path, rollouts: dict[str, Any]
) -> None:
    tree = recorded_recipe(tmp_path, steps=3, rollouts=rollouts)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    done = nursery.run_python("-m", "oncurve", "train", tmp_path / "recipe.yaml", "--processes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    data = tmp_path / "found.json"
    again = ["-m", "oncurve", "replay", tmp_path / "run", "--step", 3, "--json", data]
    done = nursery.run_python(*again, "algorithm.type=dr_grpo")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(data.read_text(encoding="utf-8"))
    assert found["compared"][-1] == "the weights after step 3"
    assert found["gradient_norm"] == pytest.approx(norms(tmp_path / "run")[3], rel=1e-6)
    assert sum(group["share"] for group in found["groups"]) == pytest.approx(1.0, abs=1e-4)
    assert 0.3 < found["change"]["cosine"] < 1.0
    alone = replay(tmp_path / "run", 3)
    assert any("the number of processes: 2 -> 1" in cause for cause in alone.causes)
    assert alone.step.norm == pytest.approx(found["gradient_norm"], rel=1e-5)


def norms(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["policy/gradient_norm"] for row in rows if "policy/gradient_norm" in row}


def test_the_gradient_is_that_of_the_step_and_of_autograd_by_hand(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=2, policy={"device": "cpu", "compute_type": "float32"})
    found = replay(run, 2, recorded=True)
    assert found.step.norm == pytest.approx(norms(run)[2], rel=1e-6)
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step_000001", dtype=torch.float64)
    record = read_step(run, 2)
    loss = torch.zeros((), dtype=torch.float64)
    for group, weights in zip(record.groups, record.advantages, strict=True):
        for one, weight in zip(group.completions, weights, strict=True):
            ids = torch.tensor([*one.prompt_ids, *one.token_ids])
            logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
            logprobs = logits[torch.arange(len(ids) - 1), ids[1:]][len(one.prompt_ids) - 1 :]
            ratio = (logprobs - logprobs.detach()).exp()
            loss = loss - (ratio * weight).mean() / (len(record.groups) * len(group.completions))
    loss.backward()
    theirs = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    mine = {name: found.step.gradient()[name] for name in theirs}
    assert cosine(mine, theirs) == pytest.approx(1.0, abs=1e-6)
    assert found.step.norm == pytest.approx(norm_of(theirs), rel=1e-5)


def norm_of(gradient: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in gradient.values()]).norm())


def test_a_change_shows_what_the_same_completions_would_have_taught(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=2)
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    turned = tmp_path / "turned.py"
    turned.write_text(f"{REWARD}\n\ndef less(completion, answer):\n    return 1 - reward(completion, answer)\n")
    found = replay(run, 2, reward=f"{turned}:less")
    assert found.is_same
    assert found.change is not None
    assert found.change.flipped > 8
    assert found.change.cosine == pytest.approx(-1.0, abs=1e-3)
    scaled = replay(run, 2, changes=["algorithm.type=dr_grpo"]).change
    assert scaled is not None
    assert scaled.flipped == 0
    assert 0.3 < scaled.cosine < 1.0
    same = replay(run, 2, changes=["algorithm.clip_high=0.9"]).change  # no ratio is that large
    assert same is not None
    assert (same.step.norm, same.flipped, same.lost_signal) == (found.step.norm, 0, 0)
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before  # nothing was written into the run
    for change in ("rollouts.temperature=0.5", "algorithm.group_size=8", "algorithm={group_size: 2}"):
        with pytest.raises(ConfigError, match="would have sampled other completions"):
            replay(run, 2, changes=[change])


def test_the_run_is_begun_anew_where_no_checkpoint_is_left_from_before(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=3, run={"save_every_steps": 0, "keep_every_steps": 0})
    found = replay(run, 2)
    assert found.checkpoint == 0
    assert found.is_same, found.differences


def test_a_step_that_was_not_done_is_refused(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=2)
    with pytest.raises(ConfigError, match="the run has the steps 1 to 2"):
        replay(run, 3)
    with pytest.raises(DataError, match=r"step 7 is not recorded. Recorded: 1, 2"):
        oncurve.open_run(run).step(7)


def edit_token(run: Path) -> None:
    record = read_step(run, 2)
    group = record.groups[1]
    one = group.completions[2]
    ids = (one.token_ids[0], *one.token_ids[1:-1], (one.token_ids[-1] + 1) % 200)
    changed = replace(group, completions=(*group.completions[:2], replace(one, token_ids=ids), *group.completions[3:]))
    groups = (record.groups[0], changed, *record.groups[2:])
    write_step(step_path(run, 2), groups, record.rewards, record.advantages)


def edit_reward(run: Path) -> None:
    file = run.parent / "mine.py"
    file.write_text(file.read_text(encoding="utf-8").replace("return sum", "return 0.5 * sum"), encoding="utf-8")


def edit_row(run: Path) -> None:
    file = run.parent / "rows.jsonl"
    file.write_text(file.read_text(encoding="utf-8").replace('"2+3="', '"2+4="'), encoding="utf-8")


def edit_seed(run: Path) -> None:
    file = run / "config.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("  seed: 0\n", "  seed: 1\n"), encoding="utf-8")


def edit_versions(run: Path) -> None:
    for manifest in run.glob("checkpoints/step_*/manifest.json"):
        text = manifest.read_text(encoding="utf-8")
        facts = json.loads(text)
        manifest.unlink()
        facts.pop("sha256")
        facts["versions"]["torch"] = "1.0.0"
        write_checkpoint_manifest(manifest.parent, {k: v for k, v in facts.items() if k not in ("files", "format")})


DIFFERENCES = {
    "token": (edit_token, r"step 2, prompt \d+, completion 2: token \d+ is \d+ in the record", ""),
    "reward file": (edit_reward, r"step 1, prompt \d+, completion \d: (reward|advantage)", ""),
    "row": (edit_row, r"step \d", "training prompts"),
    "seed": (edit_seed, r"step 1", "run.seed: 0 -> 1"),
    "version": (edit_versions, "", "torch"),
}


@pytest.mark.parametrize("planted", DIFFERENCES)
def test_what_was_changed_since_is_named_at_its_step(tmp_path: Path, planted: str) -> None:
    change, difference, cause = DIFFERENCES[planted]
    run = recorded_run(tmp_path, steps=3)
    change(run)
    for checkpoint in (run / "checkpoints").glob("step_00000[12]"):
        shutil.rmtree(checkpoint)  # so that the steps before the last are done again
    found = replay(run, 3)
    assert bool(difference) != found.is_same
    assert re.search(difference, " ".join(found.differences)) is not None
    assert cause in " ".join(found.causes)


def test_a_run_without_checkpoints_is_done_again_with_its_threads_and_other_machines_are_named(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, steps=2)
    shutil.rmtree(run / "checkpoints")
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["threads"] == torch.get_num_threads()
    manifest["hardware"]["cpu"] = "a processor of yesterday"
    (run / "manifest.json").write_text(json.dumps(manifest))
    torch.set_num_threads(manifest["threads"] + 1)
    try:
        found = replay(run, 2)
        assert torch.get_num_threads() == manifest["threads"] + 1
    finally:
        torch.set_num_threads(manifest["threads"])
    assert found.is_same
    assert "processor: a processor of yesterday then" in " ".join(found.causes)


def test_a_kernel_that_rounds_otherwise_is_named_at_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded_run(tmp_path, steps=2)
    exact = torch.nn.functional.embedding
    monkeypatch.setattr(torch.nn.functional, "embedding", lambda *given, **named: exact(*given, **named) * (1 + 1e-6))
    found = replay(run, 2)
    assert not found.is_same
    assert re.search(r"step 2", " ".join(found.differences)) is not None


def test_both_commands_write_text_json_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded_run(tmp_path, steps=2)
    (tmp_path / "strict.py").write_text("def strict(completion, answer):\n    return float(answer in completion)\n")
    page, data = tmp_path / "page.html", tmp_path / "found.json"
    arguments = ["--output", str(page), "--json", str(data)]
    app(["regrade", str(run), "--with", f"{tmp_path}/strict.py:strict", "--cosine", *arguments], standalone_mode=False)
    assert "32 completions of 2 steps" in capsys.readouterr().out
    found = json.loads(data.read_text(encoding="utf-8"))
    assert found["totals"]["num_completions"] == 32
    assert set(found["cosines"]) == {"1", "2"}
    assert "<svg" in page.read_text(encoding="utf-8")
    app(["replay", str(run), "algorithm.type=dapo", "--step", "2", *arguments], standalone_mode=False)
    assert (
        "step 2: same bits as the record (16 completions, " in capsys.readouterr().out
    )  # one step, from its checkpoint
    assert json.loads(data.read_text(encoding="utf-8"))["change"]["described"] == "algorithm.type=dapo"
    assert "Groups by their share" in page.read_text(encoding="utf-8")
