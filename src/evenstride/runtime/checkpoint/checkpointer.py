"""`Checkpointer`: saves a training run asynchronously, and restores it."""

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
    warn_if_unrestored,
    warn_if_unsaved,
)
from evenstride.runtime.checkpoint.save.save_job import copy_part, manifest_of
from evenstride.runtime.checkpoint.save.save_statistics import SaveResult, SaveStatistics
from evenstride.runtime.failures.heartbeat import ending_exception
from evenstride.runtime.usage_errors import user_line

logger = logging.getLogger("evenstride")

# After a failed save the leader requests another one; the pause doubles with each failure.
_FIRST_RETRY_S, _LAST_RETRY_S = 15.0, 600.0
# The assumed duration of a save until the first is measured.
_FIRST_SAVE_S = 5.0


class Checkpointer:
    """Saves model, optimizer, data position and random states to a folder during training.

    Every rank creates one with the same arguments and makes the same calls::

        checkpoint = evenstride.Checkpointer(folder, stride, model=model, optimizer=optimizer)
        checkpoint.restore()
        for epoch in range(stride.epoch, epochs):
            for x, y in loader:
                ...
                optimizer.step(); optimizer.zero_grad()
                checkpoint.step()
        checkpoint.close()

    A save blocks training only while it copies this rank's part; a thread then writes the copy.
    With DDP each of ``W`` ranks copies and writes a ``W``-th of the bytes. A checkpoint can be
    restored with any number of ranks. An incomplete one is ignored. It holds no pickle, so loading
    it runs no code. A failed save is logged and retried; training continues.

    Args:
        folder: a path shared by all ranks and used by this run alone; or a URL such as
            ``s3://bucket/run``, which needs ``evenstride[remote]`` and the store's fsspec
            package. If ``EVENSTRIDE_CHECKPOINTS`` is set, as by ``evenstride lab``, a subfolder
            of it is used instead.
        stride: the run's `Stride`. Create its training loader before calling `restore`.
        model: plain, in DDP, or in FSDP2.
        optimizer: one or several, of the model's parameters.
        scheduler: one or several objects with ``state_dict`` and ``load_state_dict``.
        every: the interval: a number of steps, or a duration by rank 0's clock ("30s", "5min", a
            `datetime.timedelta`). "auto" computes it from the observed preemptions and the
            duration of a save (Young and Daly). Also takes a
            `evenstride.core.reliability.checkpoint_interval.Saving`.
        keep: the number of complete checkpoints to keep, at least 1. Older ones are deleted after
            a newer one is complete, if this run wrote them or was restored from them. Others are
            never deleted.
        extra: more objects with ``state_dict`` and ``load_state_dict``, by name, such as a
            gradient scaler or averaged weights. Their state must be the same on every rank; if
            it differs, rank 0's is saved.
        notices: the sources of preemption notices: ``auto`` (signals and this cloud's metadata
            service), ``off``, or names such as ``aws,signals``. The default is
            ``EVENSTRIDE_NOTICES``. See the page on notices. After a notice, the rank gets no more
            samples and all ranks save. The rank then ends with exit code 143; the others raise
            `WorkerLost`, so that the launcher restarts them.

    Raises:
        ConfigError: an argument is invalid, or a state cannot be saved safely.
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
                f"stride is a {type(stride).__name__}; pass the evenstride.Stride that splits the "
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
        """With ``every="auto"``: the interval in seconds, as a function of a save's cost in s."""
        self._seen, self._next = -1, self._is.cadence.after(stride.step)
        self._ask_at_s = math.inf
        self._name: Name | None = None
        self._lineage = Lineage()
        self._tally = SaveStatistics(str(self._is.storage), speaks=self._ties.rank == 0)
        self._copied_s = 0.0
        self._checked = self._closed = False
        self._unrestored, self._line = True, user_line()  # for warnings
        self._plan_by_clock()
        # Last: it installs signal handlers, which a refused request must not do.
        self._ties.begin(_FIRST_SAVE_S, notices, self._is.cadence.saving)
        self._pid = os.getpid()
        atexit.register(self._close_at_exit)

    def step(self) -> None:
        """Save if a save is due. Every rank must call it after every optimizer step.

        If the previous save is still running, it waits for that one first. In asynchronous modes
        (``asp``, ``ssp``) it only warns that a save was due: call `save` at the end of an epoch.

        Raises:
            ConfigError: at the first save, if a state cannot be saved safely.
            StepInFlight: a save is due between a step's backward pass and its optimizer step.
            SystemExit: this rank leaves because of a preemption notice.
            WorkerLost: other ranks leave because of one; restart to continue without them.

        Cost:
            A few microseconds if no save is due, else a copy of this rank's part.
        """
        step = self._stride.step
        # Without a newly committed step the state has not changed.
        if step == self._seen:
            return
        self._refuse_if_closed("step")
        if self._seen < 0:
            self._warn_if_unrestored()
        self._seen = step
        # Clocks differ between ranks, so only rank 0's counts. It requests a save at an agreed
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
            # After the save, so that the checkpoint holds every step of the ranks that leave.
            self._let_go(*self._ties.saves.going(self._ties.committed()))

    def _warn_if_unrestored(self) -> None:
        """Warn before the first save if the script forgot to call `restore`."""
        # More steps than this process has committed: the script has loaded a state itself.
        loaded_otherwise = self._stride.step > self._ties.committed()
        unrestored, self._unrestored = self._unrestored, False
        if unrestored and self._ties.rank == 0 and not loaded_otherwise:
            warn_if_unrestored(self._is.storage, self._is.generation, self._line)

    def save(self) -> None:
        """Save now, and return when the checkpoint is complete; collective.

        In asynchronous modes (``asp``, ``ssp``), training continues after a rank is lost. There it
        only warns if a rank is missing or is lost during the save.

        Raises:
            CheckpointError: the save failed; raised on every rank.
            ConfigError: a state cannot be saved safely.
            StepInFlight: called between a step's backward pass and its optimizer step.
        """
        self._refuse_if_closed("save")
        if not self._ties.complete():
            return
        self._warn_if_unrestored()
        try:
            self._take_over()
            self._start(self._stride.step)
            self._take_over()
            if self._tally.error:
                raise CheckpointError(self._tally.error)
        except EvenstrideError as error:
            if not self._ties.forgives(error):
                raise
            # The lost rank never writes its part, so the thread that waits for it is abandoned.
            self._saver.abandon()
            self._tally.forgive()

    def wait(self) -> None:
        """Wait until the running save, if any, has ended, whether it succeeds or fails."""
        self._take_over()

    def restore(self, allow: Collection[str] = ()) -> Restored | None:
        """Restore the newest intact checkpoint; collective. Call it before the training loop.

        Damaged checkpoints are skipped with a warning that names the damaged file, and are not
        deleted. Every file is checked before any state is overwritten. Ranks that the checkpoint
        contains restore their random states; further ranks get seeds of their own.

        Args:
            allow: what may differ from the saved run: ``data``, ``global_batch``, and, at the
                start of an epoch, ``seed``.

        Returns:
            What was restored; ``None`` if the folder has no checkpoint yet.

        Raises:
            ConfigError: the checkpoint belongs to another run or model. No state has changed.
            CheckpointDamaged: every checkpoint is damaged; or the newest has correct digests, but
                was not written by evenstride.
            CheckpointError: a file cannot be read, even after several tries.
        """
        self._refuse_if_closed("restore")
        self._unrestored = False
        self._take_over()
        data = self._ties.described()
        if self._ties.dataset() is None and self._ties.rank == 0:
            logger.warning(
                "restore() was called before the training loader was created, so the data set "
                "cannot be compared with the checkpoint's; create the loader first if possible"
            )
        allowed = frozenset((allow,) if isinstance(allow, str) else allow)
        restorer = Restorer(
            self._is.reader, self._ties, self._saver.group, self._is.training, data, allowed
        )
        restored, self._lineage = restorer.run()
        if restored is not None:
            self._tally.begin_from(parse_name(restored.folder))
        elif self._is.source is not None:  # only read: no checkpoint there is ever deleted
            restored, _ = replace(restorer, storage=self._is.source).run()
        self._seen, self._next = self._stride.step, self._is.cadence.after(self._stride.step)
        self._plan_by_clock()
        return restored

    def report(self) -> dict[str, float]:
        """Return the cost of saving on this rank so far.

        Returns:
            Counts of saves: ``saved``, ``failed``, ``put_off`` (delayed by the previous save) and
            ``left_out`` (skipped after failures). ``copied_s`` and ``blocked_s``: seconds that
            training has waited for copies and for earlier saves. ``save_s``: seconds of the
            thread. ``written_bytes``.
        """
        return dict(self._tally.count)

    def close(self) -> None:
        """Wait for the running save, and close. Further calls have no effect.

        If the last save failed, the current state is saved once more, because the cause may be
        gone. So every rank must call it, like `step`.

        Raises:
            CheckpointError: the newest state could not be saved; raised on every rank.
        """
        if self._closed:
            return
        self._take_over()
        # A save is collective: if only this rank knows of the failure, the others do not join.
        if self._tally.failed is not None and self._tally.failed.everywhere:
            with contextlib.suppress(EvenstrideError):  # in mid-step, for example: still failed
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
                f"{call}() was called on a closed Checkpointer; create another one, or call "
                "close() later"
            )

    def _begin(self, step: int, *, asked: bool) -> None:
        self._next = self._is.cadence.after(step)
        if self._saver.busy:
            self._tally.postponed()
        self._take_over()
        if asked or not self._tally.leaves_out():
            self._start(step)

    def _start(self, step: int) -> None:
        begun_s = time.monotonic()
        state = self._ties.state(self._is.training.optimizers)
        # All ranks refuse an unsafe state together: if one raised alone, the others would wait in
        # the save.
        if not self._checked:
            if self._ties.rank == 0:
                warn_if_unsaved(self._is.training, self._line)
            self._ties.agree("the first save", self._show_safe, lambda shown: shown[0])
            self._checked = True
        # Another attempt at the same step gets its own folder: disconnected ranks may still write
        # to the previous one.
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
        self._plan_by_clock()  # before the thread starts, which plans a retry if it fails
        self._saver.start(job, self._lineage)
        self._copied_s = time.monotonic() - begun_s
        self._tally.count["copied_s"] += self._copied_s

    def _let_go(self, going: tuple[int, ...], why: str) -> None:
        if not going:
            return
        # The processes end right after this, and the writing thread with them.
        self._take_over()
        leads = self._ties.leads_host(going)
        self._end()
        if self._tally.error:
            logger.error("evenstride: ranks leave, but %s", self._tally.error)
            why = f"{why}; the newest state could not be saved, so later steps are lost"
        part(self._stride.close, self._stride.step, self._ties.rank, going, why, leads_host=leads)

    def _show_safe(self) -> dict[str, Any]:
        collect(self._is.training)
        return {}

    def _take_over(self) -> None:
        """Wait for the previous save, if any, and note its outcome."""
        begun_s = time.monotonic()
        with self._ties.waiting():
            # Counted as waiting time: slow storage must not look like slow training.
            outcome = self._saver.take(wait=self._ties.until)
        self._tally.count["blocked_s"] += time.monotonic() - begun_s
        if outcome is not None:
            self._note(outcome)

    def _note(self, outcome: SaveResult) -> None:
        self._tally.note(outcome)
        if not outcome.error:
            self._ties.saves.takes(self._copied_s + outcome.took_s)

    def _failed(self, outcome: SaveResult) -> None:
        """Report a failed save once, and request another one; called by the save's thread."""
        if self._ties.rank:
            return
        failures = self._tally.failures_in_row
        pause_s = min(_FIRST_RETRY_S * 2**failures, _LAST_RETRY_S)
        self._ask_at_s = min(self._ask_at_s, time.monotonic() + pause_s)
        if not failures:
            logger.warning(
                "checkpoint %s was not saved: %s; training continues, and saving is retried",
                outcome.name,
                outcome.error,
            )

    def _ask(self) -> None:
        self._ask_at_s = math.inf
        self._ties.saves.ask("a checkpoint is due by the clock, or a failed one is retried")

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
        """End because of an exception, after a short wait for the running save."""
        if not self._closed:
            outcome = self._saver.take(last_wait_s(error))
            if outcome is not None:
                self._note(outcome)
            self._end()

    def _close_at_exit(self) -> None:
        if os.getpid() != self._pid:  # a fork of this process has none of its threads
            return
        # A failing program must not wait long for other ranks, which may be gone.
        if (error := ending_exception()) is not None:
            self._abandon(error)
            return
        try:
            self._take_over()
            self._finish()
        except CheckpointError as unsaved:
            logger.error("%s", unsaved)  # noqa: TRY400
            end_in_error(unsaved)
