"""The thread that writes: one save at a time, beside training."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from evenstride.runtime.checkpoint.checkpoint_errors import ManifestUncertain
from evenstride.runtime.checkpoint.format.manifest import Name, items_file, tensors_file
from evenstride.runtime.checkpoint.format.retention import Lineage, prune
from evenstride.runtime.checkpoint.format.storage import Storage
from evenstride.runtime.checkpoint.save.checkpoint_writer import SaveJob, Writer, write

logger = logging.getLogger("evenstride")

COUNTS = (
    "saved",
    "failed",
    "put_off",
    "left_out",
    "copied_s",
    "blocked_s",
    "save_s",
    "written_bytes",
)
"""What is counted of saves; see `Checkpointer.report`."""

# Training threads come first where there are too few cores for all.
_NICENESS = 10


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save ended.

    Args:
        name: of the attempt.
        error: why it failed; empty if it did not.
        took_s: seconds from its beginning on.
        written_bytes: by this rank.
        everywhere: whether all ranks know that it ended like this.
    """

    name: Name
    error: str
    took_s: float
    written_bytes: int
    everywhere: bool = True


class Saver:
    """Saves in a thread of its own, at most one at a time; every rank has one.

    Args:
        storage: to write to.
        group: of all ranks, for nothing else; ``None`` with one process.
        keep: complete checkpoints that stay.
        failed: called, in the thread, when a save has failed.
    """

    def __init__(
        self,
        storage: Storage,
        group: dist.ProcessGroup | None,
        keep: int,
        failed: Callable[[SaveResult], object] = lambda _: None,
    ) -> None:
        self._storage, self.group, self._keep, self._failed = storage, group, keep, failed
        self._thread: threading.Thread | None = None
        self._outcome: SaveResult | None = None
        self._hurry = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether a save is going on."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: SaveJob, lineage: Lineage) -> None:
        """Begin to save; what ``job`` refers to must not change until it has ended."""
        assert self._thread is None, "the outcome of the save before was not taken"
        self._hurry.clear()
        # A daemon: it may wait for a lost rank, and must not keep the program from its end.
        self._thread = threading.Thread(
            target=self._run, args=(job, lineage), name="evenstride-checkpoint", daemon=True
        )
        self._thread.start()

    def take(
        self,
        timeout_s: float | None = None,
        wait: Callable[[Callable[[], bool]], object] = lambda _: None,
    ) -> SaveResult | None:
        """Wait for the save to end and return how; ``None`` if there was none, or it goes on.

        Args:
            timeout_s: how long to wait; ``None`` for no limit.
            wait: waits before that until something is so, and may raise.
        """
        if self._thread is None:
            return None
        # Training waits from here on, so a write that fails is tried again without a pause.
        self._hurry.set()
        wait(lambda: not self.busy)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        outcome, self._thread, self._outcome = self._outcome, None, None
        return outcome

    def abandon(self) -> None:
        """Wait no longer for a save that cannot end: its thread waits for a rank that is lost."""
        self._thread, self._failed = None, lambda _: None

    def close(self) -> None:
        """Let go of the group."""
        self.group = None

    def _run(self, job: SaveJob, lineage: Lineage) -> None:
        _step_back()
        begun_s, error, everywhere = time.monotonic(), "", True
        writer = Writer(self._storage, job, self._hurry)
        try:
            write(job, writer, self.group)
        except BaseException as failure:  # whatever it is, it must not end with the thread
            error = told(failure)
            # torch's save raises this class on all ranks alike; any other error is this rank's
            # alone.
            everywhere = self.group is None or isinstance(failure, CheckpointException)
            self._tidy(job, failure, everywhere)
        took_s = time.monotonic() - begun_s
        self._outcome = SaveResult(job.name, error, took_s, writer.written_bytes, everywhere)
        if error:
            self._failed(self._outcome)
        elif job.rank == 0:
            self._prune(job.name, lineage)

    def _prune(self, name: Name, lineage: Lineage) -> None:
        try:
            prune(self._storage, name, self._keep, lineage)
        except Exception as error:
            logger.warning(
                "checkpoint %s is saved, but older ones could not be deleted from %s (%s); this is "
                "tried again after the next one",
                name,
                self._storage,
                told(error),
            )

    def _tidy(self, job: SaveJob, failure: BaseException, everywhere: bool) -> None:
        """Give back the space of an attempt that failed, unless it may be complete after all."""
        # The manifest may be there, and then these files belong to a complete checkpoint.
        if any(isinstance(error, ManifestUncertain) for error in _causes(failure)):
            return
        if not everywhere:  # then another rank may have written the manifest
            return
        with contextlib.suppress(Exception):
            # Each rank deletes its own; the folder goes with the last, as it must be empty.
            for file in (tensors_file(job.rank), items_file(job.rank)):
                self._storage.delete(job.name.file(file))
            self._storage.delete_folder(str(job.name))


def _causes(failure: BaseException) -> list[BaseException]:
    if isinstance(failure, CheckpointException):
        return [wrapped[0] for wrapped in failure.failures.values()]
    return [failure]


def told(failure: BaseException) -> str:
    """Return what went wrong, in one line: with the rank, if torch tells it."""
    if isinstance(failure, CheckpointException) and failure.failures:
        rank, wrapped = next(iter(sorted(failure.failures.items())))
        return f"rank {rank}: {told(wrapped[0])}"
    text = " ".join(str(failure).split())
    ours = type(failure).__module__.startswith("evenstride")
    return text if ours and text else f"{type(failure).__name__}: {text}"


def _step_back() -> None:
    """Give this thread a lower priority, where threads have one of their own (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
