"""Property: a schedule answers as a plain list of decisions would, forgotten ones apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.control.schedule import Schedule

decisions = st.lists(
    st.tuples(st.integers(0, 5), st.tuples(st.integers(0, 9), st.integers(0, 9))), max_size=20
)


@given(gaps=decisions, probe=st.integers(0, 120), forget=st.integers(0, 120))
def test_shares_at_a_step_are_those_of_the_latest_decision_before_it(
    gaps: list[tuple[int, tuple[int, int]]], probe: int, forget: int
) -> None:
    schedule, plain, step = Schedule.opening((1, 1)), {0: (1, 1)}, 0
    for gap, shares in gaps:
        step += gap
        schedule, plain[step] = schedule.decided(step, shares), shares

    expected = plain[max(s for s in plain if s <= probe)]

    assert schedule.shares_at(probe) == expected
    assert schedule.latest == step
    if forget <= probe:
        assert schedule.forget_before(forget).shares_at(probe) == expected
        assert schedule.forget_before(forget).checksum == schedule.checksum


@given(gaps=decisions.filter(bool), index=st.integers(0, 19))
def test_one_different_decision_changes_the_checksum(
    gaps: list[tuple[int, tuple[int, int]]], index: int
) -> None:
    index %= len(gaps)
    gap, (a, b) = gaps[index]
    other = [*gaps[:index], (gap, (a + 1, b)), *gaps[index + 1 :]]

    def checksum(history: list[tuple[int, tuple[int, int]]]) -> int:
        schedule, step = Schedule.opening((1, 1)), 0
        for gap, shares in history:
            step += gap
            schedule = schedule.decided(step, shares)
        return schedule.checksum

    assert checksum(gaps) != checksum(other)
