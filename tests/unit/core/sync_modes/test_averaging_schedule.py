"""When a round of local SGD ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.sync_modes.mode_specs import LocalSgd, RoundPosition, ends_round


def _ends(
    mode: LocalSgd, length: int, batch: int, steps: int, limit: int | None = None
) -> list[bool]:
    """Return for each step of a run whether it ends a round."""
    found, position = [], 0
    for step in range(steps):
        window = min(batch, length - position)
        place = RoundPosition(step, position, window, length, batch, step + 1 == limit)
        found.append(ends_round(mode, place))
        position = (position + window) % length
    return found


@given(
    every=st.integers(1, 6),
    after=st.integers(0, 12),
    length=st.integers(1, 60),
    batch=st.integers(1, 20),
)
def test_a_round_is_as_long_as_asked_unless_its_epoch_ends(
    every: int, after: int, length: int, batch: int
) -> None:
    in_epoch = -(-length // batch)
    steps = 3 * in_epoch

    ends = _ends(LocalSgd(every, after), length, batch, steps)

    alone = 0
    for step in range(steps):
        alone = alone + 1 if step >= after else 0
        last = (step + 1) % in_epoch == 0
        assert ends[step] == (step >= after and (alone == every or last))
        alone = 0 if ends[step] else alone


def test_a_run_that_ends_in_mid_round_ends_it() -> None:
    assert _ends(LocalSgd(every=4), 100, 10, 6, limit=6) == [0, 0, 0, 1, 0, 1]


def test_the_first_round_after_plain_steps_in_mid_epoch_is_a_whole_one() -> None:
    assert _ends(LocalSgd(every=3, after=2), 80, 10, 8) == [0, 0, 0, 0, 1, 0, 0, 1]
