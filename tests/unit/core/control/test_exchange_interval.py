"""When a worker asks for an exchange."""

from __future__ import annotations

from evenstride.core.control.schedule import HICCUP_S, ToleranceBand


def _steps_until_asked(busy_s: float, expected_s: float) -> int:
    band = ToleranceBand(share=8, expected_s=expected_s, part=0.2)
    for step in range(1, 1000):
        band = band.step(8, busy_s)
        if band.asked:
            return step
    return 0


def test_two_slow_steps_ask_where_steps_are_long() -> None:
    assert _steps_until_asked(0.5, 0.3) == 2


def test_short_slow_steps_have_to_outlast_a_hiccup() -> None:
    assert _steps_until_asked(0.010, 0.004) == round(HICCUP_S / 0.010)


def test_one_fast_step_asks_at_once() -> None:
    assert _steps_until_asked(0.1, 0.3) == 1


def test_a_usual_step_in_between_resets_the_count() -> None:
    band = ToleranceBand(share=8, expected_s=0.3, part=0.2)
    for busy_s in (0.5, 0.3, 0.5):
        band = band.step(8, busy_s)

    assert not band.asked
