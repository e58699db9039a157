"""Workers get notices, stay after all or return: every policy splits the whole batch."""

from __future__ import annotations

from math import nan

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.advance import advance
from evenstride.core.control.events import (
    Event,
    Exchanged,
    FleetFormed,
    Instruction,
    MembersChanged,
    Recalled,
    SetShares,
)
from evenstride.core.control.state import Control
from evenstride.core.fleet import Shares, Worker
from evenstride.core.membership.member_table import Happening, MembershipEvent
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from tests.contract.fleets import SPECS

GIVEN = "static:20,12,16,16"
POLICIES = [spec for spec in SPECS if "GIVEN" not in spec] + [GIVEN]
NAMES = ("a/0", "a/1", "b/2", "b/3")
WORKERS = tuple(
    Worker(name, 1, 60, cores=1.0 + k, flops_per_s=1e9 * (1 + k), quantum=4, device="d", slot=k)
    for k, name in enumerate(NAMES)
)
BATCH = 64
reported = st.tuples(
    st.just("notified"),
    st.lists(
        st.builds(
            Happening,
            st.sampled_from(NAMES),
            st.sampled_from(
                [MembershipEvent.NOTICE, MembershipEvent.WITHDRAWN, MembershipEvent.READY]
            ),
            st.none() | st.floats(-5, 500),
            st.just("why"),
            st.booleans(),
        ),
        max_size=4,
    ),
)
seen = st.tuples(st.just("seen"), st.lists(st.floats(1e-3, 5.0), min_size=4, max_size=4))
formed = st.tuples(st.just("formed"), st.sets(st.integers(0, 3), min_size=1))
recalled = st.tuples(st.just("recalled"), st.none())


def _event(control: Control, step: int, kind: str, value: object, shares: Shares) -> Event:
    if kind == "notified":
        return MembersChanged(step, step + 2, tuple(value), 1.0)  # type: ignore[arg-type]
    if kind == "recalled":
        return Recalled(step, step + 1, control.known, control.generation)
    if kind == "formed":
        return FleetFormed(control.generation + 1, step, BATCH, _workers(sorted(value)))  # type: ignore[call-overload]
    times_s: list[float] = value  # type: ignore[assignment]
    reports = [
        Observation(rank, share, step, (times_s[rank],), (0.0,), cpu_load=nan)
        for rank, share in enumerate(shares)
    ]
    return Exchanged(step + 1, step + 2, Measurements.of(reports))


def _workers(ranks: list[int]) -> tuple[Worker, ...]:
    return tuple(
        Worker(w.name, 1, BATCH, cores=w.cores, flops_per_s=w.flops_per_s, device="d", slot=k)
        for k, w in enumerate(WORKERS)
        if k in ranks
    )


def _check(control: Control, instructions: tuple[Instruction, ...], shares: Shares) -> Shares:
    for instruction in instructions:
        if isinstance(instruction, SetShares):
            shares = instruction.shares
            assert sum(shares) == BATCH
    assert shares == control.rank_shares
    left_out = set(range(len(shares))) - set(control.roster.serving)
    assert all(shares[rank] == 0 for rank in left_out)
    if control.roster.serving != control.membership.serving:
        most = sum(control.roster.workers[k].max_share or 0 for k in control.membership.serving)
        assert most < BATCH or control.policy == policy_from_spec(GIVEN), "somebody has to stay"
    return shares


@given(
    st.sampled_from(POLICIES),
    st.lists(reported | seen | seen | formed | recalled, max_size=14),
)
def test_any_story_of_members_keeps_the_global_batch(
    spec: str, story: list[tuple[str, object]]
) -> None:
    control, instructions = advance(
        Control(policy_from_spec(spec)), FleetFormed(0, 0, BATCH, WORKERS)
    )
    shares = _check(control, tuple(instructions), ())
    for number, (kind, value) in enumerate(story):
        if kind == "formed" and spec == GIVEN:
            continue  # a given split is of as many workers
        event = _event(control, 2 * number, kind, value, shares)
        control, instructions = advance(control, event)
        shares = _check(control, tuple(instructions), shares)
