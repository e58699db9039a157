"""What each worker's steps took at each of its latest shares, as if its speed had never changed.

A time curve with steps or a cliff is no straight line, so a filter of two numbers takes each step
of the curve for a change of speed. This record keeps the two apart: a time that changes at one
share is a change of speed, which moves all of a worker's entries; a time that changes with the
share, in the same direction, is the shape of its curve. `wave_search` finds waves in these entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenstride.core.arrays import FloatArray, IntArray, Mask

_ENTRIES = 12  # stored shares of each worker; the longest unused one is replaced
# A time this far from its entry is no noise, in standard deviations and in logarithms.
_FAR_STD, _FAR = 4.0, 0.08
# A time this far from its curve is a reason to look for waves, in standard deviations.
_ODD_STD = 2.5
# After this many steps, an entry stays; later deviations are the speed's. They count as one of so
# many steps then.
_SETTLED, _MEMORY = 16.0, 8.0
# Prior of the noise of one step, and the number of steps for which it counts.
_NOISE_FIRST, _NOISE_STEPS = 0.03**2, 4.0
# Number of slow steps that show a cliff rather than a cold start.
_PROOF = 2
# A first step at a new share is slow if it takes this much longer, in logarithms.
_SLOW = 0.2
# A limit: a step at more samples took this much longer per sample than before, in logarithms.
_CLIFF = 0.18


@dataclass(frozen=True, slots=True, eq=False)
class ShareTimes:
    """The entries of ``W`` workers; row 0 of each is its present share."""

    share: IntArray  # ``(n, W)``, 0 for no entry
    level: FloatArray  # ``(n, W)``, logarithm of the seconds at that share, at the reference speed
    count: FloatArray  # ``(n, W)``, number of steps in it
    used: IntArray  # ``(n, W)``, number of the worker's steps when it was used last
    slower: FloatArray  # ``(W,)``, logarithm of the present times relative to the entries
    steps: IntArray  # ``(W,)``, number of steps seen
    held: Mask  # ``(W,)``, whether the latest step was far from its entry, and may be a spike
    sought: Mask  # ``(W,)``, whether waves are sought
    squares: FloatArray  # ``(2, W)``, sum of squared deviations at one share, and their number
    odd: Mask  # ``(W,)``, whether entries have come that the curve did not foresee
    # ``(W,)``, samples of a wave: times change only at its multiples. 1 for any share.
    quantum: IntArray
    # ``(3, W)``: above ``least`` samples times are far too long, as seen at ``most`` samples, at
    # the step ``since``; 0 for no limit.
    limit: IntArray
    limit_level: FloatArray  # ``(W,)``, the entry's level there
    proof: IntArray  # ``(W,)``, number of steps that were slow above it
    tries: IntArray  # ``(W,)``, number of times that a cliff or waves were found

    @classmethod
    def none(cls, workers: int, sought: Mask | None = None) -> ShareTimes:
        whole, flat = np.zeros((_ENTRIES, workers), np.int64), np.zeros(workers)
        rows, never = np.zeros((_ENTRIES, workers)), np.zeros(workers, np.bool_)
        none = np.zeros(workers, np.int64)
        limit, one = np.zeros((3, workers), np.int64), np.ones(workers, np.int64)
        pair = np.zeros((2, workers))
        return cls(
            *(
                whole,
                rows,
                rows,
                whole,
                flat,
                none,
                never,
                ~never if sought is None else sought,
                pair,
                never,
            ),
            *(one, limit, flat, none, none),
        )

    @property
    def noise(self) -> FloatArray:
        """Relative variance of one step, ``(W,)``."""
        # All workers count a little, because the first steps of one say almost nothing.
        squares, count = self.squares
        common = (_NOISE_FIRST * _NOISE_STEPS + squares.sum()) / (_NOISE_STEPS + count.sum())
        return np.asarray((common * _NOISE_STEPS + squares) / (_NOISE_STEPS + count))

    @property
    def has_waves(self) -> bool:
        return bool((self.quantum > 1).any())

    @property
    def limits_s(self) -> tuple[IntArray, FloatArray] | None:
        """The largest shares without a cliff, and the least seconds above them, ``(W,)`` both."""
        limited = (self.limit[1] > 0) & (self.proof >= _PROOF)
        if not limited.any():
            return None
        beyond_s = np.where(limited, np.exp(self.limit_level + self.slower), 0.0)
        return self.limit[0], beyond_s

    def trying(self, shares: IntArray) -> ShareTimes:
        """Return the record with cliffs above decided shares that have not been measured yet."""
        least, most, _ = self.limit
        under_way = (shares > least) & (shares < most)
        if not under_way.any():
            return self
        limit = self.limit.copy()
        limit[0] = np.where(under_way, shares, least)
        return replace(self, limit=limit)

    def bolder(self) -> tuple[ShareTimes, Mask, int]:
        """Return the record with each cliff halfway to the smallest slow share.

        Also the workers for which that differs, and the steps since the latest cliff was met, over
        the number of times that one was: each trial waits for twice as long.
        """
        least, most, since = self.limit
        middle = (least + most) // 2
        open_to = (middle > least) & (self.proof >= _PROOF)
        limit = self.limit.copy()
        limit[0] = np.where(open_to, middle, least)
        waited = (self.steps - since)[open_to] >> np.minimum(self.tries[open_to] - 1, 30)
        return replace(self, limit=limit), open_to, int(waited.min(initial=2**40))

    @property
    def discoveries(self) -> int:
        return int(self.tries.sum())

    @property
    def cliffs(self) -> FloatArray:
        """Each worker's largest share below a cliff, the smallest slow one, and its seconds.

        ``(3, W)``, 0 without a cliff.
        """
        limits = self.limits_s
        if limits is None:
            return np.zeros((3, len(self.steps)))
        return np.where(limits[1] > 0, np.array([self.limit[0], self.limit[1], limits[1]]), 0.0)

    def shaped(self, workers: IntArray, quanta: IntArray, cliffs: FloatArray) -> ShareTimes:
        """Return the record with the waves and cliffs of workers without entries."""
        if not len(workers):
            return self
        quantum, limit = self.quantum.copy(), self.limit.copy()
        limit_level, proof = self.limit_level.copy(), self.proof.copy()
        quantum[workers] = np.where(self.sought[workers], quanta, 1)
        limit[:2, workers] = cliffs[:2].astype(np.int64)
        limit_level[workers] = np.log(np.where(cliffs[2] > 0, cliffs[2], 1.0))
        proof[workers] = _PROOF
        return replace(self, quantum=quantum, limit=limit, limit_level=limit_level, proof=proof)

    @property
    def unclear(self) -> Mask:
        """Which workers were slow for one step with more samples than ever, ``(W,)``."""
        least, most, _ = self.limit
        return np.asarray((most > 0) & (self.proof < _PROOF) & (self.share[0] > least))

    def counted(self, workers: IntArray | slice, shares: IntArray) -> IntArray:
        """Return the samples whose time counts: shares rounded up to whole waves."""
        if not self.has_waves:  # a division of integers costs as much as ten products
            return shares
        quantum = self.quantum[workers]
        return np.asarray(-(-shares // quantum) * quantum)


@dataclass(frozen=True, slots=True, eq=False)
class NewTimes:
    """One time of each of some workers, arrays ``(n,)``."""

    workers: IntArray
    share: IntArray
    time_s: FloatArray  # a median
    steps: IntArray  # number of steps in it
    curve_s: FloatArray  # the time that its curve predicts; 0 if unknown
    before_s: FloatArray  # and at the share before
    doubt: FloatArray  # relative standard deviation of the curve at the share


def noted(seen: ShareTimes, new: NewTimes) -> tuple[ShareTimes, Mask]:
    """Return the record after some times, and which of them say nothing about the speed, ``(n,)``.

    Cost: ``O(W)``, vectorised; more for workers whose share has changed.
    """
    w, log_s = new.workers, np.log(np.maximum(new.time_s, 1e-9))
    after = replace(
        seen,
        **{name: getattr(seen, name).copy() for name in ("level", "count", "used", "slower")},
        held=seen.held.copy(),
        squares=seen.squares.copy(),
        steps=seen.steps.copy(),
    )
    after.steps[w] += new.steps
    noise = seen.noise[w]
    moved = seen.share[0, w] != new.share
    stay = np.flatnonzero(~moved)
    if len(stay) == len(seen.steps):  # all workers, nearly always
        _stayed(after, slice(None), log_s, new.steps, noise)
    elif len(stay):
        _stayed(after, w[stay], log_s[stay], new.steps[stay], noise[stay])
    jump, alone = np.zeros(len(w), np.bool_), False
    if moved.any():
        places = np.flatnonzero(moved)
        after, jump[places], alone = _moved(after, new, places, log_s[places], noise[places])
    after.used[0, w] = after.steps[w]
    # If others were as fast as ever at their new shares, it is no cold start.
    after = _limited(after, w, np.where(jump & alone, _PROOF, new.steps), jump)
    least, most, _ = after.limit[:, w]
    return after, (most > 0) & (new.share > least)


def _stayed(
    seen: ShareTimes, w: IntArray | slice, log_s: FloatArray, steps: IntArray, noise: FloatArray
) -> None:
    count = seen.count[0, w].copy()  # not a view of what changes below
    off = log_s - seen.slower[w] - seen.level[0, w]
    widest = np.maximum(_FAR_STD * np.sqrt(noise * (1 / steps + 1 / count)), _FAR)
    far = np.abs(off) > widest
    # The first step at a share was slow for another reason.
    cold = far & (off < 0) & (count <= 1)
    # A single slow step may be a spike.
    changed = far & ~cold & (seen.held[w] | (steps > 2) | (off < 0))
    seen.held[w] = far & ~cold & ~changed
    near = ~far
    young = near & (count < _SETTLED)
    weight = steps / (count + steps)
    move = np.where(cold, off, np.where(young, weight * off, 0.0))
    seen.level[0, w] += move
    drift = np.where(near & ~young, steps / (steps + _MEMORY) * off, 0.0)
    seen.slower[w] += np.where(changed, off, drift)
    seen.count[0, w] = np.where(cold, steps, np.where(near, count + steps, count))
    # The deviation of a new mean from an old one has both variances.
    # Far ones count with a limit, because many of them are noise after all.
    seen.squares[0, w] += np.minimum(off**2, widest**2) / (1 / steps + 1 / count)
    seen.squares[1, w] += 1


def _moved(
    seen: ShareTimes, new: NewTimes, places: IntArray, log_s: FloatArray, noise: FloatArray
) -> tuple[ShareTimes, Mask, bool]:
    w, share, steps = new.workers[places], new.share[places], new.steps[places]
    names = ("share", "level", "count", "used")
    seen = replace(seen, share=seen.share.copy(), odd=seen.odd.copy(), limit=seen.limit.copy())
    same = seen.share[1:, w] == share
    known = same.any(axis=0)
    at = 1 + np.where(known, same.argmax(axis=0), seen.used[1:, w].argmin(axis=0))
    before = {name: getattr(seen, name)[0, w] for name in names}
    found = {name: getattr(seen, name)[at, w] for name in names}
    for name in names:
        getattr(seen, name)[at, w] = before[name]
    first = before["share"] == 0
    curve = np.log(np.maximum(new.curve_s, 1e-12) / np.maximum(new.before_s, 1e-12))[places]
    # A new share is compared with the share before, by the curve; a known one with itself.
    expected = np.where(known, found["level"], before["level"] + curve)
    count = np.where(known, found["count"], before["count"])
    off = np.where(first, 0.0, log_s - seen.slower[w] - expected)
    std = np.sqrt(noise * (1 / steps + 1 / np.maximum(count, 1)))
    std = np.where(known, std, np.hypot(std, new.doubt[places]))
    far = np.abs(off) > np.maximum(_FAR_STD * std, _FAR)
    more = share > before["share"]
    longer = log_s - seen.slower[w] > before["level"]
    # A curve grows with the share. A time that moves the other way is another speed.
    speed = ~first & far & (known | (more != longer))
    # Nor is it the share if the worker was slow already.
    speed |= ~first & far & longer & seen.held[w]
    # Nor if more samples took less time before.
    more_samples = np.where(seen.share[1:, w] > share, seen.level[1:, w], np.inf)
    above = more_samples.min(axis=0)
    late = ~first & ~known & (log_s - seen.slower[w] - above > _FAR_STD * std + _FAR)
    place = 1 + more_samples.argmin(axis=0)
    since = seen.used[place, w]
    ratio = np.log(share / np.maximum(seen.share[place, w], 1))
    off = np.where(late, log_s - seen.slower[w] - above - 0.5 * ratio, off)
    speed |= late
    cold = speed & known & (count <= 1) & (off < 0)
    # The first steps at a new share may be slow for another reason.
    wait = speed & ~known & (off > 0) & (steps < 2) & ~seen.held[w] & ~late
    change = speed & ~cold & ~wait
    seen.slower[w] += np.where(change, off, 0.0)
    here = log_s - seen.slower[w]
    keep = known & ~cold
    weight = np.where(keep & ~change, steps / (found["count"] + steps), 0.0)
    seen.share[0, w] = share
    seen.level[0, w] = np.where(keep, found["level"] + weight * (here - found["level"]), here)
    seen.count[0, w] = np.where(keep, found["count"] + np.where(change, 0, steps), steps)
    seen.held[w] = False
    # Entries of a share since then may belong to either speed.
    stale = (known & change) | late
    if stale.any():
        whose, last = w[stale], np.where(late, since, found["used"])[stale]
        seen.share[1:, whose] = np.where(seen.used[1:, whose] > last, 0, seen.share[1:, whose])
        seen.limit[:, whose] = 0
    least_s = np.log(np.maximum(share, 1) / np.maximum(before["share"], 1))
    odd = ~first & ~known & (np.abs(off) > _ODD_STD * std)
    seen.odd[w] |= odd
    jump = odd & far & more & longer & (off > 0) & ~speed
    jump &= log_s - seen.slower[w] - before["level"] > least_s + _CLIFF
    fresh = ~first & ~known
    slow = int(np.count_nonzero(fresh & (off > _SLOW)))
    return seen, jump, 2 * slow < int(np.count_nonzero(fresh))


def _limited(seen: ShareTimes, w: IntArray, steps: IntArray, jump: Mask) -> ShareTimes:
    """Return the record with the limits of workers that have just passed one, or not."""
    least, most, _ = seen.limit[:, w]
    places = np.flatnonzero(jump | ((most > 0) & (seen.share[0, w] > least)))
    if not len(places):
        return seen
    w, steps, least, most = w[places], steps[places], least[places], most[places]
    share, level = seen.share[0, w], seen.level[0, w]
    below = np.where(seen.share[1:, w] < share, seen.share[1:, w], 0)
    below = np.where((below > least) & (most > 0), 0, below)  # those are slow as well
    from_share, at = below.max(axis=0), 1 + below.argmax(axis=0)
    more = np.log(seen.counted(w, share) / np.maximum(seen.counted(w, from_share), 1))
    # Much longer per sample than at the largest share below.
    enough = np.maximum(_CLIFF, _FAR_STD * np.sqrt(seen.noise[w]))
    slow = (from_share > 0) & (level - seen.level[at, w] - more > enough)
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
    seen.proof[w] = np.where(slow, before + steps, seen.proof[w])
    seen.tries[w] += (before < _PROOF) & (seen.proof[w] >= _PROOF) & slow
    seen.limit_level[w] = np.where(lower, level, seen.limit_level[w])
    seen.limit[0, w] = np.where(first, from_share, np.where(slow | (from_share == 0), least, share))
    seen.limit[1, w] = np.where(lower, share, most)
    seen.limit[2, w] = np.where(slow, seen.steps[w], seen.limit[2, w])
    # A normal time at so many samples: the first one was slow for another reason.
    gone = ~slow & (share >= most) & (from_share > 0)
    seen.limit[:, w] = np.where(gone, 0, seen.limit[:, w])
    return seen
