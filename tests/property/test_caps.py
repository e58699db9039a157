"""Property: bounds that memory sets take no more room than they must, and wake no idle worker."""

from __future__ import annotations

from math import ceil

from hypothesis import assume, given
from hypothesis import strategies as st

from evenstride.core.allocation.memory import Memory, within
from evenstride.core.fleet import Fleet, Worker


def _fleet(batch: int, most: list[int | None]) -> Fleet:
    return Fleet(tuple(Worker(f"w{k}", 1, one) for k, one in enumerate(most)), batch)


@given(caps=st.lists(st.integers(1, 200), min_size=2, max_size=6), more=st.integers(1, 900))
def test_caps_that_leave_no_room_are_raised_by_hardly_more_than_the_factor_they_must(
    caps: list[int], more: int
) -> None:
    batch = sum(caps) + more

    upper = Memory(caps=tuple(caps)).bound(_fleet(batch, [None] * len(caps))).upper.tolist()

    assert sum(upper) >= batch
    for cap, most in zip(caps, upper, strict=True):
        assert cap < most <= ceil(cap * batch / sum(caps) * 1.005)


@given(
    bounds=st.lists(st.integers(2, 60), min_size=2, max_size=5),
    idle=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    data=st.data(),
)
def test_an_excluded_worker_stays_out_if_the_others_have_room(
    bounds: list[int], idle: list[int], data: st.DataObject
) -> None:
    fitting = [data.draw(st.integers(1, most)) for most in bounds]
    batch, others = sum(fitting), len(fitting) - 1
    assume(batch >= len(bounds) + len(idle))
    fleet = _fleet(batch, [*bounds, *idle])

    after = within((batch - others, *[1] * others, *[0] * len(idle)), fleet)

    assert sum(after) == batch
    assert all(n <= most for n, most in zip(after, fleet.upper.tolist(), strict=True))
    assert after[len(bounds) :] == (0,) * len(idle)
