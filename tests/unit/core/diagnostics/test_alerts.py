"""Who is named, with which evidence, and who is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evenstride.core.diagnostics.alerts import (
    WHILE_S,
    WHILE_STEPS,
    Alert,
    Alerts,
    DebouncedStates,
    Span,
    best_s,
)
from evenstride.core.fleet import Fleet, Worker, as_array
from evenstride.core.time_model.observation import Measurements, Observation
from tests.messages import check_message
from tests.unit.sim.watched import watched, worker

SLOW_AT = 400


def slow_down(at: int = SLOW_AT, who: int = 1, speed: float = 0.5) -> dict[str, object]:
    return {"kind": "step", "at": at, "workers": who, "speed": speed}


def test_a_worker_that_becomes_slow_is_named_with_the_evidence() -> None:
    (alert,) = watched([worker(count=4)], 600, [slow_down()]).found

    assert (alert.kind, alert.worker, alert.since) == ("slow", "n/1", SLOW_AT)
    assert SLOW_AT + WHILE_STEPS <= alert.step <= SLOW_AT + 100
    assert alert.speed == pytest.approx(0.5, rel=0.1)
    assert alert.now_s / alert.better_s == pytest.approx(2.0, rel=0.1)
    # Of 256 samples at 1,000/s and 20 ms: 84 ms a step of all, 96 ms with one at half speed.
    assert alert.costs_s == pytest.approx(0.0117, abs=0.003)
    assert str(alert.share) in alert.reason
    check_message(alert.reason, f"{alert.speed:.2f}")
    assert f"since step {SLOW_AT}" in alert.reason


def test_under_a_fixed_split_the_whole_wait_is_what_it_costs() -> None:
    (alert,) = watched([worker(count=4)], 600, [slow_down()], policy="uniform").found

    assert alert.costs_s == pytest.approx(0.084, rel=0.1)
    assert alert.costs_part == pytest.approx(0.5, abs=0.05)


def test_it_is_named_again_only_after_it_has_recovered() -> None:
    halves = [slow_down(400), slow_down(600), slow_down(900, speed=4.0), slow_down(1200)]

    found = watched([worker(count=4)], 1500, halves).found

    assert [(a.kind, a.worker, a.since) for a in found] == [
        ("slow", "n/1", 400),
        ("slow", "n/1", 1200),
    ]


@pytest.mark.parametrize("speed", [0.75, 0.8, 1.5])
def test_one_that_stays_above_the_fraction_is_not_named(speed: float) -> None:
    assert not watched([worker(count=4)], 700, [slow_down(speed=speed)]).found


@pytest.mark.parametrize(("below", "named"), [(0.0, 0), (0.45, 0), (0.55, 1), (0.95, 1)])
def test_the_fraction_can_be_set(below: float, named: int) -> None:
    assert len(watched([worker(count=4)], 700, [slow_down()], below=below).found) == named


def test_a_short_stretch_is_not_named() -> None:
    back = slow_down(SLOW_AT + 12, speed=2.0)

    assert not watched([worker(count=4)], 700, [slow_down(), back]).found


def test_a_change_of_speed_that_is_contradicted_is_doubtful_until_it_ends() -> None:
    """A curve of the wrong shape shows half the speed, then more of it, then all."""
    run = watched([worker(count=2)], 400)
    alerts, estimate = run.alerts, run.control.estimate
    assert estimate is not None

    def exchange(speed: float, step: int) -> tuple[Alerts, tuple[Alert, ...]]:
        now = estimate.now.times(np.array([1.0, 1 / speed]), np.zeros(2))
        control = replace(run.control, estimate=replace(estimate, now=now))
        times_s = now.time_s(as_array((128, 128)))
        seen = Measurements.of(
            Observation(k, 128, step, (float(times_s[k]),) * 9, (0.0,) * 9) for k in (0, 1)
        )
        return alerts.after(control.situation(step + 9, seen))

    for step, speed, doubtful in [(400, 0.4, False), (409, 0.6, True), (418, 1.0, False)]:
        alerts, found = exchange(speed, step)
        assert alerts.doubtful.tolist() == [False, doubtful]
        assert not found


def test_a_slowdown_of_all_workers_names_no_worker() -> None:
    all_slow = {"kind": "step", "at": SLOW_AT, "workers": "all", "speed": 0.4}

    assert not watched([worker(count=4)], 700, [all_slow]).found


def test_a_worker_alone_is_named_by_its_own_past() -> None:
    (alert,) = watched([worker()], 600, [slow_down(who=0)]).found

    assert (alert.worker, alert.since) == ("n/0", SLOW_AT)
    assert alert.costs_s is not None


def test_workers_that_are_not_worth_their_place_are_named_once() -> None:
    bad = worker("bad", count=2, fixed_s=0.2)

    run = watched([worker(count=4), bad], 800)

    assert [(a.kind, a.worker, a.others) for a in run.found] == [
        ("unneeded", "bad/0", 1),
        ("unneeded", "bad/1", 1),
    ]
    # Four workers alone take 84 ms; one sample of the bad ones takes 201 ms.
    assert run.found[0].better_s == pytest.approx(0.084, rel=0.1)
    assert run.found[0].now_s == pytest.approx(0.205, rel=0.1)
    assert run.found[0].costs_s == pytest.approx(0.12, rel=0.1)
    check_message(run.found[0].reason)
    assert "with it and 1 more" in run.found[0].reason


def test_a_worker_without_which_the_batch_does_not_fit_is_needed() -> None:
    bad = worker("bad", fixed_s=0.3)

    run = watched([worker(count=2, max_share=100), bad], 500, batch=201)

    assert not run.found
    assert not run.alerts.spare.open.any()


def test_in_modes_without_lockstep_no_worker_costs_the_others_time() -> None:
    run = watched([worker(count=3), worker("bad", fixed_s=0.3)], 600, [slow_down()], lockstep=False)

    assert [(a.kind, a.costs_s) for a in run.found] == [("slow", None)]
    assert "longer" not in run.found[0].reason


def test_a_worker_that_leaves_is_forgotten_and_the_others_are_not() -> None:
    run = watched([worker(count=4)], 500)
    alerts = run.alerts

    workers = tuple(Worker(name) for name in ("n/3", "new", "n/0"))
    after, _ = alerts.after(
        replace(run.control.situation(500, Measurements.of([])), fleet=Fleet(workers, 256))
    )

    assert after.names == ("n/3", "new", "n/0")
    assert after.pasts.share.tolist()[1] == 0
    for name, place in (("n/3", 0), ("n/0", 2)):
        was = alerts.names.index(name)
        assert after.pasts.time_s[place] == alerts.pasts.time_s[was] > 0


def test_an_alert_is_plain_data() -> None:
    alert = Alert("slow", "a/0", 9, 5, 8, 0.1, 0.25, 0.4, 1.5, 0.25)

    plain = alert.to_dict()

    assert plain["alert"] == "slow"
    assert plain["costs_s"] == 1.5
    check_message(plain["reason"], "0.40", "step 5", "8 samples")


def test_times_of_microseconds_are_shown_as_such() -> None:
    alert = Alert("slow", "a/0", 9, 5, 64, 8.25e-6, 2e-5, 0.4, 1.175e-5, 0.25)

    check_message(alert.reason, "64 samples", "8.25 us", "20 us")


def test_without_measurements_no_worker_is_named() -> None:
    run = watched([worker(count=2)], 20)

    estimate = run.control.estimate
    assert estimate is not None
    assert not run.found
    assert np.isnan(run.alerts.speeds(estimate.now)).all(), "twenty steps are no while"


def test_steps_alone_are_no_while() -> None:
    # Steps of 2 ms: sixty of them are over in no time.
    quick = worker(count=2, samples_per_s=100_000, fixed_s=0.0005)
    events = [slow_down(5000, speed=0.3), slow_down(5300, speed=1 / 0.3)]

    run = watched([quick], 5600, events)

    estimate = run.control.estimate
    assert estimate is not None
    assert run.alerts.speeds(estimate.now) == pytest.approx(1.0, abs=0.1), "they have a past"
    assert not run.found


def test_a_look_without_news_of_a_worker_changes_nothing_about_it() -> None:
    bad = np.array([True, True])
    first = Span(np.array([40.0, 40.0]), np.array([9.0, 9.0]), np.array([3, 4]))
    none_of_one = Span(np.array([40.0, 0.0]), np.array([9.0, 0.0]), np.array([23, 0]))

    episodes, begun = DebouncedStates.none(2).after(bad, ~bad, first, first)
    assert not begun.any()
    episodes, begun = episodes.after(bad, ~bad, none_of_one, none_of_one)

    assert begun.tolist() == [True, False]
    assert episodes.since.tolist() == [3, 4]
    assert episodes.steps.tolist() == [0.0, 40.0]
    assert WHILE_STEPS == 60
    assert WHILE_S == 5


def test_a_curve_that_is_slow_where_no_time_was_counts_from_the_next_step() -> None:
    run = watched([worker(count=2)], 400)
    estimate = run.control.estimate
    assert estimate is not None
    slower = replace(estimate, now=estimate.now.times(np.array([1.0, 2.0]), 0.0))  # type: ignore[arg-type]
    control, quick = (
        replace(run.control, estimate=slower),
        0.5 * estimate.model.at(as_array((128, 128))),
    )
    seen = Measurements.of(
        Observation(k, 128, 400, (float(quick[k]),) * 9, (0.0,) * 9) for k in (0, 1)
    )

    after, found = run.alerts.after(control.situation(409, seen))

    assert not found
    assert after.slow.since.tolist() == [0, 409]
    assert after.slow.steps.tolist() == [0, 0]


@pytest.mark.parametrize(("variance", "slow"), [(0.0, True), (0.04, False)])
def test_a_speed_counts_as_low_only_beyond_its_doubt(variance: float, slow: bool) -> None:
    run = watched([worker(count=2)], 400)
    estimate = run.control.estimate
    assert estimate is not None
    doubtful = estimate.now.times(np.array([1.0, 1 / 0.64]), np.array([0.0, variance]))
    control = replace(run.control, estimate=replace(estimate, now=doubtful))
    times_s = doubtful.time_s(as_array((128, 128)))
    seen = Measurements.of(
        Observation(k, 128, 400, (float(times_s[k]),) * 9, (0.0,) * 9) for k in (0, 1)
    )

    after, _ = run.alerts.after(control.situation(409, seen))

    assert after.slow.turning.tolist() == [False, slow], "0.64 is 0.77 with a fifth on top"


@pytest.mark.parametrize(
    ("beside", "variance", "again"), [(1.1, 0.04, False), (0.9, 0.04, True), (0.98, 0.0, False)]
)
def test_an_unneeded_worker_stays_so_despite_doubt_or_small_changes(
    beside: float, variance: float, again: bool
) -> None:
    """A sample of the last worker takes somewhat more or less than a step of the others alone."""
    run = watched([worker(count=4), worker("bad", fixed_s=0.2)], 800)
    control, estimate, fleet = run.control, run.control.estimate, run.control.fleet
    assert estimate is not None
    assert fleet is not None
    assert run.alerts.spare.open.tolist() == [False] * 4 + [True]
    alone_s = best_s(estimate.model, fleet, without=run.alerts.spare.open)
    assert alone_s is not None
    factor = np.ones(5)
    factor[4] = beside * alone_s / float(estimate.model.at(fleet.lower)[4])
    now = estimate.now.times(factor, np.array([0.0] * 4 + [variance]))
    held = replace(control, estimate=replace(estimate, now=now))
    times_s = now.time_s(as_array(control.shares))
    seen = Measurements.of(
        Observation(k, share, 800, (float(times_s[k]),) * 9, (0.0,) * 9)
        for k, share in enumerate(control.shares)
    )

    after, _ = run.alerts.after(held.situation(809, seen))

    assert after.spare.open[4]
    assert after.spare.turning[4] == again


def test_the_usual_fraction_is_what_the_settings_say() -> None:
    assert Alerts().below == 0.7
