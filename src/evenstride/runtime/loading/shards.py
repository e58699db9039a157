"""Data in shards that are read in a row: what the user gives, and how samples come out of it."""

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
from evenstride.runtime.usage_errors import check_whole, whole

Read = Callable[[int, int], Iterable[Any]]
"""Gives a shard's samples from some number on: called with the shard, and the samples to skip."""

# Shards that one process keeps open. It has one per lane; some more where lanes and loader
# processes do not go in step.
_MOST_OPEN = 16
# Samples that are read and passed over rather than opening the shard anew. Other processes of the
# loader train those in between where a step has several batches.
_STEPS_ON = 4096
_NOTHING = object()


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
        if not isinstance(lengths, Iterable):
            raise ConfigError(
                f"the lengths of the shards are {lengths!r}; they must be a whole number for each "
                "shard; give a list"
            )
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


class ShardReader(Dataset[Any]):
    """Shards as a data set with indices, which is quick where these go up."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._ends = tuple(accumulate(shards.lengths))
        self._open: OrderedDict[int, Iterator[Any]] = OrderedDict()  # by the index that is next
        self._inherited: Any = None
        self._owner = os.getpid()
        self._spare: Any = None

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if self._owner != os.getpid():
            # What is open is read by the process that this one was forked from, which is also
            # the one to close it: a generator must not be ended here.
            self._inherited, self._open = self._open, OrderedDict()
            self._owner = os.getpid()
        # A rank that takes part in a step without counting asks for any sample at all.
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
                with generators_kept():  # the sample's randomness is its own
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
        """Close a shard, and make sure that it has no more."""
        more = next(samples, _NOTHING) is not _NOTHING
        _close(samples)
        if more:
            raise ConfigError(
                f"shard {shard} goes on after its {self._shards.lengths[shard]} samples; give the "
                "lengths that the shards have, and let read(shard, skip) skip as many samples as "
                "it is told, or some would be lost and others trained twice"
            )

    def _ended(self, shard: int, number: int) -> ConfigError:
        return ConfigError(
            f"shard {shard} ended before its sample {number}, and its length was given as "
            f"{self._shards.lengths[shard]}; give the lengths that the shards have, and let "
            "read(shard, skip) skip as many samples as it is told"
        )

    def _nearest(self, start: int, index: int) -> int | None:
        """Return where the shard is open, if that is not far before an index."""
        lowest = max(start, index - _STEPS_ON)
        return max((at for at in self._open if lowest <= at <= index), default=None)

    def _opened(self, shard: int, skip: int) -> Iterator[Any]:
        while len(self._open) >= _MOST_OPEN:
            _close(self._open.popitem(last=False)[1])
        samples = self._shards.read(shard, skip)
        if not isinstance(samples, Iterable):
            raise ConfigError(
                f"read({shard}, {skip}) returned a {type(samples).__name__}; it must return what "
                "the samples of the shard can be iterated over from, or be a generator function"
            )
        return iter(samples)

    def _any_sample(self) -> Any:
        """Return a copy of a sample that is read once: whoever gets it may change it."""
        if self._spare is None:
            shard = next(n for n, length in enumerate(self._shards.lengths) if length)
            samples = self._opened(shard, 0)
            self._spare = next(samples, _NOTHING)
            _close(samples)
            if self._spare is _NOTHING:
                raise self._ended(shard, 0)
        return copy.deepcopy(self._spare)

    def __getstate__(self) -> dict[str, Any]:
        # What is open cannot be sent.
        return {**self.__dict__, "_open": OrderedDict(), "_inherited": None}


def _close(samples: Iterator[Any]) -> None:
    close = getattr(samples, "close", None)
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
