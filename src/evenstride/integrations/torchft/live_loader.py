"""The loader of live mode: batches of the present generation, those of older ones forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from evenstride.errors import LoaderBusy
from evenstride.integrations.torchft.live_generation import LiveGeneration
from evenstride.integrations.torchft.live_run import LiveRun
from evenstride.runtime.loading.loader import Rank, TrainLoader
from evenstride.runtime.loading.loader_options import DataLoaderOptions, LoaderOptions

_END = object()


class LiveLoader:
    """An iterable over this worker's part of each global batch.

    ``len(loader)`` is the number of steps of an epoch. A batch whose step was dropped comes again,
    cut among the workers there are then; samples are the same.
    """

    def __init__(
        self, run: LiveRun, dataset: Any, options: LoaderOptions, torch_options: DataLoaderOptions
    ) -> None:
        self._run, self._dataset = run, dataset
        self._options, self._torch_options = options, torch_options
        self._busy = False

    def __len__(self) -> int:
        return self._run.progress.cursor.steps

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of the current epoch.

        Raises:
            LoaderBusy: another loop over this loader has not ended.
        """
        if self._busy:
            raise LoaderBusy(
                "a loop over this training loader is still going on, and both would train the "
                "same samples; end it first (leave the loop, or close() its iterator)"
            )
        return self._loop()

    def _loop(self) -> Iterator[Any]:
        run, inner, generation = self._run, cast("Iterator[Any]", iter(())), None
        run.check_voted()
        self._busy = True
        try:
            epoch = None
            while not (generation is not None and self._between() and self._over()):
                now = run.stand() if self._between() else generation
                if epoch is None:
                    epoch = run.progress.epoch
                if now is not generation:
                    _close(inner)
                    assert now is not None, "there is a generation after the workers have met"
                    generation, inner = now, self._batches(now)
                if run.progress.epoch != epoch:
                    return  # the others have ended this one
                batch = next(inner, _END)
                if batch is _END:
                    return
                yield batch
                run.step.batch.check_finished()
                if run.step.batch.synced:
                    run.step.clock.timer.fetch_started()  # the step before is finished by it
                    run.check_voted()
            next(inner, None)  # ends the epoch
        finally:
            self._busy = False
            _close(inner)

    def _between(self) -> bool:
        """Whether the next batch begins a step."""
        return self._run.step.batch.synced

    def _over(self) -> bool:
        return self._run.committed and self._run.progress.cursor.done

    def _batches(self, generation: LiveGeneration) -> Iterator[Any]:
        run = self._run
        rank = Rank(
            gate=generation.gate,
            step=run.step,
            progress=run.progress,
            rank=generation.quorum.rank,
            max_steps=None,
            tick=None,  # decisions are made before each step, see `LiveRun.stand`
            explain_failure=lambda: None,
        )
        options = cast("DataLoaderOptions", dict(self._torch_options))
        return iter(TrainLoader(rank, self._dataset, self._options, options))


def _close(batches: Iterator[Any]) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()
