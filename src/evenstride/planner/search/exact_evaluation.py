"""Exact looks at single choices, and how much of the time for them they took."""

from __future__ import annotations

from math import inf

import numpy as np

from evenstride.errors import InfeasibleShares
from evenstride.planner.search.lower_bounds import Bounds, Cells, Pair
from evenstride.planner.search.step_time import StepEstimate, exact_step
from evenstride.planner.search.training_forecast import (
    ClusterChoice,
    TrainingForecast,
    TrainingTask,
    outlook,
    step_error,
)
from evenstride.planner.workload.step_curve import Curve

# Milliseconds, roughly: what a run of the search may take is counted, so that it always ends at
# the same choice, whatever the machine.
_CLOSE, _STEP, _OUTLOOK, _SPOT = 0.2, 0.6, 0.1, 8.0
_DRIFTS = 5

_Key = tuple[tuple[tuple[Curve, int, int | None], ...], int]


class ExactEvaluator:
    """Looks at single choices; equal steps, as of one cluster in many places, are reckoned once."""

    def __init__(self, task: TrainingTask, bounds: Bounds) -> None:
        self._task, self._bounds = task, bounds
        self._steps: dict[_Key, StepEstimate | None] = {}
        self.work, self.judged = 0.0, 0

    def closely(self, choice: ClusterChoice, pair: Pair, some: Cells) -> tuple[float, float]:
        """Return time and cost at least, from the exact step; infinite if there is none."""
        self.work += _CLOSE
        step = self._step(choice)
        if step is None:
            return inf, inf
        compute_s = np.array([step.compute_s])
        error = np.array([step_error(choice.kinds, step)])
        time_s, usd = self._bounds.of(pair, some, compute_s, error, fine=True)
        return float(time_s[0]), float(usd[0])

    def exactly(self, choice: ClusterChoice) -> TrainingForecast | None:
        """Return what a choice comes to; ``None`` if it does not fit, or may never end."""
        self.judged += 1
        waits = any(kind.transience and kind.transience.waits_s for kind in choice.kinds)
        self.work += _SPOT * (_DRIFTS if waits else 1) if choice.spot else _OUTLOOK
        step = self._step(choice)
        return None if step is None else outlook(choice, self._task, step)

    def _step(self, choice: ClusterChoice) -> StepEstimate | None:
        fleet = [kind.machines(n) for kind, n in zip(choice.kinds, choice.counts, strict=True)]
        key = tuple((one.curve, one.count, one.most_samples) for one in fleet), choice.batch
        if key not in self._steps:
            self.work += _STEP
            try:
                self._steps[key] = exact_step(fleet, choice.batch, self._task.ring)
            except InfeasibleShares:
                self._steps[key] = None
        return self._steps[key]
