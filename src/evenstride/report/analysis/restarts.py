"""How many steps of a training lie before each of its processes, as far as they were kept.

A process counts its steps from its own start. Where it goes on with the training is in epochs, in
the record of its first pass; what the processes before it trained beyond that was undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from evenstride.report.analysis.run_timeline import LeaderProcess

_SAME = 1e-9  # epochs, by which sums of steps may differ from a position
_MOST = 1e15  # steps that a training may have


class _EpochPass(NamedTuple):
    """A pass over the data.

    Args:
        step: with which it began.
        epochs: that were trained then.
        each: epochs that are one of its steps.
    """

    step: int
    epochs: float
    each: float


def kept_before(lives: Sequence[LeaderProcess]) -> tuple[int, ...]:
    """Return for each process how many steps the training had when it began.

    Args:
        lives: all processes of a run, in order. One that tells of no pass goes on where the one
            before it was last heard of.
    """
    kept: list[int] = []
    course: list[_EpochPass] = []  # of the training as it is, with the steps of all of it
    end = 0
    for life in lives:
        passes = _passes(life)
        start = end
        if passes and course:
            course = [one for one in course if one.epochs <= passes[0].epochs + _SAME]
            start = _steps_until(passes[0].epochs, course[-1]) if course else 0
            start -= passes[0].step
        course += [one._replace(step=start + one.step) for one in passes]
        end = start + max((one.first + one.steps for one in life.generations), default=0)
        kept.append(start)
    return tuple(kept)


def _steps_until(epochs: float, last: _EpochPass) -> int:
    """Return the steps of a training that stands so far within its last pass."""
    # An epoch's last step may have fewer samples, and counts as one.
    return last.step + ceil(round((epochs - last.epochs) / last.each, 6))


def _passes(life: LeaderProcess) -> list[_EpochPass]:
    """Return what a process told of its passes, without what makes no sense."""
    found = []
    for note in life.notes:
        try:
            if note["kind"] != "pass":
                continue
            of = {**life.header, **note}  # older versions told of the batch in the header alone
            each = int(of["global_batch"]) / int(note["samples"])
            one = _EpochPass(int(note["step"]), float(note["epochs"]), each)
        except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError):
            continue
        if one.each > 0 and 0 <= one.step < _MOST and 0 <= one.epochs / one.each < _MOST:
            found.append(one)
    return sorted(found, key=lambda one: one.step)
