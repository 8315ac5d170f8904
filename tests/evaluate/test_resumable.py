"""Does an evaluation that was stopped anywhere end at the same examples as one that was not?"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from evaluation_fakes import Boxed, Reciter, prompts_of

from oncurve.core.errors import ConfigError, DataError
from oncurve.core.records import Group, SamplingParams
from oncurve.core.sampler import SamplingRequest
from oncurve.evaluate import resumable as module
from oncurve.evaluate.evaluate import evaluate
from oncurve.evaluate.evaluation import Evaluation
from oncurve.evaluate.resumable import PartialResults

WARM = SamplingParams(temperature=0.7)
TEXTS = [["[1]", "[x]"], ["[9]", "[9]"], ["[3]", "boom"], ["[4]", "[4]"], ["[x]", "[5]"], ["[6]", "[0]"], ["7", "[7]"]]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPLETIONS_PER_CALL", 4)  # two prompts of two completions


class Interrupted(Reciter):
    """Presses Ctrl-C instead of answering the given call."""

    def __init__(self, at: int) -> None:
        super().__init__(TEXTS)
        self.at = at

    def sample(self, request: SamplingRequest) -> list[Group]:
        if len(self.calls) == self.at:
            raise KeyboardInterrupt
        return super().sample(request)


def run(folder: Path, sampler: Reciter, *, settings: dict[str, object] | None = None) -> Evaluation:
    with PartialResults(folder, settings or {"seed": 0}, samples=2, num_prompts=len(TEXTS)) as kept:
        return evaluate(
            prompts_of(len(TEXTS)),
            sampler,
            Boxed(),
            params=WARM,
            samples_per_prompt=2,
            prompts_per_call=module.prompts_per_call(2),
            store=kept,
        )


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_after_ctrl_c_only_what_is_missing_is_sampled(at: int, tmp_path: Path) -> None:
    whole_sampler = Reciter(TEXTS)
    whole = run(tmp_path / "whole", whole_sampler)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", Interrupted(at))
    sampler = Reciter(TEXTS)
    resumed = run(tmp_path / "cut", sampler)
    assert resumed.examples == whole.examples
    assert sampler.calls == whole_sampler.calls[at:]
    name = "samples.jsonl"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("lines", [1, 3, 5, 6])
def test_a_part_that_was_cut_off_in_writing_is_done_again(lines: int, tmp_path: Path) -> None:
    whole = run(tmp_path, Reciter(TEXTS))
    path = tmp_path / "samples.jsonl"
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:lines]) + text[lines][:20])
    sampler = Reciter(TEXTS)
    assert run(tmp_path, sampler).examples == whole.examples
    assert sampler.calls[0][2] == lines // 4 * 2


@pytest.mark.parametrize(("samples", "prompts"), [(1, 128), (2, 128), (4, 64), (32, 8), (1000, 1)])
def test_a_part_is_what_a_stop_may_cost(samples: int, prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert module.prompts_per_call(samples) == prompts


def test_every_part_is_on_the_disk_before_the_next_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    folder = tmp_path / "new" / "folder"
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text('{"seed": 0}')
    monkeypatch.setattr(module.os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    run(folder, Reciter(TEXTS))
    assert len(sizes) == 4
    assert [0, *sizes] == sorted({0, *sizes})
    assert sizes[-1] == (folder / "samples.jsonl").stat().st_size
    monkeypatch.undo()
    run(tmp_path / "other" / "new", Reciter(TEXTS))


def test_what_is_finished_is_read_and_not_sampled(tmp_path: Path) -> None:
    whole = run(tmp_path, Reciter(TEXTS))
    sampler = Reciter(TEXTS)
    assert run(tmp_path, sampler).examples == whole.examples
    assert sampler.calls == []
    assert whole.examples[5].error == "timeout"


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path, Reciter(TEXTS))
    with pytest.raises(ConfigError, match=r"other settings \(seed 0, now 1\)"):
        run(tmp_path, Reciter(TEXTS), settings={"seed": 1})
    assert [len(module._short("x" * length)) for length in (58, 59, 70)] == [60, 60, 60]
    assert module._short("é" * 59) == f'"{"é" * 56}...'


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    with PartialResults(tmp_path, {}, samples=1, num_prompts=1), pytest.raises(ConfigError, match="another process"):
        PartialResults(tmp_path, {}, samples=1, num_prompts=1)


def test_rows_of_something_else_are_a_message_and_the_folder_stays_free(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    for _ in range(2):
        with pytest.raises(DataError, match="no examples of this version"):
            PartialResults(tmp_path, {}, samples=1, num_prompts=1)


def test_a_folder_that_cannot_be_made_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        PartialResults(tmp_path / "file" / "folder", {}, samples=1, num_prompts=1)
