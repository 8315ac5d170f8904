"""Is what a page is made of right: the choice of steps, the money, the state, the words?"""

from __future__ import annotations

import base64
import json
import math
import os
import socket
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from made_runs import CONFIG, MANIFEST, make_episode_run, make_run, row, write_step

from oncurve.core.errors import DataError
from oncurve.doctor.case import read_case
from oncurve.evaluate.evaluation import read_evaluation
from oncurve.observe.columns import Columns
from oncurve.observe.record import RunFolder, read_metrics
from oncurve.observe.summary import batch_arithmetic
from oncurve.plan.hardware import load_devices
from oncurve.report.curves import PANELS, CurveTable, block_size, glossary
from oncurve.report.overview import _measured, overview, phases, priced_device, run_mfu, spending, state
from oncurve.report.page import (
    MAX_EPISODE_CHARACTERS,
    episode_texts,
    in_markup,
    make_blocks,
    pack,
    read_step,
    render,
    shorten,
    spread,
)
from oncurve.report.write import example_groups, packed_examples

MakeRun = Callable[..., Path]


def unpacked(packed: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(packed), -zlib.MAX_WBITS))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 100])
def test_every_step_is_tried_once_and_the_ends_first(count: int) -> None:
    order = list(spread(range(count)))
    assert sorted(order) == list(range(count))
    assert order[:2] == [0, count - 1][:count]


@pytest.mark.parametrize("kept", [5, 9, 20, 33])
def test_whatever_fits_covers_the_run(kept: int) -> None:
    chosen = sorted(list(spread(range(1000)))[:kept])
    gaps = [b - a for a, b in pairwise(chosen)]
    assert max(gaps) <= 2 * min(gaps) + 2


def test_a_block_holds_the_groups_of_its_step(made_run: MakeRun) -> None:
    blocks = make_blocks(made_run())
    assert sorted(blocks.texts) == blocks.recorded == [1, 2, 4, 6, 8]
    groups = unpacked(blocks.texts[4])
    assert [group["index"] for group in groups] == [40, 41, 42]
    first = groups[2]["completions"][0]
    assert first == {
        "text": "step 4 place 2 sample 0 says 2", "tokens": 30, "end": "stop", "version": 3, "error": "timeout",
        "detail": "took 3 s", "advantage": -0.5,
    }  # fmt: skip
    lengths, hundredths = unpacked(blocks.tokens[4])[0][0]
    assert sum(lengths) == 30
    assert hundredths[:3] == [0, 2, 4]
    assert unpacked(blocks.tokens[4])[2] is None


def test_what_is_too_large_is_left_out_evenly(made_run: MakeRun) -> None:
    run = made_run(steps=16, every=1)
    whole = make_blocks(run)
    budget = sum(map(len, whole.texts.values())) // 2
    blocks = make_blocks(run, text_budget=budget, token_budget=1)
    assert len(blocks.recorded) == 16
    assert 6 <= len(blocks.texts) <= 9
    assert {1, 16} <= set(blocks.texts)
    assert blocks.tokens == {}
    assert blocks.with_tokens == len(blocks.texts)


def test_a_long_text_says_what_is_missing() -> None:
    assert shorten("x" * MAX_EPISODE_CHARACTERS) == "x" * MAX_EPISODE_CHARACTERS
    assert shorten("x" * (MAX_EPISODE_CHARACTERS + 1500)).endswith("[... 1,500 more characters in the run folder]")


