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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from evenstride.core.allocation.proportional_split import apportion
from evenstride.core.allocation.step_forecast import StepForecast
from evenstride.core.control.events import (
    EpochEnded,
    Verdict,
)
from evenstride.core.control.state import Control, allowed, expected, serving
from evenstride.core.convergence.batch_efficiency import efficiency
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.policy import Move
from evenstride.errors import ConfigError

MIN_GAIN = 0.05
"""Part of the time to the same result that a change must save, to be worth another batch."""

# Sizes that are looked at between a batch and its double; and how far one change may go.
_PER_DOUBLING, _FURTHEST = 4, 2.0


@dataclass(frozen=True, slots=True, eq=False)
class _Prospect:
    """A batch, what it would be trained with, and its step.

    Args:
        batch: samples.
        control: with that batch.
        opening: its split.
        step_s: seconds of the slowest worker's mean step, communication included.
        late_s: seconds expected of the latest, as far as the curves are known.
    """

    batch: int
    control: Control
    opening: Move
    step_s: float
    late_s: float


def epoch_ended(control: Control, event: EpochEnded) -> tuple[Control, Verdict]:
    """Return the control with the batch of the next epoch, and the verdict.

    Raises:
        ConfigError: the batch is to be one that the fleet cannot be served with.
    """
    assert control.fleet is not None, "a fleet forms before an epoch ends"
    present = control.fleet.global_batch
    nearest = min(max(present, event.low), event.high)
    # A batch outside of its bounds must change, whatever the change is worth.
    if nearest != present:
        after, opening = rebatched(control, nearest, event.step)
        allowed_are = f"{event.low} to {event.high}" if event.low < event.high else "restored"
        why = f"global batch {present} -> {nearest} ({allowed_are})"
        return _changed(after, event, why, opening)
    best, reason = _better(control, event)
    if best is None:
        return _kept(control, event, reason)
    return _changed(best.control, event, reason, best.opening)


def rebatched(control: Control, batch: int, step: int) -> tuple[Control, Move]:
    """Return the control with the same workers and another global batch, and its split.

    All that was learned of the workers stays. A policy that has moved the shares goes on from
    shares in the same proportion; one that has not, from its opening.

    Args:
        control: with a fleet.
        batch: samples.
        step: steps the leader had committed.

    Raises:
        ConfigError: the fleet cannot be served with it.
    """
    return serving(control, control.roster, batch, step, lambda fleet: _scaled(control, fleet))


def _scaled(control: Control, fleet: Fleet) -> Move | None:
    assert control.fleet is not None, "there is a fleet"
    # Shares that are still those of the opening are opened again: scaled up, the remainder of an
    # equal split would grow with the batch.
    opening = control.policy.init(control.fleet)[1].shares
    if allowed(opening, control.fleet) == control.shares:
        return None
    at = as_array(control.shares)
    upper = np.where(at > 0, fleet.upper, 0)
    lower = np.minimum(fleet.lower, upper)
    if int(upper.sum()) < fleet.global_batch:  # whoever was left out is needed now
        lower, upper = fleet.lower, fleet.upper
    shares = apportion(at.astype(np.float64), fleet.global_batch, lower, upper)
    return Move(as_shares(shares), "in proportion to the shares before")


def _better(control: Control, event: EpochEnded) -> tuple[_Prospect | None, str]:
    """Return the batch that saves most, if that is enough; and why, or why not."""
    now = _prospect(control, Move(control.shares, ""))
    if event.scale_low is None:
        return None, "the global batch stays: the noise of the gradient is not known"
    if now is None:
        return None, "the global batch stays: not every worker's step has been measured"
    found = [(_careful_gain(now, then, event), then) for then in _others(control, event)]
    if not found:
        return None, f"the global batch stays {now.batch}: no other is possible"
    # By gain alone: without a key, equal gains would compare the prospects, which have no order.
    gain, best = max(found, key=lambda one: one[0])
    if gain <= MIN_GAIN:
        return None, (
            f"the global batch stays {now.batch}: at {_noise(event)} no other is expected to save "
            f"{MIN_GAIN:.0%} of the time to the same result ({best.batch}: {gain:.1%})"
        )
    return best, (
        f"global batch {now.batch} -> {best.batch}: at {_noise(event)}, with steps of "
        f"{best.step_s * 1e3:.1f} ms instead of {now.step_s * 1e3:.1f}, it is expected to save "
        f"{gain:.1%} of the time to the same result"
    )


