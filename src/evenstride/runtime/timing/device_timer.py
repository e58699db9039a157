"""Measure one rank's steps where a device works on them: by events on its compute stream.

A program only queues work for such a device, so the times at which it does so tell nothing. Here
the same marks as in `evenstride.runtime.timing.step_timer` are events in the stream: each takes the
time at which the device comes to it. What lies between two of them is what the device did and what
it idled, whether it waited for data, for copies or for a slow program: all of that is the worker's
own time. Work of other streams, such as communication that overlaps the backward pass, does not
enter until the compute stream waits for it, which is after ``gradients_ready``.

Nothing ever waits for the device. Events are read in order as the device has passed them, at the
latest when the loop comes by again, and used anew. `RankClock` holds the timer in use.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from evenstride.runtime.timing.step_timer import StepQueue, StepTimer

logger = logging.getLogger("evenstride")

_WAIT = "wait_s"
# What a stretch counts as that is cut short by waiting, by what the training thread was doing.
_PART_OF = {"data": "data_s", "compute": "compute_s", "sync": _WAIT, "between": "between_s"}
_PHASE_OF = {part: phase for phase, part in _PART_OF.items()}
# How long the program must stand still before the device is asked what it is doing: an event that
# is queried while another thread captures a CUDA graph breaks the capture.
_STANDS_STILL_S = 2.5


class Mark(Protocol):
    """A point in a stream; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the time to a later mark of the same kind, in milliseconds."""


class Marks(Protocol):
    """Where marks come from."""

    @property
    def capturing(self) -> bool:
        """Whether the stream is captured as a graph."""

    def record(self) -> Mark: ...

    def free(self, mark: Any) -> None:
        """Take back a mark of its own that has been read."""


class CudaMarks:
    """Events on the current stream of one CUDA device, used again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._free = device, list[torch.cuda.Event]()

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record(self) -> torch.cuda.Event:
        """Return an event that the device passes after everything queued so far."""
        event = self._free.pop() if self._free else _new_event()
        # By name: the callbacks of a backward pass run on a thread of their own.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def free(self, mark: torch.cuda.Event) -> None:
        self._free.append(mark)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class _Spent:
    """What the device spent on one step, as far as it is known."""

    step: int = -1
    share: int = 0
    modelled: bool = False
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    between_s: float = 0.0
    control_s: float = 0.0
    uncounted_control_s: float = 0.0

    def begin(self, step: int, share: int, *, modelled: bool) -> None:
        """Note which step it is, known only once its batch has been fetched."""
        self.step = step
        self.share = share
        self.modelled = modelled

    def spoil(self) -> None:
        self.modelled = False

    def control_waited(self, seconds: float) -> None:
        """Count waiting for a decision, to be taken out of the next stretch of the fetch."""
        self.control_s += seconds
        self.uncounted_control_s += seconds

    def book(self, part: str, seconds: float) -> None:
        """Add a stretch of device time to one part of the step."""
        if part == "data_s" and self.uncounted_control_s:
            # The device idles through less of the wait than the program if it had work queued.
            waited_s = min(self.uncounted_control_s, seconds)
            self.uncounted_control_s = 0.0
            seconds -= waited_s
        setattr(self, part, getattr(self, part) + max(seconds, 0.0))


class _Lap(NamedTuple):
    """A stretch that ends at ``mark``; without ``of`` it is nobody's."""

    mark: Mark
    of: _Spent | None
    part: str
    last: bool


