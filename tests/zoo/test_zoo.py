"""Every cell of the zoo is right or refused with a sentence, and what is planted in modelling files is caught."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from families import FAMILIES, REFUSED_AT_LOAD
from offenders import assert_none
from trial import RIGHT, try_family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

QUICK = ("qwen2, windows", "gpt_neox", "qwen3_moe", "lfm2", "deepseek_v32", "mamba", "gemma3n_text, shared keys")
"""One of each kind of road, of names in files and of refusals."""
MORE = ("llama", "gemma2", "hyperclovax", "phimoe", "laguna", "hy_v4")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft's word to transformers
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of peft and transformers about kinds of models
    pytest.mark.filterwarnings("ignore:target_parameters=:RuntimeWarning"),  # of peft about kinds without experts
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),  # of peft alone
    pytest.mark.timeout(1800),
]


def faults(names: list[str], tokenizer: PreTrainedTokenizerFast, folder: Path) -> list[str]:
    """Weights are counted in this process; that a planner starts another for it is a test of plans."""
    trials = [
        try_family(name, folder / str(number), lambda: tokenizer, plans_here=True) for number, name in enumerate(names)
    ]
    for trial in trials:
        assert (trial.cells["load"] == RIGHT) != (trial.name in REFUSED_AT_LOAD), trial.cells
    return [fault for trial in trials for fault in trial.faults]


def test_one_family_of_each_kind_is_right_or_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    assert_none(faults(list(QUICK), tokenizer, tmp_path))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(2))
def test_every_third_family_is_right_or_refused(part: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """`python -m tests.zoo` tries all of them, which takes more time than a test may."""
    names = [*MORE, *[name for name in FAMILIES if name not in (*QUICK, *MORE)][::3]]
    assert len(FAMILIES) >= 90
    assert_none(faults(names[part::2], tokenizer, tmp_path))
