"""The global batch of the next epoch, if its size is open.

At the noise scale ``phi``, training to a given result takes ``e_min (1 + B / phi)`` epochs. So its
time is proportional to ``t(B) (phi + B) / B``, where ``t(B)`` is the step time under the policy's
split of ``B``. Both are measured during training. A batch is compared at the end of the interval of
``phi`` that is worse for it, because training with the batch does not narrow that interval. Its
step time is the expected time of the slowest worker, with uncertainty, because a trial does narrow
that. Step times are known near the trained shares, so a batch at most doubles or halves at a time.

Source:
    The goodput of Qiao et al., "Pollux", OSDI 2021, section 3 (see
    `evenstride.core.convergence.batch_efficiency`). There the batch follows estimates without
    their intervals, and can change between any two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from evenstride.core.control.events import EpochEnded
from evenstride.core.convergence.batch_efficiency import efficiency
from evenstride.core.formatting import signed_part

MIN_GAIN = 0.05
"""Smallest fraction of the time to the same result that a change of batch must save."""

# Sizes to consider between a batch and its double; and the largest factor of one change.
_PER_DOUBLING, _FURTHEST = 4, 2.0


@dataclass(frozen=True, slots=True)
class BatchOutlook:
    """A global batch and the predicted time of its step."""

    batch: int  # samples
    step_s: float  # mean step of the slowest worker, communication included
    late_s: float  # expected step, with the uncertainty of the curves


def better_of(
    now: BatchOutlook | None, others: Sequence[BatchOutlook], event: EpochEnded
) -> tuple[int | None, str]:
    """Return the index of the batch that saves enough and most, if any, and the reason.

    ``now`` is ``None`` if a worker's step has not been measured.
    """
    if event.scale_low is None:
        return None, "the global batch stays: the noise scale of the gradient is not known"
    if now is None:
        return None, "the global batch stays: some workers have no measured step"
    if not others:
        return None, f"the global batch stays {now.batch}: no other size is possible"
    gains = [_careful_gain(now, then, event) for then in others]
    gain = max(gains)
    best = others[gains.index(gain)]
    if gain <= MIN_GAIN:
        return None, (
            f"the global batch stays {now.batch}: at {_noise(event)} no other size is expected to "
            f"save {MIN_GAIN:.0%} of the time to the same result ({best.batch}: "
            f"{signed_part(gain, ('less', 'more'))})"
        )
    return gains.index(gain), (
        f"global batch {now.batch} -> {best.batch}: at {_noise(event)}, with steps of "
        f"{best.step_s * 1e3:.1f} ms instead of {now.step_s * 1e3:.1f}, it is expected to save "
        f"{gain:.1%} of the time to the same result"
    )


def _careful_gain(now: BatchOutlook, then: BatchOutlook, event: EpochEnded) -> float:
    """Return the fraction of time that another batch saves, at the worse end of the noise scale."""
    high = inf if event.scale_high is None else event.scale_high
    # Less noise makes a larger batch worth less and a smaller batch worth more.
    phi = (event.scale_low or 0.0) if then.batch > now.batch else high
    worth = efficiency(phi, now.batch, then.batch)
    # The present step has been measured. The other one counts with its full uncertainty.
    return 1.0 - (then.late_s / then.batch) / (now.step_s / now.batch) / worth


def sizes(low: int, high: int, present: int, quantum: int = 1) -> tuple[int, ...]:
    """Return the batches from ``low`` to ``high`` that may follow the present one, ascending.

    They are multiples of ``quantum`` as far as the bounds allow, and exclude the present one.

    >>> sizes(64, 1024, 64), sizes(64, 100, 100)
    ((76, 91, 108, 128), (64, 76, 91))
    """
    # The bounds are valid sizes, so the ends of the range can always be reached.
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
        return f"a noise scale without upper bound (95 %: {between} samples)"
    return f"a noise scale of {event.scale:.0f} samples (95 %: {between})"
