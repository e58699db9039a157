"""What the memory of a fleet's workers allows, beside the bounds that were asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil

from evenstride.core.allocation.memory_model import MemoryModel, PeakMemory
from evenstride.core.allocation.min_max import whole_lower
from evenstride.core.allocation.proportional_split import apportion
from evenstride.core.arrays import Shares
from evenstride.core.fleet import Fleet, Worker, as_array, as_shares
from evenstride.errors import InfeasibleShares

# How often the factor is halved by which caps are raised that leave too little room.
# Eight leave less than half a per cent of the factor between too little and enough.
_HALVINGS = 8


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of all workers of a fleet; empty until one has told of it."""

    models: tuple[MemoryModel, ...] = ()  # of each worker
    # Most samples of each worker; ``None`` where there is no telling.
    caps: tuple[int | None, ...] = ()

    def learn(self, held: Iterable[PeakMemory], workers: int, fraction: float) -> Memory:
        """Return the memory after an exchange; the same object if no cap has changed for it.

        Args:
            held: what the workers told; reports of workers or sizes that there are not are left.
            workers: ``W``.
            fraction: part of its limit that each may use.
        """
        # A rank of -1 would otherwise teach the last worker.
        told = [h for h in held if 0 <= h.worker < workers and h.samples > 0]
        if not told:
            return self
        models = list(self.models) or [MemoryModel()] * workers
        caps = list(self.caps) or [None] * workers
        for each in told:
            models[each.worker] = models[each.worker].saw(each.samples, each.peak_bytes)
            caps[each.worker] = models[each.worker].cap(each.limit_bytes, fraction)
        return Memory(tuple(models), tuple(caps))

    def of(self, ranks: tuple[int, ...]) -> Memory:
        """Return the memory of some workers."""
        if not self.models or len(ranks) == len(self.models):
            return self
        return Memory(tuple(self.models[k] for k in ranks), tuple(self.caps[k] for k in ranks))

    def following(self, workers: tuple[Worker, ...], former: tuple[Worker, ...]) -> Memory:
        """Return the memory for another generation: what is known of those who stay, by name."""
        if not self.models:
            return Memory()
        # By name, because another generation may number its ranks differently.
        known = {worker.name: rank for rank, worker in enumerate(former)}
        ranks = [known.get(worker.name) for worker in workers]
        return Memory(
            tuple(MemoryModel() if rank is None else self.models[rank] for rank in ranks),
            tuple(None if rank is None else self.caps[rank] for rank in ranks),
        )

    def bound(self, fleet: Fleet) -> Fleet:
        """Return the fleet with every worker's share bounded by its memory, too.

        Caps that leave no room for the global batch are raised, all by the same factor: a run
        that may end for want of memory is better than one that has ended.
        """
        bound, low, high = self._raised(fleet, 1.0), 1.0, 2.0
        if bound is not None:
            return bound
        # This ends: caps that have grown beyond the fleet's own bounds change nothing any more.
        while (bound := self._raised(fleet, high)) is None:
            low, high = high, 2.0 * high
        # No higher than the batch demands, because every sample above a cap may end the run.
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            better = self._raised(fleet, middle)
            if better is None:
                low = middle
            else:
                bound, high = better, middle
        return bound

    def fits(self, fleet: Fleet) -> bool:
        """Return whether the fleet's global batch fits, as far as is known, with no cap raised."""
        return not self.caps or self._raised(fleet, 1.0) is not None

    def _raised(self, fleet: Fleet, factor: float) -> Fleet | None:
        """Return the fleet under caps that are so much higher, unless they leave too little."""
        pairs = zip(fleet.workers, self.caps, strict=True)
        workers = tuple(_bounded(worker, cap, factor) for worker, cap in pairs)
        try:
            bound = replace(fleet, workers=workers)
            # `Fleet` checks the bounds in samples; in whole micro-batches less may fit.
            whole_lower(bound.lower, bound.upper, bound.global_batch, bound.quanta)
        except InfeasibleShares:
            # Caps that bound no one are not the cause, and raising them would never end.
            return None if workers != fleet.workers else fleet
        return bound

    def ends(self, rank: int) -> int | None:
        """Return the most samples that fit into a worker's memory; ``None`` if not known yet."""
        cap = self.caps[rank] if self.caps else None
        return cap if cap is not None and self.models[rank].ends_at(cap) else None

    def reason(self, before: Memory, workers: tuple[Worker, ...], global_batch: int) -> str:
        """Return a clause about the caps that are new, or nothing; at most two are named."""
        was = before.caps or (None,) * len(self.caps)
        news = [rank for rank, cap in enumerate(self.caps) if cap != was[rank]]
        # A cap that is no lower than the global batch limits nothing.
        binding = [r for r in news if (self.caps[r] or global_batch) < global_batch]
        named = [
            f"{workers[r].name} may {'grow to' if self.ends(r) is None else 'hold'} "
            f"{self.caps[r]} ({self.models[r].reason()})"
            for r in binding[:2]
        ]
        return "; memory: " + ", ".join(named) if named else ""


def _bounded(worker: Worker, cap: int | None, factor: float) -> Worker:
    """Return the worker with its cap; what the user asked for always holds."""
    if cap is None:
        return worker
    # A cap below one whole micro-batch would make the fleet infeasible, and raising all caps until
    # this one fits would give the other workers more than they can hold.
    least = worker.min_share + -worker.min_share % worker.quantum
    most = max(ceil(cap * factor), least)
    if worker.max_share is not None and worker.max_share <= most:
        return worker
    return replace(worker, max_share=most)


def within(shares: Shares, fleet: Fleet) -> Shares:
    """Return the split next to another one that keeps the fleet's bounds; workers at 0 stay.

    What a bound takes away goes to the others in proportion to the room they have.
    """
    at = as_array(shares)
    over = at - fleet.upper
    if (over <= 0).all():
        return shares
    clipped = at.clip(max=fleet.upper)
    room = fleet.upper - clipped
    # A worker at 0 was left out on purpose; bounds of the others are no reason to take it back.
    room[at == 0] = 0
    missing = int(at.sum() - clipped.sum())
    if int(room.sum()) < missing:  # those at 0 are needed
        room = fleet.upper - clipped
    given = apportion(room.astype(float), missing, room * 0, room)
    return as_shares(clipped + given)
