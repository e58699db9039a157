"""A run in sentences and in numbers, from fixed figures."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from evenstride.core.control.events import FleetFormed
from evenstride.core.control.state import Control
from evenstride.core.fleet import Worker
from evenstride.core.policies import policy_from_spec
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.runtime.coordination.leader import Leader, Reply
from evenstride.runtime.telemetry.summary import Summary, WorkerSummary, summarise
from tests.messages import check_message

SLOW = WorkerSummary("one/0", 20, 60.0, 0.0, 39.5, 97, 5.0, 0.0)
FAST = WorkerSummary("two/1", 100, 20.0, 39.5, 0.0015, 3, 1.0, 2.0)
RUN = Summary(
    rank=0,
    epoch=2,
    step=100,
    global_batch=120,
    policy="adaptive",
    workers=(SLOW, FAST),
    changes=3,
    step_s=0.4567,
    efficiency_model=0.957,
    speedup_model=2.404,
    bound_model=2.512,
    samples_dropped=0,
    overhead_s=0.0001234,
)
FACTS: dict[str, Any] = {
    "rank": 0,
    "epoch": 1,
    "step": 8,
    "global_batch": 12,
    "policy": "static",
    "samples_dropped": 0,
    "overhead_s": 0.0,
}


def test_a_whole_run_in_sentences() -> None:
    check_message(str(RUN).splitlines(), "100 steps", "120 samples", "20/100")


def test_for_equal_workers_the_summary_reports_that_balancing_cannot_help() -> None:
    text = str(replace(RUN, bound_model=1.029, step_s=1.25))

    check_message(text, "1.25 s")
    assert "times as fast" not in text


def test_for_equal_workers_with_unequal_shares_the_summary_reports_the_cost() -> None:
    text = str(replace(RUN, bound_model=1.0, speedup_model=0.79, efficiency_model=0.79))

    check_message(text, "0.79")
    assert "balancing cannot help" not in text


@pytest.mark.parametrize(
    ("bound", "speedup", "reported"),
    [(1.029, 0.98, False), (1.029, 0.96, True), (1.031, 1.0, True)],
)
def test_speed_ups_and_losses_are_reported_from_three_percent(
    bound: float, speedup: float, reported: bool
) -> None:
    text = str(replace(RUN, bound_model=bound, speedup_model=speedup))

    assert ("times as fast" in text) == reported
    assert ("balancing cannot help" in text) != reported


def test_without_fitted_curves_only_measurements_are_reported() -> None:
    text = str(replace(RUN, efficiency_model=None, speedup_model=None, bound_model=None))

    check_message(text, "20/100", "457 ms")


def test_before_the_first_report_no_speed_is_reported() -> None:
    idle = tuple(replace(worker, busy_s=0.0, waited_s=0.0, caused_s=0.0) for worker in RUN.workers)

    text = str(replace(RUN, step_s=None, workers=idle))

    assert "a step takes" not in text
    assert "wait" not in text


def test_the_samples_that_drop_last_drops_are_reported() -> None:
    check_message(str(replace(RUN, samples_dropped=7)), "drop_last", "7 samples")
    assert "drop_last" not in str(RUN)


def test_at_most_three_workers_are_blamed() -> None:
    workers = tuple(
        WorkerSummary(f"h/{rank}", 1, 10.0, 0.0, caused_s, 1, 0.0, 0.0)
        for rank, caused_s in enumerate([5.0, 9.0, 1.2, 7.0, 6.0])
    )

    blamed = [
        line for line in str(replace(RUN, workers=workers)).splitlines() if "made the" in line
    ]

    assert [line.split()[1] for line in blamed] == ["h/1", "h/3", "h/4"]
    few = str(replace(RUN, workers=(replace(SLOW, caused_s=2.3), FAST)))
    assert "made the others wait" not in few, "2.3 s of 119.5 s are under 2 %"


def test_refused_reports_are_shown() -> None:
    text = str(replace(RUN, workers=(replace(SLOW, refused=3), FAST)))

    check_message(text)
    assert "cannot be" not in str(RUN)


def test_refused_reports_are_counted_from_the_leaders_control() -> None:
    summary = summarise(_leader("static:4,8", (0.3, float("nan")), (0.21, 0.01)), **FACTS)

    assert [worker.refused for worker in summary.workers] == [0, 1]


def test_many_workers_are_not_all_listed() -> None:
    text = str(replace(RUN, workers=(FAST,) * 40))

    assert "shares " + "/".join(["100"] * 16) + ";" in text


def test_other_ranks_report_that_they_know_only_themselves() -> None:
    summary = summarise(None, **{**FACTS, "rank": 3})

    check_message(str(summary), "rank 3", "rank 0")
    assert summary.workers == ()
    assert summary.step_s is summary.efficiency_model is None


def test_it_is_plain_json() -> None:
    plain = json.loads(json.dumps(RUN.to_dict()))

    assert plain["workers"][1]["name"] == "two/1"
    assert plain["forgoes"] == []
    lists = {"workers": (), "forgoes": ()}
    assert {**plain, **lists} == {**RUN.to_dict(), **lists}


def test_the_limits_of_a_mode_and_the_staleness_are_reported() -> None:
    each = {"count": 30, "mean": 1.5, "maximum": 4}
    staleness = {
        **each,
        "count": 60,
        "workers": [each, each],
        "most_ahead": 5,
        "handed_out_again": 7,
    }
    summary = replace(RUN, sync="asp", forgoes=("No bound.",), staleness=staleness)

    text = str(summary)

    assert "sync asp: No bound." in text
    check_message(text, "60", "30/30", "1.50", "7 samples")
    assert "staleness" not in str(RUN)


def _leader(spec: str, busy_s: tuple[float, float], wait_s: tuple[float, float]) -> Leader:
    """Return a leader whose two workers have reported eight steps each."""
    leader = Leader(Control(policy_from_spec(spec)))
    leader.form(FleetFormed(0, 0, 12, (Worker("one/0"), Worker("two/1"))))
    replies = [
        Reply(
            9,
            0,
            ((0, 0, 0),),
            Measurements.of(
                [
                    Observation(
                        k,
                        leader.control.shares[k],
                        0,
                        (busy_s[k],) * 8,
                        (wait_s[k],) * 8,
                        0.5,
                        0.25,
                    )
                ]
            ),
        )
        for k in range(2)
    ]
    leader.exchange(8, replies, 0)
    return leader


def test_the_leaders_figures_are_those_that_were_reported() -> None:
    summary = summarise(_leader("static:4,8", (0.3, 0.5), (0.21, 0.01)), **FACTS)

    one, two = summary.workers
    assert summary.step_s == pytest.approx(0.5 + 0.01), "the slowest, and the communication"
    assert (one.name, one.share, one.slowest_steps) == ("one/0", 4, 0)
    assert (two.name, two.share, two.slowest_steps) == ("two/1", 8, 8)
    assert (one.busy_s, one.waited_s, one.caused_s) == pytest.approx((2.4, 1.6, 0.0))
    assert (two.busy_s, two.waited_s, two.caused_s) == pytest.approx((4.0, 0.0, 1.6))
    assert (one.data_s, one.outside_s) == (0.5, 0.25)
    assert summary.changes == 0


def test_efficiency_and_speed_up_compare_with_the_fitted_curves() -> None:
    # Proportional times of 10 and 20 ms per sample would finish 8/4 at 80 ms and 6/6 at 120 ms;
    # with a single time, a third is assumed to be fixed, which moves the optimum little.
    summary = summarise(_leader("static:6,6", (0.06, 0.12), (0.06, 0.0)), **FACTS)

    assert summary.bound_model == pytest.approx(120 / 80, rel=0.05)
    assert summary.speedup_model == pytest.approx(1.0, rel=1e-6)
    assert summary.efficiency_model == pytest.approx(80 / 120, rel=0.05)


def test_communication_is_the_same_for_every_split() -> None:
    none = summarise(_leader("static:6,6", (0.06, 0.12), (0.06, 0.0)), **FACTS)
    some = summarise(_leader("static:6,6", (0.06, 0.12), (0.16, 0.1)), **FACTS)

    assert none.bound_model is not None
    best_s = 0.12 / none.bound_model
    assert some.bound_model == pytest.approx((0.12 + 0.1) / (best_s + 0.1))
    assert some.step_s == pytest.approx(0.12 + 0.1)


def test_the_figures_of_the_model_fit_together() -> None:
    summary = summarise(_leader("static:8,4", (0.08, 0.08), (0.004, 0.004)), **FACTS)

    assert summary.bound_model is not None
    assert summary.speedup_model is not None
    assert summary.efficiency_model is not None
    assert summary.bound_model == pytest.approx(summary.speedup_model / summary.efficiency_model)
    assert summary.efficiency_model == pytest.approx(1.0, abs=0.05)


def test_with_an_unmeasured_worker_the_model_figures_are_none() -> None:
    leader = Leader(Control(policy_from_spec("uniform")))
    leader.form(FleetFormed(0, 0, 12, (Worker("one/0"), Worker("two/1"))))

    summary = summarise(leader, **FACTS)

    assert summary.efficiency_model is summary.bound_model is summary.step_s is None
    assert [worker.share for worker in summary.workers] == [6, 6]


def test_the_comparison_of_a_fixed_split_is_marked_as_a_guess() -> None:
    fixed = replace(RUN, policy="static:20,100", changes=0)

    check_message(str(fixed))
    assert "guess" not in str(replace(fixed, changes=1))
    assert "guess" not in str(replace(fixed, policy="adaptive"))
