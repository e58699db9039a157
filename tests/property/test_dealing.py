"""Property: an epoch of shards has every sample once, for any changes of ranks, read in a row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.sampling.draw import ShardAssignment
from evenstride.core.sampling.partition import EpochCursor, step_shares

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any).map(tuple)
LANES = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple)


class Epoch:
    """An epoch in training, by workers that may change; every worker deals for itself."""

    def __init__(self, data: Any, lengths: tuple[int, ...], batch: int) -> None:
        self._data, self.lengths = data, lengths
        self.cursor, self._step = EpochCursor(sum(lengths), batch), 0
        self.dealing: ShardAssignment | None = None

    def change(self, lanes: tuple[int, ...]) -> None:
        """Go on with other workers, from what a checkpoint holds."""
        before = self.dealing
        fresh = ShardAssignment.of(self.lengths, lanes, seed=3, epoch=1, shuffle=True)
        self.dealing = fresh if before is None else fresh.restored(before.save())

    def steps(
        self, most: int
    ) -> Iterator[tuple[ShardAssignment, dict[tuple[int, int], list[int]]]]:
        """Yield what was left before each step, and what each lane trains in it."""
        while most and not self.cursor.done:
            before = self.dealing
            assert before is not None
            lanes, shares = before.lanes.tolist(), self._shares(len(before.lanes))
            reported = [before.step(self._step, shares, worker) for worker in range(len(lanes))]
            trained = {}
            for worker, (_, indices) in enumerate(reported):
                if shares[worker]:
                    trained[worker, self._step % lanes[worker]] = indices.tolist()
                    assert len(indices) == shares[worker]
                else:
                    assert len(indices) == 1
                    assert 0 <= -1 - indices[0] < sum(self.lengths), "a ghost has a sample, too"
            assert len({str(after.save()) for after, _ in reported}) == 1, "all know the same"
            self.dealing, self._step, most = reported[0][0], self._step + 1, most - 1
            self.cursor = self.cursor.commit(len(self.cursor.window))
            yield before, trained

    def _shares(self, workers: int) -> tuple[int, ...]:
        batch = self.cursor.global_batch
        cuts = st.lists(st.integers(0, batch), min_size=workers - 1, max_size=workers - 1)
        edges = [0, *sorted(self._data.draw(cuts)), batch]
        shares = tuple(after - before for before, after in pairwise(edges))
        return step_shares(shares, len(self.cursor.window))


@given(
    data=st.data(),
    lengths=LENGTHS,
    fleets=st.lists(LANES, min_size=1, max_size=3),
    batch=st.integers(1, 24),
    steps=st.integers(0, 6),
)
def test_every_sample_is_trained_once(
    data: Any, lengths: tuple[int, ...], fleets: list[tuple[int, ...]], batch: int, steps: int
) -> None:
    epoch, trained = Epoch(data, lengths, batch), list[int]()

    for number, lanes in enumerate(fleets):
        epoch.change(lanes)
        last = number == len(fleets) - 1
        for _, of_lanes in epoch.steps(-1 if last else steps):
            trained += [index for indices in of_lanes.values() for index in indices]

    assert sorted(trained) == list(range(sum(lengths)))


@given(data=st.data(), lengths=LENGTHS, lanes=LANES, batch=st.integers(1, 24))
def test_a_lane_reads_shard_after_shard_while_there_are_new_ones(
    data: Any, lengths: tuple[int, ...], lanes: tuple[int, ...], batch: int
) -> None:
    epoch, ends = Epoch(data, lengths, batch), {0, *accumulate(lengths)}
    epoch.change(lanes)
    latest: dict[tuple[int, int], int] = {}

    for before, of_lanes in epoch.steps(-1):
        if before.begun + batch >= len(lengths):
            break  # a step may begin as many shards as it has samples
        for lane, indices in of_lanes.items():
            for last, index in pairwise([latest.get(lane, -1), *indices]):
                assert index == last + 1 or {index, last + 1} <= ends
            latest[lane] = indices[-1]


def test_the_order_of_the_shards_is_the_epochs() -> None:
    lengths, orders = (1,) * 40, []
    for epoch in (0, 1):
        dealing = ShardAssignment.of(lengths, (1,), seed=7, epoch=epoch, shuffle=True)
        orders.append(dealing.step(0, (40,), worker=0)[1].tolist())

    assert sorted(orders[0]) == sorted(orders[1]) == list(range(40))
    assert orders[0] != orders[1] != list(range(40))


def test_the_last_shard_is_shared_by_all() -> None:
    dealing, taken = ShardAssignment.of((90,), (1, 1, 1), seed=0, epoch=0, shuffle=False), []
    for step in range(10):
        taken.append([dealing.step(step, (3, 3, 3), worker)[1].tolist() for worker in range(3)])
        dealing, _ = dealing.step(step, (3, 3, 3), worker=0)

    for worker in range(3):
        seeks = [b for (*_, a), (b, *_) in pairwise(row[worker] for row in taken) if b != a + 1]
        assert len(seeks) <= 4, "halves, so that a worker takes few times"
