"""Virtual workers report their steps just as the recorder of a real one does."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.events import Expect
from evenstride.core.control.schedule import ToleranceBand
from evenstride.core.time_model.observation import Observation
from evenstride.sim.engine.virtual_workers import Bands, Notes

pytest.importorskip("torch")

from evenstride.runtime.timing.recorder import Recorder
from evenstride.runtime.timing.step_timer import StepRecord

WORKERS = 2
TIMES = st.sampled_from([0.5, 1.0, 1.125, 2.0])  # all without rounding
SHARES = st.sampled_from([0, 4, 8])
STEPS = st.tuples(st.tuples(SHARES, SHARES), st.tuples(TIMES, TIMES))
# Steps between two exchanges, and the shares that are expected after the second of them.
STRETCHES = st.tuples(st.lists(STEPS, min_size=1, max_size=8), st.tuples(SHARES, SHARES))


class _Both:
    """The same history, reported to the simulator's notes and to a recorder for each worker."""

    def __init__(self) -> None:
        self.notes, self.bands = Notes(WORKERS), Bands(WORKERS)
        self.recorders = [Recorder(rank, lambda: None) for rank in range(WORKERS)]

    def step(self, step: int, shares: tuple[int, ...], busy_s: tuple[float, ...]) -> None:
        wait_s = tuple(max(busy_s) - mine_s for mine_s in busy_s)
        self.notes.add(step, np.array(shares), np.array(busy_s), np.array(wait_s))
        self.bands.step(np.array(shares), np.array(busy_s))
        for rank, recorder in enumerate(self.recorders):
            mine = shares[rank], busy_s[rank], wait_s[rank]
            recorder.append(StepRecord(step, *mine, 0.0, 0.0, 0.0, True))

    def expect(self, shares: tuple[int, ...]) -> None:
        self.bands.expect(Expect((1.0,) * WORKERS, (0.15,) * WORKERS), shares)
        for recorder, share in zip(self.recorders, shares, strict=True):
            recorder.expect(ToleranceBand(share, 1.0, 0.15))

    def taken(self) -> tuple[list[Observation], list[Observation]]:
        virtual = list(self.notes.take(self.bands.broke))
        return virtual, [seen for recorder in self.recorders for seen in recorder.take()]


@given(st.lists(STRETCHES, min_size=1, max_size=4))
def test_the_same_steps_are_cut_into_the_same_observations(history: list[Any]) -> None:
    both, number = _Both(), 0

    for steps, expected in history:
        for shares, busy_s in steps:
            both.step(number, shares, busy_s)
            number += 1
        virtual, real = both.taken()

        # That machine's loads are unknown, and nan equals nothing, so the text is compared.
        assert repr(virtual) == repr(real)
        both.expect(expected)


def test_a_change_of_share_and_a_step_outside_its_band_begin_an_observation() -> None:
    both = _Both()
    both.expect((8, 8))
    for number, (shares, busy_s) in enumerate(
        [((8, 8), (1.0, 1.0)), ((8, 4), (1.0, 1.0)), ((8, 4), (2.0, 1.0)), ((8, 4), (2.0, 2.0))]
    ):
        both.step(number, shares, busy_s)

    virtual, _ = both.taken()

    assert [(seen.worker, seen.share, seen.first_step, seen.busy_s) for seen in virtual] == [
        (0, 8, 0, (1.0, 1.0)),
        (0, 8, 2, (2.0, 2.0)),
        (1, 8, 0, (1.0,)),
        (1, 4, 1, (1.0, 1.0, 2.0)),
    ]


def test_every_step_is_taken_once_and_with_its_wait() -> None:
    both = _Both()
    both.step(5, (8, 4), (1.0, 0.25))

    first, _ = both.taken()
    both.step(6, (8, 4), (1.0, 0.5))
    second, _ = both.taken()

    assert [seen.first_step for seen in (*first, *second)] == [5, 5, 6, 6]
    assert [seen.wait_s for seen in (*first, *second)] == [(0.0,), (0.75,), (0.0,), (0.5,)]
    assert all(one.first_step <= other.first_step for one, other in pairwise((*first, *second)))
