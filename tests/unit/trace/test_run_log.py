"""A damaged record stops each reader of a whole run, with an error that names the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evenstride.core.control.events import FleetFormed, SetBatch, SetShares
from evenstride.core.fleet import Worker
from evenstride.errors import TraceError
from evenstride.trace.codec import TraceWriter
from evenstride.trace.run_log import RunLog
from tests.messages import raises_message

FLEET = (Worker("here-0"), Worker("here-1"))


def _written(path: Path) -> list[dict[str, Any]]:
    """Write the trace of a run whose batch changes, and return its records."""
    with TraceWriter(path, {"policy": "adaptive"}) as trace:
        trace.event(0.0, FleetFormed(0, 0, 12, FLEET), (SetShares(0, (6, 6), "opening"),))
        trace.event(1.0, FleetFormed(1, 4, 12, FLEET), (SetBatch(8, 24, "it is faster"),))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_batch_that_was_set_begins_a_generation(tmp_path: Path) -> None:
    _written(tmp_path / "t")

    log = RunLog(tmp_path / "t")

    assert [one.global_batch for one in log.processes[0].generations] == [12, 12, 24]
    assert log.opening_batch == 12


@pytest.mark.parametrize("batch", [0, -12, 12.5, "x", None])
def test_a_batch_that_cannot_be_is_damage(tmp_path: Path, batch: Any) -> None:
    records = _written(tmp_path / "t")
    records[-1]["instructions"][0]["global_batch"] = batch
    (tmp_path / "t").write_text("".join(json.dumps(one) + "\n" for one in records))

    with raises_message(TraceError, "'instructions'"):
        RunLog(tmp_path / "t")
