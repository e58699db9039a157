"""What to do about a worker that will be taken away, by the time that is left.

A notice gives little time (30 s on some clouds, 120 s on others, none on a signal), and may be
withdrawn. So the worker's samples go to the others at once, the state is saved at once, and the
worker goes on taking part without samples until shortly before it is taken. Then the state is
saved once more, nothing is lost, and it ends by itself: others that wait in a collective for one
that was taken would notice only when connections break.
"""

from __future__ import annotations

from dataclasses import dataclass

# A save may take so many times as long as the latest did.
_SAVE_SPREAD = 1.5
# Time for the decision to reach all, beyond the steps that are drawn already.
_DECISION_S = 1.0
# A worker ends before the time that its notice names by this much at least: clocks differ.
_EARLY_S = 3.0
# Steps from a decision until it is carried out.
STEPS_AHEAD = 3


@dataclass(frozen=True, slots=True)
class Leave:
    """What is done about one notice.

    Args:
        save: whether the state is saved now.
        go: whether the worker ends after that.
        reason: a clause for people.
    """

    save: bool
    go: bool
    reason: str


def needed_s(save_s: float, step_s: float) -> float:
    """Return the seconds that it takes from a decision until the state is saved."""
    return _SAVE_SPREAD * save_s + STEPS_AHEAD * step_s + _DECISION_S


def leave(left_s: float | None, save_s: float | None, step_s: float, *, again: bool) -> Leave:
    """Return what to do about a worker that is to leave.

    Args:
        left_s: seconds until it is taken away; ``None`` if it should go as soon as possible.
        save_s: seconds that a checkpoint takes; ``None`` if the run takes none.
        step_s: expected step time; 0 if not known.
        again: whether the state was saved for this notice before.
    """
    if save_s is None:
        return Leave(False, False, "the run saves no checkpoints")
    needs_s = needed_s(save_s, step_s)
    if left_s is None:
        return Leave(True, True, "the state is saved, then it ends")
    if left_s < needs_s:
        return Leave(
            False, True, f"{max(left_s, 0):.0f} s are too short for a checkpoint ({needs_s:.0f} s)"
        )
    if left_s < 2 * needs_s + _EARLY_S:
        return Leave(True, True, "the state is saved, then it ends")
    if again:
        return Leave(False, False, "it takes part without samples until then")
    return Leave(True, False, "the state is saved, and it takes part without samples until then")
