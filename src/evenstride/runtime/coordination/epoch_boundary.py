"""The leader's side of a turn: who stands where, and what the core is asked."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from evenstride.core.control.events import EpochEnded
from evenstride.core.gradients.noise_scale import NoiseEstimate
from evenstride.errors import SplitDiverged
from evenstride.runtime.coordination.messages import BatchChange


def meeting(
    turns: Sequence[BatchChange | None], drawn: Sequence[int]
) -> tuple[BatchChange | None, ...] | None:
    """Return the ranks' turns, if there is something to decide for those who stand at one.

    That is where all stand at the same one; or where somebody has drawn the step after it and so
    will never stand there, having left the loop just before its end.

    Args:
        turns: of all ranks, in rank order; ``None`` for those who go on.
        drawn: first step that each of them has not drawn.

    Returns:
        The turns; ``None`` where nobody stands at one, or some are still on their way.

    Raises:
        SplitDiverged: ranks need different batches.
    """
    there = [(rank, turn) for rank, turn in enumerate(turns) if turn is not None]
    if not there:
        return None
    _, first = there[0]
    passed = [rank for rank, at in enumerate(drawn) if turns[rank] is None and at > first.step]
    if len(there) < len(turns) and not passed:
        return None
    for rank, turn in there:
        if (turn.step, turn.wanted) != (first.step, first.wanted):
            raise _apart(there[0], (rank, turn))
    if passed and first.wanted is not None:
        raise SplitDiverged(
            f"rank {there[0][0]} goes on with the global batch of {first.wanted} that it restored, "
            f"but rank {passed[0]} with that of before; load the same state on every rank"
        )
    return tuple(turns)


def asked(
    met: Sequence[BatchChange | None],
    step: int,
    present: int,
    bounds: tuple[int, int] | None,
    noise: NoiseEstimate,
) -> EpochEnded | None:
    """Return what the core is asked at a turn; ``None`` if the batch in force is kept unasked.

    Args:
        met: turns of the ranks.
        step: steps the leader has committed.
        present: batch in force.
        bounds: smallest and largest batch that may be chosen; ``None`` if it is not left open.
        noise: of the gradients so far.
    """
    there = [turn for turn in met if turn is not None]
    if len(there) < len(met):
        return None
    wanted, first = there[0].wanted, there[0].step
    if wanted is not None:
        return None if wanted == present else EpochEnded(step, first, wanted, wanted)
    low, high = bounds or (present, present)
    high = max(low, min(high, *(turn.most for turn in there)))
    # With weighted batches the noise scale is in weights, which are no samples.
    if not noise.steps or any(turn.weighted for turn in there):
        return EpochEnded(step, first, low, high)
    scale = noise.scale()
    return EpochEnded(step, first, low, high, _finite(scale.value), scale.low, _finite(scale.high))


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _apart(one: tuple[int, BatchChange], other: tuple[int, BatchChange]) -> SplitDiverged:
    def told(rank: int, turn: BatchChange) -> str:
        batch = "to choose a global batch" if turn.wanted is None else f"with {turn.wanted} samples"
        return f"rank {rank} stands after {turn.step} steps {batch}"

    return SplitDiverged(
        f"{told(*one)}, but {told(*other)}; load the same state on every rank and leave the loop "
        "at the same step"
    )
