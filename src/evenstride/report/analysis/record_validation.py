"""What can be believed of a trace's records, and what is missing in what is shown of them.

A trace may have been changed after it was written. What is shown of it is taken as read from here
on, so whatever cannot be is refused before it gets there, by a `ValueError` or `TypeError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from evenstride.core.control.events import Exchanged, FleetFormed, SetShares
from evenstride.core.fleet import FloatArray
from evenstride.core.sync_modes.mode_specs import sync_from_spec
from evenstride.core.time_model.observation import Measurements
from evenstride.errors import EvenstrideError
from evenstride.report.analysis.run_generation import RecordedGeneration, since_met, waits_of
from evenstride.report.wording import duration
from evenstride.trace.read import is_number

MOST_STEPS = 10**15
_MOST_SAMPLES = 10**12
_MOST_BYTES = 1 << 62
_LATEST_S = 4.0e9  # over a hundred years
_DEEPEST = 32
_SHORTEST_S = 1e-9
_DIFFERS = 0.05  # part of the larger of two sums
_LONGEST_S = 1e12
_COUNTS = 0.001  # part of all own work; what is less is left to rounding
_WORDS = {
    "busy_s": "was at work for",
    "waited_s": "waited for slower ones for",
    "caused_s": "made others wait for",
}


def number_of(value: Any) -> float | None:
    """Return a finite number; ``None`` for all else.

    >>> number_of(3), number_of("3"), number_of(float("inf")), number_of(10**400)
    (3.0, None, None, None)
    """
    return float(value) if is_number(value) else None


def seconds_of(value: Any) -> float | None:
    """Return a moment of a process's clock; ``None`` for what is none."""
    found = number_of(value)
    return found if found is not None and 0.0 <= found <= _LATEST_S else None


def shallow(value: Any, most: int = _DEEPEST) -> Any:
    """Return JSON types with what lies too deep to be written again as an ellipsis.

    >>> shallow({"a": [1, [2]]}, 2)
    {'a': [1, '…']}
    """
    if not isinstance(value, dict | list):
        return value
    if most <= 0:
        return "…"
    if isinstance(value, dict):
        return {key: shallow(one, most - 1) for key, one in value.items()}
    return [shallow(one, most - 1) for one in value]


def whole_of(value: Any, most: int, low: int = 0) -> int:
    """Return a whole number that lies within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
        raise ValueError(f"not a whole number from {low} to {most}")
    return value


def batch_of(value: Any) -> int:
    return whole_of(value, _MOST_SAMPLES, 1)


def lockstep_of(header: dict[str, Any]) -> bool:
    """Return whether all workers of a process take the same steps."""
    try:
        return sync_from_spec(str(header.get("sync") or "bsp")).lockstep
    except EvenstrideError:  # a mode of another version
        return True


def check_formed(event: FleetFormed) -> None:
    whole_of(event.step, MOST_STEPS)
    whole_of(event.generation, MOST_STEPS)
    batch_of(event.global_batch)
    if not event.workers:
        raise ValueError("a group without workers")


def check_shares(told: SetShares, batch: int) -> None:
    whole_of(told.effective, MOST_STEPS)
    if not isinstance(told.shares, tuple):
        raise TypeError("shares are a list")
    for share in told.shares:
        whole_of(share, batch)


def check_exchanged(event: Exchanged) -> None:
    for told in event.memory:
        whole_of(told.worker, MOST_STEPS)
        whole_of(told.samples, _MOST_SAMPLES)
        for size in (told.peak_bytes, told.limit_bytes):
            if size is not None:
                whole_of(size, _MOST_BYTES)


def possible(told: Measurements, batch: int) -> npt.NDArray[np.bool_]:
    """Return which reports there can be, bool ``(n,)``.

    They are sound, of no more than the batch, and of no step that took under a nanosecond.
    """
    owner = np.repeat(np.arange(len(told)), told.steps)
    short = np.bincount(owner, weights=told.busy_s < _SHORTEST_S, minlength=len(told))
    samples = (told.share >= 0) & (told.share <= batch)
    return np.asarray(told.sound & samples & (short == 0), dtype=np.bool_)


def unlike_summary(generations: Sequence[RecordedGeneration], summary: dict[str, Any]) -> str:
    """Return in a sentence which sums of a process's summary differ from those of the steps read.

    They differ by 5 % or more only if records are missing, or were changed after they were written:
    the run sums up the same steps as the trace tells of. Sums are of the last workers that met.

    Cost:
        0.1 us for each step of each worker.
    """
    differing = list(_differing(since_met(generations), summary))
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

    ``not_replayed`` is the error for which the control does not follow any more; else empty.
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
