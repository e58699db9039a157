"""The data loaders users iterate over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from evenstride.core.sampling.draw import Draw
from evenstride.errors import LoaderBusy
from evenstride.runtime import usage_errors
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.engines.weight_drift import DriftGuard
from evenstride.runtime.loading.batch_change import BatchChanges
from evenstride.runtime.loading.loader_options import (
    BatchStream,
    DataLoaderOptions,
    LoaderOptions,
    own_generator,
)
from evenstride.runtime.loading.micro_batches import (
    LoadedBatch,
    Retry,
    check_weights,
    merge,
    smaller,
)
from evenstride.runtime.loading.position import CommittedPosition
from evenstride.runtime.loading.sampler import StepSampler
from evenstride.runtime.loading.seeding import SeededDataset, seeded_dataset
from evenstride.runtime.loading.shards import ShardReader, indexed
from evenstride.runtime.loss.step_state import StepEvent
from evenstride.runtime.loss.token_weights import checked
from evenstride.runtime.loss.training_step import TrainingStep


@dataclass(frozen=True, slots=True)
class Rank:
    """The parts of a rank's `Stride` that its training loader works with."""

    gate: DrawBarrier
    step: TrainingStep
    progress: CommittedPosition
    rank: int
    max_steps: int | None
    tick: Callable[[], None] | None
    explain_failure: Callable[[], None]
    sampler: Callable[..., StepSampler] = StepSampler
    turns: BatchChanges | None = None
    drift: DriftGuard | None = None


