"""A run as JSON: all that its page shows, and what the page leaves out of long lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from evenstride.report.analysis.run_generation import Incident, RecordedDecision, RecordedGeneration
from evenstride.report.page.charts.curve_chart import fitted_of
from evenstride.report.page.charts.metric_charts import courses_of
from evenstride.report.page.event_lists import alerts_of
from evenstride.report.page.findings import headline, rate_of, who_waited
from evenstride.report.page.page_runs import Leg, ReportedRun
from evenstride.report.page.worker_rows import figures_of

_FIGURES = ("efficiency_model", "speedup_model", "bound_model", "saved_s", "waiting_part")


def run_data(run: ReportedRun) -> dict[str, Any]:
    """Return a run as JSON types; what is no finite number is ``None``."""
    totals = {**asdict(run.totals), **{name: getattr(run.totals, name) for name in _FIGURES}}
    told = {
        "name": run.name,
        "trace": str(run.story.path),
        "policy": run.policy,
        "sync": run.sync,
        "lockstep": run.lockstep,
        "ended": run.story.ended,
        "headline": headline(run),
        "not_measured": next((one.not_measured for one in reversed(run.story.generations)), ""),
        "who_waited": who_waited(run),
        "samples_per_s": rate_of(run),
        "totals": totals,
        "workers": [asdict(figures_of(run, lane)) for lane in range(len(run.lanes))],
        "generations": [_leg(leg) for leg in run.legs],
        "decisions": _of_generations(run, lambda one: one.decisions),
        "incidents": _of_generations(run, lambda one: one.incidents),
        "alerts": alerts_of(run),
        "curves": [
            {
                "worker": run.lanes[one.lane],
                "fixed_s": one.fixed_s,
                "per_sample_s": one.per_sample_s,
            }
            for one in fitted_of(run)
        ],
        "metrics": {
            one.name: {"steps": one.steps.tolist(), "values": one.values.tolist()}
            for one in courses_of(run)
        },
        "processes": [{"header": life.header, "summary": life.summary} for life in run.story.lives],
        "unread": list(run.story.unread),
    }
    found: dict[str, Any] = finite(told)
    return found


def _of_generations(
    run: ReportedRun, of: Callable[[RecordedGeneration], Sequence[RecordedDecision | Incident]]
) -> list[dict[str, Any]]:
    return [
        {"process": one.life + 1, **asdict(entry)}
        for one in run.story.generations
        for entry in of(one)
    ]


def _leg(leg: Leg) -> dict[str, Any]:
    one = leg.generation
    return {
        "process": one.life + 1,
        "generation": one.number,
        "first_step": one.first,
        "steps": one.steps,
        "global_batch": one.global_batch,
        "workers": list(one.workers),
        "blames": [asdict(blame) for blame in leg.blames],
        "phases": [
            [asdict(phase) for phase in leg.phases(rank)] for rank in range(len(one.workers))
        ],
    }


def finite(value: Any) -> Any:
    """Return JSON types in which no number is infinite or none; those are ``None``."""
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
