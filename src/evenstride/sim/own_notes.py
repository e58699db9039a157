"""What virtual workers report that do not keep step: each its own updates, in its own count."""

from __future__ import annotations

from dataclasses import replace

from evenstride.core.band import Band
from evenstride.core.events import Expect
from evenstride.core.fleet import FloatArray, Shares
from evenstride.core.observation import Measured, Observation


class OwnNotes:
    """Keeps the updates of ``W`` workers until the leader asks for them, and who asks for it.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        self._made = [0] * workers
        self._bands = [Band() for _ in range(workers)]
        self._seen: list[list[Observation]] = [[] for _ in range(workers)]

    def expect(self, expect: Expect, shares: Shares) -> None:
        """Set the bands anew, for the shares that the leader has decided on."""
        columns = zip(shares, expect.expected_s, expect.band, strict=True)
        self._bands = [Band(share, expected_s, part) for share, expected_s, part in columns]

    def add(self, worker: int, share: int, busy_s: float, wait_s: float) -> bool:
        """Keep an update; return whether the worker asks for an exchange because of it."""
        before = self._bands[worker]
        after = self._bands[worker] = before.step(share, busy_s)
        seen, step = self._seen[worker], self._made[worker]
        self._made[worker] += 1
        breaks = (after.strikes > 0 or after.asked) and before.strikes == 0 and not before.asked
        if seen and seen[-1].share == share and not breaks:
            last = seen[-1]
            seen[-1] = replace(last, busy_s=(*last.busy_s, busy_s), wait_s=(*last.wait_s, wait_s))
        else:
            seen.append(Observation(worker, share, step, (busy_s,), (wait_s,)))
        return after.asked and not before.asked

    def take(self, cpu_load: FloatArray) -> Measured:
        """Return all updates as observations, and forget them.

        Args:
            cpu_load: of each worker's machine by now, ``(W,)``.
        """
        told = Measured.of(
            replace(seen, cpu_load=float(cpu_load[worker]))
            for worker, all_seen in enumerate(self._seen)
            for seen in all_seen
        )
        self._seen = [[] for _ in self._seen]
        return told