class TrainLoader(DataLoader[Any]):
    """A `DataLoader` whose batches are this rank's part of each global batch.

    ``len(loader)`` is the number of global steps of an epoch, on every rank and also with
    micro-batches. One loop at a time may draw from it; a loop that was left is continued by
    the next one, from the last committed step.
    """

    def __init__(
        self,
        rank: Rank,
        dataset: Dataset[Any],
        options: LoaderOptions,
        torch_options: DataLoaderOptions,
    ) -> None:
        self._rank, self._options = rank, options
        self._busy, self._retired, self._own_s = False, False, 0.0
        rank.step.limits.ask(options.max_micro_batch, by_cost=options.costs is not None)
        self._ready: deque[LoadedBatch] = deque()
        order = rank.progress.order
        assert order is not None, "the layout is set before the loader is made"
        data = indexed(dataset)
        self._reader = data if isinstance(data, ShardReader) else None
        samples = seeded_dataset(data, seeded=options.seeded)
        self._steps = rank.sampler(
            order,
            rank.gate,
            rank.rank,
            rank.step.limits,
            seeded=isinstance(samples, SeededDataset),
            sizes=options.sizes,
            costs=options.costs,
        )
        torch_options.setdefault("generator", own_generator(order.seed, rank.rank))
        super().__init__(
            samples,
            batch_sampler=BatchStream(self._steps),
            **torch_options,
        )

    def __len__(self) -> int:
        return self._rank.progress.cursor.steps

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return an iterator over the rest of the current epoch.

        Raises:
            LoaderBusy: another loop over this loader has not ended.
        """
        self._refuse_second_loop()
        return self._loop()

    def restart(self) -> None:
        """Leave the rest of the current epoch; the next loop begins the next one.

        Raises:
            LoaderBusy: a loop over this loader is going on.
        """
        if self._busy:
            raise LoaderBusy("restart() was called inside the loop; leave the loop first")
        self._rank.progress.next_epoch()

    @property
    def busy(self) -> bool:
        """Whether a loop over this loader is going on."""
        return self._busy

    def retire(self) -> None:
        """Refuse to be iterated over from now on: another loader has taken its place."""
        self._retired = True

    @property
    def own_s(self) -> float:
        """Time this loader has spent in our own code on the training thread, in seconds."""
        return self._own_s + self._steps.own_s

    def _refuse_second_loop(self) -> None:
        if self._retired:
            raise LoaderBusy(
                "another training loader of the same Stride has taken the place of this one; "
                "iterate over that one, or use train=False for evaluation"
            )
        if self._busy:
            raise LoaderBusy(
                "a loop over this training loader is still going on, and both would train the "
                "same samples; end it first (leave the loop, or close() its iterator)"
            )

    def _loop(self) -> Iterator[Any]:
        self._refuse_second_loop()  # two iterators may have been made before either was used
        rank, progress = self._rank, self._rank.progress
        if rank.turns is not None:
            rank.turns.before_pass()
        self._busy = True
        progress.begin_pass()
        if progress.first_since_load() and rank.rank == 0:
            usage_errors.tell_if_epochs_begin_anew(progress.epoch)
        self._steps.begin(
            progress.epoch,
            progress.cursor,
            progress.step,
            rank.max_steps,
            whole_first=bool(rank.step.watched.unrecorded),
            parts=progress.parts,
            dealing=progress.dealing,
        )
        steps_before = progress.earlier + progress.step  # where workers do not keep step: of all
        try:
            yield from self._deliver()
            rank.step.clock.timer.epoch_ended()
            rank.step.batch.happened(StepEvent.LOOP_ENDS)
            if rank.turns is not None:
                rank.turns.after_pass()
            empty = progress.earlier + progress.step == steps_before and not progress.cursor.done
            if empty and (rank.max_steps is not None or self._options.sizes is not None):
                usage_errors.end_program(rank.rank, rank.max_steps)
        finally:
            self._busy = False
            self._steps.left()
            self._ready.clear()
            rank.step.clock.timer.pass_ended()
            rank.step.leave()
            progress.end_pass()
            if rank.tick is not None:
                rank.tick()

    def _deliver(self) -> Iterator[Any]:
        """Yield the batches, fetched in this process at first and by the workers then."""
        rank, fresh, between_steps = self._rank, True, True
        step, clock, batch = rank.step, rank.step.clock, rank.step.batch
        opening = rank.gate.opening and self.num_workers > 0
        source = self._here(self.batch_sampler) if opening else self._whole(super().__iter__())
        given: list[LoadedBatch] = []  # of the step in hand
        while True:
            if batch.failed:
                step.optimizers.check_stepped()
                rank.explain_failure()
            asked_s = clock.timer.fetch_started()
            if batch.retry:
                self._put_back(given.pop() if batch.retry is Retry.BATCH else merge(given))
                between_steps = False
            batch.check_finished()
            if rank.gate.opening:
                clock.timer.settle()  # the decision about the next step waits for the last
            if between_steps:
                self._end_step()
                if opening and not rank.gate.opening:
                    opening, fresh = False, True
                    started_s = clock.timer.now()
                    source = self._from_processes()
                    asked_s += clock.timer.now() - started_s  # torch's own
            fetching_s = clock.timer.now()
            item = self._fetch(source)
            fetched_s = clock.timer.now()
            if item is None:
                return
            draw = item.draw
            rank.progress.keep_parts(self._steps.parts)
            given = [item] if draw.first else [*given, item]
            step.begin(draw, item.weight)
            modelled = not fresh and draw.share > 0
            handed_s = clock.timer.fetch_ended(draw.step, draw.share, modelled=modelled)
            clock.handed_out(draw.samples, compiled=step.watched.compiled)
            self._own_s += fetching_s - asked_s + handed_s - fetched_s
            yield item.batch
            between_steps, fresh = draw.last, fresh and not draw.last

    def _end_step(self) -> None:
        """Do what belongs between two steps."""
        rank = self._rank
        if rank.drift is not None and rank.drift.every:
            rank.drift.check(rank.progress.step)
        if rank.tick is not None:
            # The step file and the exchanges go by steps that are committed, not by batches.
            rank.tick()

    def _whole(self, source: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over what is loaded, and over what comes back from other workers."""
        if self._steps.finished:  # nothing does
            return source

        def whole() -> Iterator[Any]:
            yield from source
            while not self._steps.finished:
                yield from self._here(self.batch_sampler)

        return whole()

    def _from_processes(self) -> Iterator[Any]:
        """Return an iterator over what the loader's processes load from here on."""
        if self._reader is not None:
            self._reader.release()  # forked, they would share what is open here
        return super().__iter__()

    def _here(self, batches: Any) -> Iterator[Any]:
        """Return an iterator that loads batches in the training process."""
        options = DataLoaderOptions(
            collate_fn=self.collate_fn, pin_memory=self.pin_memory, generator=self.generator
        )
        return iter(DataLoader(self.dataset, batch_sampler=batches, **options))

    def _fetch(self, source: Iterator[Any]) -> LoadedBatch | None:
        """Return the next batch that fits into memory, or ``None`` at the end of the epoch."""
        item, fits = self._fetch_drawn(source), self._rank.step.limits.learned
        if item is None or fits is None or item.draw.samples <= fits:
            return item
        self._put_back(item)  # it was drawn before that was known
        return self._ready.popleft()

    def _put_back(self, item: LoadedBatch) -> None:
        """Let the samples of a batch that does not fit into memory come again, in smaller ones."""
        fits = self._rank.step.limits.at_most
        assert fits is not None, "what does not fit is known by a size that may"
        pieces = list(smaller(item.draw, item.keys, fits))
        batches = self._here(BatchStream([keys for _, keys in pieces]))
        items = [
            LoadedBatch(batch, draw, keys, self._weight_of(batch, draw))
            for batch, (draw, keys) in zip(batches, pieces, strict=True)
        ]
        check_weights(item, items)
        self._ready.extendleft(reversed(items))

    def _fetch_drawn(self, source: Iterator[Any]) -> LoadedBatch | None:
        """Return the next batch as it was drawn, or ``None`` at the end of the epoch.

        With a weight function all of a step's micro-batches are fetched before the first is
        handed out, because their weights' sum is needed to scale it.
        """
        if self._ready:
            return self._ready.popleft()
        waited_s = self._rank.gate.waited_s
        try:
            batch = next(source)
        except StopIteration:
            return None
        finally:
            waited_s = self._rank.gate.waited_s - waited_s
            if waited_s:
                self._rank.step.clock.timer.control_waited(waited_s)
        item = self._item(batch)
        if item.weight is None:
            return item
        self._ready.append(item)
        while not self._ready[-1].draw.last:
            self._ready.append(self._item(next(source)))
        self._rank.step.weights.start(sum(item.weight or 0.0 for item in self._ready))
        return self._ready.popleft()

    def _item(self, batch: Any) -> LoadedBatch:
        draw, keys = self._steps.delivered()
        return LoadedBatch(batch, draw, keys, self._weight_of(batch, draw))

    def _weight_of(self, batch: Any, draw: Draw) -> float | None:
        weight_fn = self._options.weight_fn
        if weight_fn is None:
            return None
        return checked(weight_fn(batch)) if draw.samples else 0.0
