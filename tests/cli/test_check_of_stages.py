"""What does `check` say of a supervised stage, whose rows hold completions and mostly no answers?"""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from oncurve.recipe.load import parse_config
from oncurve.run.examine import check_recipe


def check(text: str) -> tuple[bool, str]:
    said = io.StringIO()
    good = check_recipe(parse_config(text), console=Console(file=said, width=200))
    return good, said.getvalue()


def test_completions_are_counted_and_without_answers_no_reward_is_checked(tmp_path: Path) -> None:
    rows = [{"prompt": f"User: {a}+{b}?", "completion": f" {a + b}"} for a in range(5) for b in range(5)]
    rows.append({"prompt": "User: a long one?", "completion": " 1" * 300})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = "{model: embedded, sft: {max_tokens: 200}, evaluation: {num_prompts: 5}, run: {prompts_per_step: 4}, "
    good, said = check(f"{stage} data: {{path: {tmp_path / 'rows.jsonl'}}}}}")
    assert good
    assert "demonstrations," in said
    assert "too long: 1 row" in said
    assert "No row has an answer, so that no reward is checked" in said


def test_where_the_rows_of_the_evaluation_have_answers_the_reward_is_checked_on_those() -> None:
    data = "data: {type: demonstrations, limit: 64}, evaluation: {data: {type: word_problems, limit: 30}}"
    good, said = check(f"{{model: embedded, sft: {{}}, {data}, rewards: [{{type: r1_zero}}]}}")
    assert good
    assert "64 demonstrations" in said
    assert "gold" in said
