"""Measure one rank's steps on its training thread: its own work apart from waiting for others.

A step's life, as the marks come in:

    fetch_started -> fetch_ended -> gradients_ready -> synchronised -> fetch_started ...
      data_s           compute_s        wait_s           between

``gradients_ready`` fires when this rank's last gradient is there, before any wait for others;
``synchronised`` after the engine has averaged. The time between a step's synchronisation and
the next fetch (optimizer, logging, evaluation, saving) enters the busy time as its running
median, because it belongs to every step; what exceeds the median is outside training.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from evenstride.core.band import Band
from evenstride.core.observation import Observation, median

# Steps whose between-time enters the running median.
_BETWEEN_STEPS = 31


@dataclass(slots=True)
class _Step:
    """Sums of the step in progress, in seconds."""

    step: int = -1
    share: int = 0
    modelled: bool = True
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    control_wait_s: float = 0.0
    synchronised: bool = False


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step of this rank; times in seconds, as in `Observation`."""

    step: int
    share: int
    busy_s: float
    wait_s: float
    data_s: float
    outside_s: float
    control_wait_s: float
    modelled: bool
    begins: bool  # first step outside the expected band: what came before must not blur it


class Recorder:
    """Finished steps on their way from the training thread to the control thread."""

    def __init__(self, rank: int, ask: Callable[[], None]) -> None:
        self._rank, self._ask = rank, ask
        self._lock = threading.Lock()
        self._records: list[StepRecord] = []
        self._band = Band()

    def expect(self, band: Band) -> None:
        """Watch for steps outside ``band`` from now on."""
        with self._lock:
            self._band = band

    def add(self, record: StepRecord) -> None:
        """Keep a finished step; ask for an exchange if it left its band."""
        with self._lock:
            before = self._band
            if record.modelled:
                self._band = before.step(record.share, record.busy_s)
            left = self._band.strikes > before.strikes or (self._band.asked and not before.asked)
            if left and before.strikes == 0:
                record = replace(record, begins=True)
            self._records.append(record)
            asks = self._band.asked and not before.asked
        if asks:
            self._ask()

    def take(self) -> tuple[Observation, ...]:
        """Return all finished steps as observations, and forget them."""
        with self._lock:
            records, self._records = self._records, []
        return tuple(_observation(self._rank, run) for run in _runs(records))


def _runs(records: list[StepRecord]) -> Iterator[list[StepRecord]]:
    """Yield stretches of consecutive steps that may be judged together."""
    run: list[StepRecord] = []
    for record in records:
        if run and (
            record.begins
            or record.share != run[-1].share
            or record.modelled != run[-1].modelled
            or record.step != run[-1].step + 1
        ):
            yield run
            run = []
        run.append(record)
    if run:
        yield run


def _observation(rank: int, run: list[StepRecord]) -> Observation:
    return Observation(
        worker=rank,
        share=run[0].share,
        first_step=run[0].step,
        busy_s=tuple(round(r.busy_s, 7) for r in run),
        wait_s=tuple(round(r.wait_s, 7) for r in run),
        data_s=round(sum(r.data_s for r in run), 7),
        outside_s=round(sum(r.outside_s for r in run), 7),
        control_wait_s=round(sum(r.control_wait_s for r in run), 7),
        modelled=run[0].modelled,
    )


@dataclass(slots=True)
class StepTimer:
    """Turns marks into step records. All calls come from the training thread.

    Args:
        finished: called with each finished step, at the fetch that follows it.
        now: a monotonic clock in seconds.
    """

    finished: Callable[[StepRecord], None]
    now: Callable[[], float] = time.perf_counter
    _phase: str = "idle"
    _step: int = -1
    _current: _Step | None = None
    _mark_s: float = 0.0
    _excluded_s: float = 0.0
    # Waiting and control waiting of a step that has not begun: its fetch is still going on.
    _early_s: tuple[float, float] = (0.0, 0.0)
    _between_s: deque[float] = field(default_factory=lambda: deque(maxlen=_BETWEEN_STEPS))

    @property
    def at(self) -> tuple[str, int]:
        """What the training thread is doing, and in which step; for heartbeats."""
        return self._phase, self._step

    def fetch_started(self) -> None:
        """Mark that the training loop asks for its next batch."""
        self._phase = "data"
        lap_s = self._lap()
        if self._current is None:
            return
        if self._current.synchronised:
            self._finish(max(0.0, lap_s))
        else:
            self._current.compute_s += lap_s

    def fetch_ended(self, step: int, share: int, *, modelled: bool) -> None:
        """Mark that a batch of ``step`` is handed to the training loop."""
        self._phase, self._step = "compute", step
        lap_s = self._lap()
        if self._current is None or self._current.step != step:
            self._current = _Step(step, share, modelled)
            self._current.wait_s, self._current.control_wait_s = self._early_s
            self._early_s = (0.0, 0.0)
        self._current.data_s += lap_s
        self._current.modelled &= modelled

    def gradients_ready(self) -> None:
        """Mark that this rank's last gradient of a synchronising backward pass is there."""
        self._phase = "sync"
        if self._current is not None:
            self._current.compute_s += self._lap()

    def synchronised(self) -> None:
        """Mark that the engine has averaged the gradients."""
        self._phase = "between"
        if self._current is not None:
            self._current.wait_s += self._lap()
            self._current.synchronised = True

    def pass_ended(self) -> None:
        """Mark that the loop over the loader was left; what follows is nobody's step.

        `at` keeps telling where it was left: a program that ends while its gradients are being
        synchronised has lost another rank.
        """
        phase = self._phase
        self.fetch_started()
        self._current = None
        self._phase = phase

    def epoch_ended(self) -> None:
        """Mark that the loop has come to its end."""
        self._phase = "idle"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for others, not as work."""
        started_s = self.now()
        try:
            yield
        finally:
            self.waited(self.now() - started_s)

    def waited(self, seconds: float) -> None:
        """Count ``seconds`` of the stretch in progress as waiting for others."""
        self._excluded_s += seconds
        if self._current is not None:
            self._current.wait_s += seconds
        else:
            self._early_s = (self._early_s[0] + seconds, self._early_s[1])

    def control_waited(self, seconds: float) -> None:
        """Count ``seconds`` of the fetch in progress as waiting for a decision."""
        self._excluded_s += seconds
        self._early_s = (self._early_s[0], self._early_s[1] + seconds)

    def _lap(self) -> float:
        """Return the seconds since the last mark, without what was waiting."""
        now_s = self.now()
        lap_s = now_s - self._mark_s - self._excluded_s
        self._mark_s, self._excluded_s = now_s, 0.0
        return lap_s

    def _finish(self, between_s: float) -> None:
        current, self._current = self._current, None
        assert current is not None, "only a step in progress can be finished"
        if current.modelled:
            self._between_s.append(between_s)
        usual_s = median(tuple(self._between_s)) if self._between_s else between_s
        self.finished(
            StepRecord(
                step=current.step,
                share=current.share,
                busy_s=current.data_s + current.compute_s + usual_s,
                wait_s=current.wait_s,
                data_s=current.data_s,
                outside_s=max(0.0, between_s - usual_s),
                control_wait_s=current.control_wait_s,
                modelled=current.modelled,
                begins=False,
            )
        )
