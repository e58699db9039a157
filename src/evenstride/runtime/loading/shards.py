"""Sequential data sets in shards: what the user gives, and how samples are read from it."""

from __future__ import annotations

import copy
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from evenstride.errors import ConfigError
from evenstride.runtime.loading.seeding import generators_kept
from evenstride.runtime.loading.whole_reading import whole_stream
from evenstride.runtime.usage_errors import check_whole, whole

Read = Callable[[int, int], Iterable[Any]]
"""Yields the samples of a shard; called with the shard's number and the samples to skip."""

# Shards that one process keeps open: one per lane, and more if lanes and loader processes differ
# in number.
_MOST_OPEN = 16
# Most samples that are read and skipped instead of opening the shard again. If a step has several
# batches, other loader processes train the samples in between.
_STEPS_ON = 4096
_NOTHING = object()


class Shards:
    """A sequential data set in shards, which can be read from any sample on, but only in order.

    Pass it to `Stride.loader` instead of a data set. Each rank then reads its own shards from
    start to end, and takes a new shard whenever one is used up. In each step it reads as many
    samples as its share. Every sample is still trained once per epoch. Which samples make up a
    step depends on the split.

    Args:
        lengths: Exact number of samples in each shard; they determine the length of an epoch.
        read: Called with the number of a shard and the number of samples to skip; returns an
            iterable over the remaining samples, in the same order every time. May be a generator
            function. With loader processes it must be importable by name, unless they are forked.

    Raises:
        ConfigError: There is no shard, a length is not an integer, or all shards are empty.

    Example:
        >>> from itertools import islice
        >>> files = ["ab", "cdef"]
        >>> data = Shards([len(f) for f in files], lambda n, skip: islice(files[n], skip, None))
        >>> len(data)
        6
    """

    def __init__(self, lengths: Iterable[int], read: Read) -> None:
        if not isinstance(lengths, Iterable):
            raise ConfigError(
                f"the lengths of the shards are {lengths!r}; pass a list with a whole number for "
                "each shard"
            )
        self.lengths: tuple[int, ...] = tuple(map(whole, lengths))
        for shard, length in enumerate(self.lengths):
            check_whole(f"the length of shard {shard}", length, least=0)
        if not sum(self.lengths):
            raise ConfigError(
                f"the {len(self.lengths)} shards have no samples; pass the number of samples in "
                "each, at least one of them above 0"
            )
        if not callable(read):
            raise ConfigError(
                f"read is a {type(read).__name__}; it must be a function of a shard's number and "
                "the number of samples to skip, which returns the remaining samples of the shard"
            )
        self.read = read

    def __len__(self) -> int:
        return sum(self.lengths)


class ShardReader(Dataset[Any]):
    """Shards as a data set with indices, which is fast for ascending indices."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._ends = tuple(accumulate(shards.lengths))
        self._open: OrderedDict[int, Iterator[Any]] = OrderedDict()  # by their next index
        self._inherited: Any = None
        self._owner = os.getpid()
        self._spare: Any = None

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if self._owner != os.getpid():
            # The process that this one was forked from reads the open iterators and closes them:
            # a generator must not be ended here.
            self._inherited, self._open = self._open, OrderedDict()
            self._owner = os.getpid()
        with whole_stream():
            # A rank with a share of 0 asks for any sample, as its placeholder.
            return self._sample(index) if index >= 0 else self._any_sample()

    def release(self) -> None:
        while self._open:
            _close(self._open.popitem()[1])

    def _sample(self, index: int) -> Any:
        shard = bisect_right(self._ends, index)
        start = self._ends[shard - 1] if shard else 0
        at = self._nearest(start, index)
        samples = self._opened(shard, index - start) if at is None else self._open.pop(at)
        try:
            if at is not None and at < index:
                with generators_kept():  # the sample has its own randomness
                    for _ in range(index - at):
                        next(samples)
            sample = next(samples)
        except StopIteration:
            raise self._ended(shard, index - start) from None
        if index + 1 < self._ends[shard]:
            self._open[index + 1] = samples
        else:
            self._end(shard, samples)
        return sample

    def _end(self, shard: int, samples: Iterator[Any]) -> None:
        """Close a shard, and check that it has no further samples."""
        more = next(samples, _NOTHING) is not _NOTHING
        _close(samples)
        if more:
            raise ConfigError(
                f"shard {shard} has more than its {self._shards.lengths[shard]} samples, so some "
                "samples would be lost and others trained twice; pass the exact lengths of the "
                "shards, and let read(shard, skip) skip exactly `skip` samples"
            )

    def _ended(self, shard: int, number: int) -> ConfigError:
        return ConfigError(
            f"shard {shard} ended before its sample {number}, but its length was given as "
            f"{self._shards.lengths[shard]}; pass the exact lengths of the shards, and let "
            "read(shard, skip) skip exactly `skip` samples"
        )

    def _nearest(self, start: int, index: int) -> int | None:
        """Return the index at which the shard is open, if it is close enough before ``index``."""
        lowest = max(start, index - _STEPS_ON)
        return max((at for at in self._open if lowest <= at <= index), default=None)

    def _opened(self, shard: int, skip: int) -> Iterator[Any]:
        while len(self._open) >= _MOST_OPEN:
            _close(self._open.popitem(last=False)[1])
        samples = self._shards.read(shard, skip)
        if not isinstance(samples, Iterable):
            raise ConfigError(
                f"read({shard}, {skip}) returned a {type(samples).__name__}; it must return an "
                "iterable over the samples of the shard, or be a generator function"
            )
        return iter(samples)

    def _any_sample(self) -> Any:
        """Return a copy of a sample that is read once: the caller may change it."""
        if self._spare is None:
            shard = next(n for n, length in enumerate(self._shards.lengths) if length)
            samples = self._opened(shard, 0)
            self._spare = next(samples, _NOTHING)
            _close(samples)
            if self._spare is _NOTHING:
                raise self._ended(shard, 0)
        return copy.deepcopy(self._spare)

    def __getstate__(self) -> dict[str, Any]:
        # Open iterators cannot be pickled.
        return {**self.__dict__, "_open": OrderedDict(), "_inherited": None}


def _close(samples: Iterator[Any]) -> None:
    close = getattr(samples, "close", None)
    if callable(close):
        close()


def indexed(dataset: Any) -> Any:
    """Return a data set whose samples are accessible by index."""
    return ShardReader(dataset) if isinstance(dataset, Shards) else dataset


def digest(lengths: tuple[int, ...]) -> str:
    """Return a fingerprint of shards' lengths for comparison; empty without shards."""
    return blake2b(repr(lengths).encode(), digest_size=8).hexdigest() if lengths else ""


def lengths_of(dataset: Any) -> tuple[int, ...]:
    """Return the lengths of a data set's shards; empty if it has no shards."""
    return dataset.lengths if isinstance(dataset, Shards) else ()
