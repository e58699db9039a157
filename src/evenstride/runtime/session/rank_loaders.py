"""A rank's training loader, as all ranks have agreed on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from evenstride.errors import ConfigError, LoaderBusy
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.coordinator import Coordinator
from evenstride.runtime.coordination.draw_barrier import BatchChange
from evenstride.runtime.engines.weight_drift import DriftGuard
from evenstride.runtime.loading.loader import Rank, TrainLoader
from evenstride.runtime.loading.loader_agreement import (
    check_loader,
    judge_loader,
    layout,
    longest_tail,
    order_of,
    policy_partitions,
)
from evenstride.runtime.loading.loader_options import (
    CostFn,
    Costs,
    DataLoaderOptions,
    LoaderOptions,
    calibration,
    check_options,
    dataset_length,
)
from evenstride.runtime.loading.position import BatchChanges
from evenstride.runtime.loading.sampler import StepSampler
from evenstride.runtime.loss.training_step import TrainingStep
from evenstride.runtime.session.opening_split import OpeningSplit
from evenstride.runtime.session.rank_calls import RankCalls
from evenstride.runtime.session.rank_state import RankState
from evenstride.runtime.settings import Settings


class TrainLoaders:
    """The current training loader, of which a rank has one at a time.

    ``turn`` waits until the global batch is decided, and returns it. ``calibrate`` is the value of
    ``EVENSTRIDE_CALIBRATE``; ``None`` without calibration.
    """

    def __init__(
        self,
        state: RankState,
        step: TrainingStep,
        coordinator: Coordinator,
        calls: RankCalls,
        opening: OpeningSplit,
        drift: DriftGuard,
        turn: Callable[[BatchChange], int | None],
        settings: Settings,
        sampler: Callable[..., StepSampler],
        calibrate: str | None,
    ) -> None:
        self._calls, self._opening = calls, opening
        self._settings, self._calibrate = settings, calibrate
        turns = None
        if settings.meets:
            turns = BatchChanges(
                state.progress,
                state.limits,
                state.clock,
                state.noise,
                turn,
                chosen=settings.chosen,
            )
        self._rank = Rank(
            coordinator,
            step,
            state.progress,
            max_steps=settings.max_steps,
            sampler=sampler,
            turns=turns,
            drift=drift,
            load=self.load,
        )
        # Weak, because a loader in a reference cycle ends its processes slowly (5 s each).
        self._latest: Callable[[], TrainLoader | None] = _none

    @property
    def latest(self) -> TrainLoader | None:
        """The latest loader, as long as the script keeps it."""
        return self._latest()

    def busy(self) -> bool:
        """Return whether the training loop is running."""
        return self.latest is not None and self.latest.busy

    def refuse_in_loop(self, call: str) -> None:
        """Raise if the training loop is running."""
        if self.busy():
            raise LoaderBusy(f"{call} was called inside the training loop; leave the loop first")

    def make(
        self,
        dataset: Any,
        asked: LoaderOptions,
        options: DataLoaderOptions,
        cost_fn: CostFn | None,
    ) -> TrainLoader:
        """Return a training loader; see `Stride.loader`; collective."""
        settings, progress, step = self._settings, self._rank.progress, self._rank.step
        costs: list[Costs] = []
        if asked.by_epoch is None:
            parts = policy_partitions(dataset, settings, by_cost=cost_fn is not None)
            # A calibration has one rank, whose batches change within an epoch.
            asked = replace(asked, by_epoch=parts and self._calibrate is None)
        processes = options.get("num_workers", 0)

        def show() -> Plain:
            # All checks are in here, so that an error of one rank is raised on every rank.
            check_options(options)
            self._refuse_second()
            batch = progress.global_batch
            check_loader(dataset, asked, settings, batch, by_cost=cost_fn is not None)
            if cost_fn is not None:
                costs.append(Costs(cost_fn, dataset_length(dataset)))
            seed = self._calls.seed_to_compare(settings.seed)
            shown = layout(dataset, asked, processes, seed)
            return {**shown, "cost_fn": costs[0].digest() if costs else None}

        verdict = self._calls.agree("loader()", show, judge_loader)
        tail = longest_tail(verdict, progress.global_batch)
        step.limits.lay_out(verdict["micro"], tail, by_cost=cost_fn is not None)
        if verdict["cold_prefetch"]:
            self._opening.skip()
        # Here, where all ranks pass: in the loop they would create the group at different batches.
        if verdict["weighted"]:
            step.weights.open()
        progress.attach(order_of(dataset, verdict, asked, settings.seed))
        # After the agreement: a calibration has one process, so no rank waits after an error here.
        sizes = calibration(self._calibrate, self._calls.world_size, settings.global_batch)
        asked = replace(asked, sizes=sizes, costs=costs[0] if costs else None)
        # Two loaders would draw the same samples from one position.
        if (former := self.latest) is not None:
            former.retire()
        loader = TrainLoader(self._rank, dataset, asked, options)
        self._latest = weakref.ref(loader)
        return loader

    def save(self) -> Plain:
        """Return the committed position; raise `StepInFlight` within a step."""
        return self._rank.save()

    def load(self, position: Plain) -> None:
        """Go to a saved position; see `CommittedPosition.load`."""
        self.refuse_in_loop("load_state_dict()")
        parts = position.get("parts") if isinstance(position, dict) else None
        if parts and len(parts) != self._calls.world_size and not position.get("parts_end"):
            # Other ranks train what the parts have left, step by step.
            position = {**position, "parts_end": position.get("position")}
        self._rank.progress.load(position)

    def _refuse_second(self) -> None:
        loader, progress = self.latest, self._rank.progress
        if loader is None:
            return
        between_epochs = progress.earlier + progress.step > 0 and not progress.position
        if loader.busy or not between_epochs:
            raise ConfigError(
                "this Stride has a training loader already, and stride.epoch counts its epochs. "
                "Use train=False for evaluation, or create another Stride. To replace the data, "
                "create the new loader between two epochs"
            )


def _none() -> None:
    """Return ``None``, as a weak reference does once its object is gone."""
