"""What a run came to so far: its time, what balancing saved, and what it left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evenstride.core.allocation.speedup import JudgedTime, judged_time
from evenstride.report.analysis.attribution import waits_of
from evenstride.report.analysis.run_generation import RecordedGeneration
from evenstride.report.analysis.step_clock import durations_s


@dataclass(frozen=True, slots=True)
class Totals(JudgedTime):
    """Sums over all steps of one or several generations, in seconds."""

    steps: int
    samples: int
    took_s: float
    busy_s: float
    waited_s: float
    communication_s: float
    apart_s: float  # evaluation, saving, waiting for decisions, by the clock

    @property
    def waiting_part(self) -> float:
        """Of all workers' time in steps, the part spent waiting for slower ones."""
        whole_s = self.busy_s + self.waited_s
        return self.waited_s / whole_s if whole_s else 0.0


def totals_of(generations: Sequence[RecordedGeneration]) -> Totals:
    """Return what some generations came to together."""
    parts = [_of(one) for one in generations] or [Totals(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)]
    names = Totals.__dataclass_fields__
    return Totals(**{name: sum(getattr(part, name) for part in parts) for name in names})


def _of(generation: RecordedGeneration) -> Totals:
    table, waits, lasting_s = generation.table, waits_of(generation), durations_s(generation)
    judged = judged_time(lasting_s, generation.slowest_s, generation.other_s)
    return Totals(
        steps=generation.steps,
        samples=int(np.maximum(table.share, 0).sum()),
        took_s=float(lasting_s.sum()),
        judged_steps=judged.judged_steps,
        judged_s=judged.judged_s,
        equal_s=judged.equal_s,
        best_s=judged.best_s,
        busy_s=float(np.nansum(table.busy_s)),
        waited_s=float(waits.waited_s.sum()),
        communication_s=float(waits.communication_s.sum()),
        apart_s=float(np.nan_to_num(table.apart_s).max(axis=1, initial=0.0).sum()),
    )
