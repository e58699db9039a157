"""Ours: equal finish times under the fitted curves, but only when it pays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from evenstride.core.allocation.opening_splits import equal_split, split_by
from evenstride.core.allocation.step_forecast import StepForecast
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.policies.idle_workers import Idle, weigh
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.spec import check_settings, within
from evenstride.core.time_model.pooling import pooled

# Known so well that measuring need not be frequent.
_SETTLED_DOUBT = 0.02
# A share that should be larger by this factor tells too little about its worker's speed: what is
# believed of it, by mistake maybe, would never be corrected.
_STARVED = 3
# So doubtful that no move may look worth it.
_BLOCKING = 0.10
# Steps that may each wait for a decision, as is promised of every policy.
_MOST_OPENING = 8


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Re-split when the expected step is shorter by more than next to nothing.

    The published rules act on throughput and so under-correct when part of a step does not
    scale with the share. Here the curves themselves are fitted (`Estimate`), workers of one kind
    share their evidence (`pooled`), and the exact integer optimum is found (`equal_finish`). It
    is adopted if the *expected maximum* of the uncertain times is smaller under it, which keeps
    a split that only noise makes look uneven (`expected_max`).
    """

    # Smallest gain worth a change, as a part of the step time. A change costs next to nothing, so
    # it is small; what keeps noise from moving the split is the expected maximum. (At 2 % a wrong
    # first step of 1.7 % was kept for good.).
    min_gain: float = field(default=0.005, metadata=within(float, 0, 1))
    # Steps at the start that may each wait for a decision.
    opening_steps: int = field(default=_MOST_OPENING, metadata=within(int, 0, _MOST_OPENING))
    # By how many standard deviations of its own noise a worker is to finish early. With workers
    # whose steps are unequally noisy, 1 makes the steps shorter, as the latest of them counts (3.5
    # % in ``unequal-noise.yaml``), and their means further apart (6 % there). With 0 the mean times
    # are evened out.
    noise_margin: float = field(default=0.0, metadata=within(float, 0, 10))
    # 1 to leave out a worker that holds up the others even with its least share. As it still runs
    # one sample, that helps where its ``min_share`` or quantum is larger than that. It is tried
    # again from time to time (see `weigh`). Of 0, never.
    allow_idle: int = field(default=0, metadata=within(int, 0, 1))

    def __post_init__(self) -> None:
        check_settings("policy adaptive", self)

    def init(self, fleet: Fleet) -> tuple[Idle | None, Move]:
        """Return the split by declared resources, else the equal one: nothing is known yet."""
        # FLOP/s first, as cores say little about a fleet with GPUs.
        declared = split_by("flops", fleet) or split_by("cores", fleet)
        if declared is not None:
            return None, Move(declared, "opening: by declared resources until measured", False)
        opening = equal_split(fleet)
        return None, Move(opening, "opening: equal split until times are measured", False)

    def decide(self, state: Idle | None, situation: Situation) -> tuple[Idle | None, Decision]:
        """Compare the split in force with the best one for the fitted curves."""
        fleet, estimate = situation.fleet, situation.estimate
        if not estimate.known:
            unknown = fleet.workers[int(np.argmin(estimate.steps))].name
            reason = f"no step of worker {unknown} has been measured yet"
            return state, Keep(reason, settled=False)
        now = as_array(situation.shares)
        # A worker with a share of 0 runs one sample.
        estimate = pooled(estimate, np.maximum(now, 1) if self.allow_idle else now)
        outlook = StepForecast(estimate, fleet, self.noise_margin)

        def usual(outlook: StepForecast) -> Decision:
            return self._compare(outlook, situation)

        if not self.allow_idle:
            return None, usual(outlook)
        return weigh(state or Idle(), situation, outlook, self.min_gain, usual)

    def _compare(self, outlook: StepForecast, situation: Situation) -> Decision:
        fleet, estimate, now = situation.fleet, outlook.estimate, as_array(situation.shares)
        now_s = outlook.step_s(now)
        best, best_s = outlook.best_split(now, now_s)
        step_s = now_s + situation.communication_s
        # A part of the whole step: where communication dominates, a shorter busy time gains little.
        gain = (now_s - best_s) / step_s
        doubt = best_s / estimate.model.makespan_s(np.maximum(best, 1)) - 1.0
        starved = np.flatnonzero(best > _STARVED * np.maximum(now, 1))
        # Only where it costs next to nothing: with one sample of many, no step would ever correct
        # what is believed of the worker.
        if len(starved) and -self.min_gain <= gain <= self.min_gain:
            some = fleet.workers[int(starved[0])].name
            reason = f"worker {some} gets more, because its speed cannot be told from so little"
            return Move(as_shares(best), reason, settled=False)
        if gain <= self.min_gain:
            # With curves that are known well, no gain means that the split has been found.
            trial = outlook.trial(now) if doubt > _BLOCKING else None
            if trial is not None:
                some = fleet.workers[int(np.argmax(trial - now))].name
                reason = f"worker {some} finishes early: it gets more, to learn what that takes"
                return Move(as_shares(trial), reason, settled=False)
            reason = f"best split would be {gain:.1%} faster, under {self.min_gain:.1%}"
            return Keep(reason, settled=doubt < _SETTLED_DOUBT)
        slowest = fleet.workers[int(np.argmax(estimate.model.at(np.maximum(now, 1))))].name
        reason = (
            f"worker {slowest} finishes last: step {step_s * 1e3:.1f} ms -> "
            f"{(step_s - now_s + best_s) * 1e3:.1f} ms expected ({gain:.1%} less)"
        )
        return Move(as_shares(best), reason, settled=False)
