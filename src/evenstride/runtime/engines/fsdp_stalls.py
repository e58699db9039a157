"""Marks where FSDP2 makes the compute stream of a device wait for other ranks.

The host waits in none of FSDP2's collectives on a device. The compute stream does, in these methods
of a parameter group (torch 2.6 to 2.15):

- ``wait_for_unshard``, before forward and backward of a module, waits for its all-gather;
- ``unshard``, when a program calls it by itself, may run the all-gather on the compute stream;
- ``post_backward`` waits for an earlier reduce-scatter whose input buffer is to be used again;
- ``_wait_for_post_backward`` waits for the group's earlier reduction in the same step.

The callback at the end of the backward pass waits for all reductions. This wait needs no marks of
its own: it is between the timer's marks ``gradients_ready`` and ``synchronised``. But from torch
2.15 on, a program can wait by itself (``set_manual_backward_finalization``). Then the method of the
root that waits is marked.

Each method is replaced on its object. The new one queues the same wait first, between two marks of
the timer, and then calls the method. A stream that waits for an event twice does nothing the second
time, so neither results nor the order of the collectives change. The time between the two marks is
what the compute stream idled; communication that overlaps with work is not counted.

`evenstride.runtime.engines.fsdp_source` compares the installed torch with all this.

A step has two marks for each wait, which take a few microseconds of host time each. In a model of
many modules with short steps, that may exceed 0.3 % of the time. Then only every n-th step has
marks, and the steps in between do not enter the estimates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch.distributed as dist

from evenstride.runtime.engines.fsdp_source import ENDS, MARKED, moved
from evenstride.runtime.timing.device_timer import RankClock
from evenstride.runtime.timing.step_timer import StepTimer

_Wait = Callable[[], object]

MOST_COST = 0.003
"""Host time that marks should take at most, as a fraction of the steps' time."""
_ALWAYS_MARKED = 50  # steps at the start, in which the split is found
_MOST_APART = 20  # steps from one with marks to the next, even if they cost more
_RECENT = 25  # steps whose median says what a step and its marks take; one alone is too noisy


class StallMarks:
    """Marks the waits of one model's parameter groups on this rank."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock
        self._step, self._began_s, self._spent_s = -1, 0.0, 0.0
        self._every, self._marks_this_step = 1, False
        self._steps_s = deque[float](maxlen=_RECENT)
        self._costs_s = deque[float](maxlen=_RECENT)  # of steps with marks

    def watch(self, group: Any) -> None:
        """Mark the waits of a parameter group, in place of earlier marks."""
        for name, waits in _WAITS.items():
            self._replace(group, name, waits)

    def watch_end(self, state: Any) -> None:
        """Mark the waits of a root's state that end a backward pass by hand."""
        self._replace(state, ENDS, _for_end)

    def _replace(self, owner: Any, name: str, waits: Callable[..., list[_Wait] | None]) -> None:
        if not hasattr(owner, name):
            return  # only newer releases have it
        method = getattr(owner, name)
        # FSDP calls these methods on the instance, so an attribute of it comes first.
        inner = method.inner if isinstance(method, _MarkedMethod) else method
        setattr(owner, name, _MarkedMethod(inner, partial(waits, owner), self))

    @property
    def marked(self) -> bool:
        """Whether the step in progress has marks."""
        timer = self._clock.timer
        if timer.step != self._step:
            self._begin(timer)
        return self._marks_this_step

    def mark(self, find_waits: Callable[[], list[_Wait] | None]) -> None:
        """Queue the waits that are found, between two marks.

        A wait that cannot be marked (``None``) leaves the step in progress out of the estimates.
        """
        timer = self._clock.timer
        began_s = timer.now()
        waits = find_waits()
        if waits is None:
            timer.spoil()
        elif waits:
            timer.wait_began()
            for wait in waits:
                wait()
            timer.wait_ended()
        self._spent_s += timer.now() - began_s

    def _begin(self, timer: StepTimer) -> None:
        now_s = timer.now()
        if self._step >= 0:
            # The host's time from step to step is the device's, as it cannot run ahead for ever.
            self._steps_s.append(now_s - self._began_s)
        if self._marks_this_step:
            self._costs_s.append(self._spent_s)
        if self._costs_s and timer.step > _ALWAYS_MARKED:
            cost = median(self._costs_s) / max(median(self._steps_s), 1e-9)
            self._every = min(max(math.ceil(cost / MOST_COST), 1), _MOST_APART)
        self._step, self._began_s, self._spent_s = timer.step, now_s, 0.0
        self._marks_this_step = timer.step <= _ALWAYS_MARKED or timer.step % self._every == 0
        if not self._marks_this_step:
            timer.spoil()  # its waits would count as work


