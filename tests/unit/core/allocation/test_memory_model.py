"""What is learned of a worker's memory, case by case."""

from __future__ import annotations

import pytest

from evenstride.core.allocation.memory import MemoryModel
from evenstride.errors import ConfigError
from tests.messages import check_message, raises_message

GB = 10**9


def test_without_measurements_no_cap_applies() -> None:
    assert MemoryModel().cap(24 * GB) is None
    assert MemoryModel().saw(16, 4 * GB).cap(None) is None
    assert MemoryModel().saw(16, None).cap(24 * GB) is None


@pytest.mark.parametrize(
    ("peak_bytes", "cap"),
    [(1 * GB, 80), (2 * GB, 40), (3 * GB, 32), (5 * GB, 32), (8 * GB, 20), (11 * GB, 16)],
)
def test_from_one_size_a_share_grows_as_if_all_were_per_sample_twice_or_to_half_of_all(
    peak_bytes: int, cap: int
) -> None:
    assert MemoryModel().saw(16, peak_bytes).cap(10 * GB, 1.0) == cap


def test_a_slope_is_believed_for_half_the_span_it_was_learned_over() -> None:
    near = MemoryModel().saw(60, 7 * GB).saw(64, 7 * GB + 4 * 10**6)
    far = MemoryModel().saw(32, 7 * GB - 28 * 10**6).saw(64, 7 * GB + 4 * 10**6)

    assert near.cap(7 * GB + GB // 2, 1.0) == 68  # 64 * 7.5 / 7.004
    assert far.cap(7 * GB + GB // 2, 1.0) == 80


def test_the_highest_peak_of_a_size_counts_whenever_it_came() -> None:
    late = MemoryModel().saw(16, 4 * GB).saw(16, 8 * GB)

    assert late.saw(16, 4 * GB) is late
    assert late == MemoryModel().saw(16, 8 * GB)


def test_a_high_peak_between_two_sizes_lifts_the_line_and_does_not_tilt_it() -> None:
    calm = MemoryModel().saw(10, 2 * GB).saw(50, 6 * GB)
    lifted = calm.saw(30, 5 * GB).line()

    assert calm.line() is not None
    assert lifted is not None
    assert lifted.per_sample_bytes == GB / 10
    assert lifted.fixed_bytes == 2 * GB


def test_a_first_step_without_optimizer_states_gives_no_negative_fixed_part() -> None:
    line = MemoryModel().saw(16, GB).saw(20, 6 * GB).line()

    assert line is not None
    assert line.fixed_bytes == 0
    assert line.per_sample_bytes == 6 * GB / 20


def test_peaks_that_fall_with_the_size_are_flat_at_the_highest_and_not_followed() -> None:
    memory = MemoryModel().saw(10, 5 * GB).saw(20, 4 * GB)
    line = memory.line()

    assert line is not None
    assert (line.at(0), line.at(20)) == (5 * GB, 5 * GB)
    assert memory.cap(6 * GB, 1.0) == 24  # 20 * 6 / 5, where half the span would be 25


def test_sizes_that_tell_least_are_forgotten_first_and_never_the_outermost() -> None:
    memory = MemoryModel()
    for samples in range(1, 9):
        memory = memory.saw(samples, samples * GB)
    memory = memory.saw(10, 10 * GB)  # without this one, 9 would be outermost

    after = memory.saw(5, 5 * GB + 1).saw(9, 8 * GB)

    kept = [samples for samples, _ in after.peaks]
    assert len(kept) == 8
    assert {1, 5, 10} <= set(kept)
    assert 9 not in kept


def test_a_size_without_a_peak_counts_as_one_that_ran() -> None:
    memory = MemoryModel().saw(16, 9 * GB).saw(24, None)

    assert memory.cap(10 * GB) == 24


def test_what_ran_is_allowed_although_it_took_more_than_the_part_of_the_limit() -> None:
    assert MemoryModel().saw(16, 11 * GB).cap(10 * GB) == 16


def test_after_a_failure_the_cap_is_half_way_up_from_what_ran() -> None:
    memory = MemoryModel().saw(16, 2 * GB).failed(32)

    assert memory.cap(100 * GB) == 24
    assert memory.cap(None) == 24
    assert memory.saw(24, 3 * GB).cap(100 * GB) == 28
    assert memory.failed(24).cap(100 * GB) == 20
    assert memory.failed(40) is memory


def test_a_failure_of_a_size_that_ran_before_falls_back_to_the_next_smaller_one() -> None:
    memory = MemoryModel().saw(8, GB).saw(16, 2 * GB).saw(24, 3 * GB).failed(16)

    assert (memory.ran, memory.cap(100 * GB)) == (8, 12)


def test_below_a_failure_the_line_counts_as_well() -> None:
    memory = MemoryModel().saw(8, GB).saw(24, 3 * GB).failed(16)

    assert [memory.cap(limit, 1.0) for limit in (GB, GB + GB // 4, 2 * GB)] == [8, 10, 12]
    level = MemoryModel().saw(8, 3 * GB).saw(24, 3 * GB).failed(16)
    assert [level.cap(limit, 1.0) for limit in (2 * GB, 3 * GB)] == [8, 12]


def test_a_later_success_does_not_lift_a_failure() -> None:
    memory = MemoryModel().saw(16, 2 * GB).failed(32).saw(40, 4 * GB).saw(32, 3 * GB)

    assert memory.cap(100 * GB) == 24


def test_a_failure_before_anything_ran_halves_and_never_forbids_the_last_sample() -> None:
    assert MemoryModel().failed(32).cap(None) == 16
    assert MemoryModel().failed(1).cap(10 * GB) == 1


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_a_fraction_outside_of_the_limit_is_refused(fraction: float) -> None:
    with raises_message(ConfigError):
        MemoryModel().cap(GB, fraction)


def test_sizes_and_peaks_that_cannot_be_are_refused() -> None:
    with raises_message(ConfigError, "0 samples"):
        MemoryModel().saw(0, GB)
    with raises_message(ConfigError, "-1 samples"):
        MemoryModel().failed(-1)
    with raises_message(ConfigError, "-5", "3 samples"):
        MemoryModel().saw(3, -5)


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        (MemoryModel(), ()),
        (MemoryModel().saw(1, 999), ("999",)),
        (MemoryModel().saw(16, 4_250_000), ("4.25 MB", "16 samples")),
        (MemoryModel().failed(16), ("16 samples",)),
        (
            MemoryModel().saw(8, 2 * GB).saw(16, 3 * GB).failed(32),
            ("1 GB", "125 MB", "16 samples"),
        ),
    ],
)
def test_the_reason_is_one_sentence_for_people(
    memory: MemoryModel, reason: tuple[str, ...]
) -> None:
    check_message(memory.reason(), *reason)
