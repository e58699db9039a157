"""What checkpoints need of a `Stride`: who the ranks are, how they agree, and when to save."""

from __future__ import annotations

import hashlib
import logging
import random
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
from evenstride.runtime.loading.seeding import SeededDataset, generators_kept, item_seeds
from evenstride.runtime.loading.shards import ShardReader, Shards
from evenstride.runtime.parameter_server.server_worker import ServedWorker
from evenstride.runtime.synchronisation.delayed_gradients import DelayedTraining
from evenstride.runtime.synchronisation.local_sgd import LocalTraining

logger = logging.getLogger("evenstride")


class SavedRun(Protocol):
    """What a `Stride` is to checkpoints, which need not import all that it is made of."""

    _session: Any  # a `RankSession`

    @property
    def step(self) -> int:
        """Steps trained, over all restarts."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""

    def close(self) -> None:
        """Part from the other ranks."""


class RunBinding:
    """One rank's ties to its team.

    With a folder for a hand-over it waits, when made, until the run before has saved.
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
        """Returns a context in which this rank's time is not its own work."""
        self._survivors: Survivors | None = session.ties.survivors
        self._sync: object = session.sync
        self.lockstep: bool = session.free is None
        """Whether all ranks are at the same step whenever one is."""
        self._described: tuple[Any, dict[str, Any]] | None = None
        self._hand_over: Handoff | None = None
        if (folder := self.environment.hand_over) is not None:
            everyone = tuple(range(self.world_size))
            self._hand_over = Handoff(folder, self.saves, self.rank, everyone, self.agree)
            # Here, when all that is slow to start has started: the other run trains until now.
            self._hand_over.wait()

    def agree(
        self, call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
    ) -> Plain:
        """Return the leader's verdict on what all ranks show; collective."""
        with self.waiting():
            verdict: Plain = self._calls.agree(call, show, judge)
            return verdict

    def own_group(self) -> dist.ProcessGroup | None:
        """Return a Gloo group of all ranks for us alone; collective; ``None`` with one process."""
        group: dist.ProcessGroup | None = self._calls.own_group("gloo")
        return group

    def dataset(self) -> Any:
        """Return the data set of the training loader; ``None`` if there is none."""
        loader = self._loaders.latest
        return None if loader is None else loader.dataset

    def described(self) -> dict[str, Any]:
        """Return what the data set is like; see `describe`."""
        dataset = self.dataset()
        # Describing a data set loads samples, so it is done once for each.
        if self._described is None or self._described[0] is not dataset:
            self._described = dataset, describe(dataset, self.run.state_dict()["seed"])
        return self._described[1]

    def committed(self) -> int:
        """Return the steps that this process has committed, which `saves` counts in."""
        steps: int = self._progress.step
        return steps

    def pending(self) -> bool:
        """Return whether a save or a departure may be due by now; cheap."""
        if self._hand_over is not None:
            self._hand_over.look()
        return self.saves.pending(self.committed())

    def due(self) -> bool:
        """Return whether to save after this step; alike on all ranks, and once."""
        due = self.saves.due(self.committed())
        if due and self._hand_over is not None:
            self._hand_over.agree_on_end(self.committed())
        return due

    def complete(self) -> bool:
        """Return whether all ranks are there to save together; warn if they are not.

        At the end of an epoch all ranks know that alike.
        """
        absent = () if self._survivors is None else self._survivors.absent()
        self._tell_of(absent)
        return not absent

    def forgives(self, error: EvenstrideError) -> bool:
        """Return whether a rank was lost during a save, and the others go on without it.

        All of them come to this, since none can have saved without it.
        """
        if self._survivors is None or not isinstance(error, WorkerLost | CheckpointError):
            return False
        absent = self._survivors.blamed(error)
        self._tell_of(absent)
        return bool(absent)

    def _tell_of(self, absent: tuple[int, ...]) -> None:
        if absent and self.rank == min(set(range(self.world_size)) - set(absent)):
            logger.warning(
                "nothing is saved, as worker(s) %s are gone and cannot take part; training goes "
                "on; start the run again to have all of them, from the newest checkpoint on",
                ", ".join(map(str, absent)),
            )

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for a save in modes in which the others go on without a rank; else return at once.

        Raises:
            WorkerLost: a rank is lost.
        """
        if self._survivors is not None:
            self._survivors.until(done, "saving")

    def state(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return the `Stride`'s state to be saved; the optimizers have theirs here then."""
        state = self.run.state_dict()
        if not self.lockstep and state["position"]:
            raise StepInFlight(
                "a checkpoint was asked for in mid-epoch, and in this mode of synchronisation "
                "workers do not keep step, so that they have different weights; call save() on "
                "every rank after the loop over an epoch has ended. A limit of steps "
                "(EVENSTRIDE_MAX_STEPS) cuts an epoch, which cannot be saved"
            )
        # Last: it is collective and may average weights, and a refused save must not do that.
        with self.waiting():
            if isinstance(self._sync, ServedWorker):  # also those that have not stepped here yet
                self._sync.bring_home(optimizers)
            elif isinstance(self._sync, LocalTraining | DelayedTraining):
                self._sync.bring_home()
        return state

    def with_own(self, extra: Any) -> Any:
        """Return the user's further objects to be saved, and the mode's own."""
        sync = self._sync
        if isinstance(sync, LocalTraining) and sync.remembers and isinstance(extra or {}, Mapping):
            return {**(extra or {}), "evenstride-outer": sync}
        return extra

    def begin(self, save_s: float, notices: str | None, saving: Saving | None) -> None:
        """Note that this run is saved from now on, and watch for notices.

        ``save_s`` is what the first save is taken to need. ``notices`` says where to look for them;
        ``None`` is what the environment says. Where workers do not keep step, they are not watched
        for: no rank could save when one leaves, and its samples are trained by others anyway. So a
        signal does there what it does without us.
        """
        lifecycle = self._lifecycle
        if self.saves.save_s is not None:
            raise ConfigError(
                "this Stride has a Checkpointer already, and the ranks agree on one save at a "
                "time; close() that one first, or give it all that is to be saved (extra=)"
            )
        if self.lockstep:
            lifecycle.watch(notices)
        elif self.rank == 0 and (asked := notices or lifecycle.notices) not in ("auto", "off"):
            logger.warning(
                "notices=%s has no effect in this mode of synchronisation, in which nothing can be "
                "saved in mid-epoch: a worker that is told to leave ends at once, and the others "
                "train its samples; leave notices out, or use bsp",
                asked,
            )
        lifecycle.pace.save_by(saving or Saving())
        self.saves.takes(save_s)

    def end(self) -> None:
        """Note that it is saved no longer: signals do again what they did before."""
        if self._hand_over is not None:
            self._hand_over.ended()
        self.saves.takes(None)
        self._lifecycle.notified.close()

    def recall(self, remembered: Plain) -> None:
        """Take up what an earlier run knew of the workers, before the first step; collective."""
        at = self._progress
        if self._hand_over is not None:
            self._hand_over.went_on(epoch=at.epoch, position=at.position, step=at.earlier + at.step)
        # A recalled split is an opening one: no step may have been drawn by another.
        if not at.step:
            self._recall(remembered)


