"""Property: an epoch cut into parts has every sample once, each worker's in one stretch."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstride.core.sampling.partition import EpochCursor, EpochParts, cut, step_shares


@given(
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple),
    length=st.integers(1, 120),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_sample_is_trained_once_by_the_worker_with_its_part(
    shares: tuple[int, ...], length: int, shuffle: bool, epoch: int
) -> None:
    batch = sum(shares)
    assume(batch > 0)
    parts = EpochParts(length, batch, shares, 5, epoch, shuffle)
    trained: list[list[int]] = [[] for _ in shares]
    cursor = EpochCursor(length, batch)

    while not cursor.done:
        pieces = cut(cursor.window, step_shares(shares, len(cursor.window)))
        for worker, piece in enumerate(pieces):
            indices = parts.indices(worker, np.array(piece.positions))
            assert ((indices >= 0) & (indices < length)).all(), "a ghost has a sample, too"
            if piece.samples:
                trained[worker] += indices.tolist()
        cursor = cursor.commit(len(cursor.window))

    for worker, mine in enumerate(trained):
        part = range(parts.bounds[worker], parts.bounds[worker + 1])
        assert sorted(mine) == list(part)
        if not shuffle:
            assert mine == list(part)
    assert parts.bounds[-1] == length


def test_parts_follow_the_shares_and_their_order_the_epoch() -> None:
    one, other = (EpochParts(1000, 10, (2, 8), 0, epoch) for epoch in (0, 1))

    assert one.bounds == (0, 200, 1000)
    positions = np.arange(2, 10)
    assert one.indices(1, positions).tolist() != other.indices(1, positions).tolist()
    assert one.indices(0, np.arange(2)).tolist() != (one.indices(1, positions)[:2] - 200).tolist()
