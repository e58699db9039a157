"""When each virtual worker would ask for an exchange: `core.band.Band` for all at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evenstride.core.band import HICCUP_S
from evenstride.core.events import Expect
from evenstride.core.fleet import IntArray, Shares, as_array

Mask = npt.NDArray[np.bool_]


class Bands:
    """The bands of ``W`` workers; see `Band` for the rule."""

    def __init__(self, workers: int) -> None:
        self._share = np.zeros(workers, dtype=np.int64)
        self._expected_s, self._part = np.zeros(workers), np.zeros(workers)
        self._strikes = np.zeros(workers, dtype=np.int64)
        self._slow_s = np.zeros(workers)
        self._asked = np.zeros(workers, dtype=np.bool_)
        self.broke: list[Mask] = []
        """For each step since the bands were set, whose times began to leave theirs."""

    def expect(self, expect: Expect, shares: Shares) -> None:
        """Set the bands anew, for the shares that the leader has decided on."""
        self._share = as_array(shares)
        self._expected_s, self._part = np.array(expect.expected_s), np.array(expect.band)
        self._strikes[:], self._slow_s[:], self._asked[:] = 0, 0.0, False
        self.broke.clear()

    def step(self, shares: IntArray, busy_s: npt.NDArray[np.float64]) -> Mask:
        """Judge a step; return who asks for an exchange because of it."""
        judged = ~self._asked & (self._expected_s > 0) & (shares == self._share)
        fast = judged & (busy_s < self._expected_s * (1 - self._part))
        slow = judged & (busy_s > self._expected_s * (1 + self._part))
        self._slow_s = np.where(slow, self._slow_s + busy_s, np.where(judged, 0.0, self._slow_s))
        asks = fast | (slow & (self._strikes >= 1) & (self._slow_s >= HICCUP_S))
        self.broke.append((fast | slow) & (self._strikes == 0))
        self._strikes = np.where(slow, self._strikes + 1, np.where(judged, 0, self._strikes))
        self._asked |= asks
        return np.asarray(asks)
