"""Runs on one axis: nothing of them is lost on the way into few bars."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.report_runs import STARTED_UNIX_S, Made, make

from evenstride.report.page.page_runs import read_run
from evenstride.report.page.series_charts import step_times, top_s
from evenstride.report.page.worker_charts import parts_of
from tests.unit.report.conftest import Making

SPIKE = 1203


def test_a_single_slow_step_is_seen_among_thousands(made: Making) -> None:
    run = made(steps=5000, policy="uniform", speeds=(1.0, 1.0), noise=0.0, spikes=((SPIKE, 1),))

    assert run.each > 1
    (leg,) = run.legs
    bucket = int(np.searchsorted(leg.last, SPIKE))
    longest = parts_of(leg, 0)[3]
    assert int(np.argmax(longest)) == bucket
    assert longest[bucket] == pytest.approx(7 / 8, abs=0.02)
    most = step_times(run).most
    assert most[bucket] == pytest.approx(leg.durations_s[SPIKE])
    assert np.median(most) < most[bucket] / 7
    assert top_s([run]) < most[bucket]


def test_a_run_among_many_has_few_bars_and_its_extremes(tmp_path: Path) -> None:
    spikes = Made(3000, "uniform", (1.0, 1.0), noise=0.0, spikes=((SPIKE, 1),))
    path = make(spikes, tmp_path / "trace.jsonl")

    alone, among = read_run(path, "a"), read_run(path, "a", among=30)

    assert len(step_times(alone).most) == 1500
    assert len(step_times(among).most) <= 2000 / 30
    assert step_times(among).most.max() == step_times(alone).most.max()
    assert step_times(among).least.min() == step_times(alone).least.min()


def test_bars_have_the_sums_of_their_steps(made: Making) -> None:
    run = made(steps=3001, policy="uniform", speeds=(1.0, 0.5), noise=0.05)

    (leg,) = run.legs
    busy = leg.sums(leg.generation.table.busy_s[:, 0])
    assert busy.sum() == pytest.approx(leg.generation.table.busy_s[:, 0].sum())
    assert leg.buckets <= 2000 < 3001
    assert (leg.last - leg.first + 1).sum() == 3001


def test_what_a_worker_did_is_all_of_its_time(made: Making) -> None:
    run = made(steps=40, policy="uniform", speeds=(1.0, 0.5), noise=0.0, communication_s=0.02)

    busy, waiting, rest, _ = parts_of(run.legs[0], 0)
    np.testing.assert_allclose(busy + waiting + rest, 1.0, atol=1e-3)
    own_s = 0.01 + 0.128
    np.testing.assert_allclose(busy, own_s / (2 * own_s + 0.02), atol=1e-3)
    np.testing.assert_allclose(waiting, own_s / (2 * own_s + 0.02), atol=1e-3)


def test_an_evaluation_is_time_apart(made: Making) -> None:
    run = made(steps=70, policy="uniform", speeds=(1.0, 1.0), noise=0.0, evaluated=30)

    (leg,) = run.legs
    parts = parts_of(leg, 0)[:3].sum(axis=0)
    apart_s = (1.0 - parts) * (leg.right_s - leg.left_s)
    assert apart_s.sum() == pytest.approx(3.0, abs=0.05)
    assert np.flatnonzero(apart_s > 0.5).tolist() == [30, 60]


def test_processes_follow_one_another_without_the_time_between(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    make(Made(30, speeds=(1.0, 0.5)), path)
    make(Made(50, speeds=(1.0, 0.5, 0.8)), path, started_unix_s=STARTED_UNIX_S + 500.0)

    run = read_run(path, "both")
    first, second = run.legs
    assert second.opens_s[0] == pytest.approx(first.ends_s[-1])
    assert run.lanes == ("node0/0", "node0/1", "node1/2")
    ((at_s, pause_s),) = run.pauses
    assert at_s == pytest.approx(first.ends_s[-1])
    assert pause_s == pytest.approx(500.0 - first.ends_s[-1])
    assert np.isnan(run.of_lane(2, lambda leg, _: np.zeros(leg.buckets))[: first.buckets]).all()


def test_workers_whose_names_are_the_same_once_cut_are_distinguished(made: Making) -> None:
    long = 90 * "a"
    run = made(steps=10, speeds=(1.0, 0.5, 0.5), names=(f"{long}1", f"{long}2", "b"))

    cut = f"{79 * 'a'}…"
    assert run.lanes == (cut, f"{cut} (2)", "b")
