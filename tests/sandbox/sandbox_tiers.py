"""Which isolation tests run in: every kind that works here, the others skipped with the reason."""

from __future__ import annotations

import pytest

from oncurve.sandbox.tiers import STRENGTH, describe_isolation

REPORTS = {report.name: report for report in describe_isolation().tiers}

TIERS = [
    pytest.param(
        name,
        marks=[] if REPORTS[name].works else pytest.mark.skip(reason=f"{name}: {REPORTS[name].problem}"),
    )
    for name in STRENGTH
]
"""For ``parametrize``."""

NEEDS_SANDBOX = pytest.mark.skipif(
    not any(report.works for report in REPORTS.values()),
    reason="no isolation works here: sudo apt-get install bubblewrap",
)