class DeviceTimer(StepTimer):
    """A `StepTimer` whose steps are measured on a device's compute stream.

    Each mark costs the training thread one event. Steps are reported one pass of the loop later
    than by the host's clock, or more if the device is further behind.
    """

    on_device = True

    def __init__(
        self, finished: StepQueue, marks: Marks, now: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(finished, now)
        self._marks = marks
        self._queue: deque[_Lap] = deque()
        self._read_to: Mark | None = None
        self._in_hand: _Spent | None = None
        self._fresh: _Spent | None = None  # of the step that is being fetched
        self._made = 0  # marks so far
        self._seen = (("", -1, -1), 0.0)  # where the program stood, and since when

    @classmethod
    def instead_of(cls, timer: StepTimer, marks: Marks) -> DeviceTimer:
        """Return a timer that goes on where another one is; its step in hand is not measured."""
        mine = cls(timer.finished, marks, timer.now)
        mine._phase, mine._step = timer.at
        return mine

    @property
    def capturing(self) -> bool:  # type: ignore[override]
        return self._marks.capturing

    @property
    def at(self) -> tuple[str, int]:
        """What this rank is doing, and in which step; for heartbeats, from any thread."""
        # The program does not wait in a collective of the device: it goes on, and stands still
        # where it next needs a result. So once it has not moved for seconds, the oldest mark that
        # the device has not passed tells what the rank is doing.
        stands, now_s = (self._phase, self._step, self._made), self.now()
        seen, since_s = self._seen
        if stands != seen:
            self._seen = (stands, now_s)
        elif now_s - since_s >= _STANDS_STILL_S:
            return self._device_at() or stands[:2]
        return stands[:2]

    def _device_at(self) -> tuple[str, int] | None:
        """Return what the device is doing; ``None`` if it has nothing to do, or is not ours."""
        try:
            # Another thread asks, while the training thread appends and takes.
            for lap in self._queue.copy():
                if not lap.mark.query():
                    return None if lap.of is None else (_PHASE_OF[lap.part], self._step)
        except RuntimeError:  # of the device, which the training thread will meet as well
            logger.debug("the device could not be asked what it is doing", exc_info=True)
        return None

    def fetch_started(self) -> float:
        now_s = self.now()
        if self._synchronised:
            self._mark("between_s", last=True)
            self._in_hand = None
        else:
            self._mark("compute_s")
        self._in_step = self._in_step and not self._synchronised
        self._phase, self._synchronised = "data", False
        self._fresh = self._in_hand or _Spent()
        self._read()
        return now_s

    def fetch_ended(self, step: int, share: int, *, modelled: bool) -> float:
        if self._in_hand is None or self._in_hand.step != step:
            if self._in_hand is not None or self._fresh is None:
                self._fresh = _Spent()
            self._in_hand = self._fresh
            self._in_hand.begin(step, share, modelled=modelled)
        self._in_step, self._step, self._fresh = True, step, None
        self._mark("data_s")
        self._phase = "compute"
        return self.now()

    def gradients_ready(self) -> None:
        self._phase = "sync"
        self._mark("compute_s")

    def synchronised(self) -> None:
        """Mark that the stream waits for the averaged gradients no longer."""
        self._phase, self._synchronised = "between", self._in_step
        self._mark(_WAIT)

    def spoil(self) -> None:
        if self._in_hand is not None:
            self._in_hand.spoil()

    def pass_ended(self) -> None:
        super().pass_ended()
        self._in_hand = self._fresh = None

    def wait_began(self) -> None:
        """Mark that what is queued from now on is waiting for others, until `wait_ended`."""
        self._mark(_PART_OF.get(self._phase, _WAIT))

    def wait_ended(self) -> None:
        """Mark that the waiting that began is over."""
        self._mark(_WAIT)
        self._read()

    def exclude(self, seconds: float) -> None:
        """Leave the step in hand out: how long the device took for that is not known."""
        del seconds
        self.spoil()

    def control_waited(self, seconds: float) -> None:
        """Count up to ``seconds`` of the fetch in progress as waiting for a decision."""
        if self._fresh is not None:
            self._fresh.control_waited(seconds)  # unnoticed by a device with work queued

    def settle(self) -> None:
        """Wait for the device to pass the latest mark, and report all finished steps."""
        if self._queue:
            self._queue[-1].mark.synchronize()
        self._read()

    def _mark(self, part: str, *, last: bool = False) -> None:
        of = self._fresh if self._phase == "data" and self._fresh is not None else self._in_hand
        self._queue.append(_Lap(self._marks.record(), of, part, last))
        self._made += 1

    def _read(self) -> None:
        while self._queue and self._queue[0].mark.query():
            lap = self._queue.popleft()
            if self._read_to is not None:
                self._book(lap, self._read_to.elapsed_time(lap.mark) / 1000.0)
                self._marks.free(self._read_to)
            self._read_to = lap.mark

    def _book(self, lap: _Lap, seconds: float) -> None:
        spent = lap.of
        if spent is None:
            return
        spent.book(lap.part, seconds)
        if lap.last:
            self._report(
                spent.step,
                spent.share,
                spent.data_s + spent.compute_s,
                spent.between_s,
                spent.wait_s,
                spent.data_s,
                spent.control_s,
                modelled=spent.modelled,
            )


class RankClock:
    """Holds the timer in use, which may be replaced: the host's, until a model is on a device."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self._sizes: set[int] = set()  # of the batches that have run

    def waiting(self) -> AbstractContextManager[None]:
        return self.timer.waiting()

    def time_on(self, device: torch.device) -> None:
        """Measure steps on a model's device from now on, if that works on its own time."""
        if device.type == "cuda" and not self.timer.on_device:
            self.timer = DeviceTimer.instead_of(self.timer, CudaMarks(device))

    def handed_out(self, samples: int, *, compiled: bool) -> None:
        """Leave a step unmodelled that holds the first batch of its size, where that is slow."""
        if samples not in self._sizes:
            self._sizes.add(samples)
            # A device chooses kernels and grows its memory for a new size, and a compiled model
            # may be compiled again.
            if compiled or self.timer.on_device:
                self.timer.spoil()
