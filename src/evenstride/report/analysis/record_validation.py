"""Validate the records of a trace, and describe what is missing.

A trace may have been changed after it was written. Later code trusts its records, so impossible
values raise `ValueError` or `TypeError` here.
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
_DIFFERS = 0.05  # fraction of the larger of two sums
_LONGEST_S = 1e12
_COUNTS = 0.001  # fraction of all busy time; smaller differences are rounding
_WORDS = {
    "busy_s": "was busy for",
    "waited_s": "waited for slower workers for",
    "caused_s": "made others wait for",
}


def number_of(value: Any) -> float | None:
    """Return a finite number; ``None`` for any other value.

    >>> number_of(3), number_of("3"), number_of(float("inf")), number_of(10**400)
    (3.0, None, None, None)
    """
    return float(value) if is_number(value) else None


def seconds_of(value: Any) -> float | None:
    """Return a time of a process's clock; ``None`` for an impossible value."""
    found = number_of(value)
    return found if found is not None and 0.0 <= found <= _LATEST_S else None


def shallow(value: Any, most: int = _DEEPEST) -> Any:
    """Return JSON types with an ellipsis in place of deeper levels.

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
    """Return an integer within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
        raise ValueError(f"not an integer from {low} to {most}")
    return value


def batch_of(value: Any) -> int:
    return whole_of(value, _MOST_SAMPLES, 1)


def lockstep_of(header: dict[str, Any]) -> bool:
    """Return whether the workers of a process take their steps together."""
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


def check_shares(decided: SetShares, batch: int) -> None:
    whole_of(decided.effective, MOST_STEPS)
    if not isinstance(decided.shares, tuple):
        raise TypeError("shares are a list")
    for share in decided.shares:
        whole_of(share, batch)


def check_exchanged(event: Exchanged) -> None:
    for peak in event.memory:
        whole_of(peak.worker, MOST_STEPS)
        whole_of(peak.samples, _MOST_SAMPLES)
        for size in (peak.peak_bytes, peak.limit_bytes):
            if size is not None:
                whole_of(size, _MOST_BYTES)


def possible(measured: Measurements, batch: int) -> npt.NDArray[np.bool_]:
    """Return which reports are possible, bool ``(n,)``.

    A possible report is sound, has at most the batch, and has no step shorter than 1 ns.
    """
    owner = np.repeat(np.arange(len(measured)), measured.steps)
    short = np.bincount(owner, weights=measured.busy_s < _SHORTEST_S, minlength=len(measured))
    samples = (measured.share >= 0) & (measured.share <= batch)
    return np.asarray(measured.sound & samples & (short == 0), dtype=np.bool_)


def unlike_summary(generations: Sequence[RecordedGeneration], summary: dict[str, Any]) -> str:
    """Return a sentence on sums of a process's summary that differ from those of its steps.

    The run sums the same steps as the trace records. So the sums differ by 5 % or more only if
    records are missing or were changed. The sums are those of the last generation.

    Cost:
        0.1 us for each step of each worker.
    """
    differing = list(_differing(since_met(generations), summary))
    if not differing:
        return ""
    more = f", and {len(differing) - 1} more sum(s) differ" if len(differing) > 1 else ""
    return f"by the run's own summary, {differing[0]}{more}: records are missing or were changed"


def _differing(generations: Sequence[RecordedGeneration], summary: dict[str, Any]) -> Iterator[str]:
    sums, workers = summary.get("workers"), generations[0].workers
    if not isinstance(sums, list) or len(sums) != len(workers):
        return
    parts = [_sums_s(one) for one in generations]  # of one batch each
    read = {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}
    counts_s = _COUNTS * float(read["busy_s"].sum())
    for rank, worker in enumerate(sums):
        for name, of_all_s in read.items():
            sum_s = _seconds(worker, name)
            if sum_s is None:
                continue
            apart_s, most_s = abs(sum_s - of_all_s[rank]), max(sum_s, of_all_s[rank])
            if apart_s > max(_DIFFERS * most_s, counts_s):
                yield (
                    f"worker {rank} ({workers[rank]}) {_WORDS[name]} {duration(sum_s)}, but for "
                    f"{duration(float(of_all_s[rank]))} by its recorded steps"
                )


def _sums_s(generation: RecordedGeneration) -> dict[str, FloatArray]:
    """Return the sums of each worker as in a summary, which counts complete steps only."""
    table = generation.table
    if not generation.lockstep:  # no step is complete, and no worker waits
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
    """Yield a sentence for each kind of record that was left out.

    ``not_replayed`` is the error that ended the replay of decisions; empty without one.
    """
    if damaged:
        yield (
            f"{damaged} damaged record(s) were left out; sums lack their steps, and the times of "
            "other splits may be wrong"
        )
    if unsound:
        yield (
            f"{unsound} report(s) of impossible times or samples were left out; their steps are "
            "not compared with other splits"
        )
    if not_replayed:
        yield (
            "this version cannot replay the decisions, so figures from fitted curves are missing "
            f"({not_replayed})"
        )


def unrecorded(generation: RecordedGeneration | None, summary: dict[str, Any] | None) -> str:
    """Return a sentence on the steps of a process after its last record; empty without any."""
    steps = number_of((summary or {}).get("step"))
    if generation is None or steps is None or not generation.lockstep or generation.not_measured:
        return ""
    left_out = int(steps) - generation.first - generation.steps
    if left_out <= 0:
        return ""
    return f"the last {left_out} step(s) came after the last exchange and are in no figure"
