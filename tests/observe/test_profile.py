"""Does the profile of a run come back from its file?"""

from __future__ import annotations

from pathlib import Path

import pytest

from oncurve.errors import DataError
from oncurve.observe import profile
from oncurve.observe.profile import Spent


def test_a_profile_comes_back_with_medians_that_leave_out_the_first_step(tmp_path: Path) -> None:
    assert profile.read_profile(tmp_path) == []
    assert profile.profile_text(tmp_path) == ""
    for step, seconds in enumerate((90.0, 1.0, 2.0, 9.0), start=1):
        phases = {"sample": Spent(seconds, 1, 10), "decode": Spent(seconds / 2, 4), "train": Spent(3 * seconds, 1, 8)}
        profile.write_step(tmp_path, step, phases)
    again = {"sample": Spent(3.0, 1, 10), "decode": Spent(1.5, 4), "train": Spent(9.0, 1, 8)}
    profile.write_step(tmp_path, 4, again)  # after a restart
    sample, decode, train = profile.read_profile(tmp_path)
    assert (sample.name, sample.is_part, sample.spent) == ("sample", False, Spent(2.0, 1, 10))
    assert (decode.name, decode.is_part, decode.spent) == ("decode", True, Spent(1.0, 4, 0))
    assert [row.share for row in (sample, decode, train)] == pytest.approx([1 / 4, 1 / 8, 3 / 4])
    lines = [line.split() for line in profile.profile_text(tmp_path).splitlines()[2:]]
    assert lines == [
        ["sample", "2.0000", "25.0%", "1", "10"],
        ["decode", "1.0000", "12.5%", "4"],
        ["train", "6.0000", "75.0%", "1", "8"],
    ]
    (tmp_path / profile.PROFILE).write_text("{}\n[]\n{}\n")
    with pytest.raises(DataError, match="line 2"):
        profile.read_profile(tmp_path)


def test_the_profile_of_an_older_run_is_read(tmp_path: Path) -> None:
    part = '{"seconds": 2.0, "tokens": 5, "operations": 1e9, "bytes": 8.0, "calls": 3}'
    (tmp_path / profile.PROFILE).write_text(
        f'{{"limits": {{"operations_per_second": 1e9}}}}\n{{"step": 1, "phases": {{"sample": {part}}}}}\n'
    )
    assert [row.spent for row in profile.read_profile(tmp_path)] == [Spent(2.0, 3, 5)]
