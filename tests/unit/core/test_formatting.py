"""Times and percentages in sentences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.formatting import signed_part, time_text

UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "h": 3600.0, "days": 86400.0}


@pytest.mark.parametrize(
    ("seconds", "reported"),
    [
        (0.0, "0 ms"),
        (5e-324, "0 ms"),
        (1.5e-8, "0.015 us"),
        (2e-5, "20 us"),
        (0.0009996, "1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.234, "1.23 s"),
        (999.4, "999 s"),
        (999.7, "1000 s"),
        (7199.0, "7199 s"),
        (7200.0, "2 h"),
        (172_799.0, "48 h"),
        (172_800.0, "2 days"),
        (5e6, "57.9 days"),
        (999.6 * 86400, "1,000 days"),
        (1e12, "11,574,074 days"),
        (-0.25, "-250 ms"),
        (float("inf"), "inf days"),
    ],
)
def test_a_time_has_three_figures_and_the_unit_that_suits_them(
    seconds: float, reported: str
) -> None:
    assert time_text(seconds) == reported


@given(st.floats(1e-6, 8e7))
def test_every_time_can_be_read_back(seconds: float) -> None:
    number, unit = time_text(seconds).split()

    assert "e" not in number
    assert float(number) * UNITS_S[unit] == pytest.approx(seconds, rel=0.0051)
    assert float(number) <= 1000 or unit == "s"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (0.034, "3.4% faster"),
        (0.0, "0.0% faster"),
        (-0.0, "0.0% faster"),
        (-0.0004, "0.0% faster"),
        (-0.0006, "0.1% slower"),
        (-0.007, "0.7% slower"),
    ],
)
def test_a_signed_part_has_a_word_instead_of_its_sign(part: float, expected: str) -> None:
    assert signed_part(part) == expected


@given(st.floats(-10.0, 10.0))
def test_a_part_and_its_opposite_have_the_same_number(part: float) -> None:
    number, word = signed_part(part, ("less", "more")).split()
    opposite, other = signed_part(-part, ("less", "more")).split()

    assert number == opposite and not number.startswith("-")
    assert (word != other) == (number != "0.0%")
