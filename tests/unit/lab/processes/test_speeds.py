"""Speeds as people write them, how they change, and where workers are placed."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.errors import ConfigError
from evenstride.lab.processes.speeds import (
    SpeedChange,
    check_fit,
    parse_change,
    parse_speeds,
    pin,
    place,
    usable_cpus,
)
from tests.messages import raises_message

# Hundredths, because an arbitrary float does not survive being written with %g.
speeds = st.lists(st.integers(1, 100).map(lambda part: part / 100), min_size=1, max_size=6)


@given(speeds)
def test_speeds_are_read_as_they_are_written(wanted: list[float]) -> None:
    assert parse_speeds(",".join(f"{speed:g}" for speed in wanted)) == tuple(wanted)


@pytest.mark.parametrize("text", ["0", "1,0", "-0.5", "1.01", "2,1", "nan", "inf", "1,-0"])
def test_a_speed_that_is_no_part_of_a_core_is_refused(text: str) -> None:
    with raises_message(ConfigError):
        parse_speeds(text)


@pytest.mark.parametrize("text", ["", "fast", "1,,1", "1;1", "1,0.5,"])
def test_speeds_that_are_no_numbers_are_refused_with_an_example(text: str) -> None:
    with raises_message(ConfigError, "1,0.5,0.2"):
        parse_speeds(text)


def test_a_change_is_due_at_its_step_or_at_its_second() -> None:
    at_step = parse_change("100:1,0.5", 2)
    at_second = parse_change("2.5s:0.25,1", 2)

    assert at_step == SpeedChange((1.0, 0.5), at_step=100)
    assert at_second == SpeedChange((0.25, 1.0), at_s=2.5)
    assert [at_step.due(step, 1e9) for step in (99, 100, 101)] == [False, True, True]
    assert [at_second.due(10**9, second) for second in (2.4, 2.5, 3.0)] == [False, True, True]


def test_a_change_without_a_moment_is_never_due() -> None:
    assert not SpeedChange((1.0,)).due(10**9, 1e9)


@pytest.mark.parametrize("text", ["1,0.5", "soon:1,0.5", "1.5:1,0.5", "-3:1,0.5", "3w:1,1", "3:"])
def test_a_change_that_is_not_understood_is_refused_with_an_example(text: str) -> None:
    with raises_message(ConfigError, "STEP", "SPEEDS"):
        parse_change(text, 2)


def test_a_change_for_another_number_of_workers_is_refused() -> None:
    with raises_message(ConfigError):
        parse_change("10:1,1,1", 2)


def test_a_change_to_a_speed_of_zero_is_refused() -> None:
    with raises_message(ConfigError):
        parse_change("10:1,0", 2)


@given(speeds, st.integers(1, 4))
def test_speeds_fit_exactly_when_their_sum_is_at_most_the_cores(
    wanted: list[float], cores: int
) -> None:
    hundredths = sum(round(speed * 100) for speed in wanted)

    if hundredths <= 100 * cores:
        check_fit(tuple(wanted), cores)
    else:
        with pytest.raises(
            ConfigError, match=f"but this machine has {cores}, so the workers would"
        ):
            check_fit(tuple(wanted), cores)


def test_the_refusal_names_the_speeds_and_their_sum() -> None:
    with raises_message(ConfigError, "1,0.75,0.5", "2.25"):
        check_fit((1.0, 0.75, 0.5), 2)


def test_a_process_may_use_the_cores_it_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 7})

    assert usable_cpus() == 3


def test_without_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)

    assert usable_cpus() == 12


@given(speeds, st.integers(1, 4))
def test_no_core_is_asked_for_more_than_it_has(wanted: list[float], cores: int) -> None:
    placed = place(tuple(wanted), cores)

    if placed is None:
        assert sum(wanted) > 1 or max(wanted) > 1, "what fits one core always has a place"
        return
    assert len(placed) == len(wanted)
    for core in range(cores):
        asked = sum(s for s, chosen in zip(wanted, placed, strict=True) if chosen == core)
        assert asked <= 1 + 1e-6
    assert set(placed) <= set(range(cores))


def test_small_workers_share_a_core_so_that_a_large_one_has_its_own() -> None:
    assert place((0.2, 1.0, 0.5, 0.3), 2) == (1, 0, 1, 1)


def test_workers_that_fit_no_arrangement_are_not_placed() -> None:
    assert place((0.7, 0.7, 0.6), 2) is None


def test_pinning_binds_every_thread_of_the_process_to_the_nth_usable_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 6, 4})
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)

    pin(os.getpid(), 1)

    threads = {int(task) for task in os.listdir(f"/proc/{os.getpid()}/task")}  # noqa: PTH208
    assert set(bound) == threads
    assert set(map(tuple, bound.values())) == {(4,)}
