"""What is missing in what is shown of a run, in sentences.

Also compares a run's own summary with the sums of the steps that were read from its trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.analysis.attribution import waits_of
from evenstride.report.analysis.record_validation import number_of
from evenstride.report.analysis.run_generation import RecordedGeneration
from evenstride.report.wording import duration

_DIFFERS = 0.05  # part of the larger of two sums
_LONGEST_S = 1e12
_COUNTS = 0.001  # part of all own work; what is less is left to rounding
_WORDS = {
    "busy_s": "was at work for",
    "waited_s": "waited for slower ones for",
    "caused_s": "made others wait for",
}


def unlike_summary(generations: Sequence[RecordedGeneration], summary: dict[str, Any]) -> str:
    """Return in a sentence which sums of a summary differ from those of the steps that were read.

    They differ by 5 % or more only if records are missing, or were changed after they were
    written: the run sums up the same steps as the trace tells of.

    Args:
        generations: of a process, read to its end; sums are of the last workers that met.
        summary: that the process ended with, as it is in the trace.

    Returns:
        Nothing if they agree, or cannot be compared.

    Cost:
        0.1 us for each step of each worker.
    """
    met = max(place for place, one in enumerate(generations) if one.met)
    differing = list(_differing(generations[met:], summary))
    if not differing:
        return ""
    more = f", and {len(differing) - 1} more sum(s) differ" if len(differing) > 1 else ""
    return (
        f"by the run's own summary {differing[0]}{more}: records of it are missing, or were changed"
    )


def _differing(generations: Sequence[RecordedGeneration], summary: dict[str, Any]) -> Iterator[str]:
    told, workers = summary.get("workers"), generations[0].workers
    if not isinstance(told, list) or len(told) != len(workers):
        return
    parts = [_sums_s(one) for one in generations]  # of one batch each
    read = {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}
    counts_s = _COUNTS * float(read["busy_s"].sum())
    for rank, worker in enumerate(told):
        for name, of_all_s in read.items():
            told_s = _seconds(worker, name)
            if told_s is None:
                continue
            apart_s, most_s = abs(told_s - of_all_s[rank]), max(told_s, of_all_s[rank])
            if apart_s > max(_DIFFERS * most_s, counts_s):
                yield (
                    f"worker {rank} ({workers[rank]}) {_WORDS[name]} "
                    f"{duration(told_s)}, and by the steps that were read for "
                    f"{duration(float(of_all_s[rank]))}"
                )


def _sums_s(generation: RecordedGeneration) -> dict[str, FloatArray]:
    """Return what a summary has of each worker, from its steps; only whole ones count there."""
    table = generation.table
    if not generation.lockstep:  # no step is whole, and nobody waits for another
        return {"busy_s": np.nansum(table.busy_s, axis=0)}
    waits = waits_of(generation)
    return {
        "busy_s": table.busy_s[table.whole].sum(axis=0),
        "waited_s": waits.waited_s.sum(axis=0),
        "caused_s": waits.caused_s.sum(axis=0),
    }


def _seconds(worker: Any, name: str) -> float | None:
    value = worker.get(name) if isinstance(worker, dict) else None
    if not isinstance(value, int | float) or not 0.0 <= value < _LONGEST_S:
        return None
    return float(value)


def gaps(damaged: int, unsound: int, not_replayed: str) -> Iterator[str]:
    """Yield a sentence for each kind of what was left out of a run while it was read.

    Args:
        damaged: records and reports that cannot be.
        unsound: reports of times or samples that cannot be.
        not_replayed: the error for which the control does not follow any more; else empty.
    """
    if damaged:
        yield (
            f"{damaged} record(s) were damaged, and left out; sums lack their steps, and "
            "what is said of other splits may be off"
        )
    if unsound:
        yield (
            f"{unsound} report(s) of impossible times or samples were left out; their "
            "steps count in no comparison"
        )
    if not_replayed:
        yield (
            "what was decided cannot be replayed by this version, so figures from fitted curves "
            f"are missing ({not_replayed})"
        )


def untold(generation: RecordedGeneration | None, summary: dict[str, Any] | None) -> str:
    """Return in a sentence how many steps a process took beyond those that it told of."""
    steps = number_of((summary or {}).get("step"))
    if generation is None or steps is None or not generation.lockstep or generation.not_measured:
        return ""
    left_out = int(steps) - generation.first - generation.steps
    if left_out <= 0:
        return ""
    return f"the last {left_out} step(s) came after the last exchange, and count in no figure"
