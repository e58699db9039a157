"""Evaluation: each sample once over all ranks, without padding, split by speed."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from evenstride.core.fleet import IntArray, Shares
from evenstride.core.sampling.draw import ShardAssignment
from evenstride.core.sampling.partition import cut, even_windows, micro_batches, step_shares
from evenstride.runtime import usage_errors
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.engines.fsdp import gathered
from evenstride.runtime.engines.watched_models import WatchedModels, is_sharded
from evenstride.runtime.loading.loader_agreement import (
    LoaderCalls,
    LoaderSettings,
    check_micro_batch,
    dealing,
    judge_loader,
    layout,
)
from evenstride.runtime.loading.loader_options import (
    BatchStream,
    DataLoaderOptions,
    LoaderOptions,
    check_options,
    own_generator,
)
from evenstride.runtime.loading.seeding import Keys, SeededDataset, item_seeds, seeded_dataset
from evenstride.runtime.loading.shards import indexed
from evenstride.runtime.loading.streams import Stream, StreamReader, window_kind
from evenstride.runtime.memory.memory_meter import PeakReport
from evenstride.runtime.usage_errors import check_whole


@dataclass(eq=False)
class EvalSampler:
    """This rank's part of a data set, in the order of the data set; of shards, shard by shard."""

    length: int
    batch: int  # most samples per step over all ranks
    shares: Callable[[], Shares]  # returns those in force; called once per pass
    rank: int
    max_micro_batch: int | None
    seed: int | None  # of the samples' randomness, equal in every pass; ``None`` for no seeding
    dealing: ShardAssignment | None = None  # how a pass over shards begins
    drawn: deque[int] = field(default_factory=deque)  # steps of the batches not yet yielded

    def __len__(self) -> int:
        return -(-self.length // self.batch)

    @property
    def batches_at_most(self) -> int:
        """Most batches that a rank may have in a pass, for any shares."""
        steps = len(self)
        if self.max_micro_batch is None:
            return steps
        largest = -(-self.length // steps)
        return steps * -(-largest // self.max_micro_batch)

    def __iter__(self) -> Iterator[Keys]:
        self.drawn.clear()
        for step, mine in self._of_steps(self.shares()):
            for part in micro_batches(range(len(mine)), self.max_micro_batch):
                self.drawn.append(step)
                yield self._keys(mine[part.start : part.stop])

    def _of_steps(self, shares: Shares) -> Iterator[tuple[int, IntArray]]:
        dealing = self.dealing
        for step, window in enumerate(even_windows(self.length, self.batch)):
            of_step = step_shares(shares, len(window))
            if dealing is not None:
                dealing, mine = dealing.step(step, of_step, self.rank)
            else:
                positions = cut(window, of_step)[self.rank].positions
                mine = np.arange(positions.start, positions.stop)
            if of_step[self.rank]:
                yield step, mine

    def _keys(self, indices: IntArray) -> Keys:
        if self.seed is None:
            return list(indices.tolist())
        seeds = item_seeds(self.seed, 0, indices)
        return list(zip(indices.tolist(), seeds.tolist(), strict=True))


class EvalStream(BatchStream):
    """The batches of an `EvalLoader`; refuses another loader that asks for them."""

    def __init__(self, source: EvalSampler) -> None:
        super().__init__(source)
        self.expected = False  # whether the loader itself is starting a pass

    @contextlib.contextmanager
    def begun_by_loader(self) -> Iterator[None]:
        self.expected = True
        try:
            yield
        finally:
            self.expected = False

    def __iter__(self) -> Iterator[list[Any]]:
        if not self.expected:
            raise usage_errors.evaluated_elsewhere()
        return super().__iter__()


class EvalLoader(DataLoader[Any]):
    """A `DataLoader` over this rank's part of a data set; ``len`` counts global steps."""

    def __init__(
        self,
        sampler: EvalSampler,
        samples: Any,
        torch_options: DataLoaderOptions,
        sharded: Callable[[], Iterable[nn.Module]],
    ) -> None:
        self._sharded, self._stream, self._drawn = sharded, EvalStream(sampler), sampler.drawn
        self.batches_at_most = sampler.batches_at_most
        """Most batches that a rank may have in a pass: more than ``len`` with micro-batches."""
        self._countable = self.batches_at_most == len(sampler)
        super().__init__(samples, batch_sampler=self._stream, **torch_options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return an iterator over this rank's batches; collective if a model is sharded."""
        with contextlib.ExitStack() as stack:
            # Ranks call the models unequally often, so no gather may happen within a pass.
            for model in self._sharded():
                stack.enter_context(gathered(model))
            with self._stream.begun_by_loader():
                batches = super().__iter__()
            yield from batches if self._countable else self._counted(batches)

    def numbered(self) -> Iterator[tuple[int, Any]]:
        """Yield each of this rank's batches with the number of its step.

        A rank that has no samples in a step has no batch of it. So a loop that calls a collective
        for each step knows from the numbers what it lacks.
        """
        for batch in self:
            yield self._drawn.popleft(), batch

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches; warn if a loop stops at the number of steps with batches left."""
        count = 0
        try:
            for count, batch in enumerate(batches, 1):  # noqa: B007
                yield batch
        except GeneratorExit:
            if count == len(self) and next(batches, None) is not None:
                self._countable = True  # once is enough
                usage_errors.tell_of_missed_batches(count)
            raise


class StreamParts(IterableDataset[Any]):
    """This rank's part of every window of a stream, as batches."""

    def __init__(
        self,
        reader: StreamReader,
        length: int,
        batch: int,  # most samples per window over all ranks
        rank: int,
        max_micro_batch: int | None,
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        self._reader, self._length, self._batch, self._rank = reader, length, batch, rank
        self._max_micro_batch, self._collate_fn = max_micro_batch, collate_fn
        self._shares: Shares = ()

    def split_by(self, shares: Shares) -> None:
        """Split the windows of the next pass by these shares."""
        self._shares = shares

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        first, processes = (0, 1) if process is None else (process.id, process.num_workers)
        for start in range(first * self._batch, self._length, processes * self._batch):
            stop = min(start + self._batch, self._length)
            window = self._reader.window(0, start, stop)
            if window:
                yield from self._batches(start, window)
            if len(window) < stop - start:
                return

    def _batches(self, start: int, window: list[Any]) -> Iterator[Any]:
        shares = step_shares(self._shares, len(window))
        piece = cut(range(start, start + len(window)), shares)[self._rank]
        if piece.ghost:
            return
        for part in micro_batches(piece.positions, self._max_micro_batch):
            yield self._collate_fn(self._reader.samples(0, start, part, window))


class StreamEvalLoader(DataLoader[Any]):
    """A `DataLoader` over this rank's part of a stream; it has no ``len``."""

    def __init__(
        self,
        parts: StreamParts,
        shares: Callable[[], Shares],  # returns those in force; called once per pass
        torch_options: DataLoaderOptions,
        sharded: Callable[[], Iterable[nn.Module]],
    ) -> None:
        self._parts, self._shares, self._sharded = parts, shares, sharded
        super().__init__(parts, batch_size=None, **torch_options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return an iterator over this rank's batches; collective if a model is sharded."""
        with contextlib.ExitStack() as stack:
            for model in self._sharded():  # see `EvalLoader`
                stack.enter_context(gathered(model))
            self._parts.split_by(self._shares())
            yield from super().__iter__()


@dataclass(eq=False)
class Evaluation:
    """Creates one rank's evaluation loaders."""

    calls: LoaderCalls
    split: Callable[[], Shares]  # returns shares that are equal on all ranks
    watched: WatchedModels
    peaks: PeakReport  # ignores the memory of an evaluation
    settings: LoaderSettings

    def loader(
        self,
        dataset: Any,
        global_batch: int | None,
        max_micro_batch: int | None,
        options: DataLoaderOptions,
        *,
        seeded: bool,
        check_data: bool,
    ) -> DataLoader[Any]:
        """Return an evaluation loader; see `Stride.loader`; collective."""
        settings = self.settings
        batch = settings.global_batch if global_batch is None else global_batch

        def show() -> Plain:
            check_options(options)
            check_whole("global_batch", batch, least=1)
            check_micro_batch(max_micro_batch)
            if window_kind(dataset) == "function":
                raise usage_errors.endless_evaluation()
            asked = LoaderOptions(
                shuffle=False, max_micro_batch=max_micro_batch, check_data=check_data
            )
            seed = self.calls.seed_to_compare(settings.seed)
            shown = layout(dataset, asked, options.get("num_workers", 0), seed)
            return {**shown, "global_batch": batch}

        judge = partial(judge_loader, topic="an evaluation loader")
        verdict = self.calls.agree("loader(train=False)", show, judge)
        # A limit that memory sets for training applies here, too.
        most = max_micro_batch or settings.max_share
        options.setdefault("generator", own_generator(settings.seed, self.calls.rank))
        if isinstance(dataset, Stream):
            reader = StreamReader(dataset, settings.seed, seeded=seeded)
            collate_fn = options.pop("collate_fn", None) or default_collate
            length, rank = verdict["length"], self.calls.rank
            parts = StreamParts(reader, length, batch, rank, most, collate_fn)
            return StreamEvalLoader(parts, self.split, options, self._begin)
        samples = seeded_dataset(indexed(dataset), seeded=seeded)
        sampler = EvalSampler(
            verdict["length"],
            batch,
            self.split,
            self.calls.rank,
            most,
            settings.seed if isinstance(samples, SeededDataset) else None,
            dealing(dataset, verdict),
        )
        return EvalLoader(sampler, samples, options, self._begin)

    def _begin(self) -> Iterator[nn.Module]:
        """Return the models whose parameters must stay gathered."""
        self.peaks.note_evaluation()
        return filter(is_sharded, self.watched.models)
