"""Connects checkpoints to a `Stride`: its ranks, their agreements, and the times to save."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.errors import (
    CheckpointError,
    ConfigError,
    EvenstrideError,
    StepInFlight,
    WorkerLost,
)
from evenstride.runtime.checkpoint.handoff import Handoff
from evenstride.runtime.coordination.agreement import Plain
from evenstride.runtime.coordination.run_lifecycle import RunLifecycle
from evenstride.runtime.failures.survivors import Survivors
from evenstride.runtime.loading.seeding import (
    SeededDataset,
    generators_kept,
    item_seeds,
    seed_generators,
)
from evenstride.runtime.loading.shards import ShardReader, Shards
from evenstride.runtime.parameter_server.server_worker import ServedWorker
from evenstride.runtime.synchronisation.delayed_gradients import DelayedTraining
from evenstride.runtime.synchronisation.local_sgd import LocalTraining

logger = logging.getLogger("evenstride")


class SavedRun(Protocol):
    """The part of a `Stride` that checkpoints use, so that they need not import it."""

    _session: Any  # a `RankSession`

    @property
    def step(self) -> int:
        """Trained steps, over all restarts."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""

    def close(self) -> None:
        """Close the connections to the other ranks."""


class RunBinding:
    """One rank's connection to its team.

    With a handoff folder, its creation waits until the previous run has saved.
    """

    def __init__(self, run: SavedRun) -> None:
        session = run._session
        self.environment = session.environment
        self.rank: int = session.team.rank
        self.world_size: int = session.team.world_size
        self.run = run
        self._loaders = session.loaders
        self._progress = session.state.progress
        self._calls = session.ties.calls
        self._recall = session.ties.opening.recall
        self._lifecycle = lifecycle = cast(RunLifecycle, session.ties.lifecycle)
        self.saves = lifecycle.saves
        self.leads_host = lifecycle.leads_host
        self.interval_s = lifecycle.pace.interval_s
        self.remember = lifecycle.remember
        self.waiting: Callable[[], AbstractContextManager[None]] = session.state.clock.waiting
        """Returns a context whose time counts as waiting time, not as busy time."""
        self._survivors: Survivors | None = session.ties.survivors
        self._sync: object = session.sync
        self.lockstep: bool = session.free is None
        """Whether all ranks are at the same step at the same time."""
        self._described: tuple[Any, dict[str, Any]] | None = None
        self._hand_over: Handoff | None = None
        if (folder := self.environment.hand_over) is not None:
            ranks = tuple(range(self.world_size))
            self._hand_over = Handoff(folder, self.saves, self.rank, ranks, self.agree)
            # Here, after the slow part of starting up: the other run trains until now.
            self._hand_over.wait()

    def agree(
        self, call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
    ) -> Plain:
        """Return the leader's answer to the values of all ranks; collective."""
        with self.waiting():
            answer: Plain = self._calls.agree(call, show, judge)
            return answer

    def own_group(self) -> dist.ProcessGroup | None:
        """Return a Gloo group for checkpoints alone; collective; ``None`` with one process."""
        group: dist.ProcessGroup | None = self._calls.own_group("gloo")
        return group

    def dataset(self) -> Any:
        """Return the data set of the training loader; ``None`` without a loader."""
        loader = self._loaders.latest
        return None if loader is None else loader.dataset

    def described(self) -> dict[str, Any]:
        """Return the description of the data set; see `describe`."""
        dataset = self.dataset()
        # Describing a data set loads samples, so each is described once.
        if self._described is None or self._described[0] is not dataset:
            self._described = dataset, describe(dataset, self.run.state_dict()["seed"])
        return self._described[1]

    def committed(self) -> int:
        """Return the number of steps that this process has committed; the unit of `saves`."""
        steps: int = self._progress.step
        return steps

    def pending(self) -> bool:
        """Return whether a save or a departure may be due now; cheap."""
        if self._hand_over is not None:
            self._hand_over.look()
        return self.saves.pending(self.committed())

    def due(self) -> bool:
        """Return whether to save after this step; the same on all ranks, and true once."""
        due = self.saves.due(self.committed())
        if due and self._hand_over is not None:
            self._hand_over.agree_on_end(self.committed())
        return due

    def complete(self) -> bool:
        """Return whether no rank is missing; warn otherwise.

        At the end of an epoch the answer is the same on all ranks.
        """
        absent = () if self._survivors is None else self._survivors.absent()
        self._warn_of(absent)
        return not absent

    def forgives(self, error: EvenstrideError) -> bool:
        """Return whether a rank was lost during a save and the others continue without it.

        The answer is the same on all ranks, because no rank can save without the lost one.
        """
        if self._survivors is None or not isinstance(error, WorkerLost | CheckpointError):
            return False
        absent = self._survivors.blamed(error)
        self._warn_of(absent)
        return bool(absent)

    def _warn_of(self, absent: tuple[int, ...]) -> None:
        if absent and self.rank == min(set(range(self.world_size)) - set(absent)):
            logger.warning(
                "no checkpoint is saved, because worker(s) %s are lost and a save needs all "
                "workers; training continues; restart the run to continue from the newest "
                "checkpoint with all workers",
                ", ".join(map(str, absent)),
            )

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for a save in modes that continue without a lost rank; else return at once.

        Raises:
            WorkerLost: a rank is lost.
        """
        if self._survivors is not None:
            self._survivors.until(done, "saving")

    def state(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return the `Stride`'s state to save, and bring the optimizers' states to this rank."""
        state = self.run.state_dict()
        if not self.lockstep and state["position"]:
            raise StepInFlight(
                "a checkpoint was requested in mid-epoch, but in this synchronisation mode the "
                "weights of the workers differ during an epoch; call save() on every rank after "
                "the loop over an epoch. An epoch that EVENSTRIDE_MAX_STEPS cuts short cannot be "
                "saved"
            )
        # Last: it is collective and may average weights, which a refused save must not do.
        with self.waiting():
            if isinstance(self._sync, ServedWorker):  # also optimizers that have not stepped yet
                self._sync.bring_home(optimizers)
            elif isinstance(self._sync, LocalTraining | DelayedTraining):
                self._sync.bring_home()
        return state

    def with_own(self, extra: Any) -> Any:
        """Return the user's additional objects to save, and those of the synchronisation mode."""
        sync = self._sync
        if isinstance(sync, LocalTraining) and sync.remembers and isinstance(extra or {}, Mapping):
            return {**(extra or {}), "evenstride-outer": sync}
        return extra

    def begin(self, save_s: float, notices: str | None, saving: Saving | None) -> None:
        """Start saving this run, and watch for notices.

        ``save_s`` is the assumed duration of the first save. ``notices`` names the sources;
        ``None`` means those of the environment. Asynchronous modes do not watch for notices: no
        rank could save in mid-epoch, and other workers train the samples of a lost one. There a
        signal keeps its usual effect.
        """
        lifecycle = self._lifecycle
        if self.saves.save_s is not None:
            raise ConfigError(
                "this Stride already has a Checkpointer, and only one can be active; close() that "
                "one first, or pass it all objects to save (extra=)"
            )
        if self.lockstep:
            lifecycle.watch(notices)
        elif self.rank == 0 and (asked := notices or lifecycle.notices) not in ("auto", "off"):
            logger.warning(
                "notices=%s has no effect in this synchronisation mode, which cannot save in "
                "mid-epoch: a preempted worker ends at once, and the others train its samples; "
                "remove notices, or use bsp",
                asked,
            )
        lifecycle.pace.save_by(saving or Saving())
        self.saves.takes(save_s)

    def end(self) -> None:
        """Stop saving this run, and restore the signal handlers."""
        if self._hand_over is not None:
            self._hand_over.ended()
        self.saves.takes(None)
        self._lifecycle.notified.close()

    def recall(self, remembered: Plain) -> None:
        """Load what an earlier run learned about the workers; collective; before the first step."""
        at = self._progress
        if self._hand_over is not None:
            self._hand_over.went_on(epoch=at.epoch, position=at.position, step=at.earlier + at.step)
        # A recalled split is the opening split, so it must come before the first drawn step.
        if not at.step:
            self._recall(remembered)