def describe(dataset: Any, seed: int) -> dict[str, Any]:
    """Return kind and length of a data set, and a digest of its first, middle and last sample.

    The samples are loaded under seeds of their own, so that random augmentation is the same each
    time. Samples that differ nevertheless when loaded twice, that hold anything but tensors,
    arrays, numbers and texts, or that cannot be loaded here, have no digest; neither have `Shards`.

    Args:
        dataset: that the training loader reads; ``None`` if there is no loader.
        seed: of the run.

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
    told = {"kind": kind, "length": length}
    if isinstance(dataset, Shards | ShardReader) or not length:
        return told
    try:
        # Random augmentation here must not move the run's own random numbers.
        with generators_kept():
            first, second = _digest(dataset, length, seed), _digest(dataset, length, seed)
    except Exception:  # whatever a data set raises, training will meet it, or it never happens
        return told
    return {**told, "samples": first} if first == second else told


def _digest(dataset: Any, length: int, seed: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    indices = np.unique(np.array([0, length // 2, length - 1]))
    for index, own in zip(indices.tolist(), item_seeds(seed, 0, indices).tolist(), strict=True):
        torch.default_generator.manual_seed(own >> 1)
        # numpy takes seeds of 32 bits only.
        np.random.seed(own & 0xFFFFFFFF)
        random.seed(own)
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
