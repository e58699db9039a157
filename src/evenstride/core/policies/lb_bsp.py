"""LB-BSP: by predicted speeds on CPU clusters, by leader and straggler on GPU clusters.

On CPUs (`LbBspCpu`) time is assumed to be linear in the batch; on GPUs (`LbBspGpu`) it is not. Each
class states its source and how we differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from evenstride.core.allocation.integer_splits import apportion, equal_finish
from evenstride.core.allocation.speedup import equal_split
from evenstride.core.arrays import FloatArray, IntArray
from evenstride.core.fleet import Fleet, as_array, as_shares
from evenstride.core.policies.dbs import Means
from evenstride.core.policy import EVERY_STEP, Decision, Keep, Move, Situation
from evenstride.core.predictors import NETWORK_NAMES, PREDICTOR_NAMES, predictor_named
from evenstride.core.spec import check_settings, one_of, within
from evenstride.core.time_model.observation import SHORTEST_S

# Shares of even and odd ranks in each split of the profile, in equal shares.
_PROFILE = ((1.0, 1.0), (0.5, 1.5), (1.5, 0.5), (0.25, 1.75), (1.75, 0.25))
_LEAST_RISE = 0.02  # of a curve, as a fraction of its mean time per sample
_NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """The state of the policy."""

    predictor: Any  # the predictor's own state
    loads: FloatArray  # latest reported processor and memory load, NaN if never, ``(2, W)``


@dataclass(frozen=True, slots=True)
class LbBspCpu:
    """In proportion to predicted speeds, whenever new ones are reported.

    Source:
        Chen et al., "Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated
        Environments", SoCC 2020, doi:10.1145/3419111.3421299. Only the speed ``v_i`` of the coming
        iteration is unknown. A NARX network predicts it from past speeds and past and current CPU
        and memory use, and ``x_i = X v_i / sum v`` of a batch ``X``, at every iteration.
        There is no dead-band: only rounding keeps noise from moving the split.

    How we differ:
        * ``every=1`` acts at every iteration, as published, at the cost that
          `evenstride.core.policy.EVERY_STEP` states.
        * Without it, workers report at an exchange, which may contain several steps. The predictor
          learns each of them in order, and at most one change follows. The change takes effect some
          steps after the reported ones. The shares then stay for 4 to 512 steps, up to 5 s, until
          the next exchange, and so does the prediction of one step ahead. The simulator exchanges
          after each step.
        * The newest known loads are those of the last observation, not of the moment in which the
          next iteration begins. Unknown loads (NaN) are left to the predictor.
        * Any share shows the speed, because time is linear for this policy. So it also learns from
          steps at an earlier share.
        * The other predictors have the same interface, because the paper compares with such. The
          networks' size and training are ours (`evenstride.core.speed_networks`).
        * Rounding is by largest remainder, within the bounds of the workers.
    """

    # ``narx``, ``rnn``, ``lstm``, ``ar``, ``ema`` or ``last``.
    predictor: str = field(default="narx", metadata=one_of(*PREDICTOR_NAMES))
    # With 1, every step waits for its decision; with 0, decisions are made at exchanges.
    every: int = field(default=0, metadata=one_of(0, 1))

    def __post_init__(self) -> None:
        check_settings("policy lb-bsp-cpu", self)

    @property
    def predicts_from_loads(self) -> bool:
        """Whether the workers should report the load of their machines."""
        return self.predictor in NETWORK_NAMES

    @property
    def opening_steps(self) -> int:
        """The paper's controller has no opening."""
        return EVERY_STEP if self.every else 0

    def init(self, fleet: Fleet) -> tuple[Predicted, Move]:
        state = predictor_named(self.predictor).start(len(fleet))
        loads = np.full((2, len(fleet)), np.nan)
        return Predicted(state, loads), Move(
            equal_split(fleet), "equal split until speeds are known"
        )

    def decide(self, state: Predicted, situation: Situation) -> tuple[Predicted, Decision]:
        """Teach the predictor every new step, then split by its prediction."""
        predictor, fleet = predictor_named(self.predictor), situation.fleet
        remembered, loads = state.predictor, state.loads.copy()
        reports = situation.observations
        seen = reports.only(reports.modelled & reports.sound & (reports.share > 0))
        for here, at in seen.step_by_step():
            # Speeds must be finite, whatever the clock returns.
            speed = seen.share[here] / np.maximum(seen.busy_s[at], SHORTEST_S)
            worker = seen.worker[here]
            # An observation's loads were read at its end, so they predicted none of its steps.
            remembered = predictor.learn(remembered, worker, speed, state.loads[:, worker])
            loads[:, worker] = seen.loads[:, here]
        state = Predicted(remembered, loads)
        speed = predictor.predict(remembered, loads)
        unknown = np.isnan(speed)
        missing = unknown & (as_array(situation.shares) > 0)
        if missing.any():
            name = fleet.workers[int(np.argmax(missing))].name
            return state, Keep(f"no step of worker {name} has been measured yet")
        # Only workers without a share can be unknown here; they get their smallest share.
        weights = np.where(unknown, 0.0, speed)
        after = as_shares(apportion(weights, fleet.global_batch, fleet.lower, fleet.upper))
        if after == situation.shares:
            return state, Keep("the predicted speeds confirm the current shares")
        return state, Move(after, f"in proportion to the speeds predicted by {self.predictor}")