def describe(dataset: Any, seed: int) -> dict[str, Any]:
    """Return kind and length of a data set, and a digest of its first, middle and last sample.

    The samples are loaded with fixed seeds, so that random augmentation is the same each time.
    The digest is left out if two loads differ, if loading fails, or if a sample holds other types
    than tensors, arrays, numbers and strings. `Shards` have no digest either.

    Args:
        dataset: the training loader's; ``None`` without a loader.
        seed: the run's seed.

    Cost:
        Loads three samples, twice.
    """
    while isinstance(dataset, SeededDataset):
        dataset = dataset.dataset
    if dataset is None:
        return {}
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    try:
        length = len(dataset)
    except TypeError:
        return {"kind": kind}
    described = {"kind": kind, "length": length}
    if isinstance(dataset, Shards | ShardReader) or not length:
        return described
    try:
        # Random augmentation here must not advance the run's own random numbers.
        with generators_kept():
            first, second = _digest(dataset, length, seed), _digest(dataset, length, seed)
    except Exception:  # if the error matters, training raises it
        return described
    return {**described, "samples": first} if first == second else described


def _digest(dataset: Any, length: int, seed: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    indices = np.unique(np.array([0, length // 2, length - 1]))
    for index, own in zip(indices.tolist(), item_seeds(seed, 0, indices).tolist(), strict=True):
        seed_generators(own)
        _add(digest, dataset[index])
    return digest.hexdigest()


def _add(digest: Any, sample: Any) -> None:
    if isinstance(sample, torch.Tensor):
        sample = sample.detach().cpu().resolve_conj().contiguous().flatten()
        digest.update(f"{sample.dtype}{len(sample)}".encode())
        digest.update(sample.view(torch.uint8).numpy().data)
    elif isinstance(sample, np.ndarray | np.generic):
        digest.update(f"{sample.dtype}{sample.shape}".encode())
        digest.update(np.ascontiguousarray(sample).tobytes())
    elif isinstance(sample, dict):
        for key in sample:
            _add(digest, key)
            _add(digest, sample[key])
    elif isinstance(sample, list | tuple):
        for value in sample:
            _add(digest, value)
    elif sample is None or isinstance(sample, bool | int | float | str | bytes):
        digest.update(repr(sample).encode())
    else:
        raise TypeError(type(sample).__name__)
