"""What the page says of a run in sentences, figures, tables and lists.

What the run itself wrote in words (reasons, alerts, names, facts) is others' text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any

import numpy as np

from evenstride.core.allocation.speedup import WORTH_IT
from evenstride.core.fleet import FloatArray
from evenstride.report.analysis.attribution import Totals, slowed_of
from evenstride.report.analysis.run_generation import RecordedGeneration, median_s
from evenstride.report.analysis.run_timeline import LeaderProcess
from evenstride.report.page.page_runs import Leg, ReportedRun
from evenstride.report.wording import NOTHING, duration, not_measured_text, plain

RECENT = 20  # steps whose times count as those of a worker at the end
MOST_LIVES = 20
_ALIKE = 0.005  # speed-ups that differ by less are not called different
_MOST_TOLD = 12
_RECENT = 50  # steps whose times count as those of the run at the end
_MOST_ROWS = 256
_MOST = 80  # rows of what happened in the course of a run
_MOST_SHARES = 16
_FACTS_APART = {"kind", "started_unix_s"}


@dataclass(frozen=True, slots=True)
class Card:
    """A figure that is shown large."""

    name: str
    value: str
    told: str


def headline(run: ReportedRun) -> str:
    """Return in one or two sentences what a run came to."""
    totals = run.totals
    why = next((one.not_measured for one in reversed(run.story.generations)), "")
    if why:
        return not_measured_text(why)
    if not run.legs:
        return "No step was told of yet."
    took = f"{totals.steps:,} steps took {duration(totals.took_s)}"
    if not run.lockstep:
        return (
            f"{took} (the worker with the most to do). In {run.sync} workers do not keep step: "
            "nobody waits for another, so there is no speed-up over equal steps to tell of."
        )
    if len(run.lanes) == 1:
        return f"{took}. There is one worker, so there is nothing to balance."
    bound, speedup = totals.bound_model, totals.speedup_model
    if bound is None or speedup is None:
        return f"{took}. What other splits would have taken is not known."
    if bound - 1.0 < WORTH_IT:
        alike = abs(speedup - 1.0) < _ALIKE
        own = "" if alike else f", and this run was {speedup:.2f} times as fast"
        return (
            f"{took}. Balancing cannot help much here: the best split would be {bound - 1:.1%} "
            f"faster than the equal one{own}."
        )
    return f"{took}, {_compared(totals, speedup, bound)}."


def _compared(totals: Totals, speedup: float, bound: float) -> str:
    saved_s = totals.saved_s or 0.0
    best = f"the best split would be {bound:.2f} times as fast as the equal one"
    if abs(speedup - 1.0) < _ALIKE:
        could_s = duration(totals.judged_s - totals.best_s)
        return f"as long as with equal shares: {best}, so balancing could save {could_s} of that"
    if speedup < 1.0:
        return f"{duration(-saved_s)} more than with equal shares, though {best}"
    return (
        f"by its fitted curves {speedup:.2f} times as fast as with equal shares: "
        f"{duration(saved_s)} saved. That is {totals.efficiency_model:.1%} of what the best split "
        "would reach"
    )


def cards_of(run: ReportedRun) -> list[Card]:
    """Return the figures that a reader asks for first; none where nothing was told."""
    totals = run.totals
    if not run.legs:
        return []
    step_s = float(np.median(run.legs[-1].durations_s[-_RECENT:]))
    found = [
        Card(
            "Speed-up over equal shares",
            _times(totals.speedup_model),
            f"best possible: {_times(totals.bound_model)}",
        ),
        Card("Efficiency", _part(totals.efficiency_model), "100% is the best split"),
        Card("Time saved", duration(totals.saved_s), "against equal shares"),
        Card("Waiting for slower workers", f"{totals.waiting_part:.1%}", "of all workers' time"),
        Card(
            "Step",
            duration(step_s),
            f"median of the last {min(_RECENT, run.legs[-1].generation.steps)}",
        ),
        Card(
            "Samples per second",
            f"{rate_of(run):,.4g}",
            f"{totals.steps:,} steps in {duration(totals.took_s)}",
        ),
    ]
    return found if run.lockstep else found[4:]


def rate_of(run: ReportedRun) -> float:
    """Return the samples that a run trained in a second of its steps."""
    return run.totals.samples / run.totals.took_s if run.totals.took_s else 0.0


def _times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}×"


def _part(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def who_waited(run: ReportedRun) -> list[str]:
    """Return who made the others wait, since when and why, who cost most first."""
    if not run.legs:
        return []
    if not run.lockstep:
        return [f"Nobody waits for another: in {run.sync} each worker goes on when it is ready."]
    found = [
        (blame.each_s, _sentence(run, leg, blame.reason))
        for leg in run.legs
        for blame in leg.blames
        if blame.stretches
    ]
    found.sort(key=lambda one: -one[0])
    told = [text for _, text in found[:_MOST_TOLD]]
    if len(found) > _MOST_TOLD:
        told.append(f"{len(found) - _MOST_TOLD} more are in the table below.")
    if not found and len(run.lanes) > 1:
        told.append("No worker made the others wait for 2% of the time or more.")
    return told + _slow(run)


def _slow(run: ReportedRun) -> list[str]:
    """Say who was slower than at its best for a while, as balancing hides it from the waits."""
    found: list[tuple[float, str]] = []
    for leg in run.legs:
        drawn = [rank for rank, lane in enumerate(leg.lanes) if lane in run.drawn]
        for one in slowed_of(leg, drawn):
            name = f"worker {one.rank} ({run.lanes[leg.lanes[one.rank]]})"
            found.append((one.lost, _sentence(run, leg, f"{name} {one.told}")))
    found.sort(key=lambda one: -one[0])
    return [text for _, text in found[:_MOST_TOLD]]


def part_name(run: ReportedRun, leg: Leg) -> str:
    """Return which process and generation a leg is, as far as there are several."""
    life = leg.generation.life
    process = f"Process {life + 1}" if len(run.story.lives) > 1 else ""
    several = sum(one.generation.life == life for one in run.legs) > 1
    group = f"generation {leg.generation.number}" if several else ""
    batches = {one.generation.global_batch for one in run.legs if one.generation.life == life}
    batch = f"global batch {leg.generation.global_batch:,}" if len(batches) > 1 else ""
    told = ", ".join(one for one in (process, group, batch) if one)
    return told[:1].upper() + told[1:]


def _sentence(run: ReportedRun, leg: Leg, reason: str) -> str:
    where, told = part_name(run, leg), plain(reason)
    return f"{where}{': ' if where else ''}{told[:1].upper()}{told[1:]}."


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """What one worker of a run did; times are medians of its latest steps."""

    worker: str
    rank: int  # its latest
    state: str | None  # what it is to the run at the end; ``None`` if that is not known
    share: int  # samples of the last split
    busy_s: float | None  # own work in a step
    wait_s: float | None  # waiting for slower workers, and communication
    speed: float | None  # at the end, as a part of its own best; ``None`` if it is not known
    # Step from which its speed has been so; ``None`` if all the time, or not known
    since: int | None
    caused_s: float  # seconds that each of the others waited for it, on average, over the whole run
    part: float  # these as a part of the time of all steps
    slowest_steps: int  # how many it was the slowest in


def figures_of(run: ReportedRun, lane: int) -> WorkerFigures:
    """Return what a worker did."""
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
    """Return the share of the last step that was told of; 0 if none was."""
    known = shares[~np.isnan(shares)]
    return int(known[-1]) if len(known) else 0


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of the page."""

    headings: Sequence[str]  # one per column
    rows: Sequence[Sequence[str]]  # cells; a row of one cell goes across all columns
    told: str  # what stands above it
    text: Sequence[int] = (0,)  # columns that hold text; the others are figures
    count: int = 0  # how many entries there are, of which the rows may show some


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
    """Return a line for each of several runs, each compared with the first."""
    first = rate_of(runs[0])
    told = (
        "Samples per second of training steps, evaluation and saving apart. Waiting: of all "
        "workers' time. Speed-up and efficiency by each run's own fitted curves."
    )
    return PageTable(_COMPARED, [_compared_row(run, first) for run in runs], told, text=(0, 1))


