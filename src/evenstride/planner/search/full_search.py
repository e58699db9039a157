"""Scavenger's full search: only clusters and batches that were trained, at their measured steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import sqrt
from statistics import mean

from evenstride.errors import ConfigError
from evenstride.planner.search.branch_and_bound import SearchResult
from evenstride.planner.search.selection import Wishes, frontier
from evenstride.planner.search.training_forecast import (
    ClusterChoice,
    Kind,
    TrainingForecast,
    TrainingTask,
    by_place,
    outlook,
)
from evenstride.planner.workload.step_time import StepEstimate, exact_step
from evenstride.planner.workload.workload_profile import MeasuredCluster

_LEAST_ERROR = 0.01  # difference between measured and future steps, at least

_Measured = Mapping[tuple[tuple[str, ...], int], list[MeasuredCluster]]


def full_search(
    kinds: Sequence[Kind], task: TrainingTask, clusters: Sequence[MeasuredCluster], wishes: Wishes
) -> SearchResult:
    """Return the best of the measured clusters, in every place that rents them.

    No step time is interpolated. Epochs are those of the task. A cluster that several runs measured
    has their mean step. O(clusters * places).

    Raises:
        ConfigError: none of the clusters can be rented, or their epochs are not known.
    """
    measured = dict[tuple[tuple[str, ...], int], list[MeasuredCluster]]()
    for one in clusters:
        measured.setdefault((tuple(sorted(one.types)), one.batch), []).append(one)
    found = list(_outlooks(kinds, task, measured))
    if not found:
        raise ConfigError(_why_none(measured))
    best = frontier(found, wishes.confidence)
    return SearchResult(best, looked_at=len(found), judged=len(found))


def gaps(clusters: Sequence[MeasuredCluster]) -> str:
    """Return which combinations of measured clusters and batches are missing; empty if none is."""
    known = {(tuple(sorted(one.types)), one.batch) for one in clusters}
    types, batches = {types for types, _ in known}, {batch for _, batch in known}
    whole = len(types) * len(batches)
    if len(known) == whole:
        return ""
    return (
        f"{whole - len(known)} of the {whole} combinations of measured clusters and batches were "
        "not trained, so the plan does not compare them"
    )


def _outlooks(
    kinds: Sequence[Kind], task: TrainingTask, measured: _Measured
) -> Iterator[TrainingForecast]:
    for there in by_place(kinds).values():
        for (types, batch), runs in measured.items():
            error = max(sqrt(sum(run.drift**2 for run in runs)) / len(runs), _LEAST_ERROR)
            for choice in _choices(there, Counter(types), batch):
                step = _measured_step(choice, task, mean(run.step_s for run in runs))
                found = outlook(choice, task, step, measured_error=error)
                if found is not None:
                    yield found


def _choices(
    there: Sequence[Kind], workers: Mapping[str, int], batch: int
) -> Iterator[ClusterChoice]:
    """Yield the ways to rent workers of these types in a place, on demand and as spot."""
    for kinds in product(*([k for k in there if _is_of(k, name)] for name in workers)):
        each = list(zip(kinds, workers.values(), strict=True))
        if not any(count % kind.workers for kind, count in each):
            yield ClusterChoice(kinds, tuple(n // kind.workers for kind, n in each), batch)


def _is_of(kind: Kind, name: str) -> bool:
    return name in (kind.type, f"{kind.type}+{kind.accelerators}")


def _measured_step(choice: ClusterChoice, task: TrainingTask, step_s: float) -> StepEstimate:
    """Return a measured step, divided into its parts as the forecast divides it."""
    both = zip(choice.kinds, choice.counts, strict=True)
    usual = exact_step([kind.machines(count) for kind, count in both], choice.batch, task.ring)
    longer = step_s / usual.time_s
    return StepEstimate(usual.compute_s * longer, usual.communication_s * longer, usual.shares)


def _why_none(measured: _Measured) -> str:
    if not measured:
        return (
            "--full compares only clusters that were trained, but none of the inputs is a run with "
            "the types of its machines; give the runs of all clusters and batches, and --as TYPE"
        )
    named = sorted({" + ".join(f"{n} {t}" for t, n in Counter(t).items()) for t, _ in measured})
    return (
        f"none of the measured clusters ({', '.join(named)}) can be rented with known epochs; "
        "--as names types of the catalogue, and --trained or --target-loss gives the epochs of "
        "their batches"
    )
