"""Measures one rank's steps on a device, by events on its compute stream.

A program only queues work for such a device, so the times at which it does so show nothing. Here
the marks of `evenstride.runtime.timing.step_timer` are events in the stream. Each records the time
at which the device reaches it. The time between two events is busy time of the worker: the device
worked, or idled because it waited for data, for copies or for a slow program. Work of other
streams, such as communication that overlaps the backward pass, counts only once the compute stream
waits for it, which is after ``gradients_ready``.

Nothing waits for the device. Events are read in order once the device has passed them, at the
latest in the next iteration of the loop, and are then reused. `RankClock` holds the timer in use.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from evenstride.runtime.timing.step_timer import StepQueue, StepTimer

logger = logging.getLogger("evenstride")

_WAIT = "wait_s"
# What an interval counts as if a wait interrupts it, by what the training thread was doing.
_PART_OF = {"data": "data_s", "compute": "compute_s", "sync": _WAIT, "between": "between_s"}
_PHASE_OF = {part: phase for phase, part in _PART_OF.items()}
# How long the program must stand still before the device is queried: querying an event while
# another thread captures a CUDA graph breaks the capture.
_STANDS_STILL_S = 2.5
_QUIET, _SELDOM = 50, 10  # readings without a retry, and steps from one reading to the next then
_PROBE = 1 << 20  # elements of a kernel that no device runs in no time


class Mark(Protocol):
    """A point in a stream, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the time to a later mark of the same kind, in milliseconds."""


class Marks(Protocol):
    """The source of marks."""

    @property
    def capturing(self) -> bool:
        """Whether the stream is captured as a graph."""

    def record(self) -> Mark: ...

    def free(self, mark: Any) -> None:
        """Take back a mark that has been read, for reuse."""


class StreamMarks:
    """Events on the current stream of one accelerator of any type, which are reused."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._free = device, list[torch.Event]()
        module = torch.get_device_module(device)
        self._is_capturing: Callable[[], bool] = getattr(
            module, "is_current_stream_capturing", bool
        )

    @property
    def capturing(self) -> bool:
        return self._is_capturing()

    def record(self) -> torch.Event:
        """Return an event that the device passes after all work queued so far."""
        event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        # By name, because the callbacks of a backward pass run on a thread of their own.
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def free(self, mark: torch.Event) -> None:
        self._free.append(mark)


class CudaMarks:
    """`StreamMarks` of a CUDA device; the events of ``torch.cuda`` cost less to record."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._free = device, list[torch.cuda.Event]()

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record(self) -> torch.cuda.Event:
        """Return an event that the device passes after all work queued so far."""
        event = self._free.pop() if self._free else _new_event()
        # By name, because the callbacks of a backward pass run on a thread of their own.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def free(self, mark: torch.cuda.Event) -> None:
        self._free.append(mark)


def marks_on(device: torch.device) -> Marks:
    """Return the source of marks for a device that is not a CPU."""
    return CudaMarks(device) if device.type == "cuda" else StreamMarks(device)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@cache
def untimed(device: torch.device) -> str:
    """Return why steps on a device cannot be timed; empty if they can, as on CPU and CUDA.

    On other devices, the first call times a small kernel by two events, and waits for it.
    """
    if device.type in ("cpu", "cuda"):
        return ""
    try:
        marks = StreamMarks(device)
        begin = marks.record()
        torch.zeros(_PROBE, device=device)
        end = marks.record()
        end.synchronize()
        elapsed_ms = begin.elapsed_time(end)
    except (RuntimeError, ValueError, AttributeError, AssertionError):
        logger.info("steps on %s cannot be timed", device, exc_info=True)
        return "its torch cannot read the time between two events"
    # Some backends have events that do nothing.
    return "" if elapsed_ms > 0 else "two events with a kernel between them are at the same time"


def alloc_retries(device: torch.device) -> Callable[[], int]:
    """Return a function that counts how often a device's allocator had to free its cache.

    The count stays 0 if the allocator has none.
    """
    module = torch.get_device_module(device)
    names = ("memory_stats_as_nested_dict", "memory_stats")  # the first one costs less
    stats: Any = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if stats is None:
        return int

    def count() -> int:
        return int(stats(device).get("num_alloc_retries", 0))

    try:
        count()
    except (RuntimeError, TypeError):  # an allocator of the user's
        return int
    return count


class RetryWatch:
    """Notices steps in which an allocator had to free its cache.

    It then waits for the device, and so for other ranks, which would count as work. Retries come
    when sizes are new, and one after another. A reading takes up to 50 us, so after many without a
    retry only some steps are read. The estimate copes with a slow step now and then.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self._count, self._last = count, count()
        self._steps = self._quiet = 0

    def occurred(self) -> bool:
        """Return whether the step that ends has a retry; call it once per step."""
        self._steps += 1
        if self._quiet >= _QUIET and self._steps % _SELDOM:
            return False
        before, self._last = self._last, self._count()
        self._quiet = self._quiet + 1 if self._last == before else 0
        return self._last != before


