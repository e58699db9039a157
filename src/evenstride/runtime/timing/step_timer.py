"""Measures one rank's steps on its training thread: busy time apart from waiting time.

A step consists of these marks:

    fetch_started -> fetch_ended -> gradients_ready -> synchronised -> fetch_started ...
      data_s           compute_s        wait_s           between

``gradients_ready`` fires when this rank's last gradient is ready, before any wait for other ranks.
``synchronised`` fires after the engine has averaged. The time between a step's synchronisation and
the next fetch (optimizer, logging, evaluation, saving) enters the busy time as its running median,
because it belongs to every step. The excess over the median is outside training.

The marks are made in every step, between large operations that have emptied the processor's
caches. Python then runs several times slower than usual, so the code makes few objects and calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

# Steps whose between-time enters the running median; odd, so that one of them is the middle.
_BETWEEN_STEPS = 31


class StepRecord(NamedTuple):
    """One finished step of this rank; times in seconds, as in `Observation`."""

    step: int
    share: int
    busy_s: float
    wait_s: float
    data_s: float
    outside_s: float
    control_wait_s: float
    modelled: bool


class StepQueue(Protocol):
    """Takes finished steps, as a list does; the training thread calls it."""

    def append(self, record: StepRecord, /) -> None: ...


class StepTimer:
    """Turns marks into step records. All calls come from the training thread."""

    on_device = False  # whether steps are measured on a device
    capturing = False  # whether the current stream is captured as a graph

    def __init__(self, finished: StepQueue, now: Callable[[], float] = time.perf_counter) -> None:
        self.finished, self.now = finished, now
        self._phase, self._step, self._share, self._modelled = "idle", -1, 0, True
        self._in_step = self._synchronised = False
        self._data_s = self._compute_s = self._wait_s = self._control_s = 0.0
        # Waiting during a fetch belongs to the step whose batch is being fetched.
        self._early_wait_s = self._early_control_s = 0.0
        self._mark_s = self._excluded_s = self._wait_began_s = 0.0
        self._between: deque[float] = deque(maxlen=_BETWEEN_STEPS)

    def report_to(self, finished: StepQueue) -> None:
        self.finished = finished

    @property
    def at(self) -> tuple[str, int]:
        """What the training thread is doing, and in which step; for heartbeats."""
        return self._phase, self._step

    @property
    def step(self) -> int:
        """The step that the training thread is in, or was in last."""
        return self._step

    @property
    def left(self) -> bool:
        """Whether the loop stopped within an epoch, with no step in progress."""
        return not self._in_step and self._phase in ("compute", "between")

    def fetch_started(self) -> float:
        """Mark that the training loop asks for its next batch; return the time."""
        now_s = self.now()
        self._phase = "data"
        lap_s = now_s - self._mark_s - self._excluded_s
        self._mark_s, self._excluded_s = now_s, 0.0
        if self._synchronised:
            self._finish(lap_s if lap_s > 0 else 0.0)
        # The step continues with another micro-batch.
        elif self._in_step:
            self._compute_s += lap_s
        return now_s

    def fetch_ended(self, step: int, share: int, *, modelled: bool) -> float:
        """Mark that the training loop gets a batch of ``step``; return the time."""
        now_s = self.now()
        lap_s = now_s - self._mark_s - self._excluded_s
        self._mark_s, self._excluded_s, self._phase = now_s, 0.0, "compute"
        if self._in_step and self._step == step:
            self._data_s += lap_s
            self._wait_s += self._early_wait_s
            self._control_s += self._early_control_s
        else:
            self._in_step, self._step, self._share, self._modelled = True, step, share, modelled
            self._data_s, self._compute_s = lap_s, 0.0
            self._wait_s, self._control_s = self._early_wait_s, self._early_control_s
        self._early_wait_s = self._early_control_s = 0.0
        return now_s

    def gradients_ready(self) -> None:
        """Mark that this rank's last gradient of a synchronising backward pass is ready."""
        self._phase = "sync"
        now_s = self.now()
        self._compute_s += now_s - self._mark_s - self._excluded_s
        self._mark_s, self._excluded_s = now_s, 0.0

    def synchronised(self) -> None:
        """Mark that the engine has averaged the gradients."""
        self._phase, self._synchronised = "between", self._in_step
        now_s = self.now()
        self._wait_s += now_s - self._mark_s - self._excluded_s
        self._mark_s, self._excluded_s = now_s, 0.0

    def spoil(self) -> None:
        """Mark that the current step was disturbed and must not be modelled."""
        self._modelled = False

    def pass_ended(self) -> None:
        """Mark that the loop over the loader has ended; what follows belongs to no step."""
        # `at` still reports where the loop stopped: a program that ends during the synchronisation
        # of its gradients has lost another rank.
        phase = self._phase
        self.fetch_started()
        self._in_step, self._phase = False, phase

    def epoch_ended(self) -> None:
        """Mark that the loop has reached the end of the epoch."""
        self._phase = "idle"

    @contextmanager
    def turning(self) -> Iterator[None]:
        """Between two passes, mark that this rank waits until all ranks do."""
        self._phase = "turn"
        try:
            yield
        finally:
            self._phase = "idle"

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for others, not as work."""
        self.wait_began()
        try:
            yield
        finally:
            self.wait_ended()

    def wait_began(self) -> None:
        """Mark that what follows is waiting for others, until `wait_ended`."""
        self._wait_began_s = self.now()

    def wait_ended(self) -> None:
        """Mark the end of the wait."""
        seconds = self.now() - self._wait_began_s
        self._excluded_s += seconds
        if self._phase == "data":
            self._early_wait_s += seconds
        else:
            self._wait_s += seconds

    def exclude(self, seconds: float) -> None:
        """Count the last ``seconds`` as neither work nor waiting."""
        self._excluded_s += seconds

    def control_waited(self, seconds: float) -> None:
        """Count ``seconds`` of the current fetch as waiting for a decision."""
        self._excluded_s += seconds
        self._early_control_s += seconds

    def settle(self) -> None:
        """Report all finished steps; in this class they are reported already."""

    def _finish(self, between_s: float) -> None:
        self._in_step = self._synchronised = False
        self._report(
            self._step,
            self._share,
            self._data_s + self._compute_s,
            between_s,
            self._wait_s,
            self._data_s,
            self._control_s,
            modelled=self._modelled,
        )

    def _report(
        self,
        step: int,
        share: int,
        worked_s: float,
        between_s: float,
        wait_s: float,
        data_s: float,
        control_s: float,
        *,
        modelled: bool,
    ) -> None:
        # Steps that are not modelled must not change the median. Nor must the first step of a run,
        # after which some loops do things that they never do again.
        if modelled and step > 0:
            self._between.append(between_s)
        # The median belongs to every step; the excess over it is outside training.
        ordered_s = sorted(self._between) or [between_s]
        usual_s = ordered_s[len(ordered_s) // 2]
        outside_s = between_s - usual_s if between_s > usual_s else 0.0
        busy_s = worked_s + usual_s
        self.finished.append(
            StepRecord(step, share, busy_s, wait_s, data_s, outside_s, control_s, modelled)
        )
