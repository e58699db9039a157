"""Which steps are shown up close."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.report_runs import EVALUATION_S

from evenstride.report.page.worker_charts import (
    closeup_chart,
    last_window,
    usual_span_s,
    windows_of,
)
from tests.unit.report.conftest import Making


def test_the_last_steps_have_no_evaluation_among_them(made: Making) -> None:
    run = made(steps=84, policy="uniform", noise=0.0, evaluated=40)

    span_s = usual_span_s([run])
    shown = last_window(run, span_s)
    assert shown.text == "steps near the end"
    assert shown.last <= 79, "the evaluation lies before step 80"
    lasting_s = float(shown.leg.ends_s[shown.last]) - shown.begin_s
    assert lasting_s == pytest.approx(span_s, rel=0.2)
    assert lasting_s < span_s + EVALUATION_S / 2


def test_the_last_steps_are_the_last_where_nothing_lies_between(made: Making) -> None:
    run = made(steps=60, policy="uniform", noise=0.0)

    shown = last_window(run, usual_span_s([run]))
    assert (shown.first, shown.last, shown.text) == (52, 59, "last steps")


def test_the_worst_steps_are_where_a_worker_was_slow(made: Making) -> None:
    slow, usual = (1.0, 1.0, 0.2), (1.0, 1.0, 1.0)
    run = made(steps=120, policy="uniform", speeds=usual, changes=((60, slow), (75, usual)))

    worst, last = windows_of(run)
    assert 60 <= worst.first <= worst.last < 75
    waited = 2 / 3 * (1.0 - (0.01 + 0.085) / ((0.01 + 0.085) / 0.2))
    assert worst.waiting == pytest.approx(waited, abs=0.03)
    assert last.waiting < 0.05
    assert last.last == 119


def test_runs_side_by_side_have_the_same_seconds(made: Making) -> None:
    runs = [made(name, steps=120, policy=name, noise=0.0) for name in ("uniform", "adaptive")]

    span_s = usual_span_s(runs)
    equal, balanced = (last_window(run, span_s) for run in runs)
    assert equal.steps == 8
    assert balanced.steps == pytest.approx(
        8 * np.median(runs[0].legs[0].durations_s) / runs[1].legs[0].durations_s[-1], abs=1.1
    )
    chart = closeup_chart([equal, balanced], "compared")
    assert len(chart.panels) == 6
    headings = [panel.heading for panel in chart.panels if panel.heading is not None]
    assert [name for name, _ in headings] == ["uniform", "adaptive"]
    assert f"{balanced.steps} steps (" in headings[1][1]