def _compared_row(run: ReportedRun, first: float) -> Sequence[str]:
    totals, rate = run.totals, rate_of(run)
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
    "kept others waiting",
    "part of the time",
    "slowest in steps",
    "state",
)


def workers_table(run: ReportedRun) -> PageTable | None:
    """Return a line for each worker of the run; ``None`` if there are none."""
    if not run.legs:
        return None
    order = np.argsort(-run.caused_s, kind="stable").tolist()
    rows = [_worker(figures_of(run, lane), run.lockstep) for lane in order[:_MOST_ROWS]]
    if len(order) > _MOST_ROWS:
        rows.append([f"{len(order) - _MOST_ROWS:,} more workers are in the output of --json"])
    told = (
        f"Share: of the last split. Busy and wait: medians of the last {RECENT} steps. Kept "
        "others waiting: seconds of each of the others, on average, over the whole run."
    )
    return PageTable(_WORKERS, rows, told, text=(0, 10))


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
    """Return the changes of the split with their reasons; ``None`` if no decision was told of."""
    told = [(of, one) for of in run.story.generations for one in of.decisions]
    if not told:
        return None
    rows = [
        (of, one.step, one.at_s, _split(one.shares), plain(one.reason))
        for of, one in told
        if one.shares is not None
    ]
    headings = ("from step", "at", "shares", "reason")
    return _history(run, headings, rows, counted(len(rows), "change"))


