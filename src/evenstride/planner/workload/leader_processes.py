"""What a trace tells of its workload, life by life: a run that was continued has several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evenstride.core.fleet import Shares
from evenstride.core.time_model.observation import Observation
from evenstride.errors import TraceError
from evenstride.trace.read import pass_of
from evenstride.trace.run_log import ProcessLog, RunLog, field_of


@dataclass(frozen=True, slots=True)
class Facts:
    """What a trace says of its workload."""

    evenstride: str  # version that ran
    torch: str  # the same
    global_batch: int  # samples per step
    workers: int  # how many there were
    parameters: int  # numbers that are trained
    gradient_bytes: float  # of all of them
    digest: str  # of their names and shapes
    samples: int  # of an epoch
    device: str  # of the leader, as its maker calls it; empty for a processor
    started_unix_s: float  # when the run began

    @property
    def computed_on(self) -> Literal["cpu", "cuda"]:
        """What steps are computed by: ``cuda`` or ``cpu``, wherever the parameters are."""
        return "cuda" if self.device else "cpu"


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """What one process of the leader has written: from its header to the next one."""

    facts: Facts  # of what it trained
    workers: tuple[str, ...]  # names of the machines' workers, as ``host/rank``
    shares: Shares  # that were in force last
    observations: tuple[Observation, ...]  # what was measured, in the order it was reported
    # When passes over the data began, in seconds, and with which step
    passes: tuple[tuple[float, int], ...] = ()


def facts(log: RunLog) -> Facts:
    """Return what a trace says of its workload; of a run that was continued, its last life.

    Raises:
        TraceError: a record cannot be used, or the trace ends before a step was trained.
    """
    known = [_facts(process, log.path) for process in log.processes]
    return _last_known(known, log.path)


def lives_of(log: RunLog) -> tuple[ProcessRecord, ...]:
    """Return the lives of a run, without those in which no step came to its end.

    Lives of another model than the last one's are of another workload, and left out.

    Raises:
        TraceError: a record cannot be used, or there is no such life.
    """
    known = [(_facts(process, log.path), process) for process in log.processes]
    last = _last_known([of for of, _ in known], log.path)
    return tuple(
        ProcessRecord(
            facts=of,
            workers=process.generations[-1].workers if process.generations else (),
            shares=next(reversed(list(process.splits)), ()),
            observations=tuple(process.observations),
            passes=tuple(_passes(process, log.path)),
        )
        for of, process in known
        if of is not None and of.digest == last.digest
    )


def _passes(process: ProcessLog, trace: Path) -> Iterator[tuple[float, int]]:
    """Yield when passes began and with which step, as far as the trace has the time."""
    for record in process.of_kind("pass"):
        begun = pass_of(record, process.header.get("global_batch"), trace)
        if begun.at_s is not None:
            yield begun.at_s, begun.step


def _facts(process: ProcessLog, trace: Path) -> Facts | None:
    workload = next(reversed(list(process.of_kind("workload"))), None)
    if workload is None:
        return None

    def told(record: dict[str, Any], name: str, kind: Any) -> Any:
        return field_of(record, name, kind, trace)

    return Facts(
        evenstride=told(process.header, "evenstride", str),
        torch=told(process.header, "torch", str),
        global_batch=told(process.header, "global_batch", int),
        workers=told(process.header, "world_size", int),
        parameters=told(workload, "parameters", int),
        gradient_bytes=told(workload, "gradient_bytes", int | float),
        digest=told(workload, "digest", str),
        samples=told(workload, "samples", int),
        device=told(workload, "device", str),
        started_unix_s=told(process.header, "started_unix_s", int | float),
    )


def _last_known(found: Sequence[Facts | None], trace: Path) -> Facts:
    known = [one for one in found if one is not None]
    if not known:
        raise TraceError(
            f"{trace} does not say what was trained: no step came to its end, or no model was "
            "given to watch(); let the run take some steps"
        )
    return known[-1]
