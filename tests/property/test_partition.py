"""Property: whatever the fleet does, an epoch is every sample once and no sample twice."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.sampling.partition import (
    EpochCursor,
    cut,
    even_windows,
    micro_batches,
    step_shares,
    whole_micro_batches,
)

splits = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)
script = st.lists(st.tuples(splits, st.booleans()), min_size=1, max_size=20)


@given(length=st.integers(1, 300), history=script, drop_last=st.booleans())
def test_an_epoch_is_exactly_once_across_resizes_departures_and_aborts(
    length: int, history: list[tuple[list[int], bool]], drop_last: bool
) -> None:
    batch = sum(history[0][0])
    cursor, trained = EpochCursor(length, batch, drop_last), Counter[int]()
    always_ends = [*history, *([(history[0][0], True)] * length)]

    for shares, commits in always_ends:
        if cursor.done:
            break
        window = cursor.window
        pieces = cut(window, step_shares(tuple(shares), len(window)))
        handed_out = [p for piece in pieces if not piece.ghost for p in piece.positions]
        assert handed_out == list(window), "an unfinished epoch always hands out its window"
        if commits:
            trained.update(handed_out)
            cursor = cursor.commit(len(handed_out))

    kept = length - length % batch if drop_last else length
    assert trained == Counter(range(kept))


@given(shares=splits, size=st.integers(1, 300))
def test_tail_shares_sum_to_the_window_and_leave_no_worker_out_without_need(
    shares: list[int], size: int
) -> None:
    size = min(size, sum(shares))

    tail = step_shares(tuple(shares), size)

    present = sum(share > 0 for share in shares)
    assert sum(tail) == size
    assert all(t == 0 for t, share in zip(tail, shares, strict=True) if share == 0)
    if size >= present:
        assert all(t >= 1 for t, share in zip(tail, shares, strict=True) if share > 0)


@given(shares=splits, start=st.integers(0, 1000))
def test_pieces_follow_the_ranks_and_ghosts_borrow_one_sample(
    shares: list[int], start: int
) -> None:
    window = range(start, start + sum(shares))

    pieces = cut(window, tuple(shares))

    assert [p.samples for p in pieces] == shares
    for piece in pieces:
        assert piece.ghost == (piece.samples == 0)
        assert len(piece.positions) >= 1
        assert set(piece.positions) <= set(window)


@given(length=st.integers(1, 500), start=st.integers(0, 99), at_most=st.integers(1, 70))
def test_micro_batches_cover_the_piece_in_nearly_equal_parts(
    length: int, start: int, at_most: int
) -> None:
    positions = range(start, start + length)

    parts = micro_batches(positions, at_most)

    assert [p for part in parts for p in part] == list(positions)
    assert max(map(len, parts)) <= at_most
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts) == -(-length // at_most)


@given(length=st.integers(0, 500), start=st.integers(0, 99), size=st.integers(1, 70))
def test_whole_micro_batches_cover_the_piece_with_one_rest_at_its_end(
    length: int, start: int, size: int
) -> None:
    positions = range(start, start + length)

    *whole, last = whole_micro_batches(positions, size)

    assert [p for part in (*whole, last) for p in part] == list(positions)
    assert all(len(part) == size for part in whole)
    assert len(last) == (length % size or min(length, size))


@given(length=st.integers(0, 500), workers=st.integers(1, 9), per_worker=st.integers(2, 9))
def test_evaluation_gives_every_worker_work_in_every_window(
    length: int, workers: int, per_worker: int
) -> None:
    batch = workers * per_worker

    windows = list(even_windows(length, batch))

    assert [p for window in windows for p in window] == list(range(length))
    assert all(len(window) <= batch for window in windows)
    if length >= workers:
        assert all(len(window) >= workers for window in windows)
