"""Decisions, incidents, alerts and facts: what the run wrote in words, all of it others' text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from evenstride.report.analysis.run_generation import RecordedDecision, RecordedGeneration
from evenstride.report.analysis.run_timeline import LeaderProcess
from evenstride.report.page.markup import Child, Markup, element
from evenstride.report.page.page_runs import ReportedRun
from evenstride.report.page.page_tables import table
from evenstride.report.wording import duration, plain

_MOST = 80
_MOST_SHARES = 16
_MOST_LIVES = 20
_FACTS_APART = {"kind", "started_unix_s"}


def decisions_part(run: ReportedRun) -> list[Markup]:
    """Return the changes of the split with their reasons; those that kept it are folded."""
    told = [(one, decision) for one in run.story.generations for decision in one.decisions]
    changes = [(one, decision) for one, decision in told if decision.shares is not None]
    kept = [(one, decision) for one, decision in told if decision.shares is None]
    if not told:
        return [element("p", "None were told of.")]
    headings = (*_process(run), "from step", "at", "shares", "reason")
    text = (len(headings) - 2, len(headings) - 1)
    found = [
        table(
            headings,
            _cut([_change(run, *one) for one in changes]),
            told=_counted(changes, "change"),
            text=text,
        )
    ]
    if kept:
        headings = (*_process(run), "step", "at", "reason")
        rows = _cut([_kept(run, *one) for one in kept])
        inside = table(headings, rows, told="Nothing was changed", text=(len(headings) - 1,))
        found.append(
            element(
                "details",
                element("summary", f"{_counted(kept, 'decision')} kept the split"),
                inside,
            )
        )
    return found


def _change(run: ReportedRun, of: RecordedGeneration, one: RecordedDecision) -> Sequence[Child]:
    shares = one.shares or ()
    told = " / ".join(f"{share:,}" for share in shares[:_MOST_SHARES])
    more = f" / … {len(shares) - _MOST_SHARES:,} more" if len(shares) > _MOST_SHARES else ""
    return *_life(run, of), f"{one.step:,}", duration(one.at_s), f"{told}{more}", plain(one.reason)


def _kept(run: ReportedRun, of: RecordedGeneration, one: RecordedDecision) -> Sequence[Child]:
    return *_life(run, of), f"{one.step:,}", duration(one.at_s), plain(one.reason)


def _process(run: ReportedRun) -> tuple[str, ...]:
    return ("process",) if len(run.story.lives) > 1 else ()


def _life(run: ReportedRun, of: RecordedGeneration) -> tuple[str, ...]:
    return (f"{of.life + 1}",) if len(run.story.lives) > 1 else ()


def _counted(things: Sequence[object], name: str) -> str:
    return f"{len(things):,} {name}{'' if len(things) == 1 else 's'}"


def _cut(rows: list[Sequence[Child]]) -> list[Sequence[Child]]:
    """Return the first and the last rows, and between them how many were left out."""
    if len(rows) <= _MOST:
        return rows
    half = _MOST // 2
    left_out = [f"{len(rows) - 2 * half:,} more are left out here; --json has them all"]
    return [*rows[:half], left_out, *rows[-half:]]


def incidents_part(run: ReportedRun) -> Markup | None:
    """Return who came, went or got a notice; ``None`` if nothing of it happened."""
    found = [(one, incident) for one in run.story.generations for incident in one.incidents]
    several = len(run.story.generations) > 1
    if not found and not several:
        return None
    rows: list[tuple[int, float, Sequence[Child]]] = [
        (of.life, one.at_s, (*_life(run, of), f"{one.step:,}", duration(one.at_s), plain(one.text)))
        for of, one in found
    ]
    if several:
        rows += [
            (
                of.life,
                of.anchors[0][0],
                (*_life(run, of), f"{of.first:,}", duration(of.anchors[0][0]), _met(of)),
            )
            for of in run.story.generations
            if of.met
        ]
    rows.sort(key=lambda row: row[:2])
    headings = (*_process(run), "step", "at", "what happened")
    told = _counted(rows, "entry").replace("entrys", "entries")
    return table(headings, _cut([row for _, _, row in rows]), told=told, text=(len(headings) - 1,))


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


def alerts_part(run: ReportedRun) -> Markup | None:
    """Return the alerts as a list; ``None`` if there is none."""
    found = alerts_of(run)
    if not found:
        return None
    told = (
        found
        if len(found) <= _MOST
        else [*found[:_MOST], f"{len(found) - _MOST:,} more: --json has them all"]
    )
    return element("ul", [element("li", one) for one in told], class_="who")


def facts_part(run: ReportedRun) -> list[Markup]:
    """Return what the headers say of the run, a list of facts for each process."""
    lives = run.story.lives
    found = [
        element(
            "details",
            element("summary", _began(number, life)),
            _facts(run, life),
            open=len(lives) == 1,
        )
        for number, life in enumerate(lives[:_MOST_LIVES], start=1)
    ]
    if len(lives) > _MOST_LIVES:
        found.append(
            element(
                "p",
                f"{len(lives) - _MOST_LIVES:,} more processes: --json has them all",
                class_="how",
            )
        )
    return found


def _facts(run: ReportedRun, life: LeaderProcess) -> Markup:
    facts: list[tuple[str, Any]] = [("trace", run.story.path)]
    facts += [(key, value) for key, value in life.header.items() if key not in _FACTS_APART]
    for note in life.notes:
        if note.get("kind") == "workload":
            facts += [(key, value) for key, value in note.items() if key not in {"kind", "at_s"}]
    told = [
        (
            element("dt", plain(key, 60)),
            element(
                "dd", "none" if value is None else value if isinstance(value, str) else str(value)
            ),
        )
        for key, value in facts
    ]
    return element("dl", told, class_="facts")


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
