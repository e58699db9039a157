"""Properties: a batch that changes is one that may be, and shares sum up to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.advance import advance
from evenstride.core.control.batch_size import sizes
from evenstride.core.control.events import (
    EpochEnded,
    Event,
    Exchanged,
    FleetFormed,
    SetBatch,
    SetShares,
)
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.trace.codec import decode, encode
from tests.effort import expensive

policies = st.sampled_from(["adaptive", "uniform", "dynamic-batching", "adaptive:allow_idle=1"])
ends = st.floats(0.0, 1e6)


@st.composite
def histories(draw: st.DrawFn) -> tuple[str, list[Event]]:
    """Return a policy, and epochs with their ends."""
    count = draw(st.integers(1, 4))
    quantum = draw(st.sampled_from([1, 1, 4]))
    low = draw(st.integers(count * quantum, 64))
    high = draw(st.integers(low, 512))
    workers = tuple(Worker(f"w/{k}", quantum=quantum) for k in range(count))
    events: list[Event] = [FleetFormed(0, 0, draw(st.integers(low, high)), workers)]
    step = 0
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(0, 3))):
            seen = [
                Observation(
                    *(k, draw(st.integers(1, low)), step),
                    (draw(st.floats(1e-4, 1.0)), draw(st.floats(1e-4, 1.0))),
                    (0.0, 0.0),
                )
                for k in range(count)
            ]
            step += 2
            events.append(Exchanged(step, step, Measurements.of(seen)))
        scales = sorted(draw(st.lists(ends, min_size=3, max_size=3)))
        known = draw(st.sampled_from(["none", "bound", "no upper end", "unbound"]))
        events.append(
            EpochEnded(
                *(step, step, low, high),
                scales[1] if known in ("bound", "no upper end") else None,
                None if known == "none" else scales[0],
                scales[2] if known == "bound" else None,
            )
        )
    return draw(policies), events


@expensive
@given(histories())
def test_a_batch_lies_within_its_bounds_and_near_the_one_before(
    history: tuple[str, list[Event]],
) -> None:
    policy, events = history
    control = Control(policy_from_spec(policy))
    for event in events:
        assert decode(encode(event)) == event or isinstance(event, Exchanged)
        before = control
        control, instructions = advance(control, event)
        again, same = advance(before, event)
        assert same == instructions, "the same events lead to the same decisions"
        assert control.fleet is not None and again.fleet is not None
        batch = control.fleet.global_batch
        assert sum(control.shares) == batch == again.fleet.global_batch
        if not isinstance(event, EpochEnded):
            continue
        assert before.fleet is not None
        present = before.fleet.global_batch
        assert event.low <= batch <= event.high and present <= 2 * batch <= 4 * present
        if event.scale_low is None:
            assert batch == present, "nothing is known of the noise"
        reported = [one for one in instructions if isinstance(one, SetBatch)]
        assert [one.global_batch for one in reported] == ([] if batch == present else [batch])
        shares = [one.shares for one in instructions if isinstance(one, SetShares)]
        assert all(sum(one) == batch for one in shares) and len(shares) == len(reported)


@given(
    st.integers(1, 5000),
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.sampled_from([1, 3, 8, 64]),
)
def test_sizes_are_within_bounds_and_a_factor(
    low: int, more: int, offset: int, quantum: int
) -> None:
    high = low + more
    present = low + offset % (more + 1)

    found = sizes(low, high, present, quantum)

    assert list(found) == sorted(set(found)) and present not in found
    assert all(low <= size <= high and present <= 2 * size <= 4 * present for size in found)
    assert all(size % quantum == 0 or size in (low, high) for size in found)
    if high >= 2 * present and quantum == 1:
        assert max(found) >= 1.5 * present or present < 4, "there is a way to go on"
