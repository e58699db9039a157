"""What to do about a worker that will be taken away, by the time that is left.

A notice gives little time: 120 s on some clouds, 30 s on others, next to none on a signal. So the
worker's samples go to the others at once, the state is saved, and it ends by itself with nothing
lost; the others would notice one that was taken only when connections break. Where notices may be
withdrawn, it goes on taking part without samples until shortly before its time, and the state is
saved once more then.
"""

from __future__ import annotations

from dataclasses import dataclass

# A save may take so many times as long as the latest did.
_SAVE_SPREAD = 1.5
# Time for the decision to reach all, beyond the steps that are drawn already.
_DECISION_S = 1.0
# A worker ends before the time that its notice names by this much at least: it may take so long
# until the next exchange, and clocks differ.
_EARLY_S = 8.0


@dataclass(frozen=True, slots=True)
class DepartureOrder:
    """What is done about one notice."""

    save: bool  # whether the state is saved now
    go: bool  # whether the worker ends after that
    reason: str  # a clause for people


def needed_s(save_s: float, ahead_s: float) -> float:
    """Return the seconds that it takes from a decision until the state is saved."""
    return _SAVE_SPREAD * save_s + ahead_s + _DECISION_S


def leave(
    left_s: float | None, save_s: float | None, ahead_s: float, *, final: bool, again: bool
) -> DepartureOrder:
    """Return what to do about a worker that is to leave.

    Args:
        left_s: seconds until it is taken away; ``None`` if it should go as soon as possible.
        save_s: seconds that a checkpoint takes; ``None`` if the run takes none.
        ahead_s: seconds until the decision takes effect: of the steps that are drawn already.
        final: whether the notice will not be withdrawn.
        again: whether the state was saved for this notice before.
    """
    if save_s is None:
        return DepartureOrder(False, False, "the run saves no checkpoints")
    needs_s = needed_s(save_s, ahead_s)
    if left_s is not None and left_s < needs_s:
        short = f"{max(left_s, 0):.0f} s are too short for a checkpoint ({needs_s:.0f} s)"
        return DepartureOrder(False, True, f"{short}, so it ends")
    # To stay, there must be time for two saves: one now and one just before the worker goes.
    if final or left_s is None or left_s < 2 * needs_s + _EARLY_S:
        return DepartureOrder(True, True, "the state is saved, then it ends")
    if again:
        return DepartureOrder(False, False, "it takes part without samples until then")
    return DepartureOrder(
        True, False, "the state is saved, and it takes part without samples until then"
    )
