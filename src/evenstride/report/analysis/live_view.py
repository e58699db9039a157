"""The current state of a run as one value, for ``evenstride top`` and its ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import floor
from typing import Any

from evenstride.report.analysis.attribution import Study, Totals, slowed_of, totals_of
from evenstride.report.analysis.key_findings import key_findings
from evenstride.report.analysis.record_validation import seconds_of
from evenstride.report.analysis.run_generation import (
    RecordedDecision,
    RecordedGeneration,
    median_s,
    since_met,
    waits_of,
)
from evenstride.report.analysis.run_timeline import LeaderProcess, RunTimeline
from evenstride.report.wording import plain

RECENT = 20
"""Number of the latest steps whose medians are shown."""
_CHANGES = 5
_ALIKE = 1e-6  # epochs


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The current state of one worker; times are medians of the latest steps."""

    rank: int
    name: str
    state: str  # serving, joining, leaving, ...
    share: int  # samples per step.
    busy_s: float | None  # busy time of a step; ``None`` if it is unknown.
    wait_s: float | None  # waiting for slower workers, and communication.
    speed: float | None  # as a fraction of its own best.
    since: int | None  # step from which it has had this speed; ``None`` if always.
    caused_s: float  # mean seconds that each other worker waited for it, in this generation.
    peak_bytes: int | None  # of memory, as reported last.
    limit_bytes: int | None  # of memory, as reported last.


@dataclass(frozen=True, slots=True)
class View:
    """The current state of a run."""

    run: str  # its trace file.
    policy: str  # its specification.
    sync: str  # synchronisation mode.
    lockstep: bool  # whether workers wait for each other.
    global_batch: int  # samples per step.
    generation: int  # of workers, counted over the whole run from 1.
    lives: int  # number of processes that have written the trace.
    step: int  # number of steps that the leader has committed, in this process.
    epoch: float | None  # epochs trained, fractions included; ``None`` if unknown.
    step_s: float | None  # median time of the latest steps.
    heard_s: float | None  # seconds since the last record of the trace, if known.
    ended: bool  # whether the trace records the end of the run.
    totals: Totals  # sums over the run.
    findings: tuple[str, ...]  # the most important facts, at most three sentences.
    workers: tuple[WorkerView, ...]  # in rank order.
    decision: RecordedDecision | None  # the latest.
    changes: tuple[RecordedDecision, ...]  # the latest changes of the shares, newest first.
    # One sentence for each worker that made the others wait, by cost. Then one for each worker
    # that is slow but delays no step, because it has fewer samples
    blames: tuple[str, ...]
    alerts: tuple[str, ...]  # newest first.
    unread: tuple[str, ...]  # parts of the trace that could not be read.
    not_measured: str = ""  # why steps could not be measured; empty if they were.

    def to_dict(self) -> dict[str, Any]:
        """Return the view as JSON types, with the figures derived from the totals."""
        totals = self.totals.to_dict()
        if self.not_measured and not self.totals.steps:
            totals |= dict.fromkeys(totals.keys() - asdict(self.totals).keys())
        return {**asdict(self), "totals": totals}


def view_of(story: RunTimeline, now_unix_s: float) -> View | None:
    """Return the current state of a run; ``None`` before its first process group exists.

    Cost:
        About 20 ms for each worker, and 0.1 us for each of its steps.
    """
    now = story.now
    if now is None:
        return None
    life = story.lives[-1]
    committed = max(step for _, step in now.anchors)
    parts = since_met(story.lives[now.life].generations)
    # A generation has no step yet if its batch was decided at the last step.
    study = Study(next((one for one in reversed(parts) if one.steps), now))
    decisions = [decision for one in parts for decision in one.decisions]
    moves = [one for one in decisions if one.shares is not None]
    header = life.header
    totals, sync = totals_of(story.generations), plain(header.get("sync") or "bsp")
    known = study if totals.steps or now.not_measured else None
    return View(
        run=plain(story.path),
        policy=plain(header.get("policy", "?")),
        sync=sync,
        lockstep=now.lockstep,
        global_batch=now.global_batch,
        generation=sum(one.met for one in story.generations),
        lives=len(story.lives),
        step=committed,
        epoch=_epoch(story.lives[now.life], committed),
        step_s=median_s(study.durations_s[-RECENT:]),
        heard_s=_heard_s(life, now, now_unix_s),
        ended=story.ended,
        totals=totals,
        findings=key_findings(known, totals, sync, range(len(now.workers))),
        workers=_workers(study, parts),
        decision=decisions[-1] if decisions else None,
        changes=tuple(reversed(moves[-_CHANGES:])),
        blames=_blames(study),
        alerts=_alerts(life),
        unread=story.unread,
        not_measured=now.not_measured,
    )


def _blames(study: Study) -> tuple[str, ...]:
    workers = study.generation.workers
    slowed = slowed_of(study, range(len(workers))) if study.generation.lockstep else ()
    return (
        *(plain(one.reason) for one in study.blames if one.stretches),
        *(plain(f"worker {one.rank} ({workers[one.rank]}) {one.text}") for one in slowed),
    )


def _workers(study: Study, parts: Sequence[RecordedGeneration]) -> tuple[WorkerView, ...]:
    now, others = parts[-1], max(len(study.generation.workers) - 1, 1)
    before = (waits_of(one) for one in parts if one is not study.generation)
    caused_s = sum((one.caused_s.sum(axis=0) for one in before), study.waits.caused_s.sum(axis=0))
    caused_s = caused_s / others
    recent, table = slice(-RECENT, None), study.generation.table
    busy_s, wait_s = table.busy_s[recent], table.wait_s[recent]
    shares = now.shares
    found = []
    for rank, name in enumerate(now.workers):
        speed, since = study.speed_now(rank)
        held = now.held.get(rank)
        found.append(
            WorkerView(
                rank=rank,
                name=plain(name, 80),
                state=now.standing[rank] if rank < len(now.standing) else "serving",
                share=shares[rank] if rank < len(shares) else 0,
                busy_s=median_s(busy_s[:, rank]),
                wait_s=median_s(wait_s[:, rank]),
                speed=speed,
                since=since,
                caused_s=float(caused_s[rank]),
                peak_bytes=held.peak_bytes if held else None,
                limit_bytes=held.limit_bytes if held else None,
            )
        )
    return tuple(found)


def _epoch(life: LeaderProcess, committed: int) -> float | None:
    """Return the epochs trained, counted from the start of the latest pass."""
    # The record of the next pass may precede that of this pass's last step.
    passes = [one for one in life.passes if one.step <= committed]
    if not passes:
        return None
    last = max(passes, key=lambda one: one.step)
    done = (committed - last.step) * last.batch / last.samples
    return min(last.epochs + done, floor(last.epochs + _ALIKE) + 1.0)


def _heard_s(life: LeaderProcess, now: RecordedGeneration, now_unix_s: float) -> float | None:
    began_s = life.began_unix_s
    if began_s is None:
        return None
    # A process writes only its header before its process group exists.
    formed = any(one is now for one in life.generations)
    last_s = now.anchors[-1][0] if formed else seconds_of(life.header.get("at_s")) or 0.0
    return max(0.0, now_unix_s - began_s - last_s)


def _alerts(life: LeaderProcess) -> tuple[str, ...]:
    notes: Sequence[dict[str, Any]] = [n for n in life.notes if n.get("kind") == "alert"]
    texts = [note.get("reason") or note.get("text") or note for note in reversed(notes)]
    return tuple(plain(text) for text in texts[:_CHANGES])
