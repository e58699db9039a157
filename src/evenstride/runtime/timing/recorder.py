"""Finished steps on their way from the training thread to the control thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import pairwise
from math import nan

from evenstride.core.control.exchange_interval import ToleranceBand
from evenstride.core.time_model.observation import Observation
from evenstride.runtime.timing.step_timer import StepRecord


class Recorder:
    """Keeps finished steps until the control thread takes them, and watches their band.

    Args:
        rank: this rank.
        ask: called when the rank's times have left their band.
        loads: tells the processor and memory load of this machine, if the policy asks for them.
    """

    def __init__(
        self,
        rank: int,
        ask: Callable[[], None],
        loads: Callable[[], tuple[float, float]] = lambda: (nan, nan),
    ) -> None:
        self._rank, self._ask, self._loads = rank, ask, loads
        self._lock = threading.Lock()
        self._records: list[StepRecord] = []
        self._breaks: set[int] = set()  # indices of records that begin a new observation
        self._band = ToleranceBand()
        self._ignores = False

    def expect(self, band: ToleranceBand) -> None:
        """Watch for steps outside ``band`` from now on."""
        with self._lock:
            self._band = band

    def add(self, record: StepRecord) -> None:
        """Keep a finished step; ask for an exchange if it left its band (training thread)."""
        asks = False
        with self._lock:
            if self._ignores:
                return
            before = self._band
            if record.modelled and not before.asked and before.expected_s:
                after = self._band = before.step(record.share, record.busy_s)
                asks = after.asked
                # What came before the first step outside the band must not blur it.
                if after is not before and not before.strikes:
                    self._breaks.add(len(self._records))
            self._records.append(record)
        # Outside the lock, which the control thread may need to take what there is.
        if asks:
            self._ask()

    def ignore(self) -> None:
        """Keep no step from now on, and forget those kept: they cannot be measured."""
        with self._lock:
            self._ignores = True
            self._records.clear()
            self._breaks.clear()

    def take(self) -> tuple[Observation, ...]:
        """Return all finished steps as observations, and forget them (control thread)."""
        with self._lock:
            records, self._records = self._records, []
            breaks, self._breaks = self._breaks, set()
        loads = self._loads()
        runs = stretches(records, breaks)
        return tuple(observation(self._rank, records[run], loads) for run in runs)


def stretches(records: Sequence[StepRecord], breaks: Set[int]) -> Iterator[slice]:
    """Yield the stretches of consecutive steps that may be judged together.

    Args:
        records: in the order of their steps.
        breaks: indices of records that begin a stretch whatever came before.
    """
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


def observation(worker: int, run: Sequence[StepRecord], loads: tuple[float, float]) -> Observation:
    """Return one stretch of steps as what a worker has measured.

    Args:
        worker: the rank, or the island.
        run: at least one step, all with the same share.
        loads: processor and memory load, as parts of 1.
    """
    return Observation(
        worker=worker,
        share=run[0].share,
        first_step=run[0].step,
        busy_s=tuple(round(r.busy_s, 7) for r in run),
        wait_s=tuple(round(r.wait_s, 7) for r in run),
        data_s=round(sum(r.data_s for r in run), 7),
        outside_s=round(sum(r.outside_s for r in run), 7),
        control_wait_s=round(sum(r.control_wait_s for r in run), 7),
        modelled=run[0].modelled,
        cpu_load=loads[0],
        memory_load=loads[1],
    )
