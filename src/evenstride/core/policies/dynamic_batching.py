"""Dynamic Batching, a proportional controller on smoothed step times, and its successor OmniLearn.

`DynamicBatching` acts whenever step times differ, `OmniLearn` once per epoch, with a dead-band for
each worker. Each class states its source and how we differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from evenstride.core.allocation.integer_splits import apportion
from evenstride.core.allocation.speedup import equal_split, split_by
from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.policies.dbs import Epoch
from evenstride.core.policy import EVERY_STEP, Decision, Keep, Move, Situation
from evenstride.core.spec import check_settings, one_of, within
from evenstride.core.time_model.observation import SHORTEST_S
from evenstride.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Smoothed:
    """The controller's state, one entry per worker in arrays of shape ``(W,)``."""

    mean_s: FloatArray  # moving average of the step time at the current share; 0 if not known yet.
    steps: IntArray  # number of steps in that average.
    learned_most: IntArray  # upper bound learned from a drop in throughput; 0 if none.
    former: IntArray  # shares before the last change.
    former_throughput: FloatArray  # samples per second at them; 0 before the first change.

    @classmethod
    def begin(cls, learned: IntArray, former: IntArray, throughput: FloatArray) -> Smoothed:
        zeros = np.zeros(len(learned))
        return cls(zeros, zeros.astype(np.int64), learned, former, throughput)


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """The closed loop, started from the open loop (cores on CPUs, else FLOP/s, else equal).

    Source:
        Tyagi & Sharma, "Taming Resource Heterogeneity in Distributed ML Training with Dynamic
        Batching", ACSOS 2020, arXiv 2305.12213. With ``mu_k`` the moving average of the times
        since the last change and ``X_k = b_k / mu_k``, the error ``tau_k = mu_k - mean(mu)`` gives
        ``delta_k = -X_k tau_k``, clamped to the bounds. If ``max |delta_k| / b_k`` then exceeds the
        dead-band of 0.05, all workers change, otherwise none. An upper bound is learned: if raising
        a worker's batch lowered its throughput, the former batch becomes its maximum.

    How we differ:
        * The rule does not conserve the global batch (by AM-HM it always grows). The result is
          renormalised, as in the authors' code; the paper's text does not mention it. The paper's
          literal rule is `proportional_step`.
        * The paper does not give the constant of the moving average; it is 0.3 here.
        * ``window`` steps at the new shares precede a change: 1, because the paper acts at every
          iteration outside the dead-band. (The example in the authors' code has 10.)
        * In training it acts at exchanges, every 4 to 512 steps. ``every=1`` acts at every
          iteration, as published, at the cost that `evenstride.core.policy.EVERY_STEP` states.
        * In the paper, any drop in throughput after a raise caps a worker permanently. With noise,
          half of all raises lose a little, so all workers would be capped wrongly. Here the drop
          must exceed ``drop``, a fraction of the throughput that the paper does not have. One slow
          step exceeds any margin, so the drop must show in the average of ``proof`` steps at the
          raised share. It is checked once, after that many steps. A true change of speed in these
          steps, or a long spike in the last of them, still caps a worker permanently. If noise
          makes each step a change, no drop is ever confirmed. (``proof=1`` checks at once, as
          published.)
        * The open loop uses cores if all ranks train on CPUs, as in the paper, and measured FLOP/s
          otherwise. A scenario that declares both for all workers is split by FLOP/s.
        * Learned upper bounds that leave no room for the global batch are ignored.
        * Shares change at a step boundary; the paper kills and restarts the job. A change takes
          effect some steps after the times that caused it. Times at any other share than the one in
          force are skipped, so the controller never acts twice on the same error.
        * If several steps arrive at once, it averages them one by one and changes at most once.
    """

    # Largest change, as a fraction of a share, that is ignored.
    dead_band: float = field(default=0.05, metadata=within(float))
    # Weight of the newest time in the moving average.
    smoothing: float = field(default=0.3, metadata=within(float, 0, 1, above=True))
    # Steps of every worker at the new shares before the next change.
    window: int = field(default=1, metadata=within(int, 1))
    # Drop in throughput, as a fraction of it, that sets an upper bound.
    drop: float = field(default=0.2, metadata=within(float, 0, 1))
    # Number of steps at the raised share in whose average the drop must show.
    proof: int = field(default=5, metadata=within(int, 1))
    # With 1, every step waits for its decision; with 0, decisions are made at exchanges.
    every: int = field(default=0, metadata=one_of(0, 1))

    def __post_init__(self) -> None:
        check_settings("policy dynamic-batching", self)

    @property
    def opening_steps(self) -> int:
        """The paper's controller has no opening."""
        return EVERY_STEP if self.every else 0

    def init(self, fleet: Fleet) -> tuple[Smoothed, Move]:
        shares = split_by("flops", fleet) or split_by("cores", fleet)
        reason = "open loop: split by declared resources"
        if shares is None:
            shares, reason = equal_split(fleet), "open loop: equal split"
        none = np.zeros(len(fleet), dtype=np.int64)
        return Smoothed.begin(none, none, np.zeros(len(fleet))), Move(shares, reason)

    def decide(self, state: Smoothed, situation: Situation) -> tuple[Smoothed, Decision]:
        """Average the new times; after the window and outside the dead-band, change all shares."""
        fleet, shares = situation.fleet, as_array(situation.shares)
        working = shares > 0
        state = self._learn_most(state, self._smooth(state, situation), shares)
        fewest = int(state.steps[working].min())
        if fewest < self.window:
            return state, Keep(f"{fewest} of {self.window} steps measured since the last change")
        upper, target = _upper(fleet, state.learned_most), np.zeros(len(shares))
        target[working] = proportional_step(shares[working], state.mean_s[working])
        clamped = np.clip(target, fleet.lower, upper)
        # After the bounds, because a change that they forbid does not count.
        change = float(np.abs(clamped[working] / shares[working] - 1.0).max())
        if change <= self.dead_band:
            return state, Keep(
                f"largest change {change:.1%} is within the {self.dead_band:.0%} dead-band"
            )
        # The rule does not conserve the sum, so the result is normalised to the global batch here.
        after = as_shares(apportion(target, fleet.global_batch, fleet.lower, upper))
        if after == situation.shares:
            return state, Keep("bounds leave no room for a change")
        reason = f"step times differ: largest change {change:.1%} of a share"
        throughput = _throughput(shares, state.mean_s)
        return Smoothed.begin(state.learned_most, shares, throughput), Move(after, reason)

    def _smooth(self, state: Smoothed, situation: Situation) -> Smoothed:
        mean_s, steps = state.mean_s.copy(), state.steps.copy()
        seen = situation.in_force
        for here, at in seen.step_by_step():
            worker, busy_s = seen.worker[here], seen.busy_s[at]
            # The first time is the average; an average from 0 would take many steps to rise.
            part = np.where(steps[worker] > 0, self.smoothing, 1.0)
            mean_s[worker] += part * (np.maximum(busy_s, SHORTEST_S) - mean_s[worker])
            steps[worker] += 1
        return replace(state, mean_s=mean_s, steps=steps)

    def _learn_most(self, before: Smoothed, state: Smoothed, shares: IntArray) -> Smoothed:
        """Set the former share as upper bound of workers whose raise lowered their throughput."""
        # Checked once, after this many steps: a later slow-down is not due to the raise.
        proven = (before.steps < self.proof) & (state.steps >= self.proof)
        throughput = _throughput(shares, state.mean_s)
        lost = throughput < (1.0 - self.drop) * state.former_throughput
        worse = proven & lost & (shares > state.former)
        return replace(state, learned_most=np.where(worse, state.former, state.learned_most))