@dataclass(slots=True)
class _Spent:
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
        """Note the step, which is known only once its batch has been loaded."""
        self.step = step
        self.share = share
        self.modelled = modelled

    def spoil(self) -> None:
        self.modelled = False

    def control_waited(self, seconds: float) -> None:
        """Count time waiting for a decision, to be subtracted from the next part of the fetch."""
        self.control_s += seconds
        self.uncounted_control_s += seconds

    def book(self, part: str, seconds: float) -> None:
        """Add an interval of device time to one part of the step."""
        if part == "data_s" and self.uncounted_control_s:
            # A device with queued work idles for less of the wait than the program.
            waited_s = min(self.uncounted_control_s, seconds)
            self.uncounted_control_s = 0.0
            seconds -= waited_s
        setattr(self, part, getattr(self, part) + max(seconds, 0.0))


class _Lap(NamedTuple):
    """An interval that ends at ``mark``; without ``of`` it belongs to no step."""

    mark: Mark
    of: _Spent | None
    part: str
    last: bool


class DeviceTimer(StepTimer):
    """A `StepTimer` whose steps are measured on a device's compute stream.

    Each mark costs the training thread one event. Steps are reported one iteration later than by
    the host's clock, or more if the device is further behind.
    """

    on_device = True

    def __init__(
        self,
        finished: StepQueue,
        marks: Marks,
        now: Callable[[], float] = time.perf_counter,
        retries: Callable[[], int] = int,  # how often the allocator had to free its cache so far
    ) -> None:
        super().__init__(finished, now)
        self._marks, self._retries = marks, RetryWatch(retries)
        self._queue: deque[_Lap] = deque()
        self._read_to: Mark | None = None
        self._in_hand: _Spent | None = None
        self._fresh: _Spent | None = None  # of the step whose batch is being loaded
        self._made = 0  # marks so far
        self._seen = (("", -1, -1), 0.0)  # where the program was, and since when

    @classmethod
    def instead_of(
        cls, timer: StepTimer, marks: Marks, retries: Callable[[], int] = int
    ) -> DeviceTimer:
        """Return a timer that continues from another one; its current step is not measured."""
        mine = cls(timer.finished, marks, timer.now, retries)
        mine._phase, mine._step = timer.at
        return mine

    @property
    def capturing(self) -> bool:  # type: ignore[override]
        return self._marks.capturing

    @property
    def at(self) -> tuple[str, int]:
        """What this rank is doing, and in which step; for heartbeats, from any thread."""
        # The program does not wait in a collective of the device: it continues, and stands still
        # when it next needs a result. So once it has not moved for seconds, the oldest mark that
        # the device has not passed shows what the rank is doing.
        stands, now_s = (self._phase, self._step, self._made), self.now()
        seen, since_s = self._seen
        if stands != seen:
            self._seen = (stands, now_s)
        elif now_s - since_s >= _STANDS_STILL_S:
            return self._device_at() or stands[:2]
        return stands[:2]

    def _device_at(self) -> tuple[str, int] | None:
        """Return what the device is doing; ``None`` if it is idle or works on something else."""
        try:
            # Another thread calls this while the training thread appends and removes.
            for lap in self._queue.copy():
                if not lap.mark.query():
                    return None if lap.of is None else (_PHASE_OF[lap.part], self._step)
        except RuntimeError:  # of the device, which the training thread will get as well
            logger.debug("the state of the device could not be queried", exc_info=True)
        return None

    def fetch_started(self) -> float:
        now_s = self.now()
        if self._retries.occurred():
            self.spoil()
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
        """Mark that the stream no longer waits for the averaged gradients."""
        self._phase, self._synchronised = "between", self._in_step
        self._mark(_WAIT)

    def spoil(self) -> None:
        if self._in_hand is not None:
            self._in_hand.spoil()

    def pass_ended(self) -> None:
        super().pass_ended()
        self._in_hand = self._fresh = None

    def wait_began(self) -> None:
        """Mark that work queued from now on is waiting for others, until `wait_ended`."""
        self._mark(_PART_OF.get(self._phase, _WAIT))

    def wait_ended(self) -> None:
        """Mark the end of the wait."""
        self._mark(_WAIT)

    def exclude(self, seconds: float) -> None:
        """Leave the current step out: how long the device took for that time is unknown."""
        del seconds
        self.spoil()

    def control_waited(self, seconds: float) -> None:
        """Count up to ``seconds`` of the current fetch as waiting for a decision."""
        if self._fresh is not None:
            self._fresh.control_waited(seconds)  # a device with queued work may not notice it

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
    """Holds the timer in use: the host's, until a model is on a device with its own timeline."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self.device = torch.device("cpu")
        """Where steps are timed."""
        self._sizes: set[int] = set()  # sizes of the batches that have run

    def waiting(self) -> AbstractContextManager[None]:
        return self.timer.waiting()

    def time_on(self, device: torch.device) -> None:
        """Measure steps on a model's device from now on, if the device works asynchronously."""
        if device.type == "cpu" or self.timer.on_device or untimed(device):
            return
        timer = DeviceTimer.instead_of(self.timer, marks_on(device), alloc_retries(device))
        self.timer, self.device = timer, device

    def handed_out(self, samples: int, *, compiled: bool, fresh: bool = False) -> None:
        """Do not model a step with the first batch of its size if such a batch is slow.

        ``fresh`` in the first step of a pass: a size counts as known as soon as its batch has been
        drawn, and a loop may draw one without training it.
        """
        if samples not in self._sizes or fresh:
            self._sizes.add(samples)
            # For a new size a device selects kernels and allocates memory, and a compiled model
            # may be compiled again.
            if compiled or self.timer.on_device:
                self.timer.spoil()
