"""Evaluation: each sample once over all ranks, no padding, split by speed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader

from evenstride.core.fleet import IntArray, Shares
from evenstride.core.sampling.partition import cut, even_windows, micro_batches, step_shares
from evenstride.core.sampling.shard_assignment import ShardAssignment
from evenstride.runtime import usage_errors
from evenstride.runtime.argument_checks import check_whole
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.engines.fsdp import gathered, is_sharded
from evenstride.runtime.engines.watched_models import WatchedModels
from evenstride.runtime.loading.loader_agreement import (
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
from evenstride.runtime.memory.peak_report import PeakReport
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.settings import Settings


class EvalSampler:
    """This rank's part of a data set, in the data set's own order; of shards, shard by shard.

    Args:
        length: samples in the data set.
        batch: samples per step over all ranks, at most.
        shares: returns the shares in force; called once per pass.
        rank: this rank.
        max_micro_batch: most samples per batch of this rank.
        seed: of the samples' randomness, the same in every pass; ``None`` for no seeding.
        dealing: where a pass over shards begins; ``None`` for other data.
    """

    def __init__(
        self,
        length: int,
        batch: int,
        shares: Callable[[], Shares],
        rank: int,
        max_micro_batch: int | None,
        seed: int | None,
        dealing: ShardAssignment | None = None,
    ) -> None:
        self._length, self._batch = length, batch
        self._shares, self._rank, self._seed = shares, rank, seed
        self._max_micro_batch, self._dealing = max_micro_batch, dealing

    def __len__(self) -> int:
        return -(-self._length // self._batch)

    @property
    def batches_at_most(self) -> int:
        """Batches that a rank may have in a pass, whatever its shares."""
        steps = len(self)
        if self._max_micro_batch is None:
            return steps
        largest = -(-self._length // steps)
        return steps * -(-largest // self._max_micro_batch)

    def __iter__(self) -> Iterator[Keys]:
        for mine in self._of_steps(self._shares()):
            for part in micro_batches(range(len(mine)), self._max_micro_batch):
                yield self._keys(mine[part.start : part.stop])

    def _of_steps(self, shares: Shares) -> Iterator[IntArray]:
        """Yield this rank's samples of each step in which it has any."""
        dealing = self._dealing
        for step, window in enumerate(even_windows(self._length, self._batch)):
            of_step = step_shares(shares, len(window))
            if dealing is not None:
                dealing, mine = dealing.step(step, of_step, self._rank)
            else:
                positions = cut(window, of_step)[self._rank].positions
                mine = np.arange(positions.start, positions.stop)
            if of_step[self._rank]:
                yield mine

    def _keys(self, indices: IntArray) -> Keys:
        if self._seed is None:
            return list(indices.tolist())
        seeds = item_seeds(self._seed, 0, indices)
        return list(zip(indices.tolist(), seeds.tolist(), strict=True))


class EvalStream(BatchStream):
    """The batches of an `EvalLoader`; another loader that asks for them is refused."""

    def __init__(self, source: EvalSampler) -> None:
        super().__init__(source)
        self.expected = False  # whether it is the loader itself that begins a pass

    @contextlib.contextmanager
    def begun_by_loader(self) -> Iterator[None]:
        """Allow a pass that the loader itself begins inside this context."""
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
    """A `DataLoader` over this rank's part of a data set; ``len`` counts global steps.

    Args:
        sampler: this rank's part.
        samples: the data set.
        torch_options: for torch's loader.
        sharded: returns the models whose parameters are kept gathered during a pass, because
            ranks run them unequally often.
    """

    def __init__(
        self,
        sampler: EvalSampler,
        samples: Any,
        torch_options: DataLoaderOptions,
        sharded: Callable[[], Iterable[nn.Module]],
    ) -> None:
        self._sharded, self._stream = sharded, EvalStream(sampler)
        self.batches_at_most = sampler.batches_at_most
        """Batches that a rank may have in a pass: more than ``len`` where they are cut."""
        self._countable = self.batches_at_most == len(sampler)
        super().__init__(samples, batch_sampler=self._stream, **torch_options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return an iterator over this rank's batches; collective if a model is sharded."""
        with contextlib.ExitStack() as stack:
            for model in self._sharded():
                stack.enter_context(gathered(model))
            with self._stream.begun_by_loader():
                batches = super().__iter__()
            yield from batches if self._countable else self._counted(batches)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and warn if a loop stops at the number of steps with some left."""
        count = 0
        try:
            for count, batch in enumerate(batches, 1):  # noqa: B007
                yield batch
        except GeneratorExit:
            if count == len(self) and next(batches, None) is not None:
                self._countable = True  # once is enough
                usage_errors.tell_of_missed_batches(count)
            raise


class Evaluation:
    """Makes one rank's loaders for evaluation.

    Args:
        calls: of all ranks.
        split: returns the shares by which all ranks cut data alike.
        watched: the models that are trained.
        peaks: leave out what an evaluation holds in memory.
        settings: of the run.
    """

    def __init__(
        self,
        calls: RankCalls,
        split: Callable[[], Shares],
        watched: WatchedModels,
        peaks: PeakReport,
        settings: Settings,
    ) -> None:
        self._calls, self._split, self._watched = calls, split, watched
        self._peaks, self._settings = peaks, settings

    def loader(
        self,
        dataset: Any,
        global_batch: int | None,
        max_micro_batch: int | None,
        options: DataLoaderOptions,
        *,
        seeded: bool,
        check_data: bool,
    ) -> EvalLoader:
        """Return a loader for evaluation; see `Stride.loader`; collective."""
        settings = self._settings
        batch = settings.global_batch if global_batch is None else global_batch

        def show() -> Plain:
            check_options(options)
            check_whole("global_batch", batch, least=1)
            check_micro_batch(max_micro_batch)
            asked = LoaderOptions(
                shuffle=False, max_micro_batch=max_micro_batch, check_data=check_data
            )
            seed = self._calls.seed_to_compare(settings.seed)
            shown = layout(dataset, asked, options.get("num_workers", 0), seed)
            return {**shown, "global_batch": batch}

        judge = partial(judge_loader, topic="an evaluation loader")
        verdict = self._calls.agree("loader(train=False)", show, judge)
        samples = seeded_dataset(indexed(dataset), seeded=seeded)
        sampler = EvalSampler(
            verdict["length"],
            batch,
            self._split,
            self._calls.rank,
            # A limit that memory sets for training holds here, too.
            max_micro_batch or settings.max_share,
            settings.seed if isinstance(samples, SeededDataset) else None,
            dealing(dataset, verdict),
        )
        options.setdefault("generator", own_generator(settings.seed, self._calls.rank))
        return EvalLoader(sampler, samples, options, self._begin)

    def _begin(self) -> Iterator[nn.Module]:
        """Return the models whose parameters must be kept gathered."""
        self._peaks.note_evaluation()
        return filter(is_sharded, self._watched.models)
