"""Hand-labelled programs: each line of tests/golden/programs.jsonl says what is paid, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lanes import gate
from reward_records import completion_of, prompt_of

from oncurve.rewards.programs import Programs
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.pool import SandboxPool
from oncurve.sandbox.tiers import describe_isolation

LINES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "golden" / "programs.jsonl").read_text(encoding="utf-8").splitlines()
]
TIERS = [tier.name for tier in describe_isolation().tiers if tier.works]

if not TIERS:
    pytest.skip("no isolation works here: sudo apt-get install bubblewrap", allow_module_level=True)


@pytest.mark.parametrize("tier", gate(TIERS, TIERS[0]))  # the strongest
def test_every_label_is_met(tier: str) -> None:
    limits = Limits(cpu_seconds=2)
    with SandboxPool(tier=tier, limits=limits, num_workers=2, packages=("numpy",)) as pool:  # type: ignore[arg-type]
        rewards = Programs(limits=limits, pool=pool)(
            [prompt_of(row=line["row"]) for line in LINES], [completion_of(line["completion"]) for line in LINES]
        )
    wrong = [
        ascii(line) + f" got {reward.value} {reward.error}: {reward.detail}"
        for line, reward in zip(LINES, rewards, strict=True)
        if (reward.error or bool(reward.value)) != line["expected"]
    ]
    assert not wrong, "\n".join(wrong)
