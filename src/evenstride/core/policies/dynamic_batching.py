"""Dynamic Batching: a proportional controller on smoothed step times.

Source:
    Tyagi & Sharma, "Taming Resource Heterogeneity in Distributed ML Training with Dynamic
    Batching", ACSOS 2020, arXiv 2305.12213. With ``mu_k`` the smoothed time since the last
    change and ``X_k = b_k / mu_k``, the error ``tau_k = mu_k - mean(mu)`` gives
    ``delta_k = -X_k tau_k``; clamp to the bounds; if ``max |delta_k| / b_k`` exceeds the
    dead-band of 0.05, all workers change, else none. An upper bound is learned: if raising a
    worker's batch lowered its throughput, the former batch becomes its most.

How we differ:
    * The rule does not conserve the global batch (by AM-HM it always grows). The result is
      renormalised, which the authors' code does and the paper's text leaves out.
    * The constant of the moving average is not in the paper: 0.3 here. The number of steps
      before a change is not either: 10, the window of the example in the authors' code.
    * Shares change at a step boundary; the paper kills and restarts the job.
    * When learned upper bounds leave no room for the global batch they are forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenstride.core.allocation import apportion
from evenstride.core.fleet import Fleet, FloatArray, IntArray, Shares, as_shares
from evenstride.core.policies.static import split_by
from evenstride.core.policies.uniform import Uniform
from evenstride.core.policy import Decision, Keep, Move, Situation


@dataclass(frozen=True, slots=True, eq=False)
class Smoothed:
    """The controller's memory, one entry per worker in arrays of shape ``(W,)``.

    Args:
        mean_s: moving average of the step time at the current share; 0 before the first.
        steps: steps in that average.
        learned_most: upper bound learned from a loss of throughput; 0 for none.
        former: shares before the last change.
        former_throughput: samples per second at them; 0 before the first change.
    """

    mean_s: FloatArray
    steps: IntArray
    learned_most: IntArray
    former: IntArray
    former_throughput: FloatArray

    @classmethod
    def begin(cls, learned: IntArray, former: IntArray, throughput: FloatArray) -> Smoothed:
        """Return the memory right after a change."""
        zeros = np.zeros(len(learned))
        return cls(zeros, zeros.astype(np.int64), learned, former, throughput)


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """The closed loop, started from the open one (FLOP/s, else cores, else equal)."""

    dead_band: float = 0.05
    smoothing: float = 0.3
    window: int = 10

    @property
    def opening_steps(self) -> int:
        """None: the paper's controller has no opening phase."""
        return 0

    def init(self, fleet: Fleet) -> tuple[Smoothed, Move]:
        """Return the open-loop split."""
        shares = split_by("flops", fleet) or split_by("cores", fleet)
        reason = "open loop: split by declared resources"
        if shares is None:
            shares, reason = Uniform().init(fleet)[1].shares, "open loop: equal split"
        none = np.zeros(len(fleet), dtype=np.int64)
        return Smoothed.begin(none, none, np.zeros(len(fleet))), Move(shares, reason)

    def decide(self, state: Smoothed, situation: Situation) -> tuple[Smoothed, Decision]:
        """Smooth the new times; past the window and outside the dead-band, change all."""
        state = self._smooth(state, situation)
        fewest = int(state.steps.min())
        if fewest < self.window:
            return state, Keep(f"{fewest} of {self.window} steps measured since the last change")
        shares, mean_s = np.array(situation.shares, dtype=np.int64), state.mean_s
        error = float(np.abs(mean_s.mean() / mean_s - 1.0).max())
        if error <= self.dead_band:
            return state, Keep(
                f"largest change {error:.1%} is inside the {self.dead_band:.0%} band"
            )
        throughput = shares / mean_s
        learned = _learned_most(state, shares, throughput)
        target = proportional_step(shares, mean_s)
        after = _within(target, situation.fleet, learned)
        if after == situation.shares:
            return replace(state, learned_most=learned), Keep("bounds leave no room for a change")
        reason = f"step times differ: largest change {error:.1%} of a share"
        return Smoothed.begin(learned, shares, throughput), Move(after, reason)

    def _smooth(self, state: Smoothed, situation: Situation) -> Smoothed:
        mean_s, steps = state.mean_s.copy(), state.steps.copy()
        measured, shares = situation.observations, np.array(situation.shares)
        current = measured.modelled & (measured.share == shares[measured.worker])
        for worker, busy_s in measured.only(current).step_by_step():
            part = np.where(steps[worker] > 0, self.smoothing, 1.0)
            mean_s[worker] += part * (busy_s - mean_s[worker])
            steps[worker] += 1
        return replace(state, mean_s=mean_s, steps=steps)


def proportional_step(shares: IntArray | FloatArray, mean_s: FloatArray) -> FloatArray:
    """Return the paper's literal next batches, real-valued; they do *not* keep their sum.

    ``b - X (t - mean t)`` with ``X = b / t`` is ``b * mean(t) / t``.

    >>> import numpy as np
    >>> cores = np.array([9.0, 12.0, 18.0])
    >>> float(proportional_step(np.full(3, 13.0), 13 / cores).sum().round(2))
    42.25
    """
    return np.asarray(shares * (mean_s.mean() / mean_s))


def _learned_most(state: Smoothed, shares: IntArray, throughput: FloatArray) -> IntArray:
    worse = (shares > state.former) & (throughput < state.former_throughput)
    return np.where(worse, state.former, state.learned_most)


def _within(target: FloatArray, fleet: Fleet, learned: IntArray) -> Shares:
    upper = np.where(learned > 0, np.minimum(learned, fleet.upper), fleet.upper)
    upper = np.maximum(upper, fleet.lower)
    if int(upper.sum()) < fleet.global_batch:
        upper = fleet.upper
    return as_shares(apportion(target, fleet.global_batch, fleet.lower, upper))
