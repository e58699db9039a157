"""Property: an epoch in parts has every sample once, each worker's from its own part."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstride.core.sampling.partition import EpochCursor, EpochParts, cut, step_shares
from evenstride.core.sampling.permutation import Permutation


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
        part = np.arange(parts.bounds[worker], parts.bounds[worker + 1])
        if shuffle:
            assert set(mine) == set(Permutation(length, 5, 0).at(part).tolist())
        else:
            assert mine == part.tolist()
    assert sum(map(len, trained)) == length
    assert parts.bounds[-1] == length


@given(
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple),
    beyond=st.integers(1, 120),
    shuffle=st.booleans(),
    steps=st.integers(1, 20),
)
def test_other_workers_find_every_sample_that_the_parts_have_left(
    shares: tuple[int, ...], beyond: int, shuffle: bool, steps: int
) -> None:
    batch = sum(shares)
    assume(batch > 0)
    length = steps * batch + beyond
    parts = EpochParts(length, batch, shares, 5, 1, shuffle)

    trained = [
        index
        for step in range(steps)
        for worker, piece in enumerate(cut(range(step * batch, step * batch + batch), shares))
        if not piece.ghost
        for index in parts.indices(worker, np.array(piece.positions)).tolist()
    ]
    rest = parts.left(steps * batch, np.arange(steps * batch, length)).tolist()

    assert sorted(trained + rest) == list(range(length))
    alone = [parts.left(steps * batch, np.array([at]))[0] for at in range(steps * batch, length)]
    assert rest == alone, "whatever else is asked for"


def test_parts_follow_the_shares_and_their_order_the_epoch() -> None:
    one, other = (EpochParts(1000, 10, (2, 8), 0, epoch) for epoch in (0, 1))

    assert one.bounds == (0, 200, 1000)
    positions = np.arange(2, 10)
    assert one.indices(1, positions).tolist() != other.indices(1, positions).tolist()


def test_data_sorted_by_class_gives_every_part_all_classes() -> None:
    parts = EpochParts(1000, 10, (2, 8), 0, 0)

    mine = [
        index
        for step in range(100)
        for index in parts.indices(0, 10 * step + np.arange(2)).tolist()
    ]

    of_classes = np.bincount(np.array(mine) // 250)
    assert len(mine) == len(set(mine)) == 200
    # 50 of each of four classes on average, with a standard deviation of 5.5.
    assert of_classes.min() > 50 - 4 * 5.5
