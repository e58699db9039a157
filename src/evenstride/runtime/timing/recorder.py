"""Passes finished steps from the training thread to the control thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import pairwise
from math import nan

import numpy as np

from evenstride.core.control.schedule import ToleranceBand
from evenstride.core.time_model.observation import Measurements
from evenstride.runtime.timing.step_timer import StepRecord


class Recorder:
    """Keeps finished steps until the control thread takes them, and checks their tolerance band."""

    def __init__(
        self,
        rank: int,
        ask: Callable[[], None],
        loads: Callable[[], tuple[float, float]] = lambda: (nan, nan),
    ) -> None:
        self.rank, self._ask, self._loads = rank, ask, loads
        self._lock = threading.Lock()
        self._records: list[StepRecord] = []
        self._breaks: set[int] = set()  # indices of records that begin a new observation
        self._band = ToleranceBand()
        self._ignores = False

    def expect(self, band: ToleranceBand) -> None:
        """Watch for steps outside ``band`` from now on."""
        with self._lock:
            self._band = band

    def append(self, record: StepRecord) -> None:
        """Keep a finished step; request an exchange if it left its band (training thread)."""
        asks = False
        with self._lock:
            if self._ignores:
                return
            before = self._band
            if record.modelled and not before.asked and before.expected_s:
                after = self._band = before.step(record.share, record.busy_s)
                asks = after.asked
                # Steps before the first one outside the band, or before a request, must not dilute
                # what follows.
                if (after.strikes or after.asked) and not before.strikes:
                    self._breaks.add(len(self._records))
            self._records.append(record)
        # Outside the lock, which the control thread may need to take the records.
        if asks:
            self._ask()

    def ignore(self) -> None:
        """Discard all steps, past and future, because they cannot be measured."""
        with self._lock:
            self._ignores = True
            self._records.clear()
            self._breaks.clear()

    def take(self) -> Measurements:
        """Return the measurements of all finished steps, and forget them (control thread)."""
        with self._lock:
            records, self._records = self._records, []
            breaks, self._breaks = self._breaks, set()
        runs = list(stretches(records, breaks))
        return in_columns(self.rank, records, runs, [self._loads()] * len(runs))


def stretches(records: Sequence[StepRecord], breaks: Set[int]) -> Iterator[slice]:
    """Yield the runs of consecutive steps that may be judged together."""
    start = 0
    for index, (before, record) in enumerate(pairwise(records), start=1):
        if (
            index in breaks
            or record.share != before.share
            or record.modelled != before.modelled
            or record.step != before.step + 1
        ):
            yield slice(start, index)
            start = index
    if records:
        yield slice(start, len(records))


def in_columns(
    worker: int,
    records: Sequence[StepRecord],
    runs: Sequence[slice],  # the `stretches` of all records
    loads: Sequence[tuple[float, float]],  # of each stretch: processor and memory, each 0 to 1
) -> Measurements:
    """Return the measurements of one worker, in the columns that the core takes."""

    # Python's own sum and round, because the digits are written to the trace and decide the split.
    def summed(times_s: list[float]) -> list[float]:
        return [round(sum(times_s[run]), 7) for run in runs]

    first = [records[run.start] for run in runs]
    return Measurements(
        worker=np.full(len(runs), worker, dtype=np.int64),
        share=np.array([r.share for r in first], dtype=np.int64),
        first_step=np.array([r.step for r in first], dtype=np.int64),
        steps=np.array([run.stop - run.start for run in runs], dtype=np.int64),
        busy_s=np.array([round(r.busy_s, 7) for r in records], dtype=np.float64),
        wait_s=np.array([round(r.wait_s, 7) for r in records], dtype=np.float64),
        sums_s=np.array(
            [
                summed([r.data_s for r in records]),
                summed([r.outside_s for r in records]),
                summed([r.control_wait_s for r in records]),
            ],
            dtype=np.float64,
        ),
        modelled=np.array([r.modelled for r in first], dtype=np.bool_),
        loads=np.array(loads, dtype=np.float64).reshape(len(runs), 2).T,
    )
