"""Shares that memory bounds: learned by the leader, kept whatever the policy wants."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.allocation.memory import Memory, within
from evenstride.core.control.advance import advance
from evenstride.core.control.events import Exchanged, FleetFormed, SetShares
from evenstride.core.control.state import Control
from evenstride.core.diagnostics.ledger import Ledger
from evenstride.core.fleet import Fleet, Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation, PeakMemory
from evenstride.runtime.telemetry.summary import worker_summaries
from evenstride.trace.codec import decode, dumps, encode


def _fleet(batch: int, *max_shares: int | None) -> Fleet:
    return Fleet(tuple(Worker(f"w{k}", 1, most) for k, most in enumerate(max_shares)), batch)


def _memory(*caps: int | None) -> Memory:
    return replace(Memory().learn([PeakMemory(0, 1, None, None)], len(caps), 0.9), caps=caps)


def _bytes(fixed: int, per_sample: int, samples: int) -> int:
    return fixed + per_sample * samples


def test_a_worker_is_bounded_by_what_its_peaks_predict() -> None:
    held = [PeakMemory(1, samples, _bytes(1000, 50, samples), 4000) for samples in (20, 40)]

    memory = Memory().learn(held, 2, 0.9)

    assert memory.caps == (None, 50)  # 40, and half of the span between the two sizes
    assert memory.bound(_fleet(100, None, None)).upper.tolist() == [100, 50]


def test_reports_of_unknown_ranks_and_empty_reports_are_ignored() -> None:
    assert Memory().learn([PeakMemory(5, 8, 9, 9), PeakMemory(0, 0, 9, 9)], 2, 0.9) == Memory()


@given(
    caps=st.lists(st.none() | st.integers(1, 60), min_size=2, max_size=5),
    max_shares=st.lists(st.none() | st.integers(8, 90), min_size=5, max_size=5),
    batch=st.integers(5, 90),
)
def test_caps_hold_and_leave_room_for_the_global_batch(
    caps: list[int | None], max_shares: list[int | None], batch: int
) -> None:
    asked_most = max_shares[: len(caps)]
    if sum(batch if m is None else m for m in asked_most) < batch:
        return
    asked = _fleet(batch, *asked_most)

    bound = _memory(*caps).bound(asked)

    assert (bound.upper <= asked.upper).all(), "what the user asked for always holds"
    held = [batch if c is None else c for c in caps]
    if sum(min(h, int(u)) for h, u in zip(held, asked.upper, strict=True)) >= batch:
        assert all(u <= h for u, h in zip(bound.upper.tolist(), held, strict=True))


def test_one_workers_quantum_does_not_raise_the_others_caps() -> None:
    workers = (Worker("a", quantum=32), Worker("b"), Worker("c"))

    bound = _memory(8, 40, 40).bound(Fleet(workers, 96))

    assert bound.upper.tolist() == [32, 40, 40]


def test_a_batch_that_quanta_do_not_allow_raises_no_cap_forever() -> None:
    fleet = Fleet((Worker("one"), Worker("other", max_share=3, quantum=3)), 2)

    assert _memory(1, None).bound(fleet) is fleet


@given(
    shares=st.lists(st.integers(0, 40), min_size=2, max_size=6),
    room=st.lists(st.integers(1, 60), min_size=6, max_size=6),
)
def test_a_split_is_brought_within_bounds_and_keeps_its_sum(
    shares: list[int], room: list[int]
) -> None:
    batch = sum(shares)
    if batch < len(shares) or sum(min(m, batch) for m in room[: len(shares)]) < batch:
        return
    fleet = _fleet(batch, *room[: len(shares)])

    after = within(tuple(shares), fleet)

    assert sum(after) == batch
    assert all(n <= most for n, most in zip(after, fleet.upper.tolist(), strict=True))
    if all(n <= most for n, most in zip(shares, fleet.upper.tolist(), strict=True)):
        assert after == tuple(shares)
    idle = [n == 0 for n in shares]
    needed = sum(m for m, none in zip(fleet.upper.tolist(), idle, strict=True) if not none)
    if needed >= batch:
        assert all(n == 0 for n, none in zip(after, idle, strict=True) if none), "who is out stays"


def _seen(worker: int, share: int, step: int, busy_s: float) -> Observation:
    times = tuple(busy_s for _ in range(4))
    return Observation(worker, share, step, times, (0.0,) * 4, 0.0, 0.0, 0.0, True)


def _driven(fraction: float | None, limit_bytes: int) -> tuple[list[tuple[int, ...]], str]:
    """Return the shares that a fast worker of little memory gets, and the reason."""
    workers = (Worker("slow"), Worker("fast"))
    control, _ = advance(
        Control(policy_from_spec("adaptive"), memory_fraction=fraction),
        FleetFormed(0, 0, 200, workers),
    )
    splits, reported = [control.shares], ""
    for exchange in range(1, 9):
        step, (slow, fast) = 4 * exchange, control.shares
        seen = (_seen(0, slow, step, 0.01 * slow), _seen(1, fast, step, 0.001 * fast))
        held = (PeakMemory(1, fast, _bytes(1000, 100, fast), limit_bytes),)
        event = Exchanged(step + 4, step + 5, Measurements.of(seen), held)
        control, instructions = advance(control, event)
        splits.append(control.shares)
        reported = next((i.reason for i in instructions if isinstance(i, SetShares)), reported)
    return splits, reported


def test_a_fast_worker_gets_no_more_than_it_can_hold() -> None:
    free, _ = _driven(None, 16_000)
    bounded, reported = _driven(0.9, 16_000)

    assert free[-1][1] > 170
    assert bounded[-1] == (66, 134), "0.9 * 16,000 bytes hold 134 samples"
    assert max(fast for _, fast in bounded) == 134
    assert "memory: fast may hold 134" in reported


def test_ample_memory_does_not_hold_a_share_up() -> None:
    assert _driven(0.9, 10**9)[0] == _driven(None, 10**9)[0]


def test_a_bound_learned_too_late_takes_the_share_back() -> None:
    control, _ = advance(
        Control(policy_from_spec("static:20,80")),
        FleetFormed(0, 0, 100, (Worker("a"), Worker("b"))),
    )
    # It has run 40 only, as part of a tail, and 80 would not fit.
    held = tuple(PeakMemory(1, n, _bytes(0, 100, n), 7000) for n in (20, 40))
    control, (verdict, *_) = advance(control, Exchanged(4, 5, Measurements.of(()), held))

    assert control.shares == (37, 63)
    assert isinstance(verdict, SetShares)
    assert "memory: b may hold 63" in verdict.reason


def test_what_is_known_stays_with_the_workers_that_stay() -> None:
    control, _ = advance(
        Control(policy_from_spec("uniform")), FleetFormed(0, 0, 100, (Worker("a"), Worker("b")))
    )
    held = tuple(PeakMemory(1, n, _bytes(1000, 50, n), 4000) for n in (20, 40))
    control, _ = advance(control, Exchanged(4, 5, Measurements.of(()), held))
    assert control.fleet is not None
    assert control.fleet.upper.tolist() == [100, 50]

    control, _ = advance(control, FleetFormed(1, 5, 100, (Worker("b"), Worker("c"), Worker("d"))))

    assert control.fleet is not None
    assert control.fleet.upper.tolist() == [50, 100, 100]


def test_memory_is_part_of_the_trace() -> None:
    event = Exchanged(
        4, 5, Measurements.of(()), (PeakMemory(1, 20, 2000, None), PeakMemory(0, 3, None, 7))
    )

    again = decode(encode(event))

    assert isinstance(again, Exchanged)
    assert again.memory == event.memory
    assert dumps(encode(again)) == dumps(encode(event))


def test_a_trace_of_before_has_no_memory() -> None:
    plain = encode(Exchanged(4, 5, Measurements.of(())))
    del plain["memory"]

    again = decode(plain)

    assert isinstance(again, Exchanged)
    assert again.memory == ()


@pytest.mark.parametrize(
    "policy", ["uniform", "dynamic-batching", "lb-bsp-gpu", "dbs", "omnilearn"]
)
def test_bounds_hold_for_every_policy(policy: str) -> None:
    control, _ = advance(
        Control(policy_from_spec(policy)), FleetFormed(0, 0, 120, tuple(map(Worker, "abc")))
    )
    for exchange in range(1, 12):
        step, now = 4 * exchange, control.shares
        seen = (_seen(k, now[k], step, 0.001 * (3, 2, 1)[k] * now[k]) for k in range(3))
        held = (PeakMemory(2, min(now[2], 40), _bytes(0, 100, min(now[2], 40)), 5000),)
        control, _ = advance(control, Exchanged(step + 4, step + 5, Measurements.of(seen), held))

        assert control.shares[2] <= 45
        assert sum(control.shares) == 120


def test_the_summary_tells_what_binds() -> None:
    control, _ = advance(
        Control(policy_from_spec("uniform")), FleetFormed(0, 0, 100, (Worker("a"), Worker("b")))
    )
    held = tuple(PeakMemory(1, n, _bytes(10**9, 5 * 10**7, n), 4 * 10**9) for n in (20, 40))
    control, _ = advance(control, Exchanged(4, 5, Measurements.of(()), held))

    one, other = worker_summaries(control, Ledger.empty(2))

    assert (one.cap, other.cap) == (None, 50)
    assert "GB" in other.memory


def test_a_left_out_worker_is_needed_if_bounds_have_narrowed() -> None:
    workers = tuple(Worker(name, quantum=8) for name in "abc")
    control, _ = advance(
        Control(policy_from_spec("static:24,0,26")), FleetFormed(0, 0, 50, workers)
    )
    held = tuple(PeakMemory(k, most, 100 * most, 112 * most) for k, most in ((0, 31), (2, 21)))

    control, _ = advance(control, Exchanged(4, 5, Measurements.of(()), held))

    assert sum(control.shares) == 50
    assert control.fleet is not None
    assert all(n <= most for n, most in zip(control.shares, control.fleet.upper, strict=True))


def test_what_a_share_may_grow_to_is_no_limit_of_memory() -> None:
    """A small model far below its limit: only the growth of its share is held back."""
    held = (
        PeakMemory(0, 23, 700_000_000, 3_000_000_000),
        PeakMemory(1, 41, 700_000_000, 900_000_000),
    )
    memory = Memory().learn(held, 2, 0.9)

    assert memory.caps == (46, 47)
    assert (memory.ends(0), memory.ends(1)) == (None, 47)
    reported = memory.reason(Memory(), (Worker("a"), Worker("b")), 64)
    assert "a may grow to 46" in reported
    assert "b may hold 47" in reported
