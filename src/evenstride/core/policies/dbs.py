"""DBS: once per epoch, shares in proportion to the speeds of the epoch.

Source:
    Ye et al., "DBS: Dynamic Batch Size for Distributed Deep Neural Network Training", arXiv
    2007.11831 (and DLB, IEEE TETCI, doi:10.1109/TETCI.2022.3220224). With ``d_i`` the fraction of
    the batch that worker ``i`` has and ``t_i`` its training time in the epoch without waiting,
    ``d_i' = (d_i / t_i) / sum_j (d_j / t_j)`` and its next batch is ``d_i' B``. The first epoch
    has equal batches. Rounding: down; then, with ``k`` units missing, one more for each of the
    ``k`` largest remainders that is at least 0.5. There is no smoothing, no dead-band and no
    bound.

How we differ:
    * That rounding may leave the batch too small (the authors renormalise and train on less).
      Here missing units go to the largest remaining remainders, so the sum is always ``B``.
    * An epoch is that of the training loader, of any length. All ranks exchange at its end, and the
      new split holds from the first step of the next. With `asp` and `ssp` the workers have no step
      in common. There it decides at the first exchange in a new epoch of the leader, 5 s later at
      most. ``epoch_steps`` counts steps instead. If the data's epoch is not known, 100 steps are an
      epoch: under torchft, and in a scenario without ``epoch_samples``.
    * ``t_i`` is a mean per step instead of a sum over the epoch, which is the same if all
      steps count. Steps at an earlier share, the first of a pass and tails do not count.
    * The bounds of the workers hold; a share outside of them becomes the bound.
    * Weights follow the shares as everywhere in this library. As theirs, the data set is
      partitioned again in every epoch, in proportion to the batches (`Stride.loader`). Data that
      cannot be partitioned is split step by step: streams, shards, samples with costs, and in `asp`
      and `ssp`. So is all data with ``epoch_steps``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from evenstride.core.allocation.integer_splits import apportion
from evenstride.core.allocation.speedup import equal_split
from evenstride.core.arrays import FloatArray, IntArray, Shares
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.spec import check_settings, within
from evenstride.core.time_model.observation import SHORTEST_S


@dataclass(frozen=True, slots=True, eq=False)
class Means:
    """Mean step times at the shares in force, one entry per worker in arrays of shape ``(W,)``."""

    total_s: FloatArray  # sum of each worker's times
    steps: IntArray  # number of times in it

    @classmethod
    def none(cls, workers: int) -> Means:
        return cls(np.zeros(workers), np.zeros(workers, dtype=np.int64))

    def including(self, situation: Situation) -> Means:
        seen, workers = situation.in_force, len(self.steps)
        owner = np.repeat(seen.worker, seen.steps)
        times_s = np.maximum(seen.busy_s, SHORTEST_S)
        return Means(
            self.total_s + np.bincount(owner, weights=times_s, minlength=workers),
            self.steps + np.bincount(owner, minlength=workers),
        )

    @property
    def mean_s(self) -> FloatArray:
        """Mean times, 0 for workers without times, ``(W,)``."""
        return np.asarray(self.total_s / np.maximum(self.steps, 1))


# Number of steps that count as an epoch if the length of the data's epoch is not known.
UNKNOWN_EPOCH_STEPS = 100


@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """The state of policies that decide at the end of an epoch."""

    number: int | None  # of the epoch of the times; ``None`` before the first time
    means: Means  # step times in it

    @classmethod
    def begin(cls, workers: int, number: int | None = None) -> Epoch:
        return cls(number, Means.none(workers))

    def following(self, situation: Situation, epoch_steps: int) -> Epoch:
        """Return the state at the beginning of the epoch of the next step."""
        number = epoch_of(situation, epoch_steps, situation.step)
        return Epoch.begin(
            len(self.means.steps), number + (epoch_steps == 0 and situation.epoch_over)
        )

    def including(self, situation: Situation, epoch_steps: int) -> Epoch:
        number, reports = self.number, situation.observations
        if number is None and len(reports):
            # The epoch of the first time; its exchange may come only in the next epoch.
            number = epoch_of(situation, epoch_steps, int(reports.first_step.min()))
        return replace(self, number=number, means=self.means.including(situation))

    def unfinished(self, situation: Situation, epoch_steps: int) -> str | None:
        """Return why it is too early to decide; ``None`` if it is time."""
        by_data = epoch_steps == 0 and situation.epoch is not None
        number = epoch_of(situation, epoch_steps, situation.step)
        over = by_data and situation.epoch_over
        if not over and self.number in (None, number):
            if by_data:
                return "the epoch of the data has not ended"
            return f"an epoch of {epoch_steps or UNKNOWN_EPOCH_STEPS} steps has not ended"
        unseen = (as_array(situation.shares) > 0) & (self.means.steps == 0)
        if unseen.any():
            name = situation.fleet.workers[int(np.argmax(unseen))].name
            return f"no step of worker {name} has been measured in this epoch"
        return None


@dataclass(frozen=True, slots=True)
class Dbs:
    """In proportion to the speeds of the epoch that has just ended."""

    # Number of steps that count as an epoch; 0 for an epoch of the data.
    epoch_steps: int = field(default=0, metadata=within(int))

    def __post_init__(self) -> None:
        check_settings("policy dbs", self)

    # The first epoch is trained on equal shares.
    opening_steps: ClassVar[int] = 0

    @property
    def partition(self) -> str:
        """How the loader splits the data set; a split within an epoch cannot cut parts again."""
        return "step" if self.epoch_steps else "epoch"

    def init(self, fleet: Fleet) -> tuple[Epoch, Move]:
        return Epoch.begin(len(fleet)), Move(equal_split(fleet), "equal split for the first epoch")

    def decide(self, state: Epoch, situation: Situation) -> tuple[Epoch, Decision]:
        """Add the new times; at the end of an epoch, split by its speeds."""
        state = state.including(situation, self.epoch_steps)
        too_early = state.unfinished(situation, self.epoch_steps)
        if too_early is not None:
            return state, Keep(too_early)
        # The times of an epoch count once, whether or not they lead to a move.
        following = state.following(situation, self.epoch_steps)
        shares = as_array(situation.shares)
        mean_s = np.maximum(state.means.mean_s, SHORTEST_S)
        after = _split(shares / mean_s, situation.fleet)
        if after == situation.shares:
            return following, Keep("the speeds of the epoch confirm the current shares")
        return following, Move(after, "in proportion to the speeds of the epoch")


def epoch_of(situation: Situation, epoch_steps: int, step: int) -> int:
    """Return the number of the data's current epoch, or of the epoch of a step."""
    if epoch_steps == 0 and situation.epoch is not None:
        return situation.epoch
    return step // (epoch_steps or UNKNOWN_EPOCH_STEPS)


