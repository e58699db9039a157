"""What checkpoints need of a `Stride`: who the ranks are, how they agree, and when to save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

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
from evenstride.runtime.parameter_server.server_worker import ServedWorker
from evenstride.runtime.rank_session import RankSession
from evenstride.runtime.synchronisation.delayed_gradients import DelayedTraining
from evenstride.runtime.synchronisation.local_sgd import LocalTraining

logger = logging.getLogger("evenstride")


class SaveAgreement(Protocol):
    """Lets all ranks save at the same step, when it is the leader who knows that it is time."""

    @property
    def save_s(self) -> float | None:
        """Seconds that a save takes, kept by the leader; ``None`` before the first."""
        ...

    def takes(self, save_s: float | None) -> None:
        """Note how long a save takes, in seconds; ``None`` if nobody saves."""
        ...

    def pending(self, steps: int) -> bool:
        """Return whether something may be due by now; cheap."""
        ...

    def due(self, steps: int) -> bool:
        """Return whether to save when ``steps`` steps are committed; alike on all ranks, once."""
        ...

    def going(self, steps: int) -> tuple[tuple[int, ...], str]:
        """Return the ranks that end when ``steps`` steps are committed, and why."""
        ...

    def ask(self, reason: str) -> None:
        """Let `due` be true at some later step (leader only); to ask again changes nothing."""
        ...


class RunBinding(Protocol):
    """A rank's ties to its team."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def saves(self) -> SaveAgreement:
        """When all ranks save together."""
        ...

    def agree(
        self, call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
    ) -> Plain:
        """Return the leader's verdict on what all ranks show; collective."""
        ...

    def own_group(self) -> dist.ProcessGroup | None:
        """Return a Gloo group of all ranks for us alone; collective; ``None`` with one process."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which this rank's time is not its own work."""
        ...

    def dataset(self) -> Any:
        """Return the data set of the training loader; ``None`` if there is none."""
        ...

    def committed(self) -> int:
        """Return the steps that this process has committed, which `saves` counts in."""
        ...

    def interval_s(self, save_s: float) -> float:
        """Return the seconds until the next save, by what one takes (leader only)."""
        ...

    @property
    def lockstep(self) -> bool:
        """Whether all ranks are at the same step whenever one is."""
        ...

    def bring_home(self, optimizers: Sequence[Optimizer]) -> None:
        """Let these optimizers have the state that is kept elsewhere, such as on servers."""
        ...

    def complete(self) -> bool:
        """Return whether all ranks are there to save together; warn if they are not."""
        ...

    def forgives(self, error: EvenstrideError) -> bool:
        """Return whether a save failed because of a lost rank that is not missed; warn then."""
        ...

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for a save, or raise if a rank is lost that is not missed."""
        ...

    def begin(self, save_s: float, notices: str | None, saving: Saving | None) -> None:
        """Note that this run is saved from now on, by one; see `SessionBinding.begin`."""
        ...

    def end(self) -> None:
        """Note that it is saved no longer."""
        ...

    def leads_host(self, going: tuple[int, ...]) -> bool:
        """Return whether this rank speaks for its machine, whose ranks all go."""
        ...

    def remember(self) -> Plain:
        """Return what is known of the workers (leader only)."""
        ...

    def recall(self, remembered: Plain) -> None:
        """Take up what `remember` returned in an earlier run; collective."""
        ...


def state_of(stride: Any, ties: RunBinding, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return a `Stride`'s state to be saved; the optimizers have theirs here then.

    Raises:
        StepInFlight: workers are not at one step, or this one is in the midst of it.
    """
    state: dict[str, Any] = stride.state_dict()
    if not ties.lockstep and state["position"]:
        raise StepInFlight(
            "a checkpoint was asked for in mid-epoch, and in this mode of synchronisation workers "
            "do not keep step, so that they have different weights; call save() on every "
            "rank after the loop over an epoch has ended. A limit of steps (EVENSTRIDE_MAX_STEPS) "
            "cuts an epoch, which cannot be saved"
        )
    # Last: it is collective and may average weights, so a save that is refused must not come here.
    ties.bring_home(optimizers)
    return state


