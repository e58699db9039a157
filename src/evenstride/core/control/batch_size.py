"""Which global batch the next epoch has, where that is left open.

At the noise scale ``phi`` a training to a given result takes ``e_min (1 + B / phi)`` epochs. So its
time is in proportion to ``t(B) (phi + B) / B``, where ``t(B)`` is the step under the split that the
policy makes of ``B``. Both are measured while it trains. A batch is judged by the end of the
interval of ``phi`` that is worse for it, since training with it does not tell more of that. Its
step is judged by what is expected of the latest worker, doubts included, as trying it tells. Steps
are known around the shares that were trained, so a batch is at most doubled or halved at a time.

Source:
    The goodput of Qiao et al., "Pollux", OSDI 2021, section 3 (see
    `evenstride.core.convergence.batch_efficiency`); there the batch follows estimates without
    their intervals, and between any two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from evenstride.core.control.events import EpochEnded
from evenstride.core.convergence.batch_efficiency import efficiency

MIN_GAIN = 0.05
"""Part of the time to the same result that a change must save, to be worth another batch."""

# Sizes that are looked at between a batch and its double; and how far one change may go.
_PER_DOUBLING, _FURTHEST = 4, 2.0


@dataclass(frozen=True, slots=True)
class BatchOutlook:
    """A global batch and what its step would take."""

    batch: int  # samples
    step_s: float  # of the slowest worker's mean step, communication included
    late_s: float  # expected of the latest worker, as far as the curves are known


def better_of(
    now: BatchOutlook | None, others: Sequence[BatchOutlook], event: EpochEnded
) -> tuple[int | None, str]:
    """Return the place of the batch that saves most, if that is enough; and why, or why not.

    ``now`` is ``None`` where some worker's step has not been measured.
    """
    if event.scale_low is None:
        return None, "the global batch stays: the noise of the gradient is not known"
    if now is None:
        return None, "the global batch stays: not every worker's step has been measured"
    if not others:
        return None, f"the global batch stays {now.batch}: no other is possible"
    gains = [_careful_gain(now, then, event) for then in others]
    gain = max(gains)
    best = others[gains.index(gain)]
    if gain <= MIN_GAIN:
        return None, (
            f"the global batch stays {now.batch}: at {_noise(event)} no other is expected to save "
            f"{MIN_GAIN:.0%} of the time to the same result ({best.batch}: {gain:.1%})"
        )
    return gains.index(gain), (
        f"global batch {now.batch} -> {best.batch}: at {_noise(event)}, with steps of "
        f"{best.step_s * 1e3:.1f} ms instead of {now.step_s * 1e3:.1f}, it is expected to save "
        f"{gain:.1%} of the time to the same result"
    )


def _careful_gain(now: BatchOutlook, then: BatchOutlook, event: EpochEnded) -> float:
    """Return the part of the time that another batch saves, at the worse end of the noise scale."""
    high = inf if event.scale_high is None else event.scale_high
    # The less noise there is, the less a larger batch is worth, and the more a smaller one.
    phi = (event.scale_low or 0.0) if then.batch > now.batch else high
    worth = efficiency(phi, now.batch, then.batch)
    # The present step has been measured. The other one counts with all the doubt about it.
    return 1.0 - (then.late_s / then.batch) / (now.step_s / now.batch) / worth


def sizes(low: int, high: int, present: int, quantum: int = 1) -> tuple[int, ...]:
    """Return the batches from ``low`` to ``high`` that may follow on the present one, ascending.

    They are multiples of ``quantum`` as far as the bounds allow, without the present one.

    >>> sizes(64, 1024, 64), sizes(64, 100, 100)
    ((76, 91, 108, 128), (64, 76, 91))
    """
    # The bounds are possible as they are, and so the ends of the range can always be reached.
    found, place = {low, high}, 1
    # On a grid from the lower bound, so that the sizes do not depend on the present batch.
    while (size := round(low * 2.0 ** (place / _PER_DOUBLING))) < high:
        found.add(max(size - size % quantum, low))
        place += 1
    near = (n for n in found if present / _FURTHEST <= n <= present * _FURTHEST and n != present)
    return tuple(sorted(near))


def _noise(event: EpochEnded) -> str:
    low, high = f"{event.scale_low or 0.0:.0f}", event.scale_high
    between = f"at least {low}" if high is None else f"{low} to {high:.0f}"
    if event.scale is None:
        return f"a noise scale without bound (95 %: {between} samples)"
    return f"a noise scale of {event.scale:.0f} samples (95 %: {between})"
