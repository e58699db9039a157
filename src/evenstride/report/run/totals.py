"""What a run came to so far: its time, what balancing saved, and what it left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstride.report.run.blame import waits_of
from evenstride.report.run.clock import durations_s
from evenstride.report.run.generation import Generation


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all steps of one or several generations, in seconds.

    Args:
        steps: that were told of.
        samples: that were trained in them.
        took_s: of all steps.
        judged_steps: of them, those that could be compared with other splits.
        judged_s: of ``took_s``, what these took.
        equal_s: what the equal split would have made of them; what is left of a step beside its
            slowest worker's own work, as communication, is the same in all splits.
        best_s: what the best split would have.
        busy_s: own work of all workers.
        waited_s: waiting of all workers for slower ones.
        communication_s: of all steps.
        apart_s: evaluation, saving, waiting for decisions, by the clock.
    """

    steps: int
    samples: int
    took_s: float
    judged_steps: int
    judged_s: float
    equal_s: float
    best_s: float
    busy_s: float
    waited_s: float
    communication_s: float
    apart_s: float

    @property
    def compared(self) -> bool:
        """Whether there is a comparison: steps that have one, of times that fit together."""
        return min(self.judged_s, self.equal_s, self.best_s) > 0.0

    @property
    def efficiency_model(self) -> float | None:
        """The best split's time over the time taken, from fitted curves; 1 is perfect."""
        return self.best_s / self.judged_s if self.compared else None

    @property
    def speedup_model(self) -> float | None:
        """The equal split's time over the time taken, from fitted curves."""
        return self.equal_s / self.judged_s if self.compared else None

    @property
    def bound_model(self) -> float | None:
        """The equal split's time over the best split's, from fitted curves."""
        return self.equal_s / self.best_s if self.compared else None

    @property
    def saved_s(self) -> float | None:
        """What the equal split would have taken more, in the steps that were compared."""
        return self.equal_s - self.judged_s if self.compared else None

    @property
    def waiting_part(self) -> float:
        """Of all workers' time in steps, the part spent waiting for slower ones."""
        whole_s = self.busy_s + self.waited_s
        return self.waited_s / whole_s if whole_s else 0.0


def totals_of(generations: Sequence[Generation]) -> Totals:
    """Return what some generations came to together."""
    parts = [_of(one) for one in generations] or [Totals(0, 0, *[0.0] * 9)]  # type: ignore[arg-type]
    names = Totals.__dataclass_fields__
    return Totals(**{name: sum(getattr(part, name) for part in parts) for name in names})


def _of(generation: Generation) -> Totals:
    table, waits, lasting_s = generation.table, waits_of(generation), durations_s(generation)
    rows = np.flatnonzero(generation.judged)
    shared_s = (lasting_s - generation.slowest_s)[rows]
    return Totals(
        steps=generation.steps,
        samples=int(np.maximum(table.share, 0).sum()),
        took_s=float(lasting_s.sum()),
        judged_steps=len(rows),
        judged_s=float(lasting_s[rows].sum()),
        equal_s=float((generation.equal_s[rows] + shared_s).sum()),
        best_s=float((generation.best_s[rows] + shared_s).sum()),
        busy_s=float(np.nansum(table.busy_s)),
        waited_s=float(waits.waited_s.sum()),
        communication_s=float(waits.communication_s.sum()),
        apart_s=float(np.nan_to_num(table.apart_s).max(axis=1, initial=0.0).sum()),
    )
