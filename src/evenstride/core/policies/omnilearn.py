"""OmniLearn: the rule of Dynamic Batching once an epoch, with a dead-band for each worker.

Source:
    Tyagi & Sharma, OmniLearn, TPDS 2025, arXiv 2503.17469, and the authors' code
    (github.com/sahiltyagi4/OmniLearn). At the end of an epoch, with ``t_k`` the mean compute
    time of worker ``k`` in it and ``X_k = b_k / t_k``, the candidate is
    ``c_k = b_k - X_k (t_k - mean t)``; a worker keeps ``b_k`` if ``|c_k - b_k| / c_k`` is under
    the dead-band of 0.2. The result is clamped to ``b_min = 16`` and ``b_max = 96``, where workers
    begin with 32; what the clamps cut off or add is spread over all workers equally, and so is,
    after that, what the sum differs from ``B``. Either may lead out of the clamps again.

How we differ:
    * The authors round each worker up, so the sum is ``B`` or somewhat more, and they scale the
      gradients by the sum there is. Here it is rounded to ``B`` by largest remainder.
    * The bounds of the workers hold in the end; ``b_min`` and ``b_max`` are as soft as they are in
      the code, so no global batch is infeasible because of them. Unless ``b_max`` is set, it
      is three times an equal share, as the authors' is of their 32: with 96, workers with a batch
      of more each would stay equal for ever.
    * ``t_k`` is the whole time at work (data, compute, and what is between steps).
    * It decides at the first exchange after an epoch of the training loader, and keeps the split
      until then. ``epoch_steps`` counts steps instead, and 100 steps are an epoch where the
      data's is not known, as in `dbs`.
    * Steps at an earlier share, the first of a pass and tails do not count.
    * Only the shares are set: no scaling of the learning rate, no asynchronous mode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from evenstride.core.allocation.opening_splits import equal_split
from evenstride.core.allocation.proportional_split import apportion
from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.policies.dbs import Epoch, epoch_of
from evenstride.core.policies.dynamic_batching import proportional_step
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.spec import check_settings, within
from evenstride.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OmniLearn:
    """In proportion to the mean speeds of the epoch that has just ended, unless nearly so."""

    # Steps that count as an epoch; 0 for an epoch of the data.
    epoch_steps: int = field(default=0, metadata=within(int))
    # Smallest change, as a part of the new share, that a worker makes.
    dead_band: float = field(default=0.2, metadata=within(float))
    b_min: int = field(default=16, metadata=within(int))  # share below which a candidate is raised
    # Share above which a candidate is lowered; 0 for three times an equal share.
    b_max: int = field(default=0, metadata=within(int))

    def __post_init__(self) -> None:
        check_settings("policy omnilearn", self)
        if 0 < self.b_max < self.b_min:
            raise ConfigError(
                f"policy omnilearn: b_min is {self.b_min} and b_max {self.b_max}; b_max must be "
                "at least b_min, or 0 for three times an equal share"
            )

    # The first epoch is trained on equal shares.
    opening_steps: ClassVar[int] = 0

    def init(self, fleet: Fleet) -> tuple[Epoch, Move]:
        return Epoch.begin(len(fleet)), Move(equal_split(fleet), "equal split for the first epoch")

    def decide(self, state: Epoch, situation: Situation) -> tuple[Epoch, Decision]:
        """Add the new times; at the end of an epoch, change who is outside the dead-band."""
        state, fleet = state.including(situation, self.epoch_steps), situation.fleet
        too_early = state.unfinished(situation, self.epoch_steps)
        if too_early is not None:
            return state, Keep(too_early)
        now = epoch_of(situation, self.epoch_steps, situation.step)
        following = Epoch.begin(len(fleet), now)
        shares = as_array(situation.shares)
        target = self._target(shares, state.means.mean_s, fleet)
        after = as_shares(apportion(target, fleet.global_batch, fleet.lower, fleet.upper))
        if after == situation.shares:
            return following, Keep(f"no worker is off by {self.dead_band:.0%} of its share")
        return following, Move(after, "step times of the epoch differ")

    def _target(self, shares: IntArray, mean_s: FloatArray, fleet: Fleet) -> FloatArray:
        working, target = shares > 0, np.zeros(len(shares))
        batches = shares[working].astype(np.float64)
        candidate = proportional_step(batches, mean_s[working])
        # As a part of the candidate, as published, not of the batch in force.
        small = np.abs(candidate - batches) < self.dead_band * candidate
        highest = self.b_max or max(self.b_min, 3.0 * fleet.global_batch / len(batches))
        target[working] = spread_equally(
            np.where(small, batches, candidate), self.b_min, highest, fleet.global_batch
        )
        # Spreading what the clamps cut off may lead below 0, and weights cannot.
        return np.maximum(target, 0.0)


def spread_equally(candidate: FloatArray, b_min: int, b_max: float, total: int) -> FloatArray:
    """Return candidates clamped, with what their sum then lacks or exceeds spread equally.

    To spread first what the clamps cut off and then the error of the sum comes to the same.

    >>> import numpy as np
    >>> spread_equally(np.array([10.0, 50.0, 120.0]), 16, 96, 180).tolist()
    [22.0, 56.0, 102.0]
    """
    clamped = np.clip(candidate, b_min, b_max)
    return np.asarray(clamped - (clamped.sum() - total) / len(candidate))