def _careful_gain(now: _Prospect, then: _Prospect, event: EpochEnded) -> float:
    """Return the part of the time that another batch saves, at the worse end of the noise scale."""
    high = inf if event.scale_high is None else event.scale_high
    # The less noise there is, the less a larger batch is worth, and the more a smaller one.
    phi = (event.scale_low or 0.0) if then.batch > now.batch else high
    worth = efficiency(phi, now.batch, then.batch)
    # The present step has been measured. The other one counts with all the doubt about it.
    return 1.0 - (then.late_s / then.batch) / (now.step_s / now.batch) / worth


def _others(control: Control, event: EpochEnded) -> Iterator[_Prospect]:
    assert control.fleet is not None, "there is a fleet"
    present, quantum = control.fleet.global_batch, int(control.fleet.quanta.max())
    for batch in sizes(event.low, event.high, present, quantum):
        try:
            # Caps may be raised for a batch that a run must have, not for one that it may choose.
            if not control.memory.of(control.roster.serving).fits(control.roster.fleet(batch)):
                continue
            prospect = _prospect(*rebatched(control, batch, event.step))
        except ConfigError:  # bounds, or shares that are given, do not sum up to it
            continue
        if prospect is not None:
            yield prospect


def sizes(low: int, high: int, present: int, quantum: int = 1) -> tuple[int, ...]:
    """Return the batches that may follow on another, ascending, without that one.

    Args:
        low: smallest.
        high: largest.
        present: batch in samples.
        quantum: of which they are multiples, as far as the bounds allow.

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


def _prospect(control: Control, opening: Move) -> _Prospect | None:
    """Return what a batch comes to under a split; ``None`` where that is not known."""
    estimate, fleet = control.estimate, control.fleet
    assert fleet is not None, "there is a fleet"
    if estimate is None or not estimate.known:
        return None
    at, shared_s = as_array(opening.shares), control.communication_s
    # Ghosts take part in the collectives too.
    mean_s = estimate.model.at(np.maximum(at, 1))  # who has a share of 0 runs one sample
    return _Prospect(
        batch=fleet.global_batch,
        control=control,
        opening=opening,
        step_s=float(mean_s.max()) + shared_s,
        late_s=StepForecast(estimate, fleet).step_s(at) + shared_s,
    )


def _noise(event: EpochEnded) -> str:
    low, high = f"{event.scale_low or 0.0:.0f}", event.scale_high
    between = f"at least {low}" if high is None else f"{low} to {high:.0f}"
    if event.scale is None:
        return f"a noise scale without bound (95 %: {between} samples)"
    return f"a noise scale of {event.scale:.0f} samples (95 %: {between})"


def _changed(
    control: Control, event: EpochEnded, why: str, opening: Move
) -> tuple[Control, Verdict]:
    assert control.fleet is not None, "there is a fleet"
    cadence = control.cadence
    # What was calm with the former batch says nothing about this one.
    after = replace(control, cadence=replace(cadence, steps=cadence.fewest_steps))
    expect, _ = expected(after)
    blocking = after.opening_left > 0
    return after, Verdict(
        event.effective,
        after.rank_shares,
        blocking,
        expect.expected_s,
        expect.band,
        opening.reason,
        batch=control.fleet.global_batch,
        why_batch=why,
        # The first step of a pass is never modelled, so the first exchange is after the second.
        exchange_after=2 if blocking else cadence.fewest_steps,
    )


def _kept(control: Control, event: EpochEnded, reason: str) -> tuple[Control, Verdict]:
    expect, _ = expected(control)
    blocking = control.opening_left > 0
    return control, Verdict(
        event.effective,
        None,
        blocking,
        expect.expected_s,
        expect.band,
        reason,
        exchange_after=1 if blocking else control.cadence.steps,
    )
