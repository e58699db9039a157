"""The training loader that users iterate over, and how micro-batches pass through it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, default_collate

from evenstride.core.sampling.draw import Draw
from evenstride.core.sampling.partition import micro_batches
from evenstride.errors import ConfigError, LoaderBusy
from evenstride.runtime import usage_errors
from evenstride.runtime.coordination.coordinator import Coordinator
from evenstride.runtime.engines.weight_drift import DriftGuard
from evenstride.runtime.loading.loader_options import (
    BatchStream,
    DataLoaderOptions,
    LoaderOptions,
    own_generator,
)
from evenstride.runtime.loading.position import BatchChanges, CommittedPosition
from evenstride.runtime.loading.sampler import StepSampler
from evenstride.runtime.loading.seeding import Keys, SeededDataset, seeded_dataset
from evenstride.runtime.loading.shards import ShardReader, indexed
from evenstride.runtime.loading.streams import (
    StreamReader,
    WindowCollate,
    window_reader,
)
from evenstride.runtime.loss.batch_in_hand import Retry, StepEvent
from evenstride.runtime.loss.training_step import TrainingStep, checked

# Allowed rounding error of a sum of weights.
_ALIKE = 1e-6


class LoadedBatch(NamedTuple):
    """A loaded batch."""

    batch: Any  # for the training loop
    draw: Draw  # its step and samples
    keys: Keys  # of its samples in the data set
    weight: float | None  # from the weight function; ``None`` counts samples


def smaller(draw: Draw, keys: Keys, at_most: int) -> Iterator[tuple[Draw, Keys]]:
    """Yield the same samples in the fewest batches of at most ``at_most`` and of similar sizes."""
    parts = micro_batches(range(len(keys)), at_most)
    for number, part in enumerate(parts):
        piece = draw._replace(
            samples=len(part),
            first=draw.first and number == 0,
            last=draw.last and number == len(parts) - 1,
        )
        yield piece, keys[part.start : part.stop]


def merge(items: list[LoadedBatch]) -> LoadedBatch:
    """Return consecutive batches of a step as one, without the loaded data."""
    draw = items[-1].draw._replace(samples=sum(item.draw.samples for item in items), first=True)
    weights = [item.weight for item in items if item.weight is not None]
    keys: list[Any] = [key for item in items if item.draw.samples for key in item.keys]
    return LoadedBatch(None, draw, keys, sum(weights) if weights else None)


def check_weights(whole: LoadedBatch, pieces: list[LoadedBatch]) -> None:
    """Raise `ConfigError` unless weights of the pieces add up to that of the whole batch."""
    if whole.weight is None:
        return
    total = sum(piece.weight or 0.0 for piece in pieces)
    if not math.isclose(total, whole.weight, rel_tol=_ALIKE):
        raise ConfigError(
            f"weight_fn gave {whole.weight:g} for a batch of {whole.draw.samples} samples, but "
            f"{total:g} for its {len(pieces)} micro-batches together. A batch that does not fit "
            "into memory is split into micro-batches, so the weight must be a sum over samples "
            "(of tokens, say)"
        )


@dataclass(frozen=True, slots=True)
class Rank:
    """The parts of a rank's `Stride` that its training loader uses."""

    coordinator: Coordinator
    step: TrainingStep
    progress: CommittedPosition
    max_steps: int | None = None
    sampler: Callable[..., StepSampler] = StepSampler
    turns: BatchChanges | None = None
    drift: DriftGuard | None = None
    # Goes to a saved position; ``None`` where the workers hand on the position.
    load: Callable[[dict[str, Any]], None] | None = None

    def save(self) -> dict[str, Any]:
        """Return the committed position; raise `StepInFlight` within a step."""
        if self.step.batch.mid_step or self.step.batch.unstepped:
            raise usage_errors.in_flight(self.progress.earlier + self.progress.step)
        return self.progress.save()


