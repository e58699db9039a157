"""Messages between ranks and leader, and two decisions as one."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from evenstride.core.control.events import Verdict
from evenstride.core.time_model.observation import Measurements, Observation
from evenstride.runtime.coordination.leader import (
    Reply,
    joined,
    reply_from_text,
    reply_to_text,
)


def test_a_reply_is_read_as_it_was_written_and_nan_as_unknown() -> None:
    seen = [
        Observation(1, 3, 7, (0.1, 1 / 3), (0.0, 0.2), 0.3, 0.4, 0.5, cpu_load=0.25),
        Observation(1, 0, 9, (nan, inf), (0.0, -inf), modelled=False),
    ]
    reply = Reply(9, 5, ((0, 0, 0),), Measurements.of(seen), drawn=8)
    read = reply_from_text(reply_to_text(reply))

    seen[1] = replace(seen[1], busy_s=(nan, nan), wait_s=(0.0, nan))
    assert read == replace(reply, observations=Measurements.of(seen))


def test_a_rank_without_measurements_sends_an_empty_reply() -> None:
    reply = Reply(0, 0, (), Measurements.of(()), leaving=True)

    assert reply_from_text(reply_to_text(reply)) == reply


FIRST = Verdict(7, (3, 4), True, (0.1, 0.2), (0.3, 0.4), "first")


@pytest.mark.parametrize(("shares", "both"), [(None, (3, 4)), ((5, 2), (5, 2))])
def test_of_two_decisions_the_second_holds_and_both_are_reported(
    shares: tuple[int, ...] | None, both: tuple[int, ...]
) -> None:
    then = Verdict(7, shares, False, (0.5, 0.6), (0.7, 0.8), "then", 9, 9, (1,), "spot")

    expected = Verdict(7, both, False, (0.5, 0.6), (0.7, 0.8), "first; then", 9, 9, (1,), "spot")
    assert joined(FIRST, then) == expected
