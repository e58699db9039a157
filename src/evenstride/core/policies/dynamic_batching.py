"""Dynamic Batching: a proportional controller on smoothed step times.

Source:
    Tyagi & Sharma, "Taming Resource Heterogeneity in Distributed ML Training with Dynamic
    Batching", ACSOS 2020, arXiv 2305.12213. With ``mu_k`` the moving average of the times since
    the last change and ``X_k = b_k / mu_k``, the error ``tau_k = mu_k - mean(mu)`` gives
    ``delta_k = -X_k tau_k``; clamp to the bounds; if ``max |delta_k| / b_k`` then exceeds the
    dead-band of 0.05, all workers change, else none. An upper bound is learned: if raising a
    worker's batch lowered its throughput, the former batch becomes its most.

How we differ:
    * The rule does not conserve the global batch (by AM-HM it always grows). The result is
      renormalised, which the authors' code does and the paper's text leaves out; the paper's
      literal rule is `proportional_step`.
    * The constant of the moving average is not in the paper: 0.3 here.
    * ``window`` steps at the new shares precede a change: 1, as the paper acts at every
      iteration outside the dead-band. (The example in the authors' code has 10.)
    * In training it acts at exchanges, every 4 to 512 steps, not at every iteration.
    * The paper takes any loss of throughput after a raise for a reason to cap a worker, for good.
      Under noise half of all raises lose a little, so all would be capped wrongly: here the loss
      must be more than ``drop``, a part of the throughput, of which the paper says nothing. And
      one slow step loses more than any margin, so it must show in the average of ``proof`` steps
      at the raised share; it is judged once, when there are so many. A true change of speed in
      these steps, or a long spike in the latest of them, still caps a worker for good. Where noise
      makes each step a change, nothing is ever proven. (``proof=1`` judges at once, as published.)
    * The open loop goes by cores where all ranks train on CPUs, as in the paper, and else by
      measured FLOP/s. A scenario that declares both for all workers is split by FLOP/s.
    * When learned upper bounds leave no room for the global batch they are not heeded.
    * Shares change at a step boundary; the paper kills and restarts the job. A change takes
      effect some steps after the times it came from; times at any other share than the one in
      force are passed over, so the controller never acts twice on the same error.
    * Told of several steps at once, it averages all of them, one by one, and changes at most once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from evenstride.core.allocation.opening_splits import equal_split, split_by
from evenstride.core.allocation.proportional_split import apportion
from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.spec import check_settings, within
from evenstride.core.time_model.observation import SHORTEST_S


@dataclass(frozen=True, slots=True, eq=False)
class Smoothed:
    """The controller's memory, one entry per worker in arrays of shape ``(W,)``."""

    mean_s: FloatArray  # moving average of the step time at the current share; 0 before the first
    steps: IntArray  # steps in that average
    learned_most: IntArray  # upper bound learned from a loss of throughput; 0 for none
    former: IntArray  # shares before the last change
    former_throughput: FloatArray  # samples per second at them; 0 before the first change

    @classmethod
    def begin(cls, learned: IntArray, former: IntArray, throughput: FloatArray) -> Smoothed:
        """Return the memory right after a change."""
        zeros = np.zeros(len(learned))
        return cls(zeros, zeros.astype(np.int64), learned, former, throughput)


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """The closed loop, started from the open one (cores on CPUs, else FLOP/s, else equal)."""

    # Largest change, as a part of a share, that is not worth making.
    dead_band: float = field(default=0.05, metadata=within(float))
    # Weight of the newest time in the moving average.
    smoothing: float = field(default=0.3, metadata=within(float, 0, 1, above=True))
    # Steps of every worker at the new shares before the next change.
    window: int = field(default=1, metadata=within(int, 1))
    # Loss of throughput, as a part of it, that teaches an upper bound.
    drop: float = field(default=0.2, metadata=within(float, 0, 1))
    # Steps at the raised share in whose average the loss must show.
    proof: int = field(default=5, metadata=within(int, 1))

    def __post_init__(self) -> None:
        check_settings("policy dynamic-batching", self)

    # The paper's controller has no opening phase.
    opening_steps: ClassVar[int] = 0

    def init(self, fleet: Fleet) -> tuple[Smoothed, Move]:
        """Return the open-loop split."""
        shares = split_by("flops", fleet) or split_by("cores", fleet)
        reason = "open loop: split by declared resources"
        if shares is None:
            shares, reason = equal_split(fleet), "open loop: equal split"
        none = np.zeros(len(fleet), dtype=np.int64)
        return Smoothed.begin(none, none, np.zeros(len(fleet))), Move(shares, reason)

    def decide(self, state: Smoothed, situation: Situation) -> tuple[Smoothed, Decision]:
        """Smooth the new times; past the window and outside the dead-band, change all."""
        fleet, shares = situation.fleet, as_array(situation.shares)
        working = shares > 0
        state = self._learn_most(state, self._smooth(state, situation), shares)
        fewest = int(state.steps[working].min())
        if fewest < self.window:
            return state, Keep(f"{fewest} of {self.window} steps measured since the last change")
        upper, target = _upper(fleet, state.learned_most), np.zeros(len(shares))
        target[working] = proportional_step(shares[working], state.mean_s[working])
        clamped = np.clip(target, fleet.lower, upper)
        # After the bounds, because a change that they forbid is none.
        change = float(np.abs(clamped[working] / shares[working] - 1.0).max())
        if change <= self.dead_band:
            return state, Keep(
                f"largest change {change:.1%} is inside the {self.dead_band:.0%} band"
            )
        # The rule does not keep the sum, so the result is brought to the global batch here.
        after = as_shares(apportion(target, fleet.global_batch, fleet.lower, upper))
        if after == situation.shares:
            return state, Keep("bounds leave no room for a change")
        reason = f"step times differ: largest change {change:.1%} of a share"
        throughput = _throughput(shares, state.mean_s)
        return Smoothed.begin(state.learned_most, shares, throughput), Move(after, reason)

    def _smooth(self, state: Smoothed, situation: Situation) -> Smoothed:
        mean_s, steps = state.mean_s.copy(), state.steps.copy()
        for worker, busy_s in situation.in_force.step_by_step():
            # The first time is the average; from 0 the average would take many steps to come up.
            part = np.where(steps[worker] > 0, self.smoothing, 1.0)
            mean_s[worker] += part * (np.maximum(busy_s, SHORTEST_S) - mean_s[worker])
            steps[worker] += 1
        return replace(state, mean_s=mean_s, steps=steps)

    def _learn_most(self, before: Smoothed, state: Smoothed, shares: IntArray) -> Smoothed:
        """Take the former share of those for the bound that now prove to have lost by a raise."""
        # Judged once, at so many steps: a slow-down later is no loss by the raise.
        proven = (before.steps < self.proof) & (state.steps >= self.proof)
        throughput = _throughput(shares, state.mean_s)
        lost = throughput < (1.0 - self.drop) * state.former_throughput
        worse = proven & lost & (shares > state.former)
        return replace(state, learned_most=np.where(worse, state.former, state.learned_most))


def _throughput(shares: IntArray, mean_s: FloatArray) -> FloatArray:
    return np.where(mean_s > 0, shares / np.maximum(mean_s, SHORTEST_S), 0.0)


def proportional_step(shares: IntArray | FloatArray, mean_s: FloatArray) -> FloatArray:
    """Return the paper's literal next batches, real-valued; they do *not* keep their sum.

    ``b - X (t - mean t)`` with ``X = b / t`` is ``b * mean(t) / t``.

    >>> import numpy as np
    >>> cores = np.array([9.0, 12.0, 18.0])
    >>> float(proportional_step(np.full(3, 13.0), 13 / cores).sum().round(2))
    42.25
    """
    return np.asarray(shares * (mean_s.mean() / mean_s))


def _upper(fleet: Fleet, learned: IntArray) -> IntArray:
    """Return the upper bounds, the learned ones included unless they leave too little room."""
    upper = np.where(learned > 0, np.minimum(learned, fleet.upper), fleet.upper)
    upper = np.maximum(upper, fleet.lower)
    # A run must go on, so bounds that were only learned give way.
    return upper if int(upper.sum()) >= fleet.global_batch else fleet.upper
