"""A cliff of one worker is expected of its kind, until one of them has been beyond it."""

from __future__ import annotations

import numpy as np
import pytest

from evenstride.core.time_model.estimates import Estimate
from evenstride.core.time_model.kalman import learn_times
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.core.time_model.pooling import with_shared_cliffs


def _after(*steps: tuple[tuple[int, float], ...]) -> Estimate:
    """Return what some steps teach; each has the share and the time of every worker."""
    estimate = Estimate.unknown(len(steps[0]))
    for workers in steps:
        seen = [Observation(k, share, 1, (s,), (0.0,)) for k, (share, s) in enumerate(workers)]
        estimate = learn_times(estimate, Measurements.of(tuple(seen)))
    return estimate


CALM = [((50, 0.24), (50, 0.24), (50, 0.24))] * 6
# The first worker has a cliff below 60 samples, the last one has none.
MET = _after(*CALM, *[((60, 1.4), (50, 0.24), (70, 0.34))] * 2, *CALM)
ALIKE = np.zeros(3, np.int64)


def test_a_worker_of_the_kind_is_expected_to_have_the_cliff() -> None:
    shared = with_shared_cliffs(MET, ALIKE)

    assert MET.model.at(np.full(3, 60))[1] == pytest.approx(0.28, rel=0.05)
    assert shared.model.at(np.full(3, 60)) == pytest.approx([1.4, 1.4, 0.29], rel=0.05)
    assert shared.model.at(np.full(3, 50)) == pytest.approx([0.24] * 3, rel=0.05)


def test_a_worker_of_another_kind_is_not() -> None:
    shared = with_shared_cliffs(MET, np.array([0, 1, 1]))

    assert shared is MET


def test_samples_that_it_has_had_are_below_the_cliff() -> None:
    more = _after(*CALM, *[((60, 1.4), (55, 0.26), (45, 0.22))] * 2, *CALM)

    shared = with_shared_cliffs(more, ALIKE)

    assert shared.seen.limit[:2].T.tolist() == [[50, 60], [55, 60], [50, 60]]


def test_a_slower_worker_of_the_kind_has_the_same_seconds_beyond_it() -> None:
    slow = _after(
        *CALM,
        *[((60, 1.4), (50, 0.24), (50, 0.24))] * 2,
        *CALM,
        *[((50, 0.24), (50, 0.48), (50, 0.24))] * 6,
    )

    shared = with_shared_cliffs(slow, ALIKE)

    assert shared.model.at(np.full(3, 60)) == pytest.approx([1.4] * 3, rel=0.05)


def test_nothing_is_copied_while_no_cliff_is_known() -> None:
    calm = _after(*CALM)

    assert with_shared_cliffs(calm, ALIKE) is calm
