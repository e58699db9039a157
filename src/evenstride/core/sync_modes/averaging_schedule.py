"""When workers that train on their own bring their weights together.

Rounds are counted from where an epoch begins, or from where training on one's own does if that is
later; the last of an epoch is as long as what is left. So whether a step ends a round follows from
the committed position alone: a restored run goes on in the same rounds, and every epoch that has
ended leaves one model behind, for evaluation and for checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from evenstride.core.sync_modes.mode_specs import LocalSgd


@dataclass(frozen=True, slots=True)
class RoundPosition:
    """Where a step stands in a run; the same on all ranks."""

    step: int  # steps of the run that were committed before it, also before a restart
    position: int  # samples of the epoch that were committed before it
    window: int  # samples of the step, over all ranks
    end: int  # samples of an epoch that are trained
    global_batch: int  # samples of a full step
    last: bool = False  # whether the run is to end after it

    @property
    def ends_epoch(self) -> bool:
        """Whether nothing of the epoch, or of the run, is left after the step."""
        return self.last or self.position + self.window >= self.end


def on_their_own(mode: LocalSgd, place: RoundPosition) -> bool:
    """Return whether each worker's optimizer steps by its own gradient in a step."""
    return place.step >= mode.after


def ends_round(mode: LocalSgd, place: RoundPosition) -> bool:
    """Return whether the weights are averaged after a step.

    >>> mode = LocalSgd(every=3)  # and 5 steps to an epoch
    >>> [ends_round(mode, RoundPosition(5 + s, 4 * s, 4, 20, 4)) for s in range(5)]
    [False, False, True, False, True]
    """
    if not on_their_own(mode, place):
        return False
    in_epoch = -(-place.position // place.global_batch)
    before = min(in_epoch, place.step - mode.after)
    return place.ends_epoch or (before + 1) % mode.every == 0
