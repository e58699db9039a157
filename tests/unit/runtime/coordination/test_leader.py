"""The leader proves that all ranks agree, books what they tell, and keeps the trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.events import FleetFormed, Verdict
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.gradients.noise_scale import GradientNorms, StepParts
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.errors import InfeasibleShares, SplitDiverged
from evenstride.runtime.coordination.leader import (
    Leader,
    Reply,
    reply_from_text,
    reply_to_text,
    verdict_from_plain,
    verdict_to_plain,
)
from evenstride.trace.codec import TraceWriter
from evenstride.trace.decision_replay import replay
from evenstride.trace.read import read_noise, read_records
from tests.messages import raises_message

STANDS = ((0, 0, 0),)
NOTHING = Measurements.of(())


def _leader(spec: str = "adaptive", batch: int = 12) -> Leader:
    leader = Leader(Control(policy_from_spec(spec)))
    leader.form(FleetFormed(0, 0, batch, (Worker("one/0"), Worker("two/1"))))
    return leader


def _reply(
    rank: int, barrier: int = 3, busy_s: float = 0.1, share: int = 6, checksum: int = 5
) -> Reply:
    seen = Observation(rank, share, 1, (busy_s,), (0.0,))
    return Reply(barrier, checksum, STANDS, Measurements.of([seen]))


def test_a_decision_takes_effect_at_the_highest_barrier() -> None:
    verdict = _leader().exchange(2, [_reply(0, 4, 0.1), _reply(1, 7, 0.4)], 5)

    assert verdict.effective == 7
    assert verdict.shares is not None
    assert sum(verdict.shares) == 12


def test_every_rank_of_the_exchange_must_have_applied_the_same_decisions() -> None:
    with raises_message(SplitDiverged, "rank 1"):
        _leader().exchange(2, [_reply(0), _reply(1, checksum=6)], 5)


@pytest.mark.parametrize("stand", [(0, 1, 0), (0, 0, 12)])
def test_every_rank_must_have_begun_its_pass_at_the_same_place(
    stand: tuple[int, int, int],
) -> None:
    replies = [_reply(0), Reply(3, 5, (stand,), NOTHING)]

    with raises_message(SplitDiverged, "rank 1"):
        _leader().exchange(2, replies, 5)


def test_a_rank_may_be_one_pass_behind_or_have_looked_twice() -> None:
    ahead = Reply(3, 5, ((0, 0, 0), (0, 0, 0), (9, 1, 0)), NOTHING)
    behind = Reply(3, 5, ((0, 0, 0),), NOTHING)

    assert _leader().exchange(2, [ahead, behind], 5).effective == 3


def test_passes_are_compared_across_exchanges() -> None:
    leader = _leader()
    leader.exchange(
        2, [Reply(3, 5, ((0, 0, 0), (9, 1, 0)), NOTHING), Reply(3, 5, ((0, 0, 0),), NOTHING)], 5
    )

    with raises_message(SplitDiverged, "9 steps", "rank 1", "epoch 0"):
        leader.exchange(3, [Reply(4, 5, (), NOTHING), Reply(4, 5, ((9, 0, 24),), NOTHING)], 5)


def test_refused_steps_are_not_recorded() -> None:
    leader = _leader()

    with pytest.raises(SplitDiverged):
        leader.exchange(2, [_reply(0), _reply(1, checksum=6)], 5)

    assert leader.ledger.steps == 0
    assert leader.control.estimate is not None
    assert not leader.control.estimate.known


def test_changes_and_the_next_exchange_are_counted_in_the_leaders_steps() -> None:
    leader = _leader()
    assert (leader.changes, leader.exchange_at) == (0, 1)

    leader.exchange(2, [_reply(0, busy_s=0.1), _reply(1, busy_s=0.4)], 5)
    assert (leader.changes, leader.exchange_at) == (1, 3)

    leader.skip_opening(5)
    assert leader.exchange_at == 9


def test_a_fleet_that_cannot_be_served_is_refused() -> None:
    with raises_message(InfeasibleShares):
        _leader(batch=1)


def test_the_trace_holds_everything_from_the_forming_on(tmp_path: Path) -> None:
    leader = _leader()
    leader.record_to(TraceWriter(tmp_path / "trace.jsonl", {"policy": "adaptive"}))
    leader.exchange(2, [_reply(0), _reply(1, busy_s=0.4)], 5)
    leader.note("remark", text="all is well")
    leader.close({"step": 2})
    leader.note("remark", text="too late")

    kinds = [record["kind"] for record in read_records(tmp_path)]

    assert kinds == ["header", *["event", "instructions"] * 2, "remark", "ended"]
    outcome = replay(tmp_path)
    assert outcome.identical
    assert outcome.events == 2


def test_the_trace_has_the_time_of_earlier_decisions(tmp_path: Path) -> None:
    leader = _leader()
    leader.record_to(TraceWriter(tmp_path / "trace.jsonl", {"policy": "adaptive"}))
    for step in (2, 3, 4, 5):
        leader.exchange(step, [_reply(0), _reply(1, busy_s=0.4)], 5)
        leader.finish_exchange()

    events = [record["event"] for record in read_records(tmp_path) if record["kind"] == "event"]

    formed, first, second, *later = [event.get("decision_s") for event in events]
    assert (formed, first, second) == (None,) * 3, "one decision may have met a pause"
    assert min(later) > 0
    assert replay(tmp_path).identical


def test_a_postponed_decision_does_not_make_a_leader_look_fast(tmp_path: Path) -> None:
    leader = _leader()
    leader.record_to(TraceWriter(tmp_path / "trace.jsonl", {"policy": "adaptive"}))
    slow = [Observation(rank, 6, 1, (0.4,), (0.0,), modelled=False) for rank in (0, 1)]
    leader.exchange(2, [Reply(3, 5, STANDS, Measurements.of([one])) for one in slow], 5)
    leader.finish_exchange()
    for step in (3, 4, 5):
        leader.exchange(step, [_reply(0), _reply(1)], 5)
        leader.finish_exchange()

    events = [record["event"] for record in read_records(tmp_path) if record["kind"] == "event"]

    assert [event["step"] for event in events if event.get("decision_s")] == [5]


def test_the_trace_says_that_the_model_is_compiled(tmp_path: Path) -> None:
    leader = _leader()
    leader.record_to(TraceWriter(tmp_path / "trace.jsonl", {"policy": "adaptive"}))
    leader.exchange(2, [_reply(0), _reply(1)], 5)
    leader.expect_slow_firsts()
    leader.exchange(3, [_reply(0), _reply(1)], 5)

    events = [record["event"] for record in read_records(tmp_path) if record["kind"] == "event"]

    assert [event.get("compiled") for event in events] == [None, None, True]
    assert replay(tmp_path).identical


def test_the_noise_of_whole_steps_is_kept_and_recorded(tmp_path: Path) -> None:
    leader = _leader("static:4,8")
    leader.record_to(TraceWriter(tmp_path / "trace.jsonl", {"policy": "static:4,8"}))
    mine, others = StepParts(3, 1, 4, 12, 4 * 5.0, 2.0), StepParts(3, 1, 8, 12, 8 * 3.5, 2.0)

    leader.exchange(5, [replace(_reply(0), norms=(mine,)), _reply(1)], 5)
    assert leader.noise.steps == 0
    leader.exchange(9, [_reply(0), replace(_reply(1), norms=(others,))], 5)
    leader.close({})

    norms = GradientNorms.of((4, 8), (5.0, 3.5), 2.0)
    assert list(read_noise(tmp_path)) == [(3, norms)]
    assert leader.noise.steps == 1
    assert leader.noise.estimate.noise == norms.noise
    assert replay(tmp_path).identical


times_s = st.lists(st.tuples(st.floats(0, 99), st.floats(0, 99)), min_size=1, max_size=4)
observations = times_s.flatmap(
    lambda pairs: st.builds(
        Observation,
        worker=st.integers(0, 9),
        share=st.integers(0, 99),
        first_step=st.integers(0, 9**9),
        busy_s=st.just(tuple(busy_s for busy_s, _ in pairs)),
        wait_s=st.just(tuple(wait_s for _, wait_s in pairs)),
        modelled=st.booleans(),
    )
)
parts = st.builds(
    StepParts,
    step=st.integers(0, 9**9),
    parts=st.integers(1, 9),
    weight=st.integers(1, 99) | st.floats(0, 99),
    batch=st.integers(1, 99) | st.floats(0, 99),
    local=st.floats(0, 1e300),
    mean=st.floats(0, 1e300),
    loss=st.none() | st.floats(-1e300, 1e300),
)


@given(
    reply=st.builds(
        Reply,
        barrier=st.integers(0, 9**9),
        checksum=st.integers(0, 2**32 - 1),
        stands=st.lists(st.tuples(*[st.integers(0, 9**9)] * 3), max_size=3).map(tuple),
        observations=st.lists(observations, max_size=3).map(Measurements.of),
        leaving=st.booleans(),
        norms=st.lists(parts, max_size=3).map(tuple),
    )
)
def test_a_reply_arrives_as_it_was_sent(reply: Reply) -> None:
    assert reply_from_text(reply_to_text(reply)) == reply


@given(
    verdict=st.builds(
        Verdict,
        effective=st.integers(0, 9**9),
        shares=st.none() | st.lists(st.integers(0, 99)).map(tuple),
        opening=st.booleans(),
        expected_s=st.lists(st.floats(0, 99)).map(tuple),
        band=st.lists(st.floats(0, 99)).map(tuple),
        reason=st.text(),
    )
)
def test_a_verdict_arrives_as_it_was_sent(verdict: Verdict) -> None:
    assert verdict_from_plain(json.loads(json.dumps(verdict_to_plain(verdict)))) == verdict
