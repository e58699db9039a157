"""What policies know of a run: its epochs, and the resources of its ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from evenstride.core.events import Exchanged, FleetFormed, KeepShares, SetShares
from evenstride.testing import RankPool
from evenstride.trace.codec import decode
from evenstride.trace.read import read_records
from evenstride.trace.replay import replay
from tests.multiproc.policies import trained

EARLY = "the epoch of the data is not over"


def test_dbs_decides_where_an_epoch_of_the_loader_ends(ranks: RankPool, tmp_path: Path) -> None:
    epochs, steps = 6, 20

    ranks.run(trained, 2, tmp_path, epochs, steps, "dbs")

    records = list(read_records(tmp_path))
    events = [decode(one["event"]) for one in records if one["kind"] == "event"]
    exchanges = [e for e in events if isinstance(e, Exchanged) and not e.last]
    assert [e.epoch for e in exchanges] == [e.step // steps for e in exchanges]
    told = [map(decode, one["instructions"]) for one in records if one["kind"] == "instructions"]
    verdicts = [one for group in told for one in group if isinstance(one, KeepShares | SetShares)]
    reasons = [one.reason for one in verdicts if one.reason != "the run ends"][-len(exchanges) :]
    decided = [not reason.startswith(EARLY) for reason in reasons]
    assert decided == [False] + [a.epoch != b.epoch for a, b in pairwise(exchanges)]
    assert any(decided)
    assert replay(tmp_path).identical


def test_dynamic_batching_opens_by_cores_on_cpus(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(trained, 2, tmp_path, 1, 2, "dynamic-batching")

    events = [one["event"] for one in read_records(tmp_path) if one["kind"] == "event"]
    formed = decode(events[0])
    assert isinstance(formed, FleetFormed)
    assert all(worker.cores for worker in formed.workers)
    assert [worker.flops_per_s for worker in formed.workers] == [None, None]