class TrainLoader(DataLoader[Any]):
    """A `DataLoader` whose batches are this rank's mini-batches or micro-batches.

    ``len(loader)`` is the number of steps of an epoch, equal on every rank, also with
    micro-batches. Only one loop at a time may iterate over it. After a loop that stopped early,
    the next loop continues from the last committed step.
    """

    def __init__(
        self,
        rank: Rank,
        dataset: Dataset[Any],
        options: LoaderOptions,
        torch_options: DataLoaderOptions,
    ) -> None:
        self._rank, self._options = rank, options
        self._standing = standing = rank.coordinator.standing
        self._busy, self._retired, self._own_s = False, False, 0.0
        by_cost = options.costs is not None
        rank.step.limits.ask(options.max_micro_batch, options.micro_batches, by_cost=by_cost)
        self._ready: deque[LoadedBatch] = deque()
        order = rank.progress.order
        assert order is not None, "the layout is set before the loader is made"
        windows = window_reader(dataset, order.seed, seeded=options.seeded)
        data = windows or indexed(dataset)
        self._reader = data if isinstance(data, ShardReader | StreamReader) else None
        self._by_windows = windows is not None
        samples = data if self._by_windows else seeded_dataset(data, seeded=options.seeded)
        if self._by_windows:
            collate_fn = torch_options.pop("collate_fn", None)
            own = default_collate if order.windows == "stream" else None
            torch_options["collate_fn"] = WindowCollate(collate_fn or own)
        self._steps = rank.sampler(
            order,
            standing.gate,
            standing.rank,
            rank.step.limits,
            seeded=isinstance(samples, SeededDataset),
            sizes=options.sizes,
            costs=options.costs,
            bucketed=options.bucketed,
        )
        self._own_seed = None if "generator" in torch_options else order.seed
        torch_options.setdefault("generator", own_generator(order.seed, standing.rank))
        super().__init__(samples, batch_sampler=BatchStream(self._steps), **torch_options)

    def __len__(self) -> int:
        order, most = self._rank.progress.order, self._options.max_steps
        if order is not None and order.windows == "function" and most is not None:
            return most
        if order is not None and order.unlimited:
            raise TypeError(
                "the loader has no len(): the length of an epoch is not known before its end. "
                "Give evenstride.Stream a length, or loader() max_steps with a batch function"
            )
        return self._rank.progress.cursor.steps

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return an iterator over the rest of the epoch; raise `LoaderBusy` during a loop."""
        self._refuse_second_loop()
        return self._loop()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data; see `Stride.state_dict`."""
        return self._rank.save()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; see `Stride.load_state_dict`."""
        if self._rank.load is None:
            raise ConfigError(
                "the loader of a LiveStride takes its position from the other workers; load no "
                "state into it"
            )
        self._rank.load(state)

    def restart(self) -> None:
        """Skip the rest of the epoch and go to the next; raise `LoaderBusy` during a loop."""
        if self._busy:
            raise LoaderBusy("restart() was called inside the loop; leave the loop first")
        self._rank.progress.next_epoch()

    @property
    def busy(self) -> bool:
        return self._busy

    def retire(self) -> None:
        """Refuse iteration from now on: another loader has replaced this one."""
        self._retired = True

    @property
    def at_end(self) -> bool:
        """Whether the current batch is the last of the epoch."""
        batch, progress = self._rank.step.batch, self._rank.progress
        if batch.draw is None or not batch.draw.last:
            return False
        left = 0 if batch.committed else batch.draw.window
        return progress.position + left >= progress.end

    @property
    def own_s(self) -> float:
        """Time spent in evenstride's own code on the training thread, in seconds."""
        return self._own_s + self._steps.own_s

    def _refuse_second_loop(self) -> None:
        if self._retired:
            raise LoaderBusy(
                "another training loader of the same Stride has replaced this one; iterate over "
                "the new one, or use train=False for evaluation"
            )
        if self._busy:
            raise LoaderBusy(
                "a loop over this training loader is still running, and both loops would train "
                "the same samples; end the first one (leave the loop, or close() its iterator)"
            )

    def _loop(self) -> Iterator[Any]:
        self._refuse_second_loop()  # two iterators may exist before either is used
        rank, progress = self._rank, self._rank.progress
        self._stand()
        if rank.turns is not None:
            rank.turns.before_pass()
        self._busy = True
        self._begin_pass()
        steps_before = progress.earlier + progress.step  # of all workers, without a common step
        try:
            yield from self._deliver()
            rank.step.clock.timer.epoch_ended()
            rank.step.batch.happened(StepEvent.LOOP_ENDS)
            if rank.turns is not None:
                rank.turns.after_pass()
            empty = progress.earlier + progress.step == steps_before and not progress.cursor.done
            empty = empty and progress.step != progress.limit
            if empty and (rank.max_steps is not None or self._options.sizes is not None):
                usage_errors.end_program(self._standing.rank, rank.max_steps)
        finally:
            self._busy = False
            self._end_pass()
            rank.coordinator.exchange()

    def _stand(self) -> bool:
        """Agree on the workers of the next step; return whether the group has changed."""
        before, self._standing = self._standing, self._rank.coordinator.stand()
        if self._standing is before:
            return False
        self._steps.regroup(self._standing.gate, self._standing.rank)
        if self._own_seed is not None:
            self.generator = own_generator(self._own_seed, self._standing.rank)
        return True

    def _begin_pass(self) -> None:
        progress = self._rank.progress
        progress.begin_pass(self._options.max_steps)
        if progress.first_since_load() and self._standing.rank == 0:
            usage_errors.tell_if_epochs_restart(progress.epoch)
        self._begin_steps()

    def _begin_steps(self) -> None:
        rank, progress = self._rank, self._rank.progress
        limits = [most for most in (rank.max_steps, progress.limit) if most is not None]
        self._steps.begin(
            progress.epoch,
            progress.cursor,
            progress.step,
            min(limits, default=None),
            whole_first=bool(rank.step.watched.unrecorded),
            parts=progress.parts,
            parts_end=progress.parts_end,
            dealing=progress.dealing,
        )

    def _begin_again(self, epoch: int) -> bool:
        """Start again in a new group; return whether the group is still in this epoch."""
        self._end_pass()
        if self._rank.progress.epoch != epoch:
            return False
        self._begin_pass()
        return True

    def _end_pass(self) -> None:
        """Forget what was drawn but not trained."""
        self._steps.left()
        self._ready.clear()
        self._rank.step.clock.timer.pass_ended()
        self._rank.step.leave()
        self._rank.progress.end_pass()

    def _deliver(self) -> Iterator[Any]:
        """Yield the batches, loaded in this process during the opening and by workers after it."""
        rank, fresh, between_steps = self._rank, True, True
        clock, batch = rank.step.clock, rank.step.batch
        epoch, opening = rank.progress.epoch, self._cold
        source = self._source()
        given: list[LoadedBatch] = []  # of the current step
        while True:
            if batch.failed:
                self._explain()
            asked_s = clock.timer.fetch_started()
            if batch.retry:
                self._put_back(given.pop() if batch.retry is Retry.BATCH else merge(given))
                between_steps = False
            batch.check_finished()
            if self._standing.gate.opening:
                clock.timer.settle()  # the decision about the next step waits for this one's time
            if between_steps:
                self._end_step()
                another = self._stand()
                if another and not self._begin_again(epoch):
                    return  # the new group has ended this epoch
                # Loader processes would load ahead, with shares that the opening has yet to find.
                if another or opening != self._cold:
                    opening, fresh = self._cold, True
                    started_s = clock.timer.now()
                    del source  # its processes end before new ones are forked
                    source = self._source()
                    asked_s += clock.timer.now() - started_s  # the time is torch's, not ours
            self._own_s += clock.timer.now() - asked_s
            item = self._fetch(source)
            if item is None:
                return
            given = [item] if item.draw.first else [*given, item]
            self._hand_out(item, fresh=fresh)
            yield item.batch
            between_steps, fresh = item.draw.last, fresh and not item.draw.last

    def _hand_out(self, item: LoadedBatch, *, fresh: bool) -> None:
        """Begin the step of a loaded batch; ``fresh`` in the first step of a pass."""
        step, clock, draw = self._rank.step, self._rank.step.clock, item.draw
        progress, fetched_s = self._rank.progress, clock.timer.now()
        progress.keep_parts(self._steps.parts, self._steps.parts_end)
        step.begin(draw, item.weight)
        # The first step of a pass includes the start of loader processes. That of a run has none in
        # the opening, and it is the longest one, so the decision should not wait for a second.
        first = progress.earlier + draw.step == 0 and self._standing.gate.opening
        modelled = (first or not fresh) and draw.share > 0
        handed_s = clock.timer.fetch_ended(draw.step, draw.share, modelled=modelled)
        clock.handed_out(draw.samples, compiled=step.watched.compiled, fresh=fresh)
        self._own_s += handed_s - fetched_s

    def _explain(self) -> None:
        """Raise the reason why the last backward pass did not finish."""
        self._rank.step.optimizers.check_stepped()
        self._rank.coordinator.explain_failure()

    def _end_step(self) -> None:
        rank = self._rank
        if rank.drift is not None and rank.drift.every:
            rank.drift.check(rank.progress.step)
        rank.coordinator.exchange()

    @property
    def _cold(self) -> bool:
        """Whether loader processes wait until the first split is found."""
        return self._standing.gate.opening and self.num_workers > 0

    def _source(self) -> Iterator[Any]:
        """Return an iterator over the batches from here on, loaded here or by loader processes."""
        if self._cold:
            return self._here(self.batch_sampler)
        if self._reader is not None and self.num_workers:
            self._reader.release()  # forked processes would share the open files
        source = super().__iter__()
        return self._whole(self._until_the_end(source) if self._by_windows else source)

    def _whole(self, source: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator that also yields samples that other workers have returned."""
        if self._steps.finished:  # no samples are returned
            return source

        def whole() -> Iterator[Any]:
            yield from source
            while not self._steps.finished:
                yield from self._here(self.batch_sampler)

        return whole()

    def _until_the_end(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of windows; at the end of the stream, split its rest once more."""
        for part in source:
            if part.rest is None:
                yield part.data
                continue
            # All ranks are here, at the same step, as they read the same stream.
            progress, reader = self._rank.progress, self._reader
            assert isinstance(reader, StreamReader), "a batch function has no end"
            start = progress.position
            reader.hold(progress.epoch, start, part.rest)
            progress.found_end(start + len(part.rest))
            self._begin_steps()
            yield from self._here(self.batch_sampler)
            return

    def _here(self, batches: Any) -> Iterator[Any]:
        options = DataLoaderOptions(
            collate_fn=self.collate_fn, pin_memory=self.pin_memory, generator=self.generator
        )
        source = iter(DataLoader(self.dataset, batch_sampler=batches, **options))
        return self._until_the_end(source) if self._by_windows else source

    def _fetch(self, source: Iterator[Any]) -> LoadedBatch | None:
        """Return the next batch that fits into memory, or ``None`` at the end of the epoch."""
        item, fits = self._fetch_drawn(source), self._rank.step.limits.learned
        if item is None or fits is None or item.draw.samples <= fits:
            return item
        self._put_back(item)  # it was drawn before the limit was known
        return self._ready.popleft()

    def _put_back(self, item: LoadedBatch) -> None:
        """Yield the samples of a batch that does not fit into memory again, in smaller batches."""
        fits = self._rank.step.limits.at_most
        assert fits is not None, "a failed batch sets a size that may fit"
        pieces = list(smaller(item.draw, item.keys, fits))
        batches = self._here(BatchStream([keys for _, keys in pieces]))
        items = [
            LoadedBatch(batch, draw, keys, self._weight_of(batch, draw))
            for batch, (draw, keys) in zip(batches, pieces, strict=True)
        ]
        check_weights(item, items)
        self._ready.extendleft(reversed(items))

    def _fetch_drawn(self, source: Iterator[Any]) -> LoadedBatch | None:
        """Return the next batch as it was drawn, or ``None`` at the end of the epoch."""
        if self._ready:
            return self._ready.popleft()
        waited_s = self._standing.gate.waited_s
        try:
            batch = next(source)
        except StopIteration:
            return None
        finally:
            waited_s = self._standing.gate.waited_s - waited_s
            if waited_s:
                self._rank.step.clock.timer.control_waited(waited_s)
        item = self._item(batch)
        if item.weight is None:
            return item
        # All micro-batches of a step are loaded before the first is yielded, because scaling it
        # needs the sum of their weights.
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
