"""Ranks that wait for each other in every layer are one worker, and nothing of theirs is lost."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation, PeakMemory
from evenstride.errors import ConfigError
from evenstride.runtime.coordination.leader import Leader, Reply
from evenstride.runtime.engines.replica_groups import Fold, Islands, islands_of
from evenstride.runtime.timing.recorder import Recorder
from evenstride.runtime.timing.step_timer import StepRecord
from evenstride.trace.codec import TraceWriter
from evenstride.trace.decision_replay import replay
from evenstride.trace.read import read_records
from tests.messages import check_message, raises_message

PAIRS = Islands(((0, 1), (2, 3)))
CROSSED = Islands(((0, 2), (1, 3)))


@st.composite
def islands(draw: st.DrawFn) -> Islands:
    """Up to three islands of up to three ranks each, however they are numbered."""
    count, size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = draw(st.permutations(range(count * size)))
    members = [tuple(sorted(ranks[at * size : (at + 1) * size])) for at in range(count)]
    return Islands(tuple(sorted(members)))


@dataclass(frozen=True)
class Reports:
    """Measurements of all ranks, and how many steps each reports at each exchange."""

    islands: Islands
    records: tuple[tuple[StepRecord, ...], ...]  # of each rank
    exchanges: tuple[tuple[int, ...], ...]  # for each rank


@st.composite
def tellings(draw: st.DrawFn) -> Reports:
    """Steps under changing splits, of which each rank tells as it likes."""
    they, steps = draw(islands()), draw(st.integers(1, 9))
    shares = draw(
        st.lists(
            st.tuples(*[st.integers(0, 9)] * len(they.members)), min_size=steps, max_size=steps
        )
    )
    times_s = st.floats(1e-3, 9).map(lambda time_s: round(time_s, 7))
    records = [
        tuple(
            StepRecord(
                *(step, they.spread(shares[step])[rank]),
                *(draw(times_s), draw(times_s), draw(times_s), draw(times_s), draw(times_s)),
                modelled=draw(st.integers(0, 3)) > 0,
            )
            for step in range(steps)
        )
        for rank in range(they.size)
    ]
    counts = st.lists(st.integers(0, 4), min_size=they.size, max_size=they.size).map(tuple)
    last = (steps,) * they.size
    return Reports(they, tuple(records), (*draw(st.lists(counts, max_size=4)), last))


def _exchanges(reports: Reports) -> list[tuple[Observation, ...]]:
    """Return what the fold makes of it, exchange by exchange; as recorders tell of it."""
    fold = Fold(reports.islands)
    recorders = [Recorder(rank, lambda: None) for rank in range(reports.islands.size)]
    ahead, taken = [iter(records) for records in reports.records], []
    for counts in reports.exchanges:
        for recorder, records, count in zip(recorders, ahead, counts, strict=True):
            for _, record in zip(range(count), records, strict=False):
                recorder.append(record)
        taken.append(tuple(fold.take([recorder.take() for recorder in recorders])))
    return taken


@given(tellings())
def test_every_step_of_a_group_is_reported_once_with_its_slowest_ranks_times(
    reports: Reports,
) -> None:
    seen = [one for taken in _exchanges(reports) for one in taken]

    for number, members in enumerate(reports.islands.members):
        own = [one for one in seen if one.worker == number]
        steps = [one.first_step + at for one in own for at in range(one.steps)]
        rows = [[reports.records[rank][step] for rank in members] for step in steps]
        assert steps == list(range(len(reports.records[0])))
        assert [one.share for one in own for _ in one.busy_s] == [
            sum(record.share for record in row) for row in rows
        ]
        assert [one.modelled for one in own for _ in one.busy_s] == [
            all(record.modelled for record in row) for row in rows
        ]
        slowest = [max(row, key=lambda record: record.busy_s) for row in rows]
        assert [t for one in own for t in one.busy_s] == [record.busy_s for record in slowest]
        assert [t for one in own for t in one.wait_s] == [
            min(record.wait_s for record in row) for row in rows
        ]


@given(tellings())
def test_the_sums_are_those_of_ranks_with_equal_reports(reports: Reports) -> None:
    first = [reports.records[members[0]] for members in reports.islands.members]
    of = {rank: k for k, members in enumerate(reports.islands.members) for rank in members}
    alike = replace(reports, records=tuple(first[of[rank]] for rank in range(reports.islands.size)))

    seen = [one for taken in _exchanges(alike) for one in taken]

    for number, records in enumerate(first):
        own = [one for one in seen if one.worker == number]
        for name in ("data_s", "outside_s", "control_wait_s"):
            total_s = sum(getattr(one, name) for one in own)
            assert total_s == pytest.approx(sum(getattr(r, name) for r in records), abs=1e-5)


@given(islands(), st.data())
def test_shares_are_spread_evenly_and_sum_up(they: Islands, data: st.DataObject) -> None:
    shares = data.draw(st.tuples(*[st.integers(0, 99)] * len(they.members)))

    of_ranks = they.spread(shares)

    for members, share in zip(they.members, shares, strict=True):
        own = [of_ranks[rank] for rank in members]
        assert sum(own) == share
        assert max(own) - min(own) <= 1
        assert own == sorted(own, reverse=True), "first members get the odd samples"


def _seen(rank: int, first: int, *busy_s: float, share: int = 3) -> Observation:
    return Observation(rank, share, first, busy_s, (0.0,) * len(busy_s))


def _take(fold: Fold, reports: Sequence[Sequence[Observation]]) -> tuple[Observation, ...]:
    return tuple(fold.take([Measurements.of(seen) for seen in reports]))


def test_a_step_waits_for_the_last_member_to_tell() -> None:
    fold = Fold(CROSSED)

    early = _take(fold, [[_seen(0, 5, 0.1, 0.2)], [], [_seen(2, 5, 0.3)], []])
    late = _take(fold, [[_seen(0, 7, 0.1)], [], [_seen(2, 6, 0.1, 0.3)], []])

    assert [(one.worker, one.first_step, one.busy_s) for one in early] == [(0, 5, (0.3,))]
    assert [(one.worker, one.first_step, one.busy_s) for one in late] == [(0, 6, (0.2, 0.3))]


def test_a_step_that_a_member_never_tells_of_is_left_out_and_forgotten() -> None:
    fold = Fold(Islands(((0, 1),)))

    (one, two) = _take(fold, [[_seen(0, 1, 0.1, 0.2, 0.3)], [_seen(1, 1, 0.1), _seen(1, 3, 0.1)]])

    assert (one.first_step, two.first_step) == (1, 3)


def test_what_differs_is_not_put_together_although_exchanges_came_in_between() -> None:
    gap, first = Fold(Islands(((0, 1),))), Fold(Islands(((0, 1),)))
    odd = replace(_seen(1, 2, 0.1), modelled=False)
    _take(gap, [[], [_seen(1, 1, 0.1)]])
    _take(first, [[], [_seen(1, 1, 0.1)]])

    without_2 = _take(gap, [[_seen(0, 1, 0.1, 0.1, 0.1)], [_seen(1, 3, 0.1)]])
    with_odd_2 = _take(first, [[_seen(0, 1, 0.1, 0.1)], [odd]])

    assert [(one.first_step, one.steps) for one in without_2] == [(1, 1), (3, 1)]
    assert [one.modelled for one in with_odd_2] == [True, False]


def test_a_step_reported_twice_counts_once() -> None:
    fold = Fold(Islands(((0, 1),)))
    _take(fold, [[_seen(0, 1, 0.1)], [_seen(1, 1, 0.1)]])

    assert _take(fold, [[_seen(0, 1, 0.1)], []]) == ()
    assert _take(fold, [[_seen(0, 2, 0.1)], [_seen(1, 2, 0.1)]])[0].first_step == 2


def test_what_waits_for_a_silent_member_is_bounded() -> None:
    fold, steps = Fold(Islands(((0, 1),))), 5000
    _take(fold, [[_seen(0, 1, *[0.1] * steps)], []])

    (seen,) = _take(fold, [[], [_seen(1, 1, *[0.2] * steps)]])

    assert seen.first_step > 1
    assert seen.first_step + seen.steps == 1 + steps, "the latest are kept"


def test_where_a_member_saw_a_change_an_observation_begins() -> None:
    fold = Fold(Islands(((0, 1),)))

    seen = _take(fold, [[_seen(0, 1, 0.1, 0.1), _seen(0, 3, 0.4)], [_seen(1, 1, 0.1, 0.1, 0.1)]])

    assert [one.busy_s for one in seen] == [(0.1, 0.1), (0.4,)]


@pytest.mark.parametrize("bad", [nan, 0.0, -1.0])
def test_what_one_member_cannot_have_measured_is_not_hidden_by_another(bad: float) -> None:
    seen = _take(Fold(Islands(((0, 1),))), [[_seen(0, 1, 0.2)], [_seen(1, 1, bad)]])

    assert isnan(seen[0].busy_s[0])
    assert not Measurements.of(seen).sound.any()


def test_members_are_expected_to_be_as_fast_as_they_are() -> None:
    fold = Fold(PAIRS)
    assert fold.expected((0.4, 0.8)) == (0.4, 0.4, 0.8, 0.8)

    reports = [[_seen(rank, 1, *times_s)] for rank, times_s in enumerate([(0.1, 0.2), (0.4, 0.2)])]
    _take(fold, [*reports, [], []])

    assert fold.expected((0.4, 0.8)) == (0.2, 0.4, 0.8, 0.8)
    assert fold.expected(()) == ()


def _ranks(**own: Sequence[float | None]) -> list[Worker]:
    names = ["a/0", "a/1", "b/2", "b/3"]
    values = [dict(zip(own, each, strict=True)) for each in zip(*own.values(), strict=True)]
    return [Worker(name, **each) for name, each in zip(names, values or [{}] * 4, strict=True)]


def test_an_island_can_do_what_its_weakest_member_can_do_as_often() -> None:
    ranks = _ranks(
        min_share=[1, 3, 1, 1],
        max_share=[9, 7, None, None],
        cores=[2.0, 1.5, 4.0, None],
        quantum=[4, 6, 1, 1],
    )

    one, other = PAIRS.workers(ranks)

    assert one == Worker("a/0-1", 6, 14, 3.0, None, 24)
    assert other == Worker("b/2-3", 2, None, None, None, 1)


def test_islands_are_named_by_their_hosts_and_ranks() -> None:
    ranks = [Worker(f"{host}/{rank}") for rank, host in enumerate("aabbccdd")]

    names = [worker.name for worker in Islands(((0, 1, 2, 3), (4, 5, 6, 7))).workers(ranks)]
    apart = [worker.name for worker in Islands(((0, 2, 4, 6), (1, 3, 5, 7))).workers(ranks)]

    assert names == ["a/0-1+b/2-3", "c/4-5+d/6-7"]
    assert apart == ["a/0+b/2+...+d/6", "a/1+b/3+...+d/7"]
    assert Islands(((0, 1),)).workers([Worker("node/7/0"), Worker("node/7/1")])[0].name == (
        "node/7/0-1"
    )


def test_all_members_memory_counts_and_the_least_limit() -> None:
    held = [
        PeakMemory(0, 5, 50, 90),
        PeakMemory(1, 4, 60, 80),
        PeakMemory(2, 7, None, None),
        PeakMemory(3, 7, 9, 10),
    ]

    reports = PAIRS.holdings(held)

    assert reports == (
        PeakMemory(0, 10, 50, 90),
        PeakMemory(0, 8, 60, 80),
        PeakMemory(1, 14, None, None),
        reports[-1],
    )
    assert reports[-1] == PeakMemory(1, 14, 9, 10)
    assert PAIRS.holdings(reversed(held)) == reports


@pytest.mark.parametrize(
    ("shown", "complaint"),
    [
        ([(0, 1), (0, 1), (2, 3), (3,)], ("ranks 2", "rank 2", "rank 3")),
        ([(0, 1), (1, 2), (2, 3), (0, 3)], ("ranks 0", "rank 0", "rank 1")),
        ([(0, 1, 2)] * 3 + [(3,)], ("1 ranks",)),
    ],
)
def test_groups_that_are_no_islands_are_refused(
    shown: list[tuple[int, ...]], complaint: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *complaint) as refusal:
        islands_of(shown)

    assert 'shard_group=mesh["shard"].get_group()' in str(refusal.value)


def test_islands_are_in_order_of_their_lowest_rank() -> None:
    assert islands_of([[0, 2], [1, 3], [0, 2], [1, 3]]) == CROSSED
    far = [[rank % 6, rank % 6 + 6] for rank in range(12)]
    assert islands_of(far) == Islands(tuple((rank, rank + 6) for rank in range(6)))
    assert islands_of([[0], [1], [2]]) is None


def test_one_island_of_all_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "evenstride"):
        assert islands_of([[0, 1], [0, 1]]) == Islands(((0, 1),))

    check_message(caplog.messages, "2 ranks")
    assert "leave shard_group out" in caplog.text


def _leader(islands: Islands | None = PAIRS, spec: str = "adaptive") -> Leader:
    return Leader(Control(policy_from_spec(spec), memory_fraction=0.9), islands)


def _formed(batch: int = 24) -> FleetFormed:
    return FleetFormed(0, 0, batch, tuple(_ranks()))


def _replies(busy_s: Sequence[float], shares: Sequence[int], step: int = 1) -> list[Reply]:
    return [
        Reply(3, 5, (), Measurements.of([Observation(rank, share, step, (time_s,), (0.01,))]))
        for rank, (time_s, share) in enumerate(zip(busy_s, shares, strict=True))
    ]


def test_the_leader_balances_islands_and_tells_ranks() -> None:
    leader = _leader()
    opening = leader.form(_formed()).shares
    assert opening == (6,) * 4

    verdict = leader.exchange(2, _replies([0.1, 0.05, 0.2, 0.4], opening), 5)

    assert verdict.shares is not None
    assert sum(verdict.shares) == 24
    assert verdict.shares[0] - verdict.shares[1] in (0, 1)
    assert verdict.shares[2] - verdict.shares[3] in (0, 1)
    assert sum(verdict.shares[:2]) > sum(verdict.shares[2:])
    assert len(verdict.expected_s) == len(verdict.band) == 4
    assert verdict.expected_s[0] == pytest.approx(2 * verdict.expected_s[1])
    assert verdict.band[0] == verdict.band[1]


def test_only_the_slowest_member_counts() -> None:
    shares = []
    for fast_s in (0.4, 0.1):
        leader = _leader()
        opening = leader.form(_formed()).shares
        assert opening is not None
        replies = _replies([0.1, 0.1, fast_s, 0.4], opening)
        shares.append(leader.exchange(2, replies, 5).shares)

    assert shares[0] == shares[1]


def test_one_island_keeps_equal_shares() -> None:
    leader = _leader(Islands(((0, 1, 2, 3),)))
    opening = leader.form(_formed(26)).shares
    assert opening == (7, 7, 6, 6)

    assert leader.exchange(2, _replies([0.1, 0.2, 0.3, 0.4], opening), 5).shares is None


@pytest.mark.parametrize("tight", [0, 1])
def test_memory_of_one_member_bounds_its_island(tight: int) -> None:
    shares = []
    for limit_bytes in (70, 700):
        leader = _leader()
        opening = leader.form(_formed()).shares
        assert opening is not None
        replies = _replies([0.1, 0.1, 0.9, 0.9], opening)
        replies[tight] = replace(replies[tight], held=PeakMemory(tight, 6, 60, limit_bytes))
        replies[1 - tight] = replace(replies[1 - tight], held=PeakMemory(1 - tight, 6, 50, 700))
        shares.append(leader.exchange(2, replies, 5).shares)

    assert shares[0] is None, "9 tenths of 70 bytes hold 6 samples of 10 bytes each"
    assert shares[1] is not None
    assert sum(shares[1][:2]) > 12


def test_a_trace_of_islands_replays(tmp_path: Path) -> None:
    leader = _leader()
    leader.record_to(TraceWriter(tmp_path / "trace.jsonl", {"policy": "adaptive"}))
    opening = leader.form(_formed()).shares
    assert opening is not None
    leader.exchange(2, _replies([0.1, 0.1, 0.2, 0.4], opening), 5)
    leader.close({"step": 2})

    events = [record["event"] for record in read_records(tmp_path) if record["kind"] == "event"]

    assert [worker["name"] for worker in events[0]["workers"]] == ["a/0-1", "b/2-3"]
    assert [seen["worker"] for seen in events[1]["observations"]] == [0, 1]
    assert replay(tmp_path).identical
