"""What policies know of a run: its epochs, and the resources of its ranks."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from evenstride.core.control.events import Exchanged, FleetFormed, KeepShares, SetShares
from evenstride.core.policy import EVERY_STEP
from evenstride.errors import TraceError
from evenstride.testing import RankPool
from evenstride.trace.codec import decode
from evenstride.trace.decision_replay import replay
from evenstride.trace.read import read_records
from tests.messages import raises_message
from tests.multiproc.policies import (
    TakeTurns,
    named_otherwise,
    trained,
    trained_by_objects,
    trained_on,
)

EARLY = "the epoch of the data has not ended"


def test_dbs_decides_where_an_epoch_of_the_loader_ends(ranks: RankPool, tmp_path: Path) -> None:
    epochs, steps = 20, 20  # of some 20 ms, far below the interval between other exchanges

    ranks.run(trained, 2, tmp_path, epochs, steps, "dbs")

    records = list(read_records(tmp_path))
    events = [decode(one["event"]) for one in records if one["kind"] == "event"]
    exchanges = [e for e in events if isinstance(e, Exchanged) and not e.last]
    ends = [(e.epoch, e.step, e.effective) for e in exchanges if e.epoch_over]
    assert ends == [(n, (n + 1) * steps, (n + 1) * steps) for n in range(epochs)]
    within = [e for e in exchanges if not e.epoch_over]
    assert [e.epoch for e in within] == [max(e.step - 1, 0) // steps for e in within]
    reported = [
        map(decode, one["instructions"]) for one in records if one["kind"] == "instructions"
    ]
    verdicts = [
        one for group in reported for one in group if isinstance(one, KeepShares | SetShares)
    ]
    reasons = [one.reason for one in verdicts if one.reason != "the run ends"][-len(exchanges) :]
    decided = [not reason.startswith(EARLY) for reason in reasons]
    assert decided == [e.epoch_over for e in exchanges]
    assert replay(tmp_path).identical


def test_dynamic_batching_opens_by_cores_on_cpus(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(trained, 2, tmp_path, 1, 2, "dynamic-batching")

    events = [one["event"] for one in read_records(tmp_path) if one["kind"] == "event"]
    formed = decode(events[0])
    assert isinstance(formed, FleetFormed)
    assert all(worker.cores for worker in formed.workers)
    assert [worker.flops_per_s for worker in formed.workers] == [None, None]


def test_policy_mode_and_sinks_may_be_objects(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(trained_by_objects, 2, tmp_path, 40)

    records = list(read_records(tmp_path))
    header = records[0]
    assert header["policy"] == "tests.multiproc.policies.TakeTurns(low=4, opening_steps=0)"
    assert header["sync"] == "local-sgd(every=2)"
    reported = [
        decode(i) for one in records if one["kind"] == "instructions" for i in one["instructions"]
    ]
    splits = [one.shares for one in reported if isinstance(one, SetShares)]
    assert splits[:2] == [(4, 12), (12, 4)]
    assert int((tmp_path / "notebook").read_text()) > 0
    assert (tmp_path / "metrics.csv").stat().st_size > 0
    assert replay(tmp_path, TakeTurns(low=4)).identical
    with raises_message(TraceError, "TakeTurns"):
        replay(tmp_path)


@pytest.mark.parametrize(
    "policy",
    [TakeTurns(low=4, opening_steps=EVERY_STEP), "lb-bsp-cpu:predictor=last,every=1"],
    ids=["own", "lb-bsp-cpu"],
)
def test_every_step_may_wait_for_its_decision(policy: Any, ranks: RankPool, tmp_path: Path) -> None:
    epochs, steps = 2, 6

    drawn = ranks.run(trained_on, 2, tmp_path, epochs, steps, policy, timeout_s=100.0)

    of_steps = [sorted(one + other) for one, other in zip(*drawn, strict=True)]
    for epoch in range(epochs):
        samples = chain(*of_steps[epoch * steps : (epoch + 1) * steps])
        assert sorted(samples) == list(range(16 * steps)), "each sample once"
    events = [decode(one["event"]) for one in read_records(tmp_path) if one["kind"] == "event"]
    exchanges = [(e.step, e.effective) for e in events if isinstance(e, Exchanged) and not e.last]
    assert exchanges == [(step, step) for step in range(1, epochs * steps)]
    if isinstance(policy, TakeTurns):
        shares = [len(ids) for ids in drawn[0]]
        # The first step of the second epoch does not count, so its decision waits for another step.
        turned = [step for step in range(1, len(shares)) if shares[step] != shares[step - 1]]
        assert turned == [step for step in range(1, len(shares)) if step != steps + 1]
    assert replay(tmp_path, policy if isinstance(policy, TakeTurns) else None).identical


def test_ranks_with_other_settings_of_an_own_policy_are_refused(ranks: RankPool) -> None:
    for refusal in ranks.run(named_otherwise, 2):
        assert "TakeTurns(low=4" in refusal
        assert "TakeTurns(low=5" in refusal
