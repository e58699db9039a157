"""What a trace tells of its workload, life by life: a run that was continued has several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evenstride.core.events import Exchanged, FleetFormed, SetShares
from evenstride.core.fleet import Shares
from evenstride.core.observation import Observation
from evenstride.errors import TraceError
from evenstride.trace.codec import decode
from evenstride.trace.read import is_number, read_records


@dataclass(frozen=True, slots=True)
class Facts:
    """What a trace says of its workload.

    Args:
        evenstride: version that ran.
        torch: the same.
        global_batch: samples per step.
        workers: how many there were.
        parameters: numbers that are trained.
        gradient_bytes: of all of them.
        digest: of their names and shapes.
        samples: of an epoch.
        device: of the leader, as its maker calls it; empty for a processor.
        started_unix_s: when the run began.
    """

    evenstride: str
    torch: str
    global_batch: int
    workers: int
    parameters: int
    gradient_bytes: float
    digest: str
    samples: int
    device: str
    started_unix_s: float

    @property
    def computed_on(self) -> Literal["cpu", "cuda"]:
        """What steps are computed by: ``cuda`` or ``cpu``, wherever the parameters are."""
        return "cuda" if self.device else "cpu"


@dataclass(frozen=True, slots=True)
class Life:
    """What one process of the leader has written: from its header to the next one.

    Args:
        facts: of what it trained.
        workers: names of the machines' workers, as ``host/rank``.
        shares: that were in force last.
        observations: what was measured, in the order it was reported.
        passes: when passes over the data began, in seconds, and with which step.
    """

    facts: Facts
    workers: tuple[str, ...]
    shares: Shares
    observations: tuple[Observation, ...]
    passes: tuple[tuple[float, int], ...] = ()


def facts(trace: Path) -> Facts:
    """Return what a trace says of its workload; of a run that was continued, its last life.

    Raises:
        TraceError: it cannot be read, or ends before a step was trained.
    """
    header, found = dict[str, Any](), None
    for record in read_records(trace):
        if record["kind"] == "header":
            header = record
        elif record["kind"] == "workload":
            found = _facts(header, record, trace)
    return _known(found, trace)


def observed(trace: Path) -> Iterator[Observation]:
    """Yield what was measured in all lives, in the order it was reported."""
    for record in read_records(trace):
        if record["kind"] == "event":
            event = decode(_held(record, "event", dict, trace))
            if isinstance(event, Exchanged):
                yield from event.observations


def lives_of(trace: Path) -> tuple[Life, ...]:
    """Return the lives of a run, without those in which no step came to its end.

    Lives of another model than the last one's are of another workload, and left out.

    Raises:
        TraceError: the trace cannot be read, or there is none.

    Cost:
        Memory for all steps' times.
    """
    lives = [life for life in _lives(trace) if life.facts is not None]
    last = _known(lives[-1].facts if lives else None, trace)
    return tuple(
        Life(*(life.facts, life.workers, life.shares), tuple(life.observations), tuple(life.passes))
        for life in lives
        if life.facts is not None and life.facts.digest == last.digest
    )


@dataclass(slots=True)
class _Life:
    header: dict[str, Any]
    facts: Facts | None = None
    workers: tuple[str, ...] = ()
    shares: Shares = ()
    observations: list[Observation] = field(default_factory=list)
    passes: list[tuple[float, int]] = field(default_factory=list)


def _lives(trace: Path) -> Iterator[_Life]:
    life = _Life({})
    for record in read_records(trace):
        match record["kind"]:
            case "header":
                yield life
                life = _Life(record)
            case "workload":
                life.facts = _facts(life.header, record, trace)
            case "pass":
                life.passes += _pass(record, trace)
            case "event":
                match decode(_held(record, "event", dict, trace)):
                    case FleetFormed(workers=workers):
                        life.workers = tuple(worker.name for worker in workers)
                    case Exchanged(observations=observations):
                        life.observations += _of_workers(observations, life.workers, trace)
            case "instructions":
                for one in map(decode, _held(record, "instructions", list, trace)):
                    life.shares = one.shares if isinstance(one, SetShares) else life.shares
    yield life


def _of_workers(
    observations: Iterable[Observation], workers: tuple[str, ...], trace: Path
) -> Iterator[Observation]:
    for seen in observations:
        if not 0 <= seen.worker < len(workers):
            raise TraceError(
                f"{trace} has times of worker {seen.worker}, but {len(workers)} workers; it was "
                "changed after it was written; take the run's own file"
            )
        yield seen


def _pass(record: dict[str, Any], trace: Path) -> list[tuple[float, int]]:
    """Return when a pass began and with which step; nothing if the trace does not tell."""
    begun_s = record.get("at_s")
    if not is_number(begun_s):
        return []
    return [(float(begun_s), _held(record, "step", int, trace))]


def _facts(header: dict[str, Any], workload: dict[str, Any], trace: Path) -> Facts:
    return Facts(
        evenstride=_held(header, "evenstride", str, trace),
        torch=_held(header, "torch", str, trace),
        global_batch=_held(header, "global_batch", int, trace),
        workers=_held(header, "world_size", int, trace),
        parameters=_held(workload, "parameters", int, trace),
        gradient_bytes=_held(workload, "gradient_bytes", int | float, trace),
        digest=_held(workload, "digest", str, trace),
        samples=_held(workload, "samples", int, trace),
        device=_held(workload, "device", str, trace),
        started_unix_s=_held(header, "started_unix_s", int | float, trace),
    )


def _held(record: dict[str, Any], name: str, kind: Any, trace: Path) -> Any:
    """Return a field of a record; raises a `TraceError` if it is not there, or is something else.

    The lines of a trace are sound JSON, but others may have written or changed them.
    """
    found = record.get(name)
    usable = isinstance(found, kind) and (is_number(found) or not isinstance(found, int | float))
    if not usable:
        raise TraceError(
            f"a record of kind {record.get('kind')!r} in {trace} has no {name} that can be used "
            f"({str(found)[:40]}); it was changed after it was written; take the run's own file"
        )
    return found


def _known(found: Facts | None, trace: Path) -> Facts:
    if found is None:
        raise TraceError(
            f"{trace} does not say what was trained: no step came to its end, or no model was "
            "given to watch(); let the run take some steps"
        )
    return found