def _split(speed: FloatArray, fleet: Fleet) -> Shares:
    literal = published_rounding(speed * (fleet.global_batch / speed.sum()), fleet.global_batch)
    inside = ((fleet.lower <= literal) & (literal <= fleet.upper)).all()
    # As published if possible; otherwise units would be missing or bounds violated.
    if inside and int(literal.sum()) == fleet.global_batch:
        return as_shares(literal)
    return as_shares(apportion(speed, fleet.global_batch, fleet.lower, fleet.upper))


def published_rounding(ideal: FloatArray, total: int) -> IntArray:
    """Return the authors' integer batches; their sum may be *less* than ``total``.

    >>> import numpy as np
    >>> published_rounding(np.array([13.7, 16.5, 19.6, 14.2]), 64).tolist()
    [14, 16, 20, 14]
    >>> published_rounding(np.array([10.4, 10.3, 10.3]), 31).tolist()
    [10, 10, 10]
    """
    # A batch that is an integer except for rounding must not lose a sample.
    batches = np.floor(ideal + 1e-9).astype(np.int64)
    remainder = ideal - batches
    missing = max(0, total - int(batches.sum()))
    largest = np.argsort(-remainder, kind="stable")[:missing]
    batches[largest] += remainder[largest] >= 0.5
    return batches