def _split(shares: Sequence[int]) -> str:
    told = " / ".join(f"{share:,}" for share in shares[:_MOST_SHARES])
    more = f" / … {len(shares) - _MOST_SHARES:,} more" if len(shares) > _MOST_SHARES else ""
    return f"{told}{more}"


def kept_table(run: ReportedRun) -> PageTable | None:
    """Return the decisions that kept the split; ``None`` if there are none."""
    rows = [
        (of, one.step, one.at_s, plain(one.reason))
        for of in run.story.generations
        for one in of.decisions
        if one.shares is None
    ]
    return _history(run, ("step", "at", "reason"), rows, "Nothing was changed") if rows else None


def _history(
    run: ReportedRun,
    headings: tuple[str, ...],
    rows: Sequence[tuple[RecordedGeneration, int, float, *tuple[str, ...]]],
    told: str,
) -> PageTable:
    """Return a table of steps, times and texts; of several processes, each row names its own."""
    several = len(run.story.lives) > 1
    shown: list[Sequence[str]] = [
        (*((f"{of.life + 1}",) if several else ()), f"{step:,}", duration(at_s), *texts)
        for of, step, at_s, *texts in rows
    ]
    if len(shown) > _MOST:
        half = _MOST // 2
        left_out = [f"{len(shown) - 2 * half:,} more are left out here; --json has them all"]
        shown = [*shown[:half], left_out, *shown[-half:]]
    headings = ("process", *headings) if several else headings
    first_text = headings.index("at") + 1
    return PageTable(headings, shown, told, range(first_text, len(headings)), len(rows))


def counted(count: int, name: str) -> str:
    """Return a number of things, the plural by an s."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def incidents_table(run: ReportedRun) -> PageTable | None:
    """Return who came, went or got a notice; ``None`` if nothing of it happened."""
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
    told = f"{len(events):,} entr{'y' if len(events) == 1 else 'ies'}"
    return _history(run, ("step", "at", "what happened"), events, told)


def _met(of: RecordedGeneration) -> str:
    names = ", ".join(of.workers[:_MOST_SHARES])
    more = f" and {len(of.workers) - _MOST_SHARES:,} more" if len(of.workers) > _MOST_SHARES else ""
    return f"generation {of.number}: {len(of.workers):,} workers met: {names}{more}"


def alerts_of(run: ReportedRun) -> list[str]:
    """Return the alerts as sentences, in order; whatever they hold was written by others."""
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
    """Return as many alerts as a page has room for, and how many more there are."""
    found = alerts_of(run)
    more = [f"{len(found) - _MOST:,} more: --json has them all"] if len(found) > _MOST else []
    return [*found[:_MOST], *more]


def processes_of(run: ReportedRun) -> list[dict[str, Any]]:
    """Return what the headers say of the run: for each process when it began, and its facts."""
    lives = run.story.lives[:MOST_LIVES]
    return [
        {"began": _began(number, life), "facts": _facts(run, life)}
        for number, life in enumerate(lives, start=1)
    ]


def _facts(run: ReportedRun, life: LeaderProcess) -> list[tuple[str, str]]:
    facts: list[tuple[str, Any]] = [("trace", run.story.path)]
    facts += [(key, value) for key, value in life.header.items() if key not in _FACTS_APART]
    for note in life.notes:
        if note.get("kind") == "workload":
            facts += [(key, value) for key, value in note.items() if key not in {"kind", "at_s"}]
    return [(plain(key, 60), "none" if value is None else str(value)) for key, value in facts]


def _began(number: int, life: LeaderProcess) -> str:
    when = ""
    if life.began_unix_s is not None and isfinite(life.began_unix_s):
        try:
            when = f", began {datetime.fromtimestamp(life.began_unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
        except (OverflowError, ValueError, OSError):
            when = ""
    ended = "ended" if life.summary is not None else "has not said that it ended"
    steps = sum(one.steps for one in life.generations)
    return f"Process {number}{when}: {steps:,} steps, {ended}"
