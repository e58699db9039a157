"""What virtual workers report, as the columns of `Measurements`, and when they ask for an exchange.

Workers that keep step report the same steps; the others report their own updates, each in its own
count. `Bands` is `ToleranceBand` for all workers at once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from evenstride.core.control.events import Expect
from evenstride.core.control.exchange_interval import HICCUP_S, ToleranceBand
from evenstride.core.fleet import FloatArray, IntArray, Shares, as_array
from evenstride.core.time_model.observation import Measurements, Observation

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


class OwnNotes:
    """Keeps the updates of ``W`` workers until the leader asks for them, and who asks for it.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        self._made = [0] * workers
        self._bands = [ToleranceBand() for _ in range(workers)]
        self._seen: list[list[Observation]] = [[] for _ in range(workers)]

    def expect(self, expect: Expect, shares: Shares) -> None:
        """Set the bands anew, for the shares that the leader has decided on."""
        columns = zip(shares, expect.expected_s, expect.band, strict=True)
        self._bands = [
            ToleranceBand(share, expected_s, part) for share, expected_s, part in columns
        ]

    def add(self, worker: int, share: int, busy_s: float, wait_s: float) -> bool:
        """Keep an update; return whether the worker asks for an exchange because of it."""
        before = self._bands[worker]
        after = self._bands[worker] = before.step(share, busy_s)
        seen, step = self._seen[worker], self._made[worker]
        self._made[worker] += 1
        breaks = (after.strikes > 0 or after.asked) and before.strikes == 0 and not before.asked
        if seen and seen[-1].share == share and not breaks:
            last = seen[-1]
            seen[-1] = replace(last, busy_s=(*last.busy_s, busy_s), wait_s=(*last.wait_s, wait_s))
        else:
            seen.append(Observation(worker, share, step, (busy_s,), (wait_s,)))
        return after.asked and not before.asked

    def take(self, cpu_load: FloatArray) -> Measurements:
        """Return all updates as observations, and forget them.

        Args:
            cpu_load: of each worker's machine by now, ``(W,)``.
        """
        told = Measurements.of(
            replace(seen, cpu_load=float(cpu_load[worker]))
            for worker, all_seen in enumerate(self._seen)
            for seen in all_seen
        )
        self._seen = [[] for _ in self._seen]
        return told


class Notes:
    """Keeps the steps of ``W`` workers until the leader asks for them."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._steps: list[int] = []
        self._shares: list[IntArray] = []
        self._busy_s: list[FloatArray] = []
        self._wait_s: list[FloatArray] = []

    def add(self, step: int, shares: IntArray, busy_s: FloatArray, wait_s: FloatArray) -> None:
        """Keep one step; all arrays have shape ``(W,)``."""
        self._steps.append(step)
        self._shares.append(shares)
        self._busy_s.append(busy_s)
        self._wait_s.append(wait_s)

    def take(
        self, breaks: list[npt.NDArray[np.bool_]], cpu_load: FloatArray | None = None
    ) -> Measurements:
        """Return all steps as observations, and forget them.

        Args:
            breaks: for each of the latest steps, for which workers it begins an observation.
            cpu_load: of each worker's machine by now, ``(W,)``; not known if left out.
        """
        shares, busy_s = np.array(self._shares).T, np.array(self._busy_s).T  # (W, steps)
        workers, steps = shares.shape
        begins = np.zeros_like(shares, dtype=np.bool_)
        begins[:, 0] = True
        begins[:, 1:] = shares[:, 1:] != shares[:, :-1]
        known = breaks[-steps:]
        if known:
            begins[:, steps - len(known) :] |= np.array(known).T
        first = np.flatnonzero(begins)
        loads = np.full((2, len(first)), np.nan)
        if cpu_load is not None:
            loads[0] = cpu_load[first // steps]
        measured = Measurements(
            worker=first // steps,
            share=shares.ravel()[first],
            first_step=np.array(self._steps)[first % steps],
            steps=np.diff(np.append(first, workers * steps)),
            busy_s=busy_s.ravel(),
            wait_s=np.array(self._wait_s).T.ravel(),
            loads=loads,
        )
        self._steps, self._shares, self._busy_s, self._wait_s = [], [], [], []
        return measured