def _throughput(shares: IntArray, mean_s: FloatArray) -> FloatArray:
    return np.where(mean_s > 0, shares / np.maximum(mean_s, SHORTEST_S), 0.0)


def proportional_step(shares: IntArray | FloatArray, mean_s: FloatArray) -> FloatArray:
    """Return the paper's literal next batches, real-valued; they do *not* conserve their sum.

    ``b - X (t - mean t)`` with ``X = b / t`` is ``b * mean(t) / t``.

    >>> import numpy as np
    >>> cores = np.array([9.0, 12.0, 18.0])
    >>> float(proportional_step(np.full(3, 13.0), 13 / cores).sum().round(2))
    42.25
    """
    return np.asarray(shares * (mean_s.mean() / mean_s))


def _upper(fleet: Fleet, learned: IntArray) -> IntArray:
    """Return the upper bounds, with the learned ones unless they leave too little room."""
    upper = np.where(learned > 0, np.minimum(learned, fleet.upper), fleet.upper)
    upper = np.maximum(upper, fleet.lower)
    # A run must go on, so learned bounds give way.
    return upper if int(upper.sum()) >= fleet.global_batch else fleet.upper


@dataclass(frozen=True, slots=True)
class OmniLearn:
    """In proportion to the mean speeds of the last epoch, outside a dead-band.

    Source:
        Tyagi & Sharma, OmniLearn, TPDS 2025, arXiv 2503.17469, and the authors' code
        (github.com/sahiltyagi4/OmniLearn). At the end of an epoch, with ``t_k`` the mean compute
        time of worker ``k`` in it and ``X_k = b_k / t_k``, the candidate is
        ``c_k = b_k - X_k (t_k - mean t)``; a worker keeps ``b_k`` if ``|c_k - b_k| / c_k`` is below
        the dead-band of 0.2. The result is clamped to ``b_min = 16`` and ``b_max = 96``; workers
        begin with 32. What the clamps cut off or add is spread over all workers equally, and then
        the difference of the sum from ``B`` as well. Either may lead out of the clamps again.

    How we differ:
        * The authors round each worker up, so the sum is ``B`` or slightly more, and they scale
          the gradients by the actual sum. Here it is rounded to ``B`` by largest remainder.
        * The bounds of the workers hold in the result. ``b_min`` and ``b_max`` are as soft as in
          the authors' code, so they make no global batch infeasible. Unless ``b_max`` is set, it
          is three times an equal share, as the authors' is of their 32. With 96, workers with
          larger batches would stay equal forever.
        * ``t_k`` is the whole busy time (data, compute, and the work between steps).
        * An epoch is that of the training loader, as in `dbs`. ``epoch_steps`` counts steps
          instead.
        * Steps at an earlier share, the first of a pass and tails do not count.
        * Only the shares are set: the learning rate is not scaled, and there is no asynchronous
          mode.
    """

    # Number of steps that count as an epoch; 0 for an epoch of the data.
    epoch_steps: int = field(default=0, metadata=within(int))
    # Smallest change, as a fraction of the new share, that a worker makes.
    dead_band: float = field(default=0.2, metadata=within(float))
    b_min: int = field(default=16, metadata=within(int))  # share below which a candidate is raised
    # Share above which a candidate is lowered; 0 for three times an equal share.
    b_max: int = field(default=0, metadata=within(int))

    def __post_init__(self) -> None:
        check_settings("policy omnilearn", self)
        if 0 < self.b_max < self.b_min:
            raise ConfigError(
                f"policy omnilearn: b_min is {self.b_min} and b_max is {self.b_max}; b_max must be "
                "at least b_min, or 0 for three times an equal share"
            )

    # The first epoch is trained on equal shares.
    opening_steps: ClassVar[int] = 0

    def init(self, fleet: Fleet) -> tuple[Epoch, Move]:
        return Epoch.begin(len(fleet)), Move(equal_split(fleet), "equal split for the first epoch")

    def decide(self, state: Epoch, situation: Situation) -> tuple[Epoch, Decision]:
        """Add the new times; at the end of an epoch, change the shares outside the dead-band."""
        state, fleet = state.including(situation, self.epoch_steps), situation.fleet
        too_early = state.unfinished(situation, self.epoch_steps)
        if too_early is not None:
            return state, Keep(too_early)
        following = state.following(situation, self.epoch_steps)
        shares = as_array(situation.shares)
        target = self._target(shares, state.means.mean_s, fleet)
        after = as_shares(apportion(target, fleet.global_batch, fleet.lower, fleet.upper))
        if after == situation.shares:
            return following, Keep(f"no share would change by {self.dead_band:.0%} or more")
        return following, Move(after, "step times of the epoch differ")

    def _target(self, shares: IntArray, mean_s: FloatArray, fleet: Fleet) -> FloatArray:
        working, target = shares > 0, np.zeros(len(shares))
        batches = shares[working].astype(np.float64)
        candidate = proportional_step(batches, mean_s[working])
        # As a fraction of the candidate, as published, not of the batch in force.
        small = np.abs(candidate - batches) < self.dead_band * candidate
        highest = self.b_max or max(self.b_min, 3.0 * fleet.global_batch / len(batches))
        target[working] = spread_equally(
            np.where(small, batches, candidate), self.b_min, highest, fleet.global_batch
        )
        # Spreading what the clamps cut off may give negative values, which weights cannot be.
        return np.maximum(target, 0.0)


def spread_equally(candidate: FloatArray, b_min: int, b_max: float, total: int) -> FloatArray:
    """Return candidates clamped, with the difference of their sum from the total spread equally.

    Spreading first what the clamps cut off and then the error of the sum gives the same result.

    >>> import numpy as np
    >>> spread_equally(np.array([10.0, 50.0, 120.0]), 16, 96, 180).tolist()
    [22.0, 56.0, 102.0]
    """
    clamped = np.clip(candidate, b_min, b_max)
    return np.asarray(clamped - (clamped.sum() - total) / len(candidate))
