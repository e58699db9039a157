"""Writes a checkpoint through torch's own save, in a thread that runs during training.

`torch.distributed.checkpoint.save` gathers the ranks' plans, runs them, and reports a failure on
any rank to all ranks. This module defines the files and their order: first the tensors and items of
all ranks, then the index, and last the manifest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from evenstride.errors import CheckpointError, RanksDisagree
from evenstride.runtime.checkpoint.format.manifest import (
    MANIFEST,
    METADATA,
    Digest,
    FileInfo,
    Name,
    encode,
    items_file,
    tensors_file,
)
from evenstride.runtime.checkpoint.format.retention import Lineage, later_run, prune
from evenstride.runtime.checkpoint.format.storage import (
    Bytes,
    Storage,
    lasting,
    tried,
)
from evenstride.runtime.checkpoint.format.tensor_index import ByteRange, encode_table
from evenstride.runtime.checkpoint.save.save_job import Laid, SaveJob, Staging, one_line
from evenstride.runtime.checkpoint.save.save_statistics import SaveResult

logger = logging.getLogger("evenstride")

# With too few cores for all threads, those of training have priority.
_NICENESS = 10


class ManifestUncertain(CheckpointError):
    """Writing the manifest failed, but it may exist nevertheless."""


class Written(NamedTuple):
    """A rank's report to the leader about an item: its location and its file."""

    place: ByteRange
    info: FileInfo


class Planner(DefaultSavePlanner):
    """Plans to write a job; its pieces were assigned to ranks when they were copied."""

    def __init__(self, job: SaveJob) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._job = job

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Note the role; the state is the job's."""
        del storage_meta
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return this rank's plan, or raise the error that prevented copying its part."""
        job = self._job
        # Raised inside torch's save, which informs all ranks; outside, the others would wait for
        # this plan.
        if job.error is not None:
            raise job.error
        items = [_write_item(laid) for laid in job.staged.laid]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in job.items]
        # The plan carries the values that the leader compares, which saves a separate message.
        self.plan = SavePlan(items, planner_data=(job.outline, str(job.name)))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return all ranks' plans."""
        odd = [r for r, p in enumerate(all_plans) if p.planner_data != all_plans[0].planner_data]
        if odd:
            raise RanksDisagree(
                f"the states of rank 0 and rank {odd[0]} differ in names, shapes, dtypes or step, "
                "so they cannot be saved together; create the same model and optimizer on every "
                "rank"
            )
        return super().create_global_plan(all_plans)


def _write_item(laid: Laid) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(laid.offset), torch.Size(laid.sizes))
    return WriteItem(
        MetadataIndex(laid.key, laid.offset),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk, TensorProperties(dtype=laid.dtype), torch.Size(laid.whole)
        ),
    )


