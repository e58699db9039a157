"""What each worker's steps took at each of its latest shares, as if its speed had never changed.

A time curve with steps or a cliff is no straight line, so a filter of two numbers takes each step
of the curve for a change of speed. `ShareTimes` keeps the two apart: a time that changes at one
share is a change of speed, which moves all of a worker's entries. A time that changes with the
share, in the same direction, is the shape of its curve. `wave_search` finds waves in these entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask
from evenstride.core.time_model.estimates import PROOF, ShareTimes

# A time this far from its entry is no noise, in standard deviations and in logarithms.
_FAR_STD, _FAR = 4.0, 0.08
# A time this far from its curve is a reason to look for waves, in standard deviations.
_ODD_STD = 2.5
# After this many steps, an entry stays; later deviations are the speed's. They count as one of so
# many steps then.
_SETTLED, _MEMORY = 16.0, 8.0
# A limit: a step at more samples took this much longer per sample than before, in logarithms.
_CLIFF = 0.18


@dataclass(frozen=True, slots=True, eq=False)
class NewTimes:
    """One time of each of some workers, arrays ``(n,)``."""

    workers: IntArray | slice  # a slice for all of them.
    share: IntArray
    time_s: FloatArray  # a median.
    steps: IntArray  # number of steps in it.
    free: Mask  # whether first steps at new shares have been as fast as later ones.
    # Given some of these, returns their usual time by the curve, in seconds, that at the share
    # before, and the relative standard deviation of the first.
    curve: Callable[[IntArray], tuple[FloatArray, FloatArray, FloatArray]]


def noted(seen: ShareTimes, new: NewTimes) -> tuple[ShareTimes, Mask, FloatArray]:
    """Return the record after some times, and which of them say nothing about the speed, ``(n,)``.

    Also how far the times of shares to which workers have returned are from their entries, in
    logarithms, ``(n,)``, and at least how far the entry of the share before is from its curve.
    Infinite for all others, and where that shows another speed.

    Cost: ``O(W)``, vectorised; more for workers whose share has changed.
    """
    w, log_s = new.workers, np.log(np.maximum(new.time_s, 1e-9))
    names = ("here", "slower", "held", "squares", "steps")
    after = replace(seen, **{name: getattr(seen, name).copy() for name in names})
    after.steps[w] += new.steps
    noise = seen.noise[w]
    moved = seen.share[0, w] != new.share
    jump, off = np.zeros(len(moved), np.bool_), np.full(len(moved), np.inf)
    if not moved.any():
        _stayed(after, w, log_s, new.steps, noise)
    else:
        ranks = np.arange(len(moved)) if isinstance(w, slice) else w
        stay, places = np.flatnonzero(~moved), np.flatnonzero(moved)
        _stayed(after, ranks[stay], log_s[stay], new.steps[stay], noise[stay])
        moves = _Moves.of(after, new, ranks, places, log_s[places], noise[places])
        after, jump[places] = _moved(after, moves)
        far = np.maximum(np.abs(moves.off), moves.misfit)
        off[places] = np.where(moves.known & ~moves.far, far, np.inf)
    if not (jump.any() or after.limit[1].any()):
        return after, jump, off
    ranks = np.arange(len(moved)) if isinstance(w, slice) else w
    after = _limited(after, ranks, new.steps, jump, new.free)
    least, most, _ = after.limit[:, w]
    return after, (most > 0) & (new.share > least), off


def _stayed(
    seen: ShareTimes, w: IntArray | slice, log_s: FloatArray, steps: IntArray, noise: FloatArray
) -> None:
    level, count = seen.here[:, w].copy()  # not a view of what changes below
    off = log_s - seen.slower[w] - level
    part = 1 / steps + 1 / count
    widest = np.maximum(_FAR_STD * np.sqrt(noise * part), _FAR)
    far = np.abs(off) > widest
    # The first step at a share was slow for another reason.
    cold = far & (off < 0) & (count <= 1)
    # A single slow step may be a spike.
    changed = far & ~cold & (seen.held[w] | (steps > 2) | (off < 0))
    seen.held[w] = far & ~cold & ~changed
    near = ~far
    young = near & (count < _SETTLED)
    weight = steps / (count + steps)
    seen.here[0, w] = level + np.where(cold, off, np.where(young, weight * off, 0.0))
    drift = np.where(near & ~young, steps / (steps + _MEMORY) * off, 0.0)
    seen.slower[w] += np.where(changed, off, drift)
    seen.here[1, w] = np.where(cold, steps, np.where(near, count + steps, count))
    # The deviation of a new mean from an old one has both variances. Far ones count with a limit,
    # because many of them are noise after all.
    seen.squares[0, w] += np.minimum(off**2, widest**2) / part
    seen.squares[1, w] += 1


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """First times of some workers after their shares have changed, arrays ``(n,)``."""

    workers: IntArray
    share: IntArray
    steps: IntArray
    level: FloatArray  # logarithm of the time relative to the entries' speed.
    first: Mask  # whether the worker had no share before.
    known: Mask  # whether it has an entry of the share.
    before: tuple[IntArray, FloatArray, FloatArray, IntArray]  # the entry of the share before.
    found: tuple[IntArray, FloatArray, FloatArray, IntArray]  # that of the share, or the oldest.
    at: IntArray  # row of the latter.
    off: FloatArray  # how much longer than expected, in logarithms.
    std: FloatArray  # standard deviation of that.
    misfit: FloatArray  # how far the entry of the share before is from its curve, in logarithms.
    late: Mask  # whether more samples took less time before.
    since: IntArray  # when that was.

    @classmethod
    def of(
        cls,
        seen: ShareTimes,
        new: NewTimes,
        ranks: IntArray,
        places: IntArray,
        log_s: FloatArray,
        noise: FloatArray,
    ) -> _Moves:
        w, share, steps = ranks[places], new.share[places], new.steps[places]
        same = seen.share[1:, w] == share
        known = same.any(axis=0)
        at = 1 + np.where(known, same.argmax(axis=0), seen.used[1:, w].argmin(axis=0))
        before = seen.share[0, w], seen.here[0, w], seen.here[1, w], seen.steps[w] - steps
        found = seen.share[at, w], seen.level[at, w], seen.count[at, w], seen.used[at, w]
        first, level = before[0] == 0, log_s - seen.slower[w]
        curve_s, before_s, doubt = new.curve(places)
        curve, curve_before = np.log(np.maximum([curve_s, before_s], 1e-12))
        by_curve = curve - curve_before
        misfit = np.abs(before[1] + seen.slower[w] - curve_before)
        # A new share is compared with the share before, by the curve; a known one with itself.
        off = level - np.where(known, found[1], before[1] + by_curve)
        count = np.maximum(np.where(known, found[2], before[2]), 1)
        std = np.sqrt(noise * (1 / steps + 1 / count) + np.where(known, 0.0, doubt**2))
        more = np.where(seen.share[:, w] > share, seen.level[:, w], np.inf)
        more[0] = np.where(before[0] > share, before[1], np.inf)
        place = more.argmin(axis=0)
        late = ~first & ~known & (level - more.min(axis=0) > _FAR_STD * std + _FAR)
        by_share = 0.5 * np.log(share / np.maximum(seen.share[place, w], 1))
        off = np.where(late, level - np.where(late, more.min(axis=0), 0.0) - by_share, off)
        since = np.where(place == 0, before[3], seen.used[place, w])
        off = np.where(first, 0.0, off)
        return cls(
            w, share, steps, level, first, known, before, found, at, off, std, misfit, late, since
        )

    @property
    def new(self) -> Mask:
        return ~self.first & ~self.known

    @property
    def far(self) -> Mask:
        return ~self.first & (np.abs(self.off) > np.maximum(_FAR_STD * self.std, _FAR))

    @property
    def longer(self) -> Mask:
        return self.level > self.before[1]

    def of_speed(self, held: Mask) -> Mask:
        """Return which far times are another speed, or a cold start, whatever the share."""
        # A curve grows with the share, so the time of a new share that moves the other way is one.
        other_way = (self.share > self.before[0]) != self.longer
        # Nor is it the share if the worker was slow already, or if more samples took less time.
        by_speed = self.known | other_way | (self.longer & held)
        return np.asarray((self.far & by_speed) | self.late)


def _moved(seen: ShareTimes, moves: _Moves) -> tuple[ShareTimes, Mask]:
    """Return the record with the new shares, and which times may be due to more samples."""
    w, known, found, steps = moves.workers, moves.known, moves.found, moves.steps
    held = seen.held[w]
    rows = ("share", "level", "count", "used")
    copied = {name: getattr(seen, name).copy() for name in (*rows, "odd", "limit")}
    seen = replace(seen, **copied)
    for name, values in zip(rows, moves.before, strict=True):
        getattr(seen, name)[moves.at, w] = values
    speed = moves.of_speed(held)
    cold = speed & known & (found[2] <= 1) & (moves.off < 0)
    # The first steps at a new share may be slow for another reason.
    wait = speed & ~known & (moves.off > 0) & (steps < 2) & ~held & ~moves.late
    change = speed & ~cold & ~wait
    shift = np.where(change, moves.off, 0.0)
    seen.slower[w] += shift
    level, keep = moves.level - shift, known & ~cold
    weight = np.where(keep & ~change, steps / (found[2] + steps), 0.0)
    seen.share[0, w] = moves.share
    seen.here[0, w] = np.where(keep, found[1] + weight * (level - found[1]), level)
    seen.here[1, w] = np.where(keep, found[2] + np.where(change, 0, steps), steps)
    seen.held[w] = False
    # Entries of a share since then may belong to either speed.
    stale = (known & change) | moves.late
    whose, last = w[stale], np.where(moves.late, moves.since, found[3])[stale]
    seen.share[1:, whose] = np.where(seen.used[1:, whose] > last, 0, seen.share[1:, whose])
    # So may a cliff that was found since.
    doubted = whose[seen.limit[2, whose] > last]
    # A cliff that one step showed is forgotten with the share, and with what that step took.
    gone = w[(seen.proof[w] < PROOF) & (moves.share <= seen.limit[0, w])]
    seen.share[1:, gone] *= seen.share[1:, gone] <= seen.limit[0, gone]
    seen.limit[:, doubted], seen.limit[:, gone] = 0, 0
    odd = moves.new & (np.abs(moves.off) > _ODD_STD * moves.std)
    seen.odd[w] |= odd
    share = np.log(moves.share / np.maximum(moves.before[0], 1))
    beyond = level - moves.before[1] > share + _CLIFF
    more = moves.share > moves.before[0]
    return seen, odd & moves.far & more & (moves.off > 0) & moves.longer & ~speed & beyond


def _limited(seen: ShareTimes, w: IntArray, steps: IntArray, jump: Mask, free: Mask) -> ShareTimes:
    """Return the record with the limits of workers that have just passed one, or not."""
    least, most, _ = seen.limit[:, w]
    places = np.flatnonzero(jump | ((most > 0) & (seen.share[0, w] > least)))
    if not len(places):
        return seen
    w, steps, least, most = w[places], steps[places], least[places], most[places]
    free = free[places]
    share, level = seen.share[0, w], seen.here[0, w]
    below = np.where(seen.share[1:, w] < share, seen.share[1:, w], 0)
    below = np.where((below > least) & (most > 0), 0, below)  # those are slow as well
    from_share, at = below.max(axis=0), 1 + below.argmax(axis=0)
    more = np.log(seen.counted(w, share) / np.maximum(seen.counted(w, from_share), 1))
    # Much longer per sample than at the largest share below.
    enough = np.maximum(_CLIFF, _FAR_STD * np.sqrt(seen.noise[w]))
    slow = (from_share > 0) & (level - seen.level[at, w] - more > enough)
    bend = slow & _bent(seen, w, from_share, seen.level[at, w])
    slow &= ~bend
    seen = replace(
        seen,
        limit=seen.limit.copy(),
        limit_level=seen.limit_level.copy(),
        proof=seen.proof.copy(),
        tries=seen.tries.copy(),
    )
    first = slow & (most == 0)
    lower = slow & (first | (share < most))
    before = np.where(lower, 0, seen.proof[w])
    # First steps at several shares may all be cold starts.
    again = free | (steps > 1) | (seen.here[1, w] > 1)
    proof = np.where(again, before + steps, np.maximum(before, 1))
    seen.proof[w] = np.where(slow, proof, seen.proof[w])
    seen.tries[w] += (before < PROOF) & (seen.proof[w] >= PROOF) & slow
    seen.limit_level[w] = np.where(lower, level, seen.limit_level[w])
    seen.limit[0, w] = np.where(first, from_share, np.where(slow | (from_share == 0), least, share))
    seen.limit[1, w] = np.where(lower, share, most)
    seen.limit[2, w] = np.where(slow, seen.steps[w], seen.limit[2, w])
    # A normal time at so many samples: the first one was slow for another reason.
    gone = bend | (~slow & (share >= most) & (from_share > 0))
    seen.limit[:, w] = np.where(gone, 0, seen.limit[:, w])
    return seen


def _bent(seen: ShareTimes, w: IntArray, below: IntArray, below_level: FloatArray) -> Mask:
    """Return which workers' present times show a bend below the next larger share, not a jump.

    Beyond a jump, times are nearly proportional to the share. Beyond a bend, a time is never above
    the straight line between two others.
    """
    share, level = seen.share[0, w], seen.here[0, w]
    larger = np.where(seen.share[1:, w] > share, seen.share[1:, w], 2**40)
    above, at = larger.min(axis=0), 1 + larger.argmin(axis=0)
    above_level = seen.level[at, w]
    part = (share - below) / np.maximum(above - below, 1)
    chord = np.log((1 - part) * np.exp(below_level) + part * np.exp(above_level))
    jump = above_level - np.log(above / share)
    return np.asarray((above < 2**40) & (level < 0.5 * (chord + np.maximum(jump, chord))))
