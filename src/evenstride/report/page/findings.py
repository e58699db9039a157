"""The sentences, figures, tables and lists of the page.

Texts that the run wrote (reasons, alerts, names, facts) are untrusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.report.analysis.attribution import slowed_of
from evenstride.report.analysis.run_generation import RecordedGeneration, median_s
from evenstride.report.analysis.run_timeline import LeaderProcess
from evenstride.report.page.page_runs import Leg, ReportedRun
from evenstride.report.wording import NOTHING, duration, plain

RECENT = 20  # latest steps, for the times of a worker at the end
MOST_LIVES = 20
_MOST_SENTENCES = 12
_RECENT = 50  # latest steps, for the step time at the end
_MOST_ROWS = 256
_MOST = 80  # rows of a table of events
_MOST_SHARES = 16
_OTHER_FACTS = {"kind", "started_unix_s"}  # header fields that the page shows elsewhere


@dataclass(frozen=True, slots=True)
class Card:
    """A figure in large type."""

    name: str
    value: str
    note: str


def cards_of(run: ReportedRun) -> list[Card]:
    """Return the main figures; an empty list for a run without steps."""
    totals = run.totals
    if not run.legs:
        return []
    step_s = float(np.median(run.legs[-1].durations_s[-_RECENT:]))
    found = [
        Card(
            "Speed-up over the equal split",
            _times(totals.speedup_model),
            f"best possible: {_times(totals.bound_model)}",
        ),
        Card("Efficiency", _part(totals.efficiency_model), "100% is the best split"),
        _saved(totals.saved_s),
        Card("Waiting for slower workers", f"{totals.waiting_part:.1%}", "of all workers' time"),
        Card(
            "Step",
            duration(step_s),
            f"median of the last {min(_RECENT, run.legs[-1].generation.steps)}",
        ),
        Card(
            "Samples per second",
            f"{totals.samples_per_s:,.4g}",
            f"{totals.steps:,} steps in {duration(totals.took_s)}",
        ),
    ]
    return found if run.lockstep else found[4:]


def _saved(seconds: float | None) -> Card:
    against = "against the equal split"
    if seconds is not None and seconds < 0:
        return Card("Time lost", duration(-seconds), against)
    return Card("Time saved", duration(seconds), against)


def _times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"


def _part(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def who_waited(run: ReportedRun) -> list[str]:
    """Return which workers made the others wait, since when and why; the costliest first."""
    if not run.legs:
        return []
    if not run.lockstep:
        return [f"In the mode {run.sync}, workers do not wait for each other."]
    found = [
        (blame.each_s, _sentence(run, leg, blame.reason))
        for leg in run.legs
        for blame in leg.blames
        if blame.stretches
    ]
    found.sort(key=lambda one: -one[0])
    sentences = [text for _, text in found[:_MOST_SENTENCES]]
    if len(found) > _MOST_SENTENCES:
        sentences.append(f"The table below has {len(found) - _MOST_SENTENCES} more.")
    if not found and len(run.lanes) > 1:
        sentences.append("No worker made the others wait for 2% of the time or more.")
    return sentences + _slow(run)


def _slow(run: ReportedRun) -> list[str]:
    """Return which workers ran below their best speed. Balancing hides this from the waits."""
    found: list[tuple[float, str]] = []
    for leg in run.legs:
        for one in slowed_of(leg, leg.drawn(run.drawn)):
            name = f"worker {one.rank} ({run.lanes[leg.lanes[one.rank]]})"
            found.append((one.lost, _sentence(run, leg, f"{name} {one.text}")))
    found.sort(key=lambda one: -one[0])
    return [text for _, text in found[:_MOST_SENTENCES]]


def part_name(run: ReportedRun, leg: Leg) -> str:
    """Return the process and generation of a leg, as far as the run has several."""
    life = leg.generation.life
    process = f"Process {life + 1}" if len(run.story.lives) > 1 else ""
    several = sum(one.generation.life == life for one in run.legs) > 1
    group = f"generation {leg.generation.number}" if several else ""
    batches = {one.generation.global_batch for one in run.legs if one.generation.life == life}
    batch = f"global batch {leg.generation.global_batch:,}" if len(batches) > 1 else ""
    name = ", ".join(one for one in (process, group, batch) if one)
    return name[:1].upper() + name[1:]


def _sentence(run: ReportedRun, leg: Leg, reason: str) -> str:
    where, text = part_name(run, leg), plain(reason)
    return f"{where}{': ' if where else ''}{text[:1].upper()}{text[1:]}."


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """The figures of one worker of a run; times are medians of its latest steps."""

    worker: str
    rank: int  # its latest.
    state: str | None  # at the end: serving, gone, ...; ``None`` if unknown.
    share: int  # samples of the last split.
    busy_s: float | None  # busy time of a step.
    wait_s: float | None  # waiting for slower workers, and communication.
    speed: float | None  # at the end, as a fraction of its own best; ``None`` if unknown.
    # Step from which it has had this speed; ``None`` if always, or unknown
    since: int | None
    caused_s: float  # mean seconds that each other worker waited for it, over the whole run.
    part: float  # `caused_s` as a fraction of the time of all steps.
    slowest_steps: int  # number of steps in which it was the slowest.


def figures_of(run: ReportedRun, lane: int) -> WorkerFigures:
    """Return the figures of a worker."""
    leg = next(one for one in reversed(run.legs) if one.rank(lane) is not None)
    rank = leg.rank(lane)
    assert rank is not None
    held, recent, caused_s = leg.generation.table, slice(-RECENT, None), float(run.caused_s[lane])
    speed, since = leg.speed_now(rank)
    return WorkerFigures(
        worker=run.lanes[lane],
        rank=rank,
        state=_state(run, leg, rank),
        share=_latest(leg.share(rank)),
        busy_s=median_s(held.busy_s[recent, rank]),
        wait_s=median_s(held.wait_s[recent, rank]),
        speed=speed,
        since=since,
        caused_s=caused_s,
        part=caused_s / max(run.totals.took_s, 1e-12),
        slowest_steps=sum(
            b.slowest_steps for one in run.legs for b in one.blames if one.lanes[b.rank] == lane
        ),
    )


def _state(run: ReportedRun, leg: Leg, rank: int) -> str | None:
    if leg is not run.legs[-1]:
        return "gone"
    standing = leg.generation.standing
    return standing[rank] if rank < len(standing) else None


def _latest(shares: FloatArray) -> int:
    """Return the share of the last recorded step; 0 without one."""
    known = shares[~np.isnan(shares)]
    return int(known[-1]) if len(known) else 0


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of the page."""

    headings: Sequence[str]  # one per column
    rows: Sequence[Sequence[str]]  # cells; a row of one cell spans all columns
    caption: str
    text: Sequence[int] = (0,)  # columns that hold text; the others hold figures
    count: int = 0  # number of entries, of which the rows may show some


