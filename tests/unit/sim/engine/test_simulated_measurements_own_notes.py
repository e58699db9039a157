"""Workers that do not keep step report as others do, if they happen to keep it."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.events import Expect
from evenstride.sim.engine.virtual_workers import Bands, Notes, OwnNotes

EXPECT, SHARES = Expect((1.0, 2.0), (0.2, 0.2)), (10, 20)
STEPS = st.tuples(
    st.tuples(st.sampled_from([0.5, 1.0, 1.1, 1.5]), st.sampled_from([1.0, 2.0, 2.1, 4.0])),
    st.sampled_from([SHARES, (11, 19)]),
)


@given(st.lists(STEPS, min_size=1, max_size=12), st.integers(1, 12))
def test_they_tell_and_ask_what_workers_in_step_do(
    steps: list[tuple[tuple[float, float], tuple[int, int]]], every: int
) -> None:
    own, notes, bands = OwnNotes(2), Notes(2), Bands(2)
    load = np.array([0.25, math.nan])
    own.expect(EXPECT, SHARES)
    bands.expect(EXPECT, SHARES)

    for number, (busy_s, shares) in enumerate(steps):
        asks = [own.add(k, shares[k], busy_s[k], 0.1 * k) for k in (0, 1)]
        notes.add(number, np.array(shares), np.array(busy_s), np.array([0.0, 0.1]))
        assert asks == bands.step(np.array(shares), np.array(busy_s)).tolist()
        if (number + 1) % every == 0 or number == len(steps) - 1:
            assert own.take(load) == notes.take(bands.broke, load)
            own.expect(EXPECT, SHARES)
            bands.expect(EXPECT, SHARES)


def test_each_counts_its_own_updates() -> None:
    own = OwnNotes(2)
    for _ in range(3):
        own.add(0, 8, 0.5, 0.0)
    own.add(1, 8, 2.0, 0.25)
    own.take(np.zeros(2))
    own.add(0, 9, 0.5, 0.0)

    (seen,) = own.take(np.array([0.5, 0.0]))

    assert (seen.worker, seen.share, seen.first_step, seen.busy_s) == (0, 9, 3, (0.5,))
    assert seen.cpu_load == 0.5


def test_a_worker_without_an_update_reports_none() -> None:
    own = OwnNotes(3)
    own.add(1, 8, 2.0, 0.25)

    (seen,) = own.take(np.zeros(3))

    assert (seen.worker, seen.wait_s) == (1, (0.25,))
    assert len(own.take(np.zeros(3))) == 0
