"""Decisions, incidents, alerts and facts: what the run wrote in words, all of it others' text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from evenstride.report.analysis.run_generation import RecordedGeneration
from evenstride.report.analysis.run_timeline import LeaderProcess
from evenstride.report.page.page_runs import ReportedRun
from evenstride.report.page.page_tables import PageTable
from evenstride.report.wording import duration, plain

MOST_LIVES = 20
_MOST = 80
_MOST_SHARES = 16
_FACTS_APART = {"kind", "started_unix_s"}


def changes_table(run: ReportedRun) -> PageTable | None:
    """Return the changes of the split with their reasons; ``None`` if no decision was told of."""
    told = [(of, one) for of in run.story.generations for one in of.decisions]
    if not told:
        return None
    rows = [
        (*_process(run, of), f"{one.step:,}", duration(one.at_s), _split(shares), plain(one.reason))
        for of, one in told
        if (shares := one.shares) is not None
    ]
    headings = (*_process(run), "from step", "at", "shares", "reason")
    text = (len(headings) - 2, len(headings) - 1)
    return PageTable(headings, _cut(rows), counted(len(rows), "change"), text)


def _split(shares: Sequence[int]) -> str:
    told = " / ".join(f"{share:,}" for share in shares[:_MOST_SHARES])
    more = f" / … {len(shares) - _MOST_SHARES:,} more" if len(shares) > _MOST_SHARES else ""
    return f"{told}{more}"


def kept_table(run: ReportedRun) -> PageTable | None:
    """Return the decisions that kept the split; ``None`` if there are none."""
    rows = [
        (*_process(run, of), f"{one.step:,}", duration(one.at_s), plain(one.reason))
        for of in run.story.generations
        for one in of.decisions
        if one.shares is None
    ]
    headings = (*_process(run), "step", "at", "reason")
    text = (len(headings) - 1,)
    told = "Nothing was changed"
    return PageTable(headings, _cut(rows), told, text, len(rows)) if rows else None


def _process(run: ReportedRun, of: RecordedGeneration | None = None) -> tuple[str, ...]:
    """Return the first cell of a row, or its heading, where there are several processes."""
    if len(run.story.lives) < 2:
        return ()
    return ("process",) if of is None else (f"{of.life + 1}",)


def counted(count: int, name: str) -> str:
    """Return a number of things, the plural by an s."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _cut(rows: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Return the first and the last rows, and between them how many were left out."""
    if len(rows) <= _MOST:
        return rows
    half = _MOST // 2
    left_out = [f"{len(rows) - 2 * half:,} more are left out here; --json has them all"]
    return [*rows[:half], left_out, *rows[-half:]]


def incidents_table(run: ReportedRun) -> PageTable | None:
    """Return who came, went or got a notice; ``None`` if nothing of it happened."""
    events = [
        (of, one.at_s, one.step, plain(one.text))
        for of in run.story.generations
        for one in of.incidents
    ]
    if len(run.story.generations) > 1:
        events += [
            (of, of.anchors[0][0], of.first, _met(of)) for of in run.story.generations if of.met
        ]
    elif not events:
        return None
    events.sort(key=lambda event: (event[0].life, event[1]))
    rows = [
        (*_process(run, of), f"{step:,}", duration(at_s), text) for of, at_s, step, text in events
    ]
    headings = (*_process(run), "step", "at", "what happened")
    told = f"{len(rows):,} entr{'y' if len(rows) == 1 else 'ies'}"
    return PageTable(headings, _cut(rows), told, (len(headings) - 1,))


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