_COMPARED = (
    "run",
    "policy",
    "workers",
    "steps",
    "time",
    "samples/s",
    "against the first",
    "waiting",
    "speed-up over equal",
    "efficiency",
)


def compared_table(runs: Sequence[ReportedRun]) -> PageTable:
    """Return one line for each run, compared with the first run."""
    first = runs[0].totals.samples_per_s
    caption = (
        "Samples per second count training steps only, without evaluation and saving. Waiting is a "
        "fraction of all workers' time. Speed-up and efficiency use each run's own fitted curves."
    )
    return PageTable(_COMPARED, [_compared_row(run, first) for run in runs], caption, text=(0, 1))


def _compared_row(run: ReportedRun, first: float) -> Sequence[str]:
    totals, rate = run.totals, run.totals.samples_per_s
    return (
        run.name,
        run.policy,
        f"{len(run.lanes):,}",
        f"{totals.steps:,}",
        duration(totals.took_s),
        f"{rate:,.4g}",
        f"{rate / first:.2f}×" if first and rate else NOTHING,
        f"{totals.waiting_part:.1%}" if run.lockstep else NOTHING,
        _times(totals.speedup_model),
        _part(totals.efficiency_model),
    )


_WORKERS = (
    "worker",
    "rank",
    "share",
    "busy",
    "wait",
    "speed, of its best",
    "since step",
    "made others wait",
    "part of the time",
    "slowest in steps",
    "state",
)


def workers_table(run: ReportedRun) -> PageTable | None:
    """Return one line for each worker of the run; ``None`` without workers."""
    if not run.legs:
        return None
    order = np.argsort(-run.caused_s, kind="stable").tolist()
    rows = [_worker(figures_of(run, lane), run.lockstep) for lane in order[:_MOST_ROWS]]
    if len(order) > _MOST_ROWS:
        rows.append([f"--json has {len(order) - _MOST_ROWS:,} more workers"])
    caption = (
        f"Share: samples of the last split. Busy and wait: medians of the last {RECENT} steps. "
        "Made others wait: mean time that each other worker waited for it, over the whole run."
    )
    return PageTable(_WORKERS, rows, caption, text=(0, 10))


def _worker(one: WorkerFigures, lockstep: bool) -> Sequence[str]:
    waits = (duration(one.caused_s), f"{one.part:.1%}", f"{one.slowest_steps:,}")
    since = "the first" if one.since is None else f"{one.since:,}"
    return (
        one.worker,
        f"{one.rank}",
        f"{one.share:,}",
        duration(one.busy_s),
        duration(one.wait_s),
        *((NOTHING, NOTHING) if one.speed is None else (f"{one.speed:.2f}", since)),
        *(waits if lockstep else (NOTHING,) * 3),
        one.state or NOTHING,
    )


def changes_table(run: ReportedRun) -> PageTable | None:
    """Return the changes of the split with their reasons; ``None`` without any decision."""
    decided = [(of, one) for of in run.story.generations for one in of.decisions]
    if not decided:
        return None
    rows = [
        (of, one.step, one.at_s, _split(one.shares), plain(one.reason))
        for of, one in decided
        if one.shares is not None
    ]
    headings = ("from step", "at", "shares", "reason")
    return _history(run, headings, rows, counted(len(rows), "change"))


