"""Streams and batch functions: every rank reads the same global batch and keeps its own samples.

Both are read by *windows*. A window is the global batch of one step, a range of positions in the
epoch. So the samples of a step do not depend on the split, and a position is one number, as for an
indexed data set. The end of a stream is found where a window has fewer samples than asked for.
Every rank finds it in the same window, so the ranks need no agreement about it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from evenstride.core.sampling.partition import UNKNOWN_LENGTH
from evenstride.errors import ConfigError
from evenstride.runtime.engines.device_support import accelerator, has_chosen
from evenstride.runtime.loading.seeding import (
    WindowKey,
    generator_states,
    generators_kept,
    item_seeds,
    restore_generators,
    seed_generators,
)
from evenstride.runtime.loading.whole_reading import whole_stream
from evenstride.runtime.usage_errors import check_whole, whole

WINDOWS = ("stream", "function")
"""Kinds of data that are read by windows."""

BatchFunction = Callable[[int], Any]
"""Returns a batch of so many samples, drawn with the global random generators."""

_PROBES = 8  # samples that the ranks compare


class Stream:
    """A sequential data set without random access, whose length need not be known.

    Pass it to `Stride.loader` instead of a data set. Every rank reads the whole stream in the same
    order and keeps its own samples of each global batch. So the samples of each step do not depend
    on the split, and a saved position can be restored with any number of ranks. Each rank, and each
    loader process, reads over the samples of the others: costly work belongs into ``transform``.

    The stream must yield the same samples in the same order on every rank, and again when it is
    read from the start. Its use of the global random generators is seeded by the epoch.

    Args:
        source: An iterable that can be iterated again, such as a `torch.utils.data.IterableDataset`
            or a streaming data set of Hugging Face. Its ``set_epoch`` is called, if it has one. Or
            a function of the epoch and of the number of samples to skip, which returns an iterable
            over the remaining samples.
        transform: Called with each sample that this rank trains, in the loader processes. Its
            random numbers are seeded per sample.
        length: Exact number of samples of an epoch; ``None`` if it is not known. The loader then
            has no length.

    Raises:
        ConfigError: The source can be iterated only once, or is no iterable and no function; or
            the length is not a whole number of at least 1.

    Cost:
        Each loader process holds the samples of one global batch, before ``transform``.

    Example:
        >>> numbers = Stream(lambda epoch, skip: iter(range(skip, 10)), transform=float)
        >>> list(numbers.read(epoch=0, skip=7))
        [7, 8, 9]
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[int, int], Iterable[Any]],
        *,
        transform: Callable[[Any], Any] | None = None,
        length: int | None = None,
    ) -> None:
        name = type(source).__name__
        if isinstance(source, Iterator):
            raise ConfigError(
                f"the source of the stream is a {name}, which can be read only once; pass an "
                "iterable that starts again (an IterableDataset), or a function of the epoch and "
                "the number of samples to skip"
            )
        if not isinstance(source, Iterable) and not callable(source):
            raise ConfigError(
                f"the source of the stream is a {name}; pass an iterable, or a function of the "
                "epoch and the number of samples to skip, which returns the remaining samples"
            )
        if transform is not None and not callable(transform):
            raise ConfigError(
                f"transform is a {type(transform).__name__}; it must be a function of a sample"
            )
        self.length = length if length is None else whole(length)
        if self.length is not None:
            check_whole("the length of the stream", self.length, least=1)
        self.source, self.transform = source, transform

    def read(self, epoch: int, skip: int) -> Iterator[Any]:
        """Return an iterator over the samples of an epoch, not transformed.

        Args:
            epoch: Number of the epoch, from 0.
            skip: Number of samples to leave out at its start.

        Raises:
            ConfigError: The source is a function and returned no iterable.
        """
        if not isinstance(self.source, Iterable):
            samples = self.source(epoch, skip)
            if not isinstance(samples, Iterable):
                raise ConfigError(
                    f"the source of the stream returned a {type(samples).__name__}; it must return "
                    "an iterable over the samples, or be a generator function"
                )
            return iter(samples)
        set_epoch = getattr(self.source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return _rest(iter(self.source), skip)


def _rest(samples: Iterator[Any], skip: int) -> Iterator[Any]:
    """Yield the samples after the first ones; close the iterator when it is closed itself."""
    try:
        yield from islice(samples, skip, None)
    finally:
        _close(samples)


class WindowPart(NamedTuple):
    """What is read for one (micro-)batch."""

    data: Any  # this rank's samples, as a list or as a batch
    # All samples of a window that the end of the stream cuts short, and no data then.
    rest: list[Any] | None = None


class WindowCollate:
    """Makes batches of window parts, with the loader's own function; also in loader processes."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._collate_fn = collate_fn

    def __call__(self, part: WindowPart) -> WindowPart:
        if part.rest is not None or self._collate_fn is None:
            return part
        return part._replace(data=self._collate_fn(part.data))


class StreamReader(Dataset[Any]):
    """A stream as a data set whose items are parts of windows; fast for ascending windows."""

    def __init__(self, stream: Stream, seed: int, *, seeded: bool) -> None:
        self._stream, self._seed, self._seeded = stream, seed, seeded
        self._epoch, self._next = -1, 0
        self._samples: Iterator[Any] | None = None  # ``None`` if closed, or at the end
        self._inherited: Any = None
        self._random: Any = None  # states of the generators, as the stream left them
        self._owner = os.getpid()
        self._held: tuple[int, int, list[Any]] = (-1, 0, [])  # epoch, start, samples

    def __getitems__(self, keys: list[WindowKey]) -> WindowPart:
        epoch, start, stop, _ = keys[0]
        window = self.window(epoch, start, stop)
        if len(window) < stop - start:
            return WindowPart(None, rest=window)
        return WindowPart(self.samples(epoch, start, [key.position for key in keys], window))

    def hold(self, epoch: int, start: int, samples: list[Any]) -> None:
        """Serve a window that was read elsewhere."""
        self._held = epoch, start, samples

    def release(self) -> None:
        """Close the stream."""
        self._close()
        self._epoch = -1

    def window(self, epoch: int, start: int, stop: int) -> list[Any]:
        """Return the samples of a window, not transformed; fewer at the end of the stream.

        Raises `ConfigError` if the stream has another length than the user gave.
        """
        held_epoch, held_start, held = self._held
        ended = epoch == self._epoch and self._samples is None
        if (held_epoch, held_start) == (epoch, start) and (ended or len(held) >= stop - start):
            return held[: stop - start]
        if self._owner != os.getpid():
            # The process that this one was forked from reads the open iterator and closes it.
            self._inherited, self._samples = self._samples, None
            self._owner, self._epoch = os.getpid(), -1
        with whole_stream(), self._own_random():
            if epoch != self._epoch or start < self._next:
                self._open(epoch, start)
            window = self._taken(start, stop)
            self._check_length(start + len(window), stop)
        self._held = epoch, start, window
        return window

    def _open(self, epoch: int, start: int) -> None:
        self._close()
        seed = int(item_seeds(self._seed, epoch, np.array([-1]))[0])
        seed_generators(seed)
        self._epoch, self._next = epoch, start
        self._samples = self._stream.read(epoch, start)

    def _taken(self, start: int, stop: int) -> list[Any]:
        if self._samples is None:  # at the end
            return []
        for _ in islice(self._samples, start - self._next):
            pass  # other loader processes read these windows
        window = list(islice(self._samples, stop - start))
        self._next = stop
        if len(window) < stop - start:
            self._close()
        return window

    def _check_length(self, end: int, stop: int) -> None:
        length = self._stream.length
        if length is None:
            return
        if end < stop:
            raise ConfigError(
                f"the stream ended before its sample {stop}, but its length was given as {length}; "
                "pass the exact length, or leave it out"
            )
        if end < length:
            return
        if self._samples is not None and next(self._samples, self) is not self:
            raise ConfigError(
                f"the stream has more than its {length} samples, so some would never be trained; "
                "pass the exact length, or leave it out"
            )
        self._close()

    def _close(self) -> None:
        samples, self._samples = self._samples, None
        _close(samples)

    def samples(
        self, epoch: int, start: int, positions: Sequence[int], window: list[Any]
    ) -> list[Any]:
        """Return some samples of the window that begins at ``start``, transformed."""
        samples = [window[position - start] for position in positions]
        transform = self._stream.transform
        if transform is None:
            return samples
        if not self._seeded:
            return [transform(sample) for sample in samples]
        seeds = item_seeds(self._seed, epoch, np.array(positions)).tolist()
        with generators_kept():
            return [_under(seed, transform, s) for seed, s in zip(seeds, samples, strict=True)]

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Let the stream continue its own random numbers, and nothing else."""
        with generators_kept():
            if self._random is not None:
                restore_generators(self._random)
            try:
                yield
            finally:
                self._random = generator_states()

    def __getstate__(self) -> dict[str, Any]:
        # An open iterator cannot be pickled.
        return {**self.__dict__, "_samples": None, "_inherited": None, "_epoch": -1}


class BatchReader(Dataset[Any]):
    """A batch function as a data set whose items are rows of windows.

    Every rank draws the whole window under the same seed. So the window does not depend on the
    split, whatever the function draws at once.
    """

    def __init__(self, function: BatchFunction, seed: int) -> None:
        self._function, self._seed = function, seed
        self._held: tuple[Any, Any] = (None, None)  # window and its batch

    def __getitems__(self, keys: list[WindowKey]) -> WindowPart:
        epoch, start, stop, first = keys[0]
        if self._held[0] != (epoch, start, stop):
            seed = int(item_seeds(self._seed, epoch, np.array([start]))[0])
            self._held = (epoch, start, stop), drawn(self._function, stop - start, seed)
        end = keys[-1].position + 1
        return WindowPart(rows_of(self._held[1], first - start, end - start, stop - start))

    def release(self) -> None:
        """Forget the latest batch."""
        self._held = (None, None)


def drawn(function: BatchFunction, samples: int, seed: int) -> Any:
    """Return a batch of a function, drawn under a seed; the generators are restored."""
    kind = accelerator()
    # A generator of a device that is not in use must not start the device.
    module: Any = torch.get_device_module(kind) if kind and has_chosen(kind, None) else None
    devices = [] if module is None else [module.current_device()]
    with generators_kept(), torch.random.fork_rng(devices, device_type=kind or "cuda"):
        seed_generators(seed)
        if module is not None:
            module.manual_seed(seed)
        return function(samples)


def rows_of(batch: Any, first: int, end: int, samples: int) -> Any:
    """Return some rows of every array in a batch, which has ``samples`` of them."""
    if isinstance(batch, Mapping):
        return {name: rows_of(part, first, end, samples) for name, part in batch.items()}
    if isinstance(batch, tuple) or (isinstance(batch, list) and _holds_arrays(batch)):
        parts = [rows_of(part, first, end, samples) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    sliceable = isinstance(batch, list) or (_is_array(batch) and batch.ndim)
    if not sliceable or len(batch) != samples:
        what = f" of {len(batch)} rows" if sliceable else ""
        raise ConfigError(
            f"the batch function was asked for {samples} samples and returned a "
            f"{type(batch).__name__}{what}; each array in its batch must have one row per sample, "
            "so pass on the number that it is called with to what draws the samples"
        )
    return batch[first:end]


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _holds_arrays(batch: list[Any]) -> bool:
    """Return whether a list holds arrays of all samples, and not one item per sample."""
    return any(_is_array(part) or isinstance(part, Mapping | tuple) for part in batch)


def _close(samples: Any) -> None:
    close = getattr(samples, "close", None)
    if callable(close):
        close()


def _under(seed: int, transform: Callable[[Any], Any], sample: Any) -> Any:
    seed_generators(seed)
    return transform(sample)


def as_source(dataset: Any) -> Any:
    """Return what a loader was given, with iterable data sets as a `Stream`."""
    if isinstance(dataset, IterableDataset):
        return Stream(dataset)
    return dataset


def window_kind(dataset: Any) -> str:
    """Return how a data set is read by windows: ``stream``, ``function``; empty if by index."""
    if isinstance(dataset, Stream):
        return "stream"
    by_index = hasattr(dataset, "__getitem__") or isinstance(dataset, Iterable)
    return "function" if callable(dataset) and not by_index else ""


def window_reader(dataset: Any, seed: int, *, seeded: bool) -> StreamReader | BatchReader | None:
    """Return what reads a data set by windows; ``None`` for other data."""
    kind = window_kind(dataset)
    if kind == "stream":
        return StreamReader(dataset, seed, seeded=seeded)
    return BatchReader(dataset, seed) if kind == "function" else None


def window_length(dataset: Any) -> int:
    """Return the samples of an epoch of a stream or batch function."""
    length = dataset.length if isinstance(dataset, Stream) else None
    return UNKNOWN_LENGTH if length is None else int(length)


def first_samples(dataset: Any, seed: int) -> Iterator[Any]:
    """Yield a few samples of a stream or batch function, as every reader would get them."""
    reader = window_reader(dataset, seed, seeded=True)
    assert reader is not None, "only data that is read by windows"
    most = min(_PROBES, window_length(dataset))
    keys = [WindowKey(0, 0, most, n) for n in range(most)]
    part = reader.__getitems__(keys)
    reader.release()
    if part.rest is not None:
        yield from part.rest
    elif isinstance(dataset, Stream):
        yield from part.data
    else:
        yield part.data
