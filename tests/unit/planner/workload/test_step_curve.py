"""Curves through measured points, and those carried over to other types."""

from typing import Any

import pytest

from evenstride.planner.catalogue.offers import ACCELERATORS, Offer, Power, power
from evenstride.planner.workload.step_time import fitted, transferred
from evenstride.planner.workload.workload_profile import Point


def points(*both: tuple[int, float], scatter: float = 0.01) -> tuple[Point, ...]:
    return tuple(Point(samples=b, step_s=t, scatter=scatter, steps=10) for b, t in both)


def offer(name: str = "x", **rest: Any) -> Offer:
    return Offer(instance_type=name, usd_per_h=1.0, **rest)


def test_exact_points_give_their_line() -> None:
    curve = fitted(points((10, 0.03), (20, 0.05), (80, 0.17)))

    assert curve.fixed_s == pytest.approx(0.01)
    assert curve.per_sample_s == pytest.approx(0.002)
    assert curve.error == 0.005  # as well as anything is known
    assert curve.noise == 0.01


def test_a_fixed_time_is_never_below_0() -> None:
    curve = fitted(points((10, 0.01), (20, 0.03)))

    assert curve.fixed_s == 0.0
    assert curve.per_sample_s == pytest.approx((0.001 + 0.0015) / 2)
    assert curve.error == pytest.approx(0.2)


def test_with_one_size_the_fixed_part_is_unknown() -> None:
    curve = fitted(points((10, 0.02)))

    assert curve.at(10) == pytest.approx(0.02)
    assert curve.at(20) == pytest.approx(0.03)
    assert curve.error_at(10) < 0.01, "a step of that size is known"
    assert curve.error_at(1) > 0.4
    assert curve.error_at(40) > 0.3
    assert curve.surest == pytest.approx(10)


def test_times_that_do_not_grow_are_all_fixed() -> None:
    curve = fitted(points((32, 0.0101), (64, 0.0100), (128, 0.0100), (256, 0.0099)))

    assert curve.at(8) == pytest.approx(0.01, rel=0.01)
    assert curve.at(512) == pytest.approx(0.01, rel=0.01)
    assert curve.per_sample_s > 0
    assert curve.largest == 256


def test_points_off_the_line_are_its_error() -> None:
    curve = fitted(points((10, 0.033), (20, 0.046), (40, 0.094), (80, 0.165)))

    assert 0.03 < curve.error < 0.2


def test_twice_the_hardware_takes_half_per_sample() -> None:
    curve = fitted(points((10, 0.03), (20, 0.05)))

    other = transferred(curve, Power(1e12, 1e11), Power(2e12, 2e11))

    assert other.per_sample_s == pytest.approx(curve.per_sample_s / 2)
    assert other.fixed_s == curve.fixed_s
    assert other.error == pytest.approx((0.2**2 + (0.1 * 0.693) ** 2) ** 0.5, rel=0.01)
    assert not other.measured


def test_hardware_that_is_better_in_one_thing_only_is_less_sure() -> None:
    curve = fitted(points((10, 0.03), (20, 0.05)))

    other = transferred(curve, ACCELERATORS["T4"], ACCELERATORS["A100"])

    assert other.error > 0.3
    low, high = 320 / 1555, 8.1 / 19.5
    assert low < other.per_sample_s / curve.per_sample_s < high


def test_processors_are_compared_by_their_number() -> None:
    four, eight = power(offer(vcpus=4.0)), power(offer(vcpus=8.0, memory_gib=32.0))

    assert four is not None
    assert eight is not None
    assert eight.flops_per_s == 2 * four.flops_per_s
    assert eight.gib == 32.0


def test_of_unknown_and_shared_hardware_nothing_is_said() -> None:
    assert power(offer()) is None
    assert power(offer("t3.large", vcpus=2.0)) is None
    assert power(offer(accelerator="NeverHeardOf", accelerators=1.0)) is None


def test_nearly_equal_sizes_do_not_determine_the_fixed_part() -> None:
    """A balanced worker has them; as its times scatter, a line through them may be any."""
    curve = fitted(points((127, 0.1000), (128, 0.0999), (129, 0.0998)))

    assert curve.at(128) == pytest.approx(0.0999, rel=1e-3)
    assert curve.fixed_s == pytest.approx(0.05, rel=0.01), "half of it"
    assert curve.error_at(512) > 0.3


def test_two_sizes_are_known_as_well_as_their_means() -> None:
    """3 steps that scatter by 10 % have a mean that is off by 6 %, and 300 one by 0.6 %."""

    def error(steps: int) -> float:
        ends = ((64, 0.06), (128, 0.1))
        curve = fitted([Point(samples=b, step_s=t, scatter=0.1, steps=steps) for b, t in ends])
        return curve.error_at(128)

    assert error(3) == pytest.approx(0.1 / 3**0.5, rel=0.02)
    assert error(300) == pytest.approx((2 * 0.005**2 + 0.01 / 300) ** 0.5, rel=0.02)


def test_a_mean_of_more_steps_counts_more() -> None:
    both = (100, 0.30), (400, 0.6)  # the line through them begins at 0.2
    sure = [Point(samples=b, step_s=t, scatter=0.1, steps=300) for b, t in both]
    off = Point(samples=200, step_s=0.8, scatter=0.1, steps=3)

    alike = fitted([*sure, off.model_copy(update={"steps": 300})])
    curve = fitted([*sure, off])

    assert curve.at(200) == pytest.approx(0.4, rel=0.03)
    assert alike.at(200) > 1.1 * curve.at(200)


@pytest.mark.parametrize("times_s", [(0.0101, 0.0100, 0.0099), (0.01, 0.021, 0.045)])
def test_lines_that_are_flat_or_begin_at_0_are_less_sure_farther_out(
    times_s: tuple[float, ...],
) -> None:
    curve = fitted(points(*zip((32, 64, 128), times_s, strict=True)))

    assert min(curve.spread[0], curve.spread[2]) > 0
    assert curve.error_at(64) < curve.error_at(1024) < curve.error_at(4096)


def test_what_blocks_lie_apart_is_the_error_of_all_sizes() -> None:
    """Of ten thousand steps the mean is known, and not what the machine is at tomorrow."""
    ends = (64, 0.06), (128, 0.1), (256, 0.18)
    steady = [Point(samples=b, step_s=t, scatter=0.1, steps=10_000) for b, t in ends]
    wandering = [one.model_copy(update={"drift": 0.2}) for one in steady]

    assert fitted(steady).error_at(128) < 0.03
    assert fitted(wandering).error_at(128) >= 0.2
    assert fitted(wandering[:1]).error_at(64) == pytest.approx(0.2, rel=0.01)
