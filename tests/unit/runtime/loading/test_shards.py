"""Data in shards: how few times they are opened, and what is refused."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import evenstride
from evenstride.errors import ConfigError
from evenstride.runtime.loading.shards import ShardReader, Shards
from tests.messages import raises_message


class Files:
    """Shards of numbers, which note when they are opened and closed."""

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.opened, self.closed = lengths, list[tuple[int, int]](), 0

    def read(self, shard: int, skip: int) -> Iterator[int]:
        """Yield a shard's samples after the first ``skip``."""
        self.opened.append((shard, skip))
        try:
            yield from range(100 * shard + skip, 100 * shard + self.lengths[shard])
        finally:
            self.closed += 1


def reader_of(files: Files) -> ShardReader:
    """Return a reader of all the files."""
    return ShardReader(Shards(files.lengths, files.read))


def test_each_shard_is_opened_once_when_read_in_a_row() -> None:
    files = Files(3, 0, 2, 4)
    reader = reader_of(files)

    seen = [reader[index] for index in range(len(reader))]

    assert seen == [0, 1, 2, 200, 201, 300, 301, 302, 303]
    assert files.opened == [(0, 0), (2, 0), (3, 0)]


def test_two_shards_read_in_turns_stay_open() -> None:
    files = Files(50, 50)
    reader = reader_of(files)

    for index in range(50):
        assert (reader[index], reader[50 + index]) == (index, 100 + index)

    assert files.opened == [(0, 0), (1, 0)]


def test_a_jump_opens_the_shard_where_it_leads() -> None:
    files = Files(10, 10)
    reader = reader_of(files)

    assert [reader[index] for index in (15, 16, 3, 4, 17)] == [105, 106, 3, 4, 107]

    assert files.opened == [(1, 5), (0, 3)]


def test_only_some_shards_are_open_at_a_time() -> None:
    files = Files(*[5] * 60)
    reader = reader_of(files)

    for shard in range(60):
        assert reader[5 * shard] == 100 * shard

    assert 40 <= files.closed < 60


def test_any_sample_may_be_changed_by_its_consumer() -> None:
    opened = []

    def read(shard: int, skip: int) -> Iterator[dict[str, int]]:
        opened.append((shard, skip))
        return iter([{"label": index} for index in range(skip, 3)])

    reader = ShardReader(Shards((0, 3), read))

    for index in (-1, 0, -2, 1, -1):
        assert reader[index].pop("label") == max(index, 0)
    assert opened == [(1, 0), (1, 0)], "once for any sample, once for those that count"


def test_samples_that_others_train_are_read_over() -> None:
    files = Files(20, 5)
    reader = reader_of(files)

    seen = [reader[index] for index in (0, 1, 4, 5, 18, 21)]

    assert seen == [0, 1, 4, 5, 18, 101]
    assert files.opened == [(0, 0), (1, 1)]


def test_a_far_jump_opens_the_shard_again() -> None:
    files = Files(9_000)
    reader = reader_of(files)

    assert [reader[index] for index in (0, 8_000, 1, 8_001)] == [0, 8_000, 1, 8_001]

    assert files.opened == [(0, 0), (0, 8_000)]


def test_readers_are_closed_on_request_and_at_their_end() -> None:
    files = Files(3, 3)
    reader = reader_of(files)
    assert [reader[index] for index in (0, 1, 2, 3)] == [0, 1, 2, 100]
    assert files.closed == 1

    reader.release()

    assert files.closed == 2


def test_a_reader_sent_elsewhere_opens_its_own() -> None:
    reader = ShardReader(Shards((4,), range_of_four))
    assert [reader[0], reader[1]] == [0, 1]

    other = pickle.loads(pickle.dumps(reader))

    assert [other[1], reader[2], other[2]] == [1, 2, 2]
    assert reader[-1] == 0