class SessionBinding:
    """The ties of a `Stride`, by its member."""

    def __init__(self, member: RankSession) -> None:
        self._member = member
        self.rank, self.world_size = member.team.rank, member.team.world_size
        self.saves: SaveAgreement = member.ties.continuity.saves
        self._hand_over: Handoff | None = None
        if (folder := member.environment.hand_over) is not None:
            self.saves = self._hand_over = Handoff(
                folder, member.ties.continuity.saves, self.rank, self.world_size, self.agree
            )
            # Here, when all that is slow to start has started: the other run trains until now.
            self._hand_over.wait()

    def agree(
        self, call: str, show: Callable[[], Plain], judge: Callable[[list[Plain]], Plain]
    ) -> Plain:
        """Return the leader's verdict on what all ranks show; collective."""
        with self.waiting():
            return self._member.ties.calls.agree(call, show, judge)

    def own_group(self) -> dist.ProcessGroup | None:
        """Return a Gloo group of all ranks for us alone; collective."""
        return self._member.ties.calls.own_group("gloo")

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which this rank's time is not its own work."""
        return self._member.state.clock.waiting()

    def dataset(self) -> Any:
        """Return the data set of the training loader."""
        loader = self._member.loaders.latest
        return None if loader is None else loader.dataset

    def committed(self) -> int:
        """Return the steps that this process has committed."""
        return self._member.state.progress.step

    def interval_s(self, save_s: float) -> float:
        """Return the seconds until the next save, by losses so far and what a save takes."""
        return self._member.ties.continuity.pace.interval_s(save_s)

    @property
    def lockstep(self) -> bool:
        """Whether all ranks are at the same step whenever one is."""
        return self._member.free is None

    def complete(self) -> bool:
        """Return whether all ranks are there; at the end of an epoch all know alike."""
        survivors = self._member.ties.survivors
        absent = () if survivors is None else survivors.absent()
        self._tell_of(absent)
        return not absent

    def forgives(self, error: EvenstrideError) -> bool:
        """Return whether a rank was lost during the save, and the others go on without it.

        All of them come to this, since none can have saved without it.
        """
        survivors = self._member.ties.survivors
        if survivors is None or not isinstance(error, WorkerLost | CheckpointError):
            return False
        absent = survivors.blamed(error)
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
        if self._member.ties.survivors is not None:
            self._member.ties.survivors.until(done, "saving")

    def bring_home(self, optimizers: Sequence[Optimizer]) -> None:
        """Let the optimizers here have the state that servers keep, or that all ranks' come to."""
        sync: object = self._member.sync
        with self.waiting():
            if isinstance(sync, ServedWorker):  # also those that have not stepped on this rank yet
                sync.bring_home(optimizers)
            elif isinstance(sync, LocalTraining | DelayedTraining):
                sync.bring_home()

    def with_own(self, extra: Any) -> Any:
        """Return the user's further objects to be saved, and the mode's own."""
        sync = self._member.sync
        if isinstance(sync, LocalTraining) and sync.remembers and isinstance(extra or {}, Mapping):
            return {**(extra or {}), "evenstride-outer": sync}
        return extra

    def begin(self, save_s: float, notices: str | None, saving: Saving | None) -> None:
        """Note that this run is saved from now on, and watch for notices.

        Args:
            save_s: seconds that the first save is taken to need.
            notices: where to look for them; ``None`` for what the environment says. They are not
                where workers do not keep step: no rank could save when one leaves, and its
                samples are trained by others anyway. So a signal does there what it does without
                us.
            saving: how to decide when to save; ``None`` for the usual way.

        Raises:
            ConfigError: somebody else saves it already, or the setting is not understood.
        """
        continuity = self._member.ties.continuity
        if continuity.saves.save_s is not None:
            raise ConfigError(
                "this Stride has a Checkpointer already, and the ranks agree on one save at a "
                "time; close() that one first, or give it all that is to be saved (extra=)"
            )
        if self.lockstep:
            continuity.watch(notices)
        elif self.rank == 0 and (asked := notices or continuity.notices) not in ("auto", "off"):
            logger.warning(
                "notices=%s has no effect in this mode of synchronisation, in which nothing can be "
                "saved in mid-epoch: a worker that is told to leave ends at once, and the others "
                "train its samples; leave notices out, or use bsp",
                asked,
            )
        continuity.pace.save_by(saving or Saving())
        continuity.saves.takes(save_s)

    def end(self) -> None:
        """Note that it is saved no longer: signals do again what they did before."""
        if self._hand_over is not None:
            self._hand_over.ended()
        self._member.ties.continuity.saves.takes(None)
        self._member.ties.continuity.notified.close()

    def leads_host(self, going: tuple[int, ...]) -> bool:
        """Return whether this rank is the first of its machine, whose ranks all go."""
        return self._member.ties.continuity.leads_host(going)

    def remember(self) -> Plain:
        """Return what is known of the workers (leader only)."""
        return self._member.ties.continuity.remember()

    def recall(self, remembered: Plain) -> None:
        """Take up what an earlier run knew of the workers, before the first step; collective."""
        if self._hand_over is not None:
            at = self._member.state.progress
            self._hand_over.went_on(epoch=at.epoch, position=at.position, step=at.earlier + at.step)
        # A recalled split is an opening one: no step may have been drawn by another.
        if not self._member.state.progress.step:
            self._member.ties.opening.recall(remembered)
