"""One rank's times, on a clock that the tests move by hand (whole seconds, so exact)."""

from __future__ import annotations

import contextlib
from statistics import median_high
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evenstride.runtime.timing.step_timer import StepRecord, StepTimer
from evenstride.testing import FakeClock

whole_s = st.integers(0, 1000).map(float)


class Bench:
    """A timer on such a clock, and the steps it has finished."""

    def __init__(self) -> None:
        self.clock, self.records = FakeClock(100.0), list[StepRecord]()
        self.timer = StepTimer(self.records, self.clock)

    def fetch(
        self, step: int, data_s: float = 0.0, *, share: int = 8, modelled: bool = True
    ) -> None:
        """Ask for a batch and get it."""
        self.timer.fetch_started()
        self.clock.spend(data_s)
        self.timer.fetch_ended(step, share, modelled=modelled)

    def train(self, compute_s: float, wait_s: float, between_s: float) -> None:
        """Compute on the batch in hand, synchronise, and do what comes between two steps."""
        self.clock.spend(compute_s)
        self.timer.gradients_ready()
        self.clock.spend(wait_s)
        self.timer.synchronised()
        self.clock.spend(between_s)

    def leave(self) -> None:
        """Leave the loop."""
        self.timer.pass_ended()


def test_busy_is_data_and_compute_and_between_and_the_rest_is_waiting() -> None:
    bench = Bench()

    bench.fetch(3, 2.0, share=5)
    bench.train(10.0, 4.0, 1.0)
    bench.leave()

    assert bench.records == [StepRecord(3, 5, 13.0, 4.0, 2.0, 0.0, 0.0, True)]


def test_excluded_time_is_neither_work_nor_waiting() -> None:
    bench = Bench()

    bench.timer.fetch_started()
    bench.clock.spend(2.0)
    bench.timer.exclude(1.0)
    bench.timer.fetch_ended(3, 5, modelled=True)
    bench.clock.spend(10.0)
    bench.timer.exclude(4.0)
    bench.train(0.0, 4.0, 1.5)
    bench.timer.exclude(0.5)
    bench.leave()

    assert bench.records == [StepRecord(3, 5, 8.0, 4.0, 1.0, 0.0, 0.0, True)]


def test_a_step_is_reported_when_the_next_batch_is_fetched() -> None:
    bench = Bench()
    bench.fetch(0)
    bench.train(1.0, 1.0, 1.0)
    assert not bench.records

    bench.timer.fetch_started()

    assert [record.step for record in bench.records] == [0]


def test_what_exceeds_the_usual_between_time_is_outside() -> None:
    bench = Bench()

    for step, between_s in enumerate([3.0, 3.0, 3.0, 50.0, 3.0]):
        bench.fetch(step)
        bench.train(10.0, 0.0, between_s)
    bench.leave()

    assert [record.busy_s for record in bench.records] == [13.0] * 5
    assert [record.outside_s for record in bench.records] == [0.0, 0.0, 0.0, 47.0, 0.0]


@given(between_s=st.lists(whole_s, min_size=40, max_size=80))
def test_the_usual_between_time_is_the_median_of_the_latest(between_s: list[float]) -> None:
    bench = Bench()

    for step, seconds in enumerate(between_s, start=1):
        bench.fetch(step)
        bench.train(5.0, 0.0, seconds)
    bench.leave()

    for index, record in enumerate(bench.records):
        usual_s = median_high(between_s[max(0, index - 30) : index + 1])
        assert record.busy_s == 5.0 + usual_s
        assert record.outside_s == max(0.0, between_s[index] - usual_s)


def test_what_follows_the_first_step_of_a_run_is_not_expected_after_later_ones() -> None:
    bench = Bench()

    for step, seconds in enumerate((90.0, 2.0, 2.0)):
        bench.fetch(step)
        bench.train(1.0, 0.0, seconds)
    bench.leave()

    assert [record.busy_s for record in bench.records] == [91.0, 3.0, 3.0]


def test_the_first_step_of_a_pass_is_flagged_and_does_not_enter_the_median() -> None:
    bench = Bench()

    bench.fetch(0, modelled=False)
    bench.train(1.0, 0.0, 90.0)
    bench.fetch(1)
    bench.train(1.0, 0.0, 2.0)
    bench.leave()

    assert [record.modelled for record in bench.records] == [False, True]
    assert bench.records[1].busy_s == 3.0
    assert bench.records[1].outside_s == 0.0


def test_micro_batches_add_up_to_one_step() -> None:
    bench = Bench()

    for data_s, compute_s in [(1.0, 10.0), (2.0, 20.0)]:
        bench.fetch(7, data_s)
        bench.clock.spend(compute_s)
    bench.fetch(7, 4.0)
    bench.train(30.0, 5.0, 3.0)
    bench.leave()

    assert bench.records == [StepRecord(7, 8, 70.0, 5.0, 7.0, 0.0, 0.0, True)]


