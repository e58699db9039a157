"""`Checkpointer`: saves a training run beside its training, and restores it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.errors import CheckpointError, ConfigError, EvenstrideError, UsageError
from evenstride.runtime.checkpoint.endings import end_in_error, last_wait_s, part
from evenstride.runtime.checkpoint.format.manifest import Name, parse_name
from evenstride.runtime.checkpoint.format.retention import Lineage
from evenstride.runtime.checkpoint.restore.restorer import Restored, Restorer
from evenstride.runtime.checkpoint.restore.saved_state import collect
from evenstride.runtime.checkpoint.run_binding import RunBinding, SavedRun
from evenstride.runtime.checkpoint.save.checkpoint_writer import Saver
from evenstride.runtime.checkpoint.save.preparing import (
    CheckpointerArguments,
    prepare,
    tell_if_unrestored,
    tell_if_unsaved,
)
from evenstride.runtime.checkpoint.save.save_job import copy_part, manifest_of
from evenstride.runtime.checkpoint.save.save_statistics import SaveResult, SaveStatistics
from evenstride.runtime.failures.heartbeat import ending_exception
from evenstride.runtime.usage_errors import user_line

logger = logging.getLogger("evenstride")

# After a failure the leader asks for another save; the pause doubles from failure to failure.
_FIRST_RETRY_S, _LAST_RETRY_S = 15.0, 600.0
# What a save is taken to need before the first has been.
_FIRST_SAVE_S = 5.0


class Checkpointer:
    """Saves model, optimizer, position and randomness to a folder, beside training.

    Every rank makes it, with the same arguments, and makes the same calls::

        checkpoint = evenstride.Checkpointer(folder, stride, model=model, optimizer=optimizer)
        checkpoint.restore()
        for epoch in range(stride.epoch, epochs):
            for x, y in loader:
                ...
                optimizer.step(); optimizer.zero_grad()
                checkpoint.step()
        checkpoint.close()

    A save copies this rank's part, which takes training's time, and a thread writes it. Parts
    are dealt out by bytes: with DDP each of ``W`` ranks copies and writes a ``W``-th. A checkpoint
    can be restored at any number of ranks, is complete or does not count, and holds no pickle:
    loading it runs no code. A save that fails is told of and tried again while training goes on.

    Args:
        folder: a path that all ranks share, for this run alone; or a URL such as
            ``s3://bucket/run``, with ``evenstride[remote]`` and the store's fsspec package. Where
            ``EVENSTRIDE_CHECKPOINTS`` is set, as by ``evenstride lab``, a folder in that one is
            used instead.
        stride: the run's `Stride`; make its training loader before you call `restore`.
        model: plain, in DDP, or in FSDP2.
        optimizer: of the model's parameters; one or several.
        scheduler: one or several; anything with ``state_dict`` and ``load_state_dict``.
        every: steps from save to save, or a duration by rank 0's clock ("30s", "5min", a
            `datetime.timedelta`), or "auto": as often as the losses that were seen, and what a
            save takes, make best (Young and Daly), or a
            `evenstride.core.reliability.checkpoint_interval.Saving`.
        keep: complete checkpoints that stay, at least 1; older ones that this run wrote or was
            restored from are deleted once a newer one is in place. Others are never deleted.
        extra: more objects with ``state_dict`` and ``load_state_dict``, by name: a gradient
            scaler, an average of the weights. What they hold must be the same on every rank;
            where it is not, rank 0's is saved.
        notices: where to look for notices that this machine or process will be taken away:
            ``auto`` (signals, and the metadata service of the cloud that this is), ``off``, or
            names such as ``aws,signals``; see the page on notices. ``EVENSTRIDE_NOTICES`` sets it
            where the script does not. Such a rank gets no more samples, all ranks save, and it
            ends with exit code 143; the others raise `WorkerLost`, for a launcher to start them
            again.

    Raises:
        ConfigError: what was asked cannot be, or a state cannot be saved safely.
        RanksDisagree: the ranks were given different settings.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        stride: SavedRun,
        *,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any = None,
        every: int | str | timedelta | Saving = 100,
        keep: int = 2,
        extra: Mapping[str, Any] | None = None,
        notices: str | None = None,
    ) -> None:
        if not hasattr(stride, "_session"):
            raise ConfigError(
                f"stride is a {type(stride).__name__}; give the evenstride.Stride that deals the "
                "batches"
            )
        self._stride, self._ties = stride, RunBinding(stride)
        more = self._ties.with_own(extra)
        asked = CheckpointerArguments(
            folder, every, keep, model, optimizer, scheduler, more, self._ties.environment
        )
        self._is = prepare(asked, self._ties)
        self._saver = Saver(self._is.storage, self._ties.own_group(), keep, self._failed)
        self.interval_s: Callable[[float], float] = self._ties.interval_s
        """With ``every="auto"``: seconds from save to save, by what one costs in seconds."""
        self._seen, self._next = -1, self._is.cadence.after(stride.step)
        self._ask_at_s = math.inf
        self._name: Name | None = None
        self._lineage = Lineage()
        self._tally = SaveStatistics(str(self._is.storage), speaks=self._ties.rank == 0)
        self._copied_s = 0.0
        self._checked = self._closed = False
        self._unrestored, self._line = True, user_line()  # for warnings
        self._plan_by_clock()
        # Last: from here on signals are watched for, and what is refused above must not start
        # that.
        self._ties.begin(_FIRST_SAVE_S, notices, self._is.cadence.saving)
        atexit.register(self._close_at_exit)

    def step(self) -> None:
        """Save if it is due; every rank must call it after every optimizer step.

        A save that is still going on when the next is due is waited for. Where workers do not keep
        step (``asp``, ``ssp``) this saves nothing, and warns when it would: call `save` where an
        epoch has ended.

        Raises:
            ConfigError: at the first save, if some state cannot be saved safely.
            StepInFlight: a save is due between a step's backward pass and its optimizer step.
            SystemExit: this rank leaves, as it was told that it will be taken away.
            WorkerLost: others leave for that reason; start again to go on without them.

        Cost:
            Some microseconds when nothing is due; a copy of this rank's part when a save is.
        """
        step = self._stride.step
        # Without a new committed step there is nothing new to save.
        if step == self._seen:
            return
        self._refuse_if_closed("step")
        if self._seen < 0:
            self._tell_if_unrestored()
        self._seen = step
        # Clocks of ranks differ. Rank 0's counts, and it asks for a save that all make at one
        # step.
        by_clock = self._ties.rank == 0 and time.monotonic() >= self._ask_at_s
        if not self._ties.lockstep:
            if by_clock or step >= self._next:
                self._tally.due_in_vain()
            return
        if by_clock:
            self._ask()
        # Agreed saves count this process' own steps; `stride.step` also counts those of earlier
        # runs.
        pending = self._ties.pending()
        asked = pending and self._ties.due()
        if asked or step >= self._next:
            self._begin(step, asked=asked)
        if pending:
            # After the save, so that those who leave have no step that is not in it.
            self._let_go(*self._ties.saves.going(self._ties.committed()))

    def _tell_if_unrestored(self) -> None:
        """Warn before the first save if `restore` was not called, and should have been."""
        # More steps than this process has committed: the script has loaded a state itself.
        loaded_otherwise = self._stride.step > self._ties.committed()
        unrestored, self._unrestored = self._unrestored, False
        if unrestored and self._ties.rank == 0 and not loaded_otherwise:
            tell_if_unrestored(self._is.storage, self._is.generation, self._line)

    def save(self) -> None:
        """Save now, and return when it is done; collective.

        Where workers go on without one that was lost (``asp``, ``ssp``) it only warns: a rank that
        is gone cannot take part, also if it goes meanwhile.

        Raises:
            CheckpointError: it could not be saved; on every rank.
            ConfigError: some state cannot be saved safely.
            StepInFlight: between a step's backward pass and its optimizer step.
        """
        self._refuse_if_closed("save")
        if not self._ties.complete():
            return
        self._tell_if_unrestored()
        try:
            self._take_over()
            self._start(self._stride.step)
            self._take_over()
            if self._tally.error:
                raise CheckpointError(self._tally.error)
        except EvenstrideError as error:
            if not self._ties.forgives(error):
                raise
            # The lost rank's part will never come, so the thread that waits for it is left behind.
            self._saver.abandon()
            self._tally.forgive()

    def wait(self) -> None:
        """Wait until the save that is going on, if any, has ended; however it did."""
        self._take_over()

    def restore(self, allow: Collection[str] = ()) -> Restored | None:
        """Restore the newest checkpoint that is whole; collective; before the training loop.

        Damaged ones are passed over with a warning that names what is damaged, and are not
        deleted. Every file is checked before anything is overwritten. Ranks that the checkpoint
        knows go on with their own random numbers; others get seeds of their own.

        Args:
            allow: what may differ from the run that was saved: ``data``, ``global_batch``, and
                ``seed`` where an epoch begins.

        Returns:
            What was restored; ``None`` if there is nothing yet.

        Raises:
            ConfigError: the checkpoint is of another run or model; nothing has changed.
            CheckpointDamaged: there are checkpoints, and none of them is whole; or the newest was
                not written by evenstride, though its digests are right.
            CheckpointError: a file cannot be read now, after some tries.
        """
        self._refuse_if_closed("restore")
        self._unrestored = False
        self._take_over()
        data = self._ties.described()
        if self._ties.dataset() is None and self._ties.rank == 0:
            logger.warning(
                "restore() was called before the training loader was made, so the data set is not "
                "compared with that of the checkpoint; make the loader first where you can"
            )
        allowed = frozenset((allow,) if isinstance(allow, str) else allow)
        restorer = Restorer(
            self._is.reader, self._ties, self._saver.group, self._is.training, data, allowed
        )
        restored, self._lineage = restorer.run()
        if restored is not None:
            self._tally.begin_from(parse_name(restored.folder))
        elif self._is.source is not None:  # only read, so nothing there is ever deleted
            restored, _ = replace(restorer, storage=self._is.source).run()
        self._seen, self._next = self._stride.step, self._is.cadence.after(self._stride.step)
        self._plan_by_clock()
        return restored

    def report(self) -> dict[str, float]:
        """Return what saving has cost this rank so far.

        Returns:
            ``saved`` and ``failed`` saves, ``put_off`` because the one before was still going on,
            ``left_out`` after failures; ``copied_s`` and ``blocked_s``, seconds that training has
            waited for copies and for earlier saves; ``save_s``, seconds of the thread;
            ``written_bytes``.
        """
        return dict(self._tally.count)

    def close(self) -> None:
        """Wait for the save that is going on, and end. May be called again.

        If the last save failed, the state as it is now is saved once more: what was in the way may
        have gone. So every rank must call it, as they do `step`.

        Raises:
            CheckpointError: the newest state could not be saved; on every rank.
        """
        if self._closed:
            return
        self._take_over()
        # A save is collective: where only this rank knows of the failure, the others would not
        # join.
        if self._tally.failed is not None and self._tally.failed.everywhere:
            with contextlib.suppress(EvenstrideError):  # in mid-step, say: the failure stands
                self._start(self._stride.step)
            self._take_over()
        self._finish()

    def _finish(self) -> None:
        self._end()
        if self._tally.error:
            raise CheckpointError(self._tally.error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon(value)

    def _refuse_if_closed(self, call: str) -> None:
        if self._closed:
            raise UsageError(
                f"{call}() was called after close(), when the ranks no longer save together; make "
                "another Checkpointer, or close this one later"
            )

    def _begin(self, step: int, *, asked: bool) -> None:
        self._next = self._is.cadence.after(step)
        if self._saver.busy:
            self._tally.put_off()
        self._take_over()
        if asked or not self._tally.leaves_out():
            self._start(step)

    def _start(self, step: int) -> None:
        begun_s = time.monotonic()
        state = self._ties.state(self._is.training.optimizers)
        # An unsafe state is refused through an agreement: a rank that raised alone would leave the
        # others waiting in the save.
        if not self._checked:
            if self._ties.rank == 0:
                tell_if_unsaved(self._is.training, self._line)
            self._ties.agree("the first save", self._show_safe, lambda shown: shown[0])
            self._checked = True
        # Another try at the same step gets a folder of its own: ranks that lost touch may still
        # write to the one before.
        attempt = 0
        if self._name is not None and self._name.step == step:
            attempt = self._name.attempt + 1
        self._name = Name(step, self._is.generation, attempt)
        rank, training = self._ties.rank, self._is.training
        manifest = manifest_of(state, step, self._ties.world_size)
        if rank == 0:
            manifest = replace(
                manifest,
                data=self._ties.described(),
                workers=self._ties.remember(),
                earlier=tuple(self._lineage.names()),
                run=self._lineage.run,
            )
        job = copy_part(self._name, training, manifest, rank, self._saver.staging)
        self._plan_by_clock()  # before the thread, which plans another try if it fails
        self._saver.start(job, self._lineage)
        self._copied_s = time.monotonic() - begun_s
        self._tally.count["copied_s"] += self._copied_s

    def _let_go(self, going: tuple[int, ...], why: str) -> None:
        if not going:
            return
        # The processes end right after this, and with them the thread that writes.
        self._take_over()
        leads = self._ties.leads_host(going)
        self._end()
        if self._tally.error:
            logger.error("evenstride: ranks leave, but %s", self._tally.error)
            why = f"{why}; but the newest state could not be saved, so later steps are lost"
        part(self._stride.close, self._stride.step, self._ties.rank, going, why, leads_host=leads)

    def _show_safe(self) -> dict[str, Any]:
        collect(self._is.training)
        return {}

    def _take_over(self) -> None:
        """Wait for the save before, if there is one, and take note of how it ended."""
        begun_s = time.monotonic()
        with self._ties.waiting():
            # Counted as waiting: slow storage must not look like slow training and move the
            # shares.
            outcome = self._saver.take(wait=self._ties.until)
        self._tally.count["blocked_s"] += time.monotonic() - begun_s
        if outcome is not None:
            self._note(outcome)

    def _note(self, outcome: SaveResult) -> None:
        self._tally.note(outcome)
        if not outcome.error:
            self._ties.saves.takes(self._copied_s + outcome.took_s)

    def _failed(self, outcome: SaveResult) -> None:
        """A save has failed (its thread): say so once, and ask for another one."""
        if self._ties.rank:
            return
        failures = self._tally.failures_in_row
        pause_s = min(_FIRST_RETRY_S * 2**failures, _LAST_RETRY_S)
        self._ask_at_s = min(self._ask_at_s, time.monotonic() + pause_s)
        if not failures:
            logger.warning(
                "checkpoint %s was not saved: %s; training goes on, and saving is tried again",
                outcome.name,
                outcome.error,
            )

    def _ask(self) -> None:
        self._ask_at_s = math.inf
        self._ties.saves.ask("a checkpoint is due by the clock, or a failed one is tried again")

    def _plan_by_clock(self) -> None:
        cadence = self._is.cadence
        self._ask_at_s = math.inf
        if self._ties.rank == 0 and cadence.by_clock:
            interval_s = self.interval_s(self._tally.cost_s) if cadence.auto else cadence.interval_s
            self._ask_at_s = time.monotonic() + interval_s

    def _end(self) -> None:
        self._closed = True
        self._ties.end()
        atexit.unregister(self._close_at_exit)
        self._saver.close()

    def _abandon(self, error: BaseException | None) -> None:
        """End because of an exception: the save that is going on gets a little time."""
        if not self._closed:
            outcome = self._saver.take(last_wait_s(error))
            if outcome is not None:
                self._note(outcome)
            self._end()

    def _close_at_exit(self) -> None:
        # A program that fails must not wait long for others, which may be gone.
        if (error := ending_exception()) is not None:
            self._abandon(error)
            return
        try:
            self._take_over()
            self._finish()
        except CheckpointError as unsaved:
            logger.error("%s", unsaved)  # noqa: TRY400
            end_in_error(unsaved)
