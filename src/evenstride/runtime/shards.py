"""Data in shards that are read in a row: what the user gives, and how samples come out of it."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from evenstride.errors import ConfigError
from evenstride.runtime.checks import check_whole, whole

Read = Callable[[int, int], Iterable[Any]]
"""Gives a shard's samples from some number on: called with the shard, and the samples to skip."""

# Shards that one process keeps open. It has one per lane; some more where lanes and loader
# processes do not go in step.
_MOST_OPEN = 16


class Shards:
    """A data set in shards that can be read from any sample on, but not in any order.

    Give it to `Stride.loader` in place of a data set. Each rank then reads shards of its own from
    beginning to end, as many samples in each step as its share says, and takes a new shard
    whenever one is used up, so that every sample is still trained once per epoch. Which samples
    make up a step depends on the split.

    Args:
        lengths: samples in each shard, exactly; they decide how long an epoch is.
        read: called with a shard's number and how many of its samples to skip; returns the rest
            of them, in the same order every time. It may be a generator function. With loader
            processes it must be importable by name, or they must be forked.

    Raises:
        ConfigError: there is no shard, a length is no whole number, or none has a sample.

    Example:
        >>> from itertools import islice
        >>> files = ["ab", "cdef"]
        >>> data = Shards([len(f) for f in files], lambda n, skip: islice(files[n], skip, None))
        >>> len(data)
        6
    """

    def __init__(self, lengths: Iterable[int], read: Read) -> None:
        self.lengths: tuple[int, ...] = tuple(map(whole, lengths))
        for shard, length in enumerate(self.lengths):
            check_whole(f"the length of shard {shard}", length, least=0)
        if not sum(self.lengths):
            raise ConfigError(
                f"the {len(self.lengths)} shards have no samples; give the number of samples in "
                "each, of which one at least is above 0"
            )
        if not callable(read):
            raise ConfigError(
                f"read is a {type(read).__name__}; it must be a function of a shard's number and "
                "of how many samples to skip, which returns the other samples of the shard"
            )
        self.read = read

    def __len__(self) -> int:
        return sum(self.lengths)


@dataclass(slots=True)
class _Open:
    """A shard that is being read, and the sample that came last."""

    samples: Iterator[Any]
    last: Any = None


class ShardReader(Dataset[Any]):
    """Shards as a data set with indices, which is quick where these go up one by one.

    A negative index ``-1 - i`` asks for any sample that is at hand, or number ``i`` if none is.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._ends = tuple(accumulate(shards.lengths))
        self._open: OrderedDict[int, _Open] = OrderedDict()  # by the index that comes next
        self._owner = os.getpid()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if self._owner != os.getpid():  # forked: what is open there is being read by the parent
            self._open, self._owner = OrderedDict(), os.getpid()
        if index >= 0:
            return self._sample(index)
        at_hand = next(reversed(self._open.values()), None)
        return self._sample(-1 - index) if at_hand is None else at_hand.last

    def _sample(self, index: int) -> Any:
        shard = bisect_right(self._ends, index)
        skip = index - self._start(shard)
        opened = self._open.pop(index, None)
        if opened is None or not skip:
            if opened is not None:
                _close(opened)  # the shard before, which has been read to its end
            opened = self._opened(shard, skip)
        try:
            opened.last = next(opened.samples)
        except StopIteration:
            raise ConfigError(
                f"shard {shard} ended after {skip} samples, and its length "
                f"was given as {self._shards.lengths[shard]}; give the lengths that the shards "
                "have, and let read(shard, skip) skip as many samples as it is told"
            ) from None
        self._open[index + 1] = opened
        return opened.last

    def _opened(self, shard: int, skip: int) -> _Open:
        while len(self._open) >= _MOST_OPEN:
            _close(self._open.popitem(last=False)[1])
        return _Open(iter(self._shards.read(shard, skip)))

    def _start(self, shard: int) -> int:
        return self._ends[shard - 1] if shard else 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}  # what is open cannot be sent


def _close(opened: _Open) -> None:
    close = getattr(opened.samples, "close", None)
    if callable(close):
        close()


def indexed(dataset: Any) -> Any:
    """Return a data set that samples can be asked for by index."""
    return ShardReader(dataset) if isinstance(dataset, Shards) else dataset


def digest(lengths: tuple[int, ...]) -> str:
    """Return a fingerprint of shards' lengths, to compare by; of none it is empty."""
    return blake2b(repr(lengths).encode(), digest_size=8).hexdigest() if lengths else ""


def lengths_of(dataset: Any) -> tuple[int, ...]:
    """Return the lengths of a data set's shards; none if it has no shards."""
    return dataset.lengths if isinstance(dataset, Shards) else ()