@dataclass(frozen=True, slots=True, eq=False)
class Stepping:
    """The state of the 2020 version."""

    means: Means  # step times since the last move
    step: int  # samples of the next move
    window: int  # steps of every worker before it
    giver: int = _NONE  # rank that gave samples in the last move, -1 before the first
    taker: int = _NONE  # rank that received them


@dataclass(frozen=True, slots=True, eq=False)
class CurvePoints:
    """The state of the 2018 version: the points of the curves found so far."""

    means: Means  # step times in the current split of the profile
    shares: IntArray  # in the previous splits, ``(n, W)``
    times_s: FloatArray  # mean times at them, ``(n, W)``


@dataclass(frozen=True, slots=True)
class LbBspGpu:
    """Leader and straggler (2020), or a profile taken once (2018).

    Source:
        Chen et al., LB-BSP. ``version=2020`` is section 3.3 of "Semi-Dynamic Load Balancing", SoCC
        2020, doi:10.1145/3419111.3421299, online and without a model. Over a window of iterations
        it finds the leader, the fastest worker that still has room, and the straggler, the slowest.
        It moves a step of the batch from the straggler to the leader. When samples go back the way
        they came, it halves the step and widens the window. ``version=2018`` is their poster (SoCC
        2018; arXiv 1806.02508v1): a piecewise linear relation of time to batch is profiled for
        every worker, and the batches with the least longest time are chosen from it,
        ``min max_i t_i(x_i)``.

    How we differ:
        * The text of 2020 was available to us in notes only, without its constants. The first step
          is half an equal share and the first window is 5 steps. The step is halved and the window
          doubled up to 20, which did best in our scenarios. "Goes back" means that the straggler
          received last, or that the leader gave last. A step never falls below one sample. Neither
          ever recovers, so a late change of speed is followed slowly.
        * The straggler gives samples only down to its lower bound. If it is there already, or no
          worker has room, nothing moves.
        * 2018: the authors profile every device by itself before training. A policy can only set
          shares, so the profile is taken in the first steps of training, in five splits in which
          neighbouring ranks get more and less in turn. These steps are as unbalanced as the splits
          are. Outside the profiled shares a curve follows the line through its outermost points,
          and it rises everywhere by at least a little, so that noise cannot make it fall. After
          that the split is fixed, as in the poster: changes are not followed.
        * Steps at an earlier share do not count.
        * In training it acts at exchanges, every 4 to 512 steps. A window counts the steps since
          the last move and ends at the first exchange after it, so it may be longer than set. With
          ``every=1`` it has its length.
    """

    version: int = field(default=2020, metadata=one_of(2018, 2020))  # 2020 or 2018
    # Steps of every worker before the first move (2020).
    window: int = field(default=5, metadata=within(int, 1))
    # Largest window (2020).
    most_window: int = field(default=20, metadata=within(int, 1))
    # Samples of the first move, as a fraction of an equal share (2020).
    first_step: float = field(default=0.5, metadata=within(float))
    # Steps of every worker in each split of the profile (2018).
    profile_steps: int = field(default=5, metadata=within(int, 1))
    # With 1, every step waits for its decision; with 0, decisions are made at exchanges.
    every: int = field(default=0, metadata=one_of(0, 1))

    def __post_init__(self) -> None:
        check_settings("policy lb-bsp-gpu", self)

    @property
    def opening_steps(self) -> int:
        """The published versions have no opening."""
        return EVERY_STEP if self.every else 0

    def init(self, fleet: Fleet) -> tuple[Stepping | CurvePoints, Move]:
        count, opening = len(fleet), equal_split(fleet)
        if self.version == 2018:
            profile = np.zeros((0, count))
            state = CurvePoints(Means.none(count), profile.astype(np.int64), profile)
            return state, Move(opening, "first split of the profile: equal", settled=False)
        step = max(1, round(self.first_step * fleet.global_batch / count))
        return Stepping(Means.none(count), step, self.window), Move(opening, "equal split")

    def decide(
        self, state: Stepping | CurvePoints, situation: Situation
    ) -> tuple[Stepping | CurvePoints, Decision]:
        """Add the new times; at the end of a window move a step, or take the next split."""
        state = replace(state, means=state.means.including(situation))
        if isinstance(state, CurvePoints):
            return self._profile(state, situation)
        return self._lead(state, situation)

    def _lead(self, state: Stepping, situation: Situation) -> tuple[Stepping, Decision]:
        fleet, shares = situation.fleet, as_array(situation.shares)
        fewest = int(state.means.steps[shares > 0].min())
        if fewest < state.window:
            return state, Keep(f"{fewest} of {state.window} steps of the window measured")
        # Bounds may have narrowed since. Moves between two workers would not repair that.
        if ((shares < fleet.lower) | (shares > fleet.upper)).any():
            weights, total = shares.astype(np.float64), fleet.global_batch
            inside = apportion(weights, total, fleet.lower, fleet.upper)
            fresh = replace(state, means=Means.none(len(fleet)))
            return fresh, Move(as_shares(inside), "shares moved back within the bounds")
        leader, straggler = _leader_and_straggler(state.means.mean_s, shares, fleet)
        fresh = replace(state, means=Means.none(len(fleet)))  # each window starts empty
        if leader == straggler:
            return fresh, Keep("no worker with room is faster than the slowest one")
        names = fleet.workers[straggler].name, fleet.workers[leader].name
        room = shares[straggler] - fleet.lower[straggler], fleet.upper[leader] - shares[leader]
        if min(room) == 0:
            return fresh, Keep(f"worker {names[0]} is the slowest and at its lower bound")
        # Samples that go back the way they came show that the step is too large.
        if straggler == state.taker or leader == state.giver:
            wider = min(2 * state.window, max(self.most_window, state.window))
            state = replace(state, step=max(1, state.step // 2), window=wider)
        step = min(state.step, *map(int, room))
        moved = shares.copy()
        moved[[straggler, leader]] += [-step, step]
        state = replace(state, means=Means.none(len(fleet)), giver=straggler, taker=leader)
        return state, Move(as_shares(moved), f"{step} samples from {names[0]} to {names[1]}")

    def _profile(self, state: CurvePoints, situation: Situation) -> tuple[CurvePoints, Decision]:
        fleet, shares = situation.fleet, as_array(situation.shares)
        count, fewest = len(fleet), int(state.means.steps[shares > 0].min())
        if len(state.shares) == len(_PROFILE):
            return state, Keep("the split from the profile is fixed")
        if fewest < self.profile_steps:
            seen = f"{fewest} of {self.profile_steps} steps of this split measured"
            return state, Keep(f"profile: {seen}", settled=False)
        state = CurvePoints(
            Means.none(count),
            np.concatenate([state.shares, shares[None]]),
            np.concatenate([state.times_s, state.means.mean_s[None]]),
        )
        taken = len(state.shares)
        if taken < len(_PROFILE):
            weights = np.array(_PROFILE[taken])[np.arange(count) % 2]
            following = apportion(weights, fleet.global_batch, fleet.lower, fleet.upper)
            reason = f"split {taken + 1} of {len(_PROFILE)} of the profile"
            return state, Move(as_shares(following), reason, settled=False)
        curves = PiecewiseCurves.through(state.shares, state.times_s, fleet.global_batch)
        best = equal_finish(curves, fleet.lower, fleet.upper, fleet.global_batch)
        return state, Move(as_shares(best), "equal finish on the profiled curves")


def _leader_and_straggler(mean_s: FloatArray, shares: IntArray, fleet: Fleet) -> tuple[int, int]:
    """Return the fastest worker with room and the slowest; the same one if no other is faster."""
    straggler = int(np.argmax(mean_s))
    with_room_s = np.where(shares < fleet.upper, mean_s, np.inf)
    leader = int(np.argmin(with_room_s))
    return (leader if with_room_s[leader] < mean_s[straggler] else straggler), straggler


@dataclass(frozen=True, slots=True, eq=False)
class PiecewiseCurves:
    """Piecewise linear step times of ``W`` workers; a `StepTimes`."""

    share: FloatArray  # where the pieces meet, ascending, ``(K, W)``
    # The times there, not descending, and rising wherever the share rises, ``(K, W)``.
    time_s: FloatArray

    @classmethod
    def through(cls, shares: IntArray, times_s: FloatArray, most: int) -> PiecewiseCurves:
        """Return the curves through some points each, ``(n, W)``, for shares up to ``most``.

        Points at the same share count as their mean. Beyond the points a curve follows the line
        through its outermost two, or through the origin if there is only one.
        """
        order = np.argsort(shares, axis=0, kind="stable")
        b = np.take_along_axis(shares, order, axis=0).astype(np.float64)
        t = np.take_along_axis(times_s, order, axis=0)
        same = b[:, None] == b[None, :]
        t = (same * t[None, :]).sum(axis=1) / same.sum(axis=1)
        least = _LEAST_RISE * t[-1] / np.maximum(b[-1], 1.0)
        span = b[-1] - b[0]
        line = np.where(span > 0, t[-1] - t[0], t[-1]) / np.maximum(
            np.where(span > 0, span, b[-1]), 1.0
        )
        line = np.maximum(line, least)
        # One more than any share, because `at` may get the share above the largest.
        far = np.full_like(least, most + 1.0)
        share = np.concatenate([0 * far[None], b, far[None]])
        ends = np.maximum(t[0] - line * b[0], 0.0), t[-1] + line * (far - b[-1])
        time_s = np.concatenate([ends[0][None], t, ends[1][None]])
        # Noise can make a later point lower. Without the least rise, the highest value so far
        # replaces it.
        rising = np.maximum.accumulate(time_s - least * share, axis=0)
        return cls(share, rising + least * share)

    def at(self, shares: IntArray) -> FloatArray:
        """Return each worker's time in seconds at its share; both ``(W,)``."""
        low = np.clip((self.share <= shares).sum(axis=0) - 1, 0, len(self.share) - 2)
        (b, b_next), (t, t_next) = _piece(self.share, low), _piece(self.time_s, low)
        return np.asarray(t + (shares - b) * ((t_next - t) / (b_next - b)))

    def capacity(self, deadline_s: float) -> IntArray:
        """Return the largest share of each worker that ends by the deadline; 0 if no share does."""
        low = np.clip((self.time_s <= deadline_s).sum(axis=0) - 1, 0, len(self.share) - 2)
        (b, b_next), (t, t_next) = _piece(self.share, low), _piece(self.time_s, low)
        rise = np.where(t_next > t, t_next - t, 1.0)  # no rise between two points at a share of 0
        exact = b + (deadline_s - t) * ((b_next - b) / rise)
        share = np.clip(np.floor(exact), 0, 2**53).astype(np.int64)
        # Rounding may be one sample off; comparing with `at` makes it exact for those times.
        share += self.at(share + 1) <= deadline_s
        share -= (share > 0) & (self.at(share) > deadline_s)
        return share


def _piece(knots: FloatArray, low: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the values at both ends of one piece of every curve, ``(W,)`` each."""
    column = np.arange(knots.shape[1])
    return knots[low, column], knots[low + 1, column]
