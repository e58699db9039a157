"""What a run came to, and who made others wait, in sentences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstride.core.allocation.speedup import WORTH_IT
from evenstride.report.analysis.totals import Totals
from evenstride.report.page.page_runs import Leg, ReportedRun
from evenstride.report.wording import duration, not_measured_text, plain

_ALIKE = 0.005
_MOST_TOLD = 12
_RECENT = 50


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
        return (
            f"{took}. Balancing cannot help much here: the best split would be {bound - 1:.1%} "
            f"faster than the equal one{_ended(speedup)}."
        )
    return f"{took}, {_compared(totals, speedup, bound)}."


def _ended(speedup: float) -> str:
    return "" if abs(speedup - 1.0) < _ALIKE else f", and this run was {speedup:.2f} times as fast"


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
    return "–" if value is None else f"{value:.2f}×"


def _part(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def who_waited(run: ReportedRun) -> list[str]:
    """Return who made the others wait, since when and why, who cost most first."""
    if not run.legs:
        return []
    if not run.lockstep:
        return [f"Nobody waits for another: in {run.sync} each worker goes on when it is ready."]
    found = [
        (blame.each_s, f"{_where(run, leg)}{_sentence(blame.reason)}")
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
        for one in leg.slowed(drawn):
            name = f"worker {one.rank} ({run.lanes[leg.lanes[one.rank]]})"
            found.append((one.lost, f"{_where(run, leg)}{_sentence(f'{name} {one.told}')}"))
    found.sort(key=lambda one: -one[0])
    return [text for _, text in found[:_MOST_TOLD]]


def _where(run: ReportedRun, leg: Leg) -> str:
    if not part_name(run, leg):
        return ""
    return f"{part_name(run, leg)}: "


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


def _sentence(reason: str) -> str:
    told = plain(reason)
    return f"{told[:1].upper()}{told[1:]}."
