"""Can a person work with a report, from disk, without a network, and does hostile text stay text?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_episode_run

from oncurve.report.write import write_report

MakeRun = Callable[..., Path]
OpenPage = Callable[..., Any]

HOSTILE = [
    "<script>window.hacked = 1; alert(1)</script>",
    "</script><script>window.hacked = 1; alert(1)</script>",
    "<!--<script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "<svg onload=window.hacked=1><a href='javascript:window.hacked=1'>x</a>",
    "{{BLOCKS}}{{SCRIPT}}</style><style>*{display:none}</style>",
    "line\u2028and\u2029paragraph \u202ereversed\u202c \x00\x1b[31m \U0001f642",
    "${window.hacked = 1} `back` \\u003cscript> &lt;b&gt; ]]>",
]


def report_of(run: Path) -> str:
    return write_report(run).path.as_uri()


def groups_shown(page: Any) -> list[int]:
    return [int(row.get_attribute("data-group")) for row in page.query_selector_all(".list tbody tr")]


def test_a_report_opens_from_disk_without_a_network(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page(report_of(made_run()), offline=True)
    assert page.title() == "made · oncurve"
    titles = [node.inner_text() for node in page.query_selector_all("#curves .chart h3")]
    assert titles[:4] == ["Reward", "KL and mismatch", "Completion length", "Gradient norm and loss"]
    assert "step 8 of 8" in page.inner_text("header.top")
    assert "finished" in page.inner_text("header.top")
    assert page.locator("#curves svg path.line").count() >= 6
    assert "= completions per step\t12" in page.inner_text("#costs")


def test_nothing_is_fetched_and_only_the_own_script_may_run(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page("about:blank", is_ready=False)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report_of(made_run()))
    page.wait_for_selector("html[data-ready=yes]")
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))"
    )
    assert page.evaluate("window.ran") is None
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_a_group_is_opened_and_the_address_leads_back_to_it(made_run: MakeRun, open_page: OpenPage) -> None:
    address = report_of(made_run())
    page = open_page(address, offline=True)
    page.click('.list tr[data-group="3"]')
    page.select_option('select[aria-label="step"]', "4")
    page.wait_for_selector("text=Step 4, group 3")
    assert page.locator(".completion").count() == 4
    assert "step 4 place 2 sample 0 says 2" in page.inner_text(".completions")
    assert page.evaluate("location.hash") == "#step=4&group=3"
    again = open_page(f"{address}#step=4&group=3", offline=True)
    again.wait_for_selector("text=Step 4, group 3")


def test_a_long_run_is_drawn_in_means_and_told_in_its_own_numbers(
    made_run: MakeRun, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncurve.report.curves.MOST_POINTS", 3)
    page = open_page(report_of(made_run()), offline=True)
    assert "Each point is the mean of 5 steps" in page.inner_text("#curves")
    reward = page.locator("#curves .chart", has_text="reward, training").first
    assert "reward, training 0.8" in reward.locator(".legend").inner_text()  # of step 8
    assert reward.locator("path.raw").count() >= 1
    reward.locator("svg").press("Home")
    reward.locator("svg").press("ArrowRight")
    assert "reward, training 0.3" in reward.locator(".legend").inner_text()  # the mean of steps 1 to 5


def test_steps_are_switched_by_buttons_and_keys(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page(report_of(made_run()), offline=True)
    page.wait_for_selector("text=Step 8, group 3")  # whose rewards differ most
    page.click('button[aria-label="previous step"]')
    page.wait_for_selector("text=Step 6, group 3")
    page.keyboard.press("[")
    page.wait_for_selector("text=Step 4, group 3")
    page.keyboard.press("]")
    page.wait_for_selector("text=Step 6, group 3")
    page.keyboard.press("k")
    page.wait_for_selector("text=Step 6, group 2")
    page.keyboard.press("j")
    page.wait_for_selector("text=Step 6, group 3")
    assert page.evaluate("location.hash") == "#step=6&group=3"


def test_groups_are_sorted_filtered_and_searched(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page(report_of(made_run()), offline=True)
    page.wait_for_selector(".list tbody tr")
    assert groups_shown(page) == [1, 2, 3]
    page.click('[data-sort="reward"]')
    assert groups_shown(page) == [3, 2, 1]
    assert page.get_attribute('th:has([data-sort="reward"])', "aria-sort") == "descending"
    page.click('[data-sort="reward"]')
    assert groups_shown(page) == [1, 2, 3]
    page.select_option('select[aria-label="filter"]', "errors")
    assert groups_shown(page) == [3]
    page.select_option('select[aria-label="filter"]', "unsolved")
    assert groups_shown(page) == [1]
    page.select_option('select[aria-label="filter"]', "all")
    page.fill('input[type="search"]', "PLACE 1 sample 3")
    assert groups_shown(page) == [2]
    page.click('.list tr[data-group="2"]')
    assert "place 1 sample 3" in page.inner_text(".completions mark")


def test_every_step_is_searched(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page(report_of(made_run()), offline=True)
    page.fill('input[type="search"]', "of step 4")
    page.click("text=in all steps")
    page.click(".hits a")
    page.wait_for_selector("text=Step 4, group 1")
    assert page.locator(".hits a").count() == 1


def test_completions_show_reward_parts_length_truncation_and_errors(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page(f"{report_of(made_run())}#step=8&group=3", offline=True)
    page.wait_for_selector("text=Step 8, group 3")
    cards = [card.inner_text() for card in page.query_selector_all(".completion")]
    assert "timeout" in cards[0]
    assert "took 3 s" in cards[0]
    assert "correct 1 · format 1" in cards[1]
    assert "+0.50" in cards[1]
    assert "cut off" in cards[3]
    page.select_option('select[aria-label="order of completions"]', "reward")
    assert "sample 1" in page.query_selector(".completion").inner_text()


def test_tokens_are_shaded_by_their_probability(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page(f"{report_of(made_run())}#step=8&group=1", offline=True)
    page.wait_for_selector(".completion")
    page.select_option('select[aria-label="colours"]', "logprob")
    letters = page.query_selector_all(".completion:first-child .text span")
    text = "step 8 place 0 sample 0 says 0"
    assert "".join(letter.inner_text() for letter in letters).replace("\xa0", " ") == text
    assert letters[0].get_attribute("title") == "p = 1"
    assert letters[0].get_attribute("class") == "p0"
    assert letters[29].get_attribute("title") == "p = 0.56"
    page.click('.list tr[data-group="3"]')  # only the first two groups of a step keep them
    assert "No log-probabilities of this group" in page.inner_text(".detail .scale")
    page.select_option('select[aria-label="colours"]', "advantage")
    assert page.evaluate("document.querySelector('.completion .text').style.background").startswith("rgba(var(--minus)")


def test_held_out_examples_stand_side_by_side(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page(f"{report_of(made_run())}#step=examples&group=2", offline=True)
    page.wait_for_selector("text=Test problem 2")
    assert "base answers 1" in page.inner_text(".completions")
    assert "trained answers 1" in page.inner_text(".completions")


def test_the_cursor_moves_by_keyboard_and_leads_to_the_completions(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page(report_of(made_run()), offline=True)
    page.focus("#curves svg")
    for _ in range(5):
        page.keyboard.press("ArrowLeft")
    assert "step 4" in page.inner_text("#curves .legend")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Step 4, group 3")


def test_every_metric_can_be_shown(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page(report_of(made_run()), offline=True)
    page.click("#every-metric summary")
    page.wait_for_selector("text=standard deviation inside a group (n - 1), mean over groups")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_and_never_run(made_run: MakeRun, open_page: OpenPage, text: str) -> None:
    run = made_run(text=text, prompt=text)
    page = open_page(f"{report_of(run)}#step=8&group=2", offline=True)
    page.wait_for_selector("text=Step 8, group 2")
    for colours in ("none", "logprob", "advantage"):
        page.select_option('select[aria-label="colours"]', colours)
        shown = page.evaluate("document.querySelector('.completion .text').textContent")
        assert shown == text
    page.fill('input[type="search"]', text[:12])
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.scripts.length") == page.evaluate(
        "document.querySelectorAll('head script, body > script').length"
    )
    assert page.locator("img, iframe, object, main svg a").count() == 0
    assert page.evaluate("getComputedStyle(document.querySelector('main')).display") == "block"


def test_hostile_words_in_every_other_place_are_never_run(
    made_run: MakeRun, open_page: OpenPage, tmp_path: Path
) -> None:
    text = "</script><img src=x onerror=window.hacked=1>"
    config = {"model": text, "run": {"steps": 8, "prompts_per_step": 3}, "algorithm": {"group_size": 4}}
    run = made_run(
        "<b>run &amp; <img src=x onerror=alert(1)>".replace("/", ""), config=config, manifest={"command": text}
    )
    (run / "log.txt").write_text(text)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, f"reward/{text}": 1.0, "reward/mean": 1.0}) + "\n")
    page = open_page(report_of(run), offline=True)
    page.click("#every-metric summary")
    assert text in page.inner_text("#recipe")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


def test_half_a_surrogate_pair_does_not_break_the_page(made_run: MakeRun, open_page: OpenPage) -> None:
    run = made_run()
    file = run / "rollouts" / "step_000008.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["completions"][0]["text"] = "half \ud83d of a pair"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = open_page(f"{report_of(run)}#step=8&group=1", offline=True)
    page.wait_for_selector("text=of a pair")


def test_a_page_fits_a_phone(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page(report_of(made_run()), offline=True, viewport={"width": 390, "height": 844}, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.tap('.list tr[data-group="2"]')
    page.wait_for_selector("text=Step 8, group 2")


def test_what_was_left_out_is_said(made_run: MakeRun, open_page: OpenPage) -> None:
    run = made_run(steps=20, every=1)
    page = open_page(write_report(run, text_budget=4000, token_budget=900).path.as_uri(), offline=True)
    notice = page.inner_text(".notice")
    assert "of 20 recorded steps (evenly chosen)" in notice
    assert "log-probabilities of tokens of" in notice


def test_who_wrote_what_is_shown_turn_by_turn(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(f"{report_of(make_episode_run(tmp_path / 'run'))}#step=1&group=1", offline=True)
    page.wait_for_selector("text=Step 1, group 1")
    card = page.query_selector(".completion")
    assert "3 turns · 2 calls · waited 0.5s" in card.inner_text()
    assert "1 failed call" in card.inner_text()
    turns = card.query_selector_all(".turn")
    assert ["told" in turn.get_attribute("class") for turn in turns] == [False, True, False, True, False]
    heads = [turn.query_selector(".who span").inner_text() for turn in turns]
    assert heads == ["policy, turn 1", "calculator", "policy, turn 2", "tools", "policy, turn 3"]
    assert "not trained on" in turns[1].inner_text()
    assert 'calculator {"expression": "2+3"}' in turns[1].inner_text()
    assert "0.25s" in turns[1].inner_text()
    assert turns[1].query_selector(".said").inner_text() == "<result>5</result>"
    assert "malformed" in turns[3].inner_text()
    second = page.query_selector_all(".completion")[1]
    assert "out of turns" in second.inner_text()
    assert "an environment asks" in second.query_selector("details").text_content()
    assert "4 turns · 2 rows" in second.inner_text()
    [fork] = second.query_selector_all("details.branch")
    assert "what was read before the fork" in fork.text_content()
    assert fork.query_selector(".said").text_content() == "else"
    assert "Turns per completion" in page.inner_text(".tiles")


def test_only_what_the_policy_wrote_is_coloured(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(f"{report_of(make_episode_run(tmp_path / 'run'))}#step=1&group=1", offline=True)
    page.wait_for_selector(".turn")
    page.select_option('select[aria-label="colours"]', "logprob")
    turns = page.query_selector(".completion").query_selector_all(".turn")
    shades = [{node.get_attribute("class") for node in turn.query_selector_all(".said span")} for turn in turns]
    assert shades == [{"p3"}, {"p0"}, {"p3"}, {"p0"}, {"p3"}]
    assert [turn.query_selector(".said").inner_text() for turn in turns][:3] == [
        "<tool>2+3</tool>", "<result>5</result>", "<tool>2+</tool>"
    ]  # fmt: skip
    page.select_option('select[aria-label="colours"]', "advantage")
    turns = page.query_selector(".completion").query_selector_all(".turn")
    grounds = [turn.query_selector(".said").get_attribute("style") for turn in turns]
    assert ["rgba" in (ground or "") for ground in grounds] == [True, False, True, False, True]


def test_episodes_are_filtered_and_held_out_ones_shown(open_page: OpenPage, made_run: MakeRun, tmp_path: Path) -> None:
    page = open_page(report_of(make_episode_run(tmp_path / "run")), offline=True)
    page.wait_for_selector(".list tbody tr")
    page.select_option('select[aria-label="filter"]', "failed")
    assert groups_shown(page) == [1]
    page.select_option('select[aria-label="step"]', "examples")
    page.wait_for_selector("text=Test problem 1")
    assert page.locator(".turn.told").count() == 2
    plain = open_page(report_of(made_run()), offline=True)
    plain.wait_for_selector(".list tbody tr")
    assert "with failed calls" not in plain.inner_text('select[aria-label="filter"]')
    assert "Turns and calls" not in plain.inner_text("#curves")


def test_what_is_unknown_has_no_tile_and_no_panel(made_run: MakeRun, open_page: OpenPage) -> None:
    page = open_page(report_of(made_run()), offline=True)
    names = [node.inner_text() for node in page.query_selector_all(".tile .name")]
    assert names == ["Validation accuracy", "Training reward", "Time", "Tokens sampled"]
    assert "unknown" not in page.inner_text("#costs")
    shown = [panel.inner_text() for panel in page.query_selector_all("#curves .chart") if panel.is_visible()]
    assert all("Not recorded" not in text for text in shown)
    assert page.inner_text(".tile:first-child .value") == "80.0%"