def test_a_forked_reader_opens_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(4)
    reader = reader_of(files)
    assert reader[0] == 0

    monkeypatch.setattr("os.getpid", lambda: -1)

    assert reader[1] == 1
    assert files.opened == [(0, 0), (0, 1)], "the file's position is the parent's"
    reader.release()
    assert files.closed == 1, "and so is the generator"


def range_of_four(_: int, skip: int) -> Iterator[int]:
    """Return the rest of four numbers."""
    return iter(range(skip, 4))


def test_a_shard_that_ends_early_is_named() -> None:
    reader = ShardReader(Shards((3, 5), lambda _, skip: iter(range(skip, 3))))

    with raises_message(ConfigError, "shard 1", "sample 3"):
        [reader[index] for index in range(8)]


@pytest.mark.parametrize("first", [0, 2], ids=["lengths too short", "skip ignored"])
def test_a_shard_that_goes_on_is_named(first: int) -> None:
    numbers = range(7) if first == 0 else range(6)
    reader = ShardReader(Shards((6,), lambda *_: iter(numbers)))

    with raises_message(ConfigError, "shard 0", "6 samples"):
        [reader[index] for index in range(first, 6)]


def test_a_read_function_that_returns_nothing_is_named() -> None:
    reader = ShardReader(Shards((6,), lambda *_: None))  # type: ignore[arg-type]

    with raises_message(ConfigError, "NoneType"):
        reader[4]


@pytest.mark.parametrize(
    ("lengths", "read", "text"),
    [
        ([], range_of_four, ()),
        ([0, 0], range_of_four, ()),
        ([3, -1], range_of_four, ("shard 1",)),
        ([3, 2.5], range_of_four, ("shard 1",)),
        ([3], [1, 2, 3], ()),
        (5, range_of_four, ()),
    ],
)
def test_what_are_no_shards_is_refused(lengths: Any, read: Any, text: tuple[str, ...]) -> None:
    with raises_message(ConfigError, *text):
        evenstride.Shards(lengths, read)


def test_lengths_may_be_of_any_whole_kind() -> None:
    assert Shards(np.array([3, 1]), range_of_four).lengths == (3, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"partition": "epoch"}, ()),
        ({"cost_fn": [1.0] * 7}, ("cost_fn",)),
        ({"drop_last": True}, ("drop_last",)),
    ],
)
def test_what_needs_indices_is_refused(options: Any, text: tuple[str, ...]) -> None:
    stride = evenstride.Stride(global_batch=8)
    try:
        with raises_message(ConfigError, *text):
            stride.loader(Shards((3, 4), range_of_four), **options)
    finally:
        stride.close()


def test_a_state_belongs_to_its_shards() -> None:
    states = []
    for lengths in ((3, 4), (4, 3)):
        stride = evenstride.Stride(global_batch=2)
        stride.loader(Shards(lengths, range_of_four))
        states.append(stride.state_dict())
        try:
            if len(states) == 2:
                with raises_message(ConfigError):
                    stride.load_state_dict(states[0])
        finally:
            stride.close()


def test_a_loader_left_in_mid_epoch_goes_on_with_other_processes() -> None:
    stride, seen = evenstride.Stride(global_batch=2), list[int]()
    net = torch.nn.Linear(1, 1)
    for processes in (0, 1, 0):
        loader = stride.loader(Shards((5, 6), floats), num_workers=processes)
        for rows in loader:
            seen += rows.int().flatten().tolist()
            stride.scale(net(rows).mean()).backward()  # type: ignore[no-untyped-call]
            if len(seen) in (4, 6):
                break
        del loader
        gc.collect()
    stride.close()

    assert sorted(seen) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 15]


def floats(shard: int, skip: int) -> Iterator[torch.Tensor]:
    """Return the rest of five or six samples."""
    return (torch.tensor([10.0 * shard + n]) for n in range(skip, 5 + shard))


def test_any_sample_of_a_shard_without_one_is_refused() -> None:
    reader = ShardReader(Shards((6,), lambda *_: iter(())))

    with raises_message(ConfigError, "shard 0", "sample 0"):
        reader[-1]