class Writer(StorageWriter):
    """Writes a job's files; on the leader also the index and the manifest.

    While ``hurry`` is set, training waits, so a failed write is retried without a pause.
    """

    def __init__(self, storage: Storage, job: SaveJob, hurry: threading.Event) -> None:
        self._storage, self._job, self._hurry = storage, job, hurry
        self.written_bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: no state is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and return the locations of all items.

        Raises:
            CheckpointError: a file cannot be written; with the storage's own message.
        """
        del plan, planner  # the job has all data
        job, results = self._job, []
        if job.staged.laid:
            # Copies from a CUDA device are only queued; the buffer holds old bytes until they end.
            job.staged.wait()
            file = tensors_file(job.rank)
            info = self._write(file, job.staged.chunks)
            for laid in job.staged.laid:
                place = ByteRange(file, laid.start_bytes, laid.size_bytes)
                results.append(_result(MetadataIndex(laid.key, laid.offset), place, info))
        if job.items:
            results += self._write_items(items_file(job.rank))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, and then the manifest.

        Raises:
            ManifestUncertain: writing the manifest failed, but it may exist.
            CheckpointError: the index was not written.
        """
        written = {result.index: result.storage_data for mine in results for result in mine}
        files = {item.place.file: item.info for item in written.values()}
        places = {index: item.place for index, item in written.items()}
        files[METADATA] = self._write(METADATA, lambda: [encode_table(metadata, places)])
        self._require_all(files)
        # As late as possible, because another run may take over while the files are written.
        self._require_latest_run()
        whole = encode(replace(self._job.manifest, files=files))
        try:
            self._write(MANIFEST, lambda: [whole])
        except CheckpointError as error:
            # A store may have written it despite the error; then the checkpoint is complete.
            raise ManifestUncertain(str(error)) from None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return false: torch cannot create a writer from an identifier."""
        del checkpoint_id
        return False

    def _require_all(self, files: Iterable[str]) -> None:
        """Refuse to complete a checkpoint if this rank does not see all its files.

        If each machine has its own disk at the same path, all writes succeed, but the checkpoint
        could not be restored.
        """
        try:
            there = self._storage.list(str(self._job.name))
        except Exception as error:
            raise CheckpointError(f"{self._storage} cannot be listed: {_named(error)}") from None
        missing = sorted(set(files) - set(there))
        if missing:
            raise CheckpointError(
                f"rank {self._job.rank} does not see {missing[0]}, which another rank has written "
                f"to {self._storage}; use a folder that all ranks share"
            )

    def _require_latest_run(self) -> None:
        """Refuse to complete a checkpoint if a later run uses the folder.

        While a process was suspended, its run may have been restarted elsewhere.
        """
        try:
            later = later_run(self._storage, self._job.name)
        except Exception as error:
            raise CheckpointError(f"{self._storage} cannot be listed: {_named(error)}") from None
        if later is not None:
            raise CheckpointError(
                f"a run that started later also saves to {self._storage} ({later}); end one of "
                "them, and use a separate folder for each run. If no other run exists, delete "
                f"{later}"
            )

    def _write_items(self, file: str) -> list[WriteResult]:
        info = self._write(file, self._job.items.values)
        results, start_bytes = [], 0
        for key, item in self._job.items.items():
            results.append(
                _result(MetadataIndex(key), ByteRange(file, start_bytes, len(item)), info)
            )
            start_bytes += len(item)
        return results

    def _write(self, file: str, chunks: Callable[[], Iterable[Bytes]]) -> FileInfo:
        """Write a file, with retries after errors that may be temporary."""
        name = self._job.name.file(file)

        def write_once() -> FileInfo:
            # A new digest for each try, because a retry writes the whole file again.
            digest = Digest()
            self._storage.write(name, digest.through(chunks()))
            return digest.info()

        try:
            info = tried(write_once, lasting, self._hurry.wait)
        except Exception as error:
            # As text, because some stores' errors cannot be sent to another rank.
            raise CheckpointError(
                f"{name} was not written to {self._storage}: {_named(error)}"
            ) from None
        self.written_bytes += info.size_bytes
        return info


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _result(index: MetadataIndex, place: ByteRange, info: FileInfo) -> WriteResult:
    return WriteResult(index, place.size_bytes, Written(place, info))


def write(job: SaveJob, writer: Writer, group: dist.ProcessGroup | None) -> None:
    """Save a checkpoint, or raise on every rank.

    Collective over the group; local if it is ``None``.
    """
    planner = Planner(job)
    state = {laid.key: job.staged.view(laid) for laid in job.staged.laid}
    if group is None and job.manifest.world_size > 1:
        raise CheckpointError(
            f"rank {job.rank} cannot save the state of {job.manifest.world_size} ranks alone; "
            "save before close()"
        )
    if group is not None:
        save(state, storage_writer=writer, planner=planner, process_group=group)
        return
    # torch's save would warn that there is no process group.
    planner.set_up_planner(state, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    writer.finish(metadata, [writer.write_data(plans[0], planner).wait()])


class Saver:
    """Saves in its own thread, one save at a time; every rank has one.

    ``group`` has all ranks and no other use; ``None`` with one process. The thread calls ``failed``
    when a save has failed.
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
        # The thread writes from this buffer, so a save must end before the next copy.
        self.staging = Staging()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: SaveJob, lineage: Lineage) -> None:
        """Start a save; the data of ``job`` must not change until it ends."""
        assert self._thread is None, "the outcome of the previous save was not taken"
        self._hurry.clear()
        # A daemon: it may wait for a lost rank, and must not keep the program from ending.
        self._thread = threading.Thread(
            target=self._run, args=(job, lineage), name="evenstride-checkpoint", daemon=True
        )
        self._thread.start()

    def take(
        self,
        timeout_s: float | None = None,
        wait: Callable[[Callable[[], bool]], object] = lambda _: None,
    ) -> SaveResult | None:
        """Wait for the save, and return its outcome; ``None`` without a save or after the timeout.

        ``timeout_s=None`` waits without a limit. ``wait`` is called first with a condition to wait
        for; it may raise.
        """
        if self._thread is None:
            return None
        # Training waits from here on, so a failed write is retried without a pause.
        self._hurry.set()
        wait(lambda: not self.busy)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        outcome, self._thread, self._outcome = self._outcome, None, None
        return outcome

    def abandon(self) -> None:
        """Stop waiting for a save that cannot end, because its thread waits for a lost rank."""
        self._thread, self._failed = None, lambda _: None

    def close(self) -> None:
        """Release the group and the memory for copies."""
        self.group = None
        self.staging.drop()

    def _run(self, job: SaveJob, lineage: Lineage) -> None:
        _step_back()
        begun_s, error, everywhere = time.monotonic(), "", True
        writer = Writer(self._storage, job, self._hurry)
        try:
            write(job, writer, self.group)
        except BaseException as failure:  # any error must become the outcome of the save
            error = one_line(failure)
            # torch's save raises this class on all ranks; any other error concerns only this one.
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
                "retried after the next save",
                name,
                self._storage,
                one_line(error),
            )

    def _tidy(self, job: SaveJob, failure: BaseException, everywhere: bool) -> None:
        """Delete the files of a failed attempt, unless it may be complete nevertheless."""
        # The manifest may exist, and then these files belong to a complete checkpoint.
        if any(isinstance(error, ManifestUncertain) for error in _causes(failure)):
            return
        if not everywhere:  # the leader may have written the manifest
            return
        with contextlib.suppress(Exception):
            # Each rank deletes its own files; the last one also deletes the empty folder.
            for file in (tensors_file(job.rank), items_file(job.rank)):
                self._storage.delete(job.name.file(file))
            self._storage.delete_folder(str(job.name))


def _causes(failure: BaseException) -> list[BaseException]:
    if isinstance(failure, CheckpointException):
        return [wrapped[0] for wrapped in failure.failures.values()]
    return [failure]


def _step_back() -> None:
    """Lower the priority of this thread, where threads have their own (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
