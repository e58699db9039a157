"""What a cluster comes to, with its intervals."""

from dataclasses import replace
from math import exp, hypot, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.convergence.regression import line
from evenstride.core.gradients.noise_scale import Interval
from evenstride.planner.search.training_forecast import ClusterChoice, outlook, product
from evenstride.planner.spot_losses import SaveCosts, expected_slowdown, mean_stretches, stretches
from evenstride.planner.workload.epochs_to_target import KnownEpochs
from evenstride.planner.workload.step_time import fitted
from evenstride.planner.workload.workload_profile import Point
from tests.unit.planner.kinds import kind, task, transience


def test_time_is_epochs_steps_and_all_machines_pay() -> None:
    """Two workers of 128 samples each: 138 ms; 391 steps an epoch; 10 epochs; 3 USD/h."""
    choice = ClusterChoice((kind("a", usd_per_h=1.5),), (2,), 256)

    reported = outlook(choice, task(KnownEpochs(10.0, 256)))

    assert reported is not None
    reduce_s = 2 * (1e-4 + 2e6 / 1.25e9)
    assert reported.step.communication_s == pytest.approx(reduce_s)
    assert reported.time_s.value == pytest.approx(10 * 391 * (0.138 + reduce_s))
    assert reported.cost_usd.value == pytest.approx(reported.time_s.value / 3600 * 3.0)
    assert reported.step.shares == (128,)


def test_the_interval_is_that_of_the_curve_where_all_else_is_known() -> None:
    reported = outlook(ClusterChoice((kind("a"),), (1,), 256), task(KnownEpochs(10.0, 256)))

    assert reported is not None
    assert reported.time_s.high / reported.time_s.value == pytest.approx(exp(1.96 * 0.02), rel=1e-3)
    assert reported.time_s.value / reported.time_s.low == pytest.approx(exp(1.96 * 0.02), rel=1e-3)


def test_shares_beyond_what_was_measured_widen_it() -> None:
    """As the interval of the line itself does, next to the scatter of a point."""
    sizes = (16.0, 32.0, 64.0, 128.0)
    times_s = [
        (0.01 + 0.001 * b) * off for b, off in zip(sizes, (1.01, 0.98, 1.02, 0.99), strict=True)
    ]
    through = line(sizes, times_s)
    curve = fitted([Point(samples=int(b), step_s=t) for b, t in zip(sizes, times_s, strict=True)])
    one = replace(kind("a"), curve=curve)

    for batch in (64, 4096):
        reported = outlook(ClusterChoice((one,), (1,), batch), task(KnownEpochs(10.0, batch)))
        own, of_line = through.scatter, through.mean(batch)
        half = (of_line.high - of_line.value) / of_line.value / 1.96

        assert reported is not None
        assert reported.time_s.high / reported.time_s.value == pytest.approx(
            exp(1.96 * hypot(own, half)), rel=1e-3
        )
    far, near = curve.errors_at(np.array([4096.0, 64.0])).tolist()
    assert far > 1.4 * near
    sizes_looked_at = np.arange(1.0, 400.0)
    least = sizes_looked_at[curve.errors_at(sizes_looked_at).argmin()]
    assert curve.surest == pytest.approx(least, abs=1)


def test_unknown_links_widen_it_for_several_workers_only() -> None:
    measured = task(KnownEpochs(10.0, 256), gradient_bytes=4e8)
    assumed = replace(measured, links=None)
    widths = {
        (n, name): reported.time_s.high / reported.time_s.value
        for n in (1, 4)
        for name, one in (("measured", measured), ("assumed", assumed))
        if (reported := outlook(ClusterChoice((kind("a"),), (n,), 256), one))
    }

    assert widths[1, "assumed"] == pytest.approx(widths[1, "measured"])
    assert widths[4, "assumed"] > 1.3 * widths[4, "measured"]


def test_epochs_that_are_not_known_make_no_outlook() -> None:
    assert outlook(ClusterChoice((kind("a"),), (1,), 512), task(KnownEpochs(10.0, 256))) is None


