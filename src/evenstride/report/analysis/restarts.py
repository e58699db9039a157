"""How many steps of a training lie before each of its processes, as far as they were kept.

A process counts its steps from its own start. Where it goes on with the training is in epochs, in
the record of its first pass; what the processes before it trained beyond that was undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from evenstride.report.analysis.run_timeline import LeaderProcess
from evenstride.trace.read import DataPass

_SAME = 1e-9  # epochs, by which sums of steps may differ from a position


def kept_before(lives: Sequence[LeaderProcess]) -> tuple[int, ...]:
    """Return for each process how many steps the training had when it began.

    Args:
        lives: all processes of a run, in order. One that tells of no pass goes on where the one
            before it was last heard of.
    """
    kept: list[int] = []
    course: list[DataPass] = []  # of the training as it is, with the steps of all of it
    end = 0
    for life in lives:
        passes = life.passes
        start = end
        if passes and course:
            course = [one for one in course if one.epochs <= passes[0].epochs + _SAME]
            start = _steps_until(passes[0].epochs, course[-1]) if course else 0
            start -= passes[0].step
        course += [one._replace(step=start + one.step) for one in passes]
        end = start + max((one.first + one.steps for one in life.generations), default=0)
        kept.append(start)
    return tuple(kept)


def _steps_until(epochs: float, last: DataPass) -> int:
    """Return the steps of a training that stands so far within its last pass."""
    # An epoch's last step may have fewer samples, and counts as one.
    each = last.batch / last.samples
    return last.step + ceil(round((epochs - last.epochs) / each, 6))