def test_a_broken_rollout_file_is_named(made_run: MakeRun) -> None:
    run = made_run()
    (run / "rollouts" / "step_000004.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"step_000004\.jsonl: line 1"):
        read_step(run, 4)


def test_a_half_surrogate_survives_packing() -> None:
    assert unpacked(pack(["\ud83d", "\u2028", "é"])) == ["\ud83d", "\u2028", "é"]


def test_a_table_has_a_value_or_nothing_for_every_step() -> None:
    table = CurveTable(Columns([{"step": 1, "a/b": math.nan}, {"step": 2, "a/c": 1 / 3}]), 1).as_json()
    assert (table["step"], table["columns"]) == ([1, 2], {"a/b": [None, None], "a/c": [None, 0.333333]})
    assert (table["ends"], table["spread"]) == ({"a/c": [0.333333, 0.333333]}, {})


def test_a_long_run_is_drawn_in_blocks_whose_ends_and_sums_are_those_of_its_steps() -> None:
    rows = [{"step": step, "a/b": float(step % 7), "time/step_seconds": 3.6} for step in range(1, 100_001)]
    found = Columns([{"step": 0, "evaluation/x": 0.5}, *rows, {"step": 100_000, "evaluation/x": 0.75}])
    size = block_size([found, Columns(rows[:5])])
    table = CurveTable(found, size).as_json()
    assert (size, len(table["step"]), table["step"][:2], table["step"][-1]) == (50, 2001, [0, 50], 100_000)
    second = [row["a/b"] for row in rows[50:100]]
    shown = [table["columns"]["a/b"][2], *(end[2] for end in table["spread"]["a/b"])]
    assert shown == [pytest.approx(fmean(second)), min(second), max(second)]
    assert (table["ends"]["a/b"], table["ends"]["evaluation/x"]) == ([1.0, 100_000 % 7], [0.5, 0.75])
    assert table["along"]["hours"][-1] == pytest.approx(100.0)
    assert block_size([Columns(rows[:2000])]) == block_size([]) == 1


@pytest.mark.proves("F133", "D25")
def test_panels_draw_metrics_that_the_glossary_knows() -> None:
    keys = [line["key"] for panel in PANELS for line in panel["lines"]]
    keys += [key for panel in PANELS for key in panel.get("band", [])[:2]]
    assert set(glossary(keys)) == set(keys)


def test_boot_data_never_ends_its_element() -> None:
    page = render("a </title><script>", {"name": "</script><script>", "kind": "run"})
    assert page.count("<script") == 2
    assert page.count("</title>") == 1
    assert json.loads(in_markup('"</script>&<!--"')) == "</script>&<!--"


def test_groups_of_held_out_examples_hold_every_measurement(made_run: MakeRun) -> None:
    groups = example_groups(made_run())
    assert [completion["label"] for completion in groups[0]["completions"]] == ["base", "trained"]
    packed, count = packed_examples(groups, budget=200)
    assert 1 <= count < len(groups)
    assert len(unpacked(packed)) == count


def test_a_block_says_who_wrote_what(tmp_path: Path) -> None:
    run = make_episode_run(tmp_path / "run")
    groups, _ = read_step(run, 1)
    shown = groups[0]["completions"][0]
    assert shown["segments"][:2] == [[1, "<tool>2+3</tool>", 16], [0, "<result>5</result>", 18]]
    assert shown["calls"] == [
        {"name": "calculator", "arguments": '{"expression": "2+3"}', "answer": "5", "turn": 0, "seconds": 0.25},
        {"name": "", "arguments": "2+", "answer": "error: cannot be read", "error": "malformed", "turn": 1,
         "seconds": 0.0},
    ]  # fmt: skip
    assert (shown["turns"], shown["waited"]) == (3, 0.5)
    assert "branches" not in shown
    assert groups[0]["completions"][1]["branches"] == [
        {"segments": [[1, "else", 4]], "own_prompt": "what was read before the fork"}
    ]
    held_out = example_groups(run)[0]["completions"][0]
    assert held_out["segments"] == shown["segments"]
    assert read_evaluation(run / "evaluations", "trained").examples[0].episode["turns"] == 3
    row = read_metrics(run)[0]
    assert row["episode/calling_fraction"] == 1.0
    assert row["episode/malformed_calls"] == row["episode/tool_errors"] == 0.5
    assert row["time/tools_max_seconds"] == 0.5


def test_a_long_episode_is_cut_like_a_long_text(tmp_path: Path) -> None:
    row = {
        "segments": [[True, "x" * MAX_EPISODE_CHARACTERS, 9], [False, "y" * 10, 9]],
        "turns": 1,
        "calls": [{"arguments": "z" * 900}],
    }
    shown = episode_texts(row)
    assert len(shown["segments"][0][1]) == MAX_EPISODE_CHARACTERS
    assert "yyy" not in shown["segments"][1][1]
    assert len(shown["calls"][0]["arguments"]) < 600


def test_the_overview_derives_the_batch_and_names_the_state(made_run: MakeRun) -> None:
    told = overview(made_run())
    assert ["= completions per step", "12"] in told["arithmetic"]
    assert ["passes over them", "1.00"] in told["arithmetic"]
    assert told["steps_done"] == 8
    assert told["state"]["name"] == "finished"
    assert [one["name"] for one in told["evaluation"]["measured"]] == ["base", "trained"]
    assert told["evaluation"]["measured"][1]["shares"]["correct"]["fraction"] == 0.75
    assert told["findings"]
    json.dumps(told, allow_nan=False)


def test_a_folder_with_the_metrics_alone_still_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    told = overview(tmp_path)
    assert told["arithmetic"] == []
    assert told["spent"]["usd"] is None
    with pytest.raises(DataError, match="is no run folder"):
        overview(tmp_path / "nothing")


def test_the_state_of_a_run_follows_its_writer(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    with RunFolder(run, resume_step=2) as folder:
        folder.write_status(2, "train")
        assert state(run)["name"] == "running"
        assert state(run)["phase"] == "train"
    assert state(run)["name"] == "stopped"
    with RunFolder(run, resume_step=2) as folder:
        folder.log("stopped: the reason")
    assert state(run)["reason"] == "stopped: the reason"
    gone = {"pid": 2**22 + 1, "host": socket.gethostname()}
    (run / ".lock").write_text(json.dumps(gone))
    assert state(run)["name"] == "died"
    assert "oncurve resume" in state(run)["reason"]
    (run / ".lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    assert state(run)["name"] == "running"
    os.utime(run / ".lock", (1, 1))
    assert state(run)["name"] == "died"


def test_time_is_told_by_phase_and_the_rest_of_the_steps() -> None:
    rows = [{"step": step, **row(step), "time/evaluate_seconds": 1.0} for step in (1, 2)]
    told = {phase.name: (phase.seconds, phase.tokens) for phase in phases(Columns(rows))}
    assert told["sample"] == (2.4, 2000.0)
    assert told["train"] == (1.4, 1600.0)
    assert told["evaluate"] == (2.0, None)
    assert told["other"][0] == pytest.approx(0.2)


def test_differences_of_weights_are_told_by_the_median_of_the_steps_that_sent_some(made_run: MakeRun) -> None:
    sent = {"weights/sent_fraction": 0.125, "weights/sent_mb": 3.0, "weights/sync_seconds": 0.5}
    run = made_run(metrics={"weights/changed_fraction": 0.25, **sent})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "weights/changed_fraction": 1.0, **dict.fromkeys(sent, 99.0)}) + "\n")
    assert ["weights sent", "3 MB per step, 12.50% of all; servers sampled from them 0.5 s later"] in overview(run)[
        "facts"
    ]


