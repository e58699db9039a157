"""Speeds that multiply, because events overlap, stay within the range of one speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstride.sim.scenario.scenario_file import load_scenario
from tests.messages import check_message
from tests.unit.sim.scenario.test_scenario_file import GOOD, refusal

RANGE = "(allowed: 1e-06 to 1e+06 in total)"


@pytest.fixture
def reported(tmp_path: Path) -> Path:
    """The file that tests write."""
    return tmp_path / "made.yaml"


def with_events(*events: str) -> str:
    """Return the good file with some events, from line 8 on."""
    return f"{GOOD}events:\n" + "".join(f"  - {{{event}}}\n" for event in events)


def step(speed: float, at: int = 3, until: int | None = None, workers: object = 0) -> str:
    """Return a step of the speed."""
    end = "" if until is None else f", until: {until}"
    return f"kind: step, at: {at}{end}, workers: {workers}, speed: {speed}"


def test_very_many_slow_downs_at_once_are_refused(reported: Path) -> None:
    said = refusal(reported, with_events(*[step(1e-6)] * 54))

    check_message(said, "made.yaml", "61", "events[53].speed", "worker 0")


OVERLAPS = [
    ([step(1e-3), step(1e-4, 5)], 1, ("worker 0", "1e-07")),
    ([step(1e3), step(1e4, 5)], 1, ("worker 0", "1e+07")),
    ([step(1e-4, 5), step(1e-3)], 0, ("worker 0", "1e-07")),
    ([step(1e-4, workers=[1, 2]), step(1e-3, workers="all")], 1, ("worker 1",)),
    # As long as it is faster, all is well.
    ([step(1e3, until=9), step(1e-4), step(1e-4)], 0, ("worker 0", "1e-08")),
    ([step(1e-4), "kind: ramp, at: 4, workers: 0, speed: 1e-3, steps: 9"], 1, ("1e-07",)),
    ([step(1e-4), "kind: periodic, at: 4, workers: 0, speed: 1e-3, period: 9"], 1, ("1e-07",)),
    (
        [step(1e-4), "kind: bursty, at: 4, workers: 0, speed: 1e-3, mean_steps: 9, mean_gap: 9"],
        1,
        ("1e-07",),
    ),
    # In a slow phase of the one, the other may be in a fast one or in none.
    (
        [step(1e-6), "kind: periodic, at: 3, workers: 0, speed: 10, period: 9", step(0.5)],
        2,
        ("5e-07",),
    ),
]


@pytest.mark.parametrize(("events", "number", "text"), OVERLAPS, ids=str)
def test_speeds_that_come_to_too_much_together_are_refused(
    reported: Path, events: list[str], number: int, text: tuple[str, ...]
) -> None:
    said = refusal(reported, with_events(*events))

    assert said.startswith(f"made.yaml:{8 + number}: events[{number}].speed: ")
    check_message(said, *text)
    assert said.endswith(RANGE)


def test_so_are_those_that_a_recording_slows_down_further(reported: Path) -> None:
    said = refusal(reported, with_events(step(1e-6), "kind: replay, at: 9, workers: all"))

    assert said.startswith("made.yaml:9: events[1].least_speed: ")
    check_message(said, "worker 0", "1e-07")


FINE = [
    [step(1e-6), step(1e-6, workers=1)],
    [step(1e-6, 3, 9), step(1e-6, 9, 12), step(1e-6, 12)],
    [step(1e-6), step(1e-6), step(1e6)],
    [step(1e-6), step(1.0)],
    [step(speed) for speed in (0.1, 0.25, 0.125, 0.008, 0.04)],  # 1e-6, were it not for rounding
    [step(10)] * 6,
    [step(0.1, at, at + 1) for at in range(99)],
    [step(0.9999, at % 90, at % 90 + 9) for at in range(900)],
]


@pytest.mark.parametrize("events", FINE, ids=lambda events: f"{len(events)} {events[0]}")
def test_speeds_within_the_range_are_read(reported: Path, events: list[str]) -> None:
    reported.write_text(with_events(*events))

    assert len(load_scenario(reported).events) == len(events)