def test_spot_machines_take_longer_and_are_less_sure() -> None:
    calm = kind("a", losses_per_h=1e-6)
    unsure = replace(kind("a"), transience=transience(*np.geomspace(0.02, 2.0, 20)))
    on_demand, one, other = (
        outlook(ClusterChoice((k,), (8,), 256), task(KnownEpochs(100.0, 256)))
        for k in (kind("a"), calm, unsure)
    )

    assert on_demand is not None
    assert one is not None
    assert other is not None
    assert on_demand.stretch == 1.0
    assert one.stretch == pytest.approx(1.0, abs=0.002)
    assert other.stretch > 1.05
    assert other.time_s.high / other.time_s.value > one.time_s.high / one.time_s.value


def test_rates_of_two_kinds_add_up() -> None:
    both = (kind("a", losses_per_h=0.3), kind("b", losses_per_h=0.6))
    mixed = outlook(ClusterChoice(both, (4, 4), 256), task(KnownEpochs(100.0, 256)))
    alone = outlook(ClusterChoice(both[:1], (12,), 256), task(KnownEpochs(100.0, 256)))

    assert mixed is not None
    assert alone is not None
    assert mixed.stretch == pytest.approx(alone.stretch, rel=1e-6)


def test_a_cluster_that_may_never_end_has_no_forecast() -> None:
    hopeless = kind("a", losses_per_h=5000.0)

    assert outlook(ClusterChoice((hopeless,), (8,), 256), task(KnownEpochs(100.0, 256))) is None


@given(st.floats(-8, -2))
def test_the_table_of_stretches_is_hardly_below_the_exact_one(logarithm: float) -> None:
    saves, hazard = SaveCosts(5.0, (60.0, 600.0)), 10.0**logarithm

    found = float(stretches(saves, np.array([hazard]))[0])
    exact = expected_slowdown(saves, hazard)

    assert 0.98 * exact <= found <= exact


def test_no_machine_lost_costs_next_to_nothing() -> None:
    saves = SaveCosts(5.0, (60.0,))
    machines = np.array([[1, 4], [0, 4]])

    assert stretches(saves, np.zeros(3)) == pytest.approx(1.0, abs=0.01)
    assert mean_stretches(saves, None, None, machines) == pytest.approx(1.0, abs=0.01)
    lossy = mean_stretches(saves, None, transience(*[1.0] * 20), machines)
    assert lossy[0] < 1.01 < lossy[1]


def test_halves_of_intervals_add_as_squares_of_logarithms() -> None:
    both = product(Interval(1.0, 0.5, 2.0), Interval(10.0, 5.0, 20.0))

    assert both.value == 10.0
    assert both.high == pytest.approx(10 * 2 ** (2**0.5))
    assert both.low == pytest.approx(10 / 2 ** (2**0.5))


def test_an_end_that_is_open_stays_open() -> None:
    both = product(Interval(1.0, 0.0, inf), Interval(10.0, 5.0, 20.0))

    assert both.low == 0.0
    assert both.high == inf


def test_time_outside_of_steps_is_part_of_the_time() -> None:
    choice, plain = ClusterChoice((kind("a"),), (1,), 256), task(KnownEpochs(10.0, 256))

    bare, whole = outlook(choice, plain), outlook(choice, replace(plain, beside_s=30.0))

    assert bare is not None
    assert whole is not None
    assert whole.time_s.value == pytest.approx(bare.time_s.value + 10 * 30.0)


def test_no_step_is_shorter_than_communication_and_a_smaller_one() -> None:
    """However badly a profile fits: here by a factor of 50, so that its line tells nothing."""
    sizes, times_s = (64, 256, 512), (0.054, 0.044, 0.119)
    points = [
        Point(samples=b, step_s=t, scatter=1.0, steps=40, drift=2.0)
        for b, t in zip(sizes, times_s, strict=True)
    ]
    unsure = replace(kind("a"), curve=fitted(points))
    sure = [one.model_copy(update={"scatter": 0.0, "drift": 0.0}) for one in points]
    known = replace(kind("a"), curve=replace(fitted(sure), error=2.0))

    for one, least_s in ((unsure, 0.0), (known, 0.044 * exp(-1.96 * 0.005) * 0.4)):
        reported = outlook(ClusterChoice((one,), (10,), 256), task(KnownEpochs(10.0, 256)))
        assert reported is not None
        steps = 10 * -(-100_000 // 256)
        assert reported.time_s.low >= steps * (reported.step.communication_s + least_s) * 0.999
        assert reported.time_s.low < reported.time_s.value < reported.time_s.high
