"""Who made the others wait, since when and for how long: against the ranks' own moments."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.attribution import Case, run


@pytest.mark.alone
def test_a_worker_that_is_slowed_down_is_named_with_its_steps_and_seconds(tmp_path: Path) -> None:
    """Both come from the same steps, so whatever else the machine does is in both."""
    case = Case((0.5, 0.5), rank=1, speed=0.15, first=20, last=59, steps=160)

    (row,) = run(case, ("uniform",), tmp_path)

    assert (row.caused_most, row.named) == (1, 1)
    assert row.reported_first is not None
    assert row.reported_last is not None
    # A lab on a busy machine changes the limit some steps late.
    assert abs(row.reported_first - 20) <= 20
    assert abs(row.reported_last - 59) <= 20
    assert row.error < 0.15, "seconds by worker, as a part of all seconds"