def test_the_clock_of_a_resumed_run_is_added_up() -> None:
    rows = [{"step": step, "time/elapsed_seconds": seconds} for step, seconds in enumerate((10.0, 20.0, 5.0, 30.0))]
    assert Columns(rows).elapsed_seconds() == 50.0
    assert Columns().elapsed_seconds() == 0.0


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_a_drivers_name_finds_its_row(name: str, found: str | None) -> None:
    device = priced_device(name, load_devices())
    assert (device.name if device else None) == found


def test_cost_is_hours_times_price_times_devices() -> None:
    rows = Columns([{"step": 1, "time/elapsed_seconds": 1800.0}])
    manifest = {**MANIFEST, "processes": 2, "hardware": {"gpus": [{"name": "NVIDIA H200"}] * 8}}
    price = load_devices()["H200"].on_demand
    assert price is not None
    assert spending(rows, manifest).usd == pytest.approx(0.5 * 2 * price)
    given = spending(rows, manifest, usd_per_hour=10.0)
    assert (given.device, given.count, given.usd) == ("NVIDIA H200", 2, 5.0)
    assert spending(rows, MANIFEST).usd is None
    assert "no price" in spending(rows, MANIFEST).basis
    unpriced = {"hardware": {"gpus": [{"name": "NVIDIA B300"}]}}
    assert spending(rows, unpriced).usd is None


def test_mfu_of_a_run_is_that_of_the_same_work_measured_on_an_h100(tmp_path: Path) -> None:
    """Published: 24.6 % by the least work, and 6 N x 42,900 tokens/s / 989 TFLOP/s = 40 % before attention."""
    config = {"model": "Qwen/Qwen2.5-1.5B", "algorithm": {"group_size": 8}, "policy": {}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    measured = {"time/train_seconds": 1.709, "tokens/trained": 40552.0, "prompt/mean_tokens": 256.0}
    measured |= {"step": 1, "completion/mean_tokens": 40552 / 128}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(measured) + "\n")
    case, h100 = read_case(tmp_path), {"hardware": {"gpus": [{"name": "NVIDIA H100 80GB HBM3"}]}}
    assert run_mfu(case, h100) == "MFU 24.5% by the least work, 41.5% with prompts in every row"
    assert run_mfu(case, MANIFEST) is None


def test_arithmetic_without_counts_leaves_them_out() -> None:
    names = [name for name, _ in batch_arithmetic(CONFIG, {})]
    assert "training prompts" not in names
    assert "= updates per step" in names


def test_a_run_without_a_finished_step_has_a_page(tmp_path: Path, made_run: MakeRun) -> None:
    from oncurve.report.write import write_report

    with RunFolder(tmp_path / "new") as folder:
        folder.write_start("model: x", CONFIG, MANIFEST)
    assert write_report(tmp_path / "new").recorded_steps == 0
    with RunFolder(tmp_path / "new", resume_step=0) as folder:
        write_step(folder, 1)
    assert write_report(tmp_path / "new").steps_in_page == 1


def test_the_mean_reward_of_an_evaluation_is_shown_where_rewards_are_graded() -> None:
    mean = {"value": 0.5, "low": 0.4, "high": 0.6}
    assert _measured({"is_binary": False, "mean_reward": mean})["mean_reward"] == mean
    assert _measured({"is_binary": True, "mean_reward": mean})["mean_reward"] is None