class _MarkedMethod:
    """A method of FSDP2, before which its waits are queued between marks."""

    def __init__(
        self, inner: Callable[..., Any], waits: Callable[..., list[_Wait] | None], marks: StallMarks
    ) -> None:
        self.inner, self._waits, self._marks = inner, waits, marks

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._marks.marked:
            self._marks.mark(partial(self._waits, *args, **options))
        return self.inner(*args, **options)


def unmarkable(group: Any) -> str:
    """Return what this release of torch lacks or adds that the marks rely on; empty if nothing."""
    lacks = next((name for name in (*MARKED, *_READ) if not hasattr(group, name)), "")
    return f"no FSDPParamGroup.{lacks}" if lacks else moved()


def _for_unshard(group: Any, async_op: bool = False) -> list[_Wait]:
    if async_op or group._all_gather_result is not None or group.is_unsharded:
        return []
    streams = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
    if group.device_handle.current_stream() not in streams:
        return []
    # The copy into the buffer is work, but small. A second call does nothing.
    return [partial(type(group).unshard, group)]


def _for_gather(group: Any, *_: Any) -> list[_Wait]:
    result = group._all_gather_result
    if result is None:
        return []
    waits = _events(group, [result.all_gather_event])
    if isinstance(result.all_gather_work, dist.Work):
        waits.append(result.all_gather_work.wait)
    return waits


def _for_buffer(group: Any, *_: Any) -> list[_Wait] | None:
    """Return the waits before a reduce-scatter; ``None`` if not all of them are known."""
    if not group.reduce_grads:
        return []
    # Modules that were sharded together, of which only some ran: torch then waits for this group's
    # own reduction, which has not begun yet.
    if len(group.modules) > 1 and group._training_state.name == "FORWARD":
        return None
    context = group.comm_ctx
    if hasattr(context, "reduce_scatter_state"):  # older releases have one buffer
        states, most = [context.reduce_scatter_state], 1
    elif not hasattr(context, "reduce_scatter_states"):
        return None
    else:
        if group._param_group_index != group._num_param_groups - 1:
            return []
        states = context.reduce_scatter_states
        most = getattr(context, "reduce_scatter_max_input_buffers", 1)  # from torch 2.13 on
    used = [state.event for state in states if state is not None]
    return _events(group, used[: max(len(used) - most + 1, 0)])


def _for_reduction(group: Any, *_: Any) -> list[_Wait]:
    # Set by an earlier backward pass of the step; the end of the last one clears both.
    reduced = group._all_reduce_state
    return _events(group, [group._post_reduce_event, reduced and reduced.event])


def _for_end(state: Any) -> list[_Wait]:
    if not state._state_ctx.manual_backward_finalization_active:
        return []  # in the backward pass
    context = state._comm_ctx
    reduced = [*context._last_post_reduce_events.values()]
    used = [one.event for one in context.reduce_scatter_states]
    groups = [group for one in state._state_ctx.all_states for group in one._fsdp_param_groups]
    return [
        *_events(context, reduced + used),
        *(wait for one in groups for wait in _for_gather(one)),
    ]


def _unknown(*_: Any) -> None:
    """Return no waits, so that the step is left out."""


def _events(owner: Any, events: Sequence[Any]) -> list[_Wait]:
    known = [event for event in events if event is not None]
    if not known:
        return []
    stream = owner.device_handle.current_stream()
    return [partial(stream.wait_event, event) for event in known]


_WAITS: dict[str, Callable[..., list[_Wait] | None]] = {
    "unshard": _for_unshard,
    "wait_for_unshard": _for_gather,
    "post_backward": _for_buffer,
    "_wait_for_post_backward": _for_reduction,
    "_reset_iter_state": _unknown,  # after an error, from torch 2.13 on
}
_READ = (
    "_all_gather_result",
    "_post_reduce_event",
    "_all_reduce_state",
    "comm_ctx",
    "device_handle",
)
