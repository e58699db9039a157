"""Shift samples from late workers to early ones by measured times, while no curve is trusted.

Where curves have failed, a `Supervisor` keeps a split for a long time. Meanwhile a `LocalSearch`
looks for a better one near it. Its evidence is the supervisor's: the longest times of whole steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from evenstride.core.allocation.integer_splits import equal_finish
from evenstride.core.arrays import IntArray, Shares
from evenstride.core.fleet import as_array, as_shares
from evenstride.core.policies.measured_splits import Hold, Supervisor, Tried
from evenstride.core.policy import Decision, Keep, Move, Situation
from evenstride.core.time_model.estimates import TimeModel
from evenstride.errors import InfeasibleShares

# Number of failures in a row after which curves are not trusted.
_FAILURES = 2
# Part of their shares that late workers give at first, the most and the least. It doubles after a
# success and halves after a failure.
_PART, _MOST_PART, _LEAST_PART = 1 / 8, 1 / 2, 1 / 64
# A worker is late if it takes at least this part of a step. An early one takes samples for this
# part of its slack, if its time is in proportion to its share.
_LATE, _OF_SLACK = 0.95, 0.8
# Steps before the first trial and after a failed one, and steps of the kept split that must be
# measured.
_BETWEEN, _KNOWN = 16, 4
# Steps of a trial that are compared, at least and at most.
_FEWEST, _MOST = 2, 6
# A trial is better if its steps are so many standard errors and this part shorter. It is given up
# early if they are longer by the last part.
_SURE_STD, _LEAST, _LONGER = 2.0, 0.005, 0.1


@dataclass(frozen=True, slots=True)
class LocalSearch:
    """What one decision of the search leaves to the next."""

    begun: int = -1  # the step at which the wait began that it belongs to.
    part: float = _PART  # part of their shares that late workers give.
    since: int = 0  # step from which on the next split may be tried.
    ended: int = 0  # step at which the latest trial ended.
    failures: int = 0  # number of trials in a row that failed; each doubles the wait

    def decide(
        self, situation: Situation, supervisor: Supervisor, limit: IntArray
    ) -> tuple[LocalSearch, Supervisor, Decision] | None:
        """Return the decision during the wait after curves have failed, ``None`` for no change.

        ``limit`` is `ShareTimes.limit`, with what workers of one kind know of each other.
        """
        hold, kept, step = supervisor.hold, supervisor.better, situation.step
        if hold is None or kept is None:
            return None
        if self.begun != hold.begun:
            return LocalSearch(hold.begun).decide(situation, supervisor, limit)
        if hold.trial == situation.shares:
            return self._on_trial(situation, supervisor, hold, kept)
        untrusted = supervisor.failures >= _FAILURES or supervisor.overdrawn
        due = step >= max(self.since, hold.begun + _BETWEEN)
        if not untrusted or not due or kept.steps < _KNOWN or supervisor.away is not None:
            return None
        split = _shifted(situation, kept, self.part, limit)
        # New shapes must have been earned.
        earned_s = supervisor.spare() * (step - max(hold.begun, self.ended)) * kept.step_s
        if split is None or situation.estimate.firsts.split_s(as_array(split)) > earned_s:
            return None
        on_trial = replace(supervisor, hold=replace(hold, trial=split))
        reason = f"local search: late workers get up to {self.part:.1%} fewer samples, on trial"
        return self, on_trial, Move(split, reason, settled=False)

    def _on_trial(
        self, situation: Situation, supervisor: Supervisor, hold: Hold, kept: Tried
    ) -> tuple[LocalSearch, Supervisor, Decision] | None:
        away, step = supervisor.away, situation.step
        if away is None or as_shares(away.now.shares) != hold.trial:
            return None
        # A spike in its last step is not why it was left.
        usual = replace(kept, logs=(*kept.logs, log(kept.step_s)))
        off, std = away.compared(usual, situation.estimate, away.here)
        if away.here >= _FEWEST and off < -(_SURE_STD * std + _LEAST):
            hold = replace(hold, kept=away.now, lasted=0, trial=None)
            better = replace(supervisor, better=away.now, away=None, hold=hold)
            reason = f"local search: steps are measured {1 - exp(off):.1%} shorter"
            search = LocalSearch(hold.begun, min(2 * self.part, _MOST_PART), ended=step)
            return search, better, Keep(reason, settled=False)
        if away.here < _MOST and (not away.here or off < _LONGER):
            return None
        # Until the return takes effect, further steps cost as much.
        cost_s = away.cost_s + (away.now.step_s - kept.step_s) * situation.lag
        repaid = max(cost_s, 0.0) / (kept.step_s * supervisor.spare())
        since = step + max(_BETWEEN << min(self.failures, 12), int(repaid))
        part = max(self.part / 2, _LEAST_PART)
        search = replace(self, part=part, since=since, ended=step, failures=self.failures + 1)
        reason = "local search: back, because steps are not measured shorter"
        return search, supervisor, Move(as_shares(kept.shares), reason, settled=False)


def _shifted(situation: Situation, kept: Tried, part: float, limit: IntArray) -> Shares | None:
    """Return a split in which late workers have fewer samples and early ones take them."""
    fleet, shares, each_s = situation.fleet, kept.shares, kept.each_s
    last_s = float(each_s.max())
    late = each_s > _LATE * last_s
    part_of = np.maximum(shares * part, fleet.quanta)
    gives = np.where(late, np.minimum(part_of, shares - np.maximum(fleet.lower, 1)), 0)
    slack = last_s / np.maximum(each_s, 1e-9) - 1.0
    # A known cliff is a limit here, too.
    most = np.where(limit[1] > 0, np.minimum(limit[0], fleet.upper), fleet.upper)
    takes = np.where(late | (each_s <= 0), 0, np.minimum(shares * _OF_SLACK * slack, most - shares))
    gives, takes = gives.clip(0), takes.clip(0)
    moved = min(gives.sum(), takes.sum())
    if moved < max(1, np.count_nonzero(late)):
        return None
    wanted = shares - gives * (moved / gives.sum()) + takes * (moved / takes.sum())
    # In proportion to these, in whole quanta.
    model = TimeModel.affine(np.zeros(len(shares)), 1.0 / np.maximum(wanted, 1e-9))
    bounds = fleet.lower, np.maximum(most, shares), fleet.global_batch
    try:
        split = equal_finish(model, *bounds, quantum=fleet.quanta, near=shares)
    except InfeasibleShares:
        return None
    return as_shares(split) if (split != shares).any() else None