def _split(shares: Sequence[int]) -> str:
    first = " / ".join(f"{share:,}" for share in shares[:_MOST_SHARES])
    more = f" / … {len(shares) - _MOST_SHARES:,} more" if len(shares) > _MOST_SHARES else ""
    return f"{first}{more}"


def kept_table(run: ReportedRun) -> PageTable | None:
    """Return the decisions that kept the split; ``None`` without one."""
    rows = [
        (of, one.step, one.at_s, plain(one.reason))
        for of in run.story.generations
        for one in of.decisions
        if one.shares is None
    ]
    return _history(run, ("step", "at", "reason"), rows, "The split stayed") if rows else None


def _history(
    run: ReportedRun,
    headings: tuple[str, ...],
    rows: Sequence[tuple[RecordedGeneration, int, float, *tuple[str, ...]]],
    caption: str,
) -> PageTable:
    """Return a table of steps, times and texts, with the process if the run has several."""
    several = len(run.story.lives) > 1
    shown: list[Sequence[str]] = [
        (*((f"{of.life + 1}",) if several else ()), f"{step:,}", duration(at_s), *texts)
        for of, step, at_s, *texts in rows
    ]
    if len(shown) > _MOST:
        half = _MOST // 2
        left_out = [f"--json has {len(shown) - 2 * half:,} more"]
        shown = [*shown[:half], left_out, *shown[-half:]]
    headings = ("process", *headings) if several else headings
    first_text = headings.index("at") + 1
    return PageTable(headings, shown, caption, range(first_text, len(headings)), len(rows))


def counted(count: int, name: str) -> str:
    """Return a number and a noun, with an s for the plural."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def incidents_table(run: ReportedRun) -> PageTable | None:
    """Return which workers joined, left or got a notice; ``None`` without such an event."""
    events = [
        (of, one.step, one.at_s, plain(one.text))
        for of in run.story.generations
        for one in of.incidents
    ]
    if len(run.story.generations) > 1:
        events += [
            (of, of.first, of.anchors[0][0], _met(of)) for of in run.story.generations if of.met
        ]
    elif not events:
        return None
    events.sort(key=lambda event: (event[0].life, event[2]))
    caption = f"{len(events):,} entr{'y' if len(events) == 1 else 'ies'}"
    return _history(run, ("step", "at", "what happened"), events, caption)


def _met(of: RecordedGeneration) -> str:
    names = ", ".join(of.workers[:_MOST_SHARES])
    more = f" and {len(of.workers) - _MOST_SHARES:,} more" if len(of.workers) > _MOST_SHARES else ""
    return f"generation {of.number} with {len(of.workers):,} workers: {names}{more}"


def alerts_of(run: ReportedRun) -> list[str]:
    """Return the alerts as sentences, in order. Their texts are untrusted."""
    return [
        _alert(note)
        for life in run.story.lives
        for note in life.notes
        if note.get("kind") == "alert"
    ]


def _alert(note: dict[str, Any]) -> str:
    reason = note.get("reason") or note.get("text")
    if reason is None:
        return plain({key: value for key, value in note.items() if key != "kind"})
    worker = f"{note['worker']} " if note.get("worker") is not None else ""
    step = f"step {note['step']}: " if isinstance(note.get("step"), int) else ""
    return plain(f"{step}{worker}{reason}")


def first_alerts(run: ReportedRun) -> list[str]:
    """Return the alerts that a page has room for, and the number of the others."""
    found = alerts_of(run)
    more = [f"--json has {len(found) - _MOST:,} more"] if len(found) > _MOST else []
    return [*found[:_MOST], *more]


def processes_of(run: ReportedRun) -> list[dict[str, Any]]:
    """Return the start and the header fields of each process."""
    lives = run.story.lives[:MOST_LIVES]
    return [
        {"began": _began(number, life), "facts": _facts(run, life)}
        for number, life in enumerate(lives, start=1)
    ]


def _facts(run: ReportedRun, life: LeaderProcess) -> list[tuple[str, str]]:
    facts: list[tuple[str, Any]] = [("trace", run.story.path)]
    facts += [(key, value) for key, value in life.header.items() if key not in _OTHER_FACTS]
    for note in life.notes:
        if note.get("kind") == "workload":
            facts += [(key, value) for key, value in note.items() if key not in {"kind", "at_s"}]
    return [(plain(key, 60), "none" if value is None else str(value)) for key, value in facts]


def _began(number: int, life: LeaderProcess) -> str:
    when = ""
    if life.began_unix_s is not None and isfinite(life.began_unix_s):
        try:
            started = datetime.fromtimestamp(life.began_unix_s, UTC)
            when = f", started {started:%Y-%m-%d %H:%M:%S} UTC"
        except (OverflowError, ValueError, OSError):
            when = ""
    ended = "ended" if life.summary is not None else "end not recorded"
    steps = sum(one.steps for one in life.generations)
    return f"Process {number}{when}: {steps:,} steps, {ended}"