def test_waiting_inside_the_forward_pass_is_not_work() -> None:
    bench = Bench()

    bench.fetch(0)
    with contextlib.suppress(KeyError), bench.timer.waiting():
        bench.clock.spend(7.0)
        raise KeyError
    bench.train(10.0, 1.0, 0.0)
    bench.leave()

    assert bench.records[0].busy_s == 10.0
    assert bench.records[0].wait_s == 8.0


def test_waiting_between_two_steps_is_not_work_either() -> None:
    bench = Bench()

    bench.fetch(0)
    bench.train(10.0, 1.0, 2.0)
    with bench.timer.waiting():  # an evaluation reduces its metric
        bench.clock.spend(30.0)
    bench.leave()

    assert bench.records[0].busy_s == 12.0
    assert bench.records[0].outside_s == 0.0
    assert bench.records[0].wait_s == 31.0


def test_waiting_during_a_fetch_belongs_to_the_step_that_is_fetched() -> None:
    bench = Bench()
    bench.fetch(0)
    bench.train(1.0, 1.0, 1.0)

    bench.timer.fetch_started()
    with bench.timer.waiting():
        bench.clock.spend(2.0)
    bench.clock.spend(6.0)
    bench.timer.control_waited(6.0)
    bench.clock.spend(3.0)
    bench.timer.fetch_ended(1, 8, modelled=True)
    bench.train(10.0, 4.0, 1.0)
    bench.leave()

    first, second = bench.records
    assert (first.wait_s, first.control_wait_s) == (1.0, 0.0)
    assert (second.wait_s, second.control_wait_s, second.data_s) == (6.0, 6.0, 3.0)
    assert second.busy_s == 14.0


def test_the_time_between_two_passes_belongs_to_no_step() -> None:
    bench = Bench()
    bench.fetch(0)
    bench.train(10.0, 0.0, 1.0)
    bench.leave()

    bench.clock.spend(500.0)
    bench.fetch(1, 2.0)
    bench.train(10.0, 0.0, 1.0)
    bench.leave()

    assert [record.busy_s for record in bench.records] == [11.0, 13.0]
    assert [record.outside_s for record in bench.records] == [0.0, 0.0]


def test_a_step_that_was_left_before_its_synchronisation_is_not_reported() -> None:
    bench = Bench()

    bench.fetch(0)
    bench.clock.spend(3.0)
    bench.leave()
    bench.fetch(0, 1.0)
    bench.train(5.0, 0.0, 0.0)
    bench.leave()

    assert [record.busy_s for record in bench.records] == [6.0]


def test_it_tells_what_the_training_thread_is_doing() -> None:
    bench = Bench()
    seen = [bench.timer.at]

    bench.timer.fetch_started()
    seen.append(bench.timer.at)
    bench.timer.fetch_ended(4, 8, modelled=True)
    seen.append(bench.timer.at)
    bench.timer.gradients_ready()
    seen.append(bench.timer.at)
    bench.leave()
    seen.append(bench.timer.at)
    bench.timer.epoch_ended()
    seen.append(bench.timer.at)

    phases = ["idle", "data", "compute", "sync", "sync", "idle"]
    assert seen == list(zip(phases, [-1, -1, 4, 4, 4, 4], strict=True))


step_scripts = st.fixed_dictionaries(
    {
        "fetches": st.lists(st.tuples(whole_s, whole_s, whole_s, whole_s), min_size=1, max_size=3),
        "wait": whole_s,
    }
)


@given(script=st.lists(step_scripts, min_size=1, max_size=6), between_s=whole_s)
def test_no_second_is_lost_or_counted_twice(script: list[Any], between_s: float) -> None:
    bench = Bench()
    started_s = bench.clock()

    for step, marks in enumerate(script):
        for data_s, control_s, compute_s, waited_s in marks["fetches"]:
            bench.timer.fetch_started()
            bench.clock.spend(data_s + control_s)
            bench.timer.control_waited(control_s)
            bench.timer.fetch_ended(step, 8, modelled=True)
            bench.clock.spend(compute_s)
            with bench.timer.waiting():
                bench.clock.spend(waited_s)
        bench.train(0.0, marks["wait"], between_s)
    bench.leave()

    counted_s = sum(r.busy_s + r.wait_s + r.control_wait_s for r in bench.records)
    assert counted_s == bench.clock() - started_s
    assert sum(r.data_s for r in bench.records) == sum(f[0] for s in script for f in s["fetches"])
