"""Writing a checkpoint through torch's own save, in a thread beside training.

`torch.distributed.checkpoint.save` gathers the ranks' plans, has them written, and tells every rank
of a failure on any. What a file looks like, and that the manifest comes last, is ours: first the
tensors and items of all ranks, then the table of contents, and last the manifest.
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
from evenstride.runtime.checkpoint.save.save_job import Laid, SaveJob, Staging, told
from evenstride.runtime.checkpoint.save.save_statistics import SaveResult

logger = logging.getLogger("evenstride")

# Training threads come first where there are too few cores for all.
_NICENESS = 10


class ManifestUncertain(CheckpointError):
    """Writing the manifest failed, and it may be in place nevertheless."""


class Written(NamedTuple):
    """What a rank tells the leader of each item: where it is, and of the file that it is in."""

    place: ByteRange
    info: FileInfo


class Planner(DefaultSavePlanner):
    """Plans to write what a job holds; the pieces were dealt out when they were copied."""

    def __init__(self, job: SaveJob) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._job = job

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take note of the role; the state is the job's."""
        del storage_meta
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return this rank's plan, or raise why its part could not be copied."""
        job = self._job
        # Raised inside torch's save, which tells every rank; outside, the others would wait for
        # this plan.
        if job.error is not None:
            raise job.error
        items = [_write_item(laid) for laid in job.staged.laid]
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in job.items]
        # What the leader compares travels with the plan, so it takes no message of its own.
        self.plan = SavePlan(items, planner_data=(job.outline, str(job.name)))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return all ranks' plans."""
        odd = [r for r, p in enumerate(all_plans) if p.planner_data != all_plans[0].planner_data]
        if odd:
            raise RanksDisagree(
                f"the states of rank 0 and rank {odd[0]} differ in names, shapes, kinds or step, "
                "so they cannot be saved as one; make the same model and optimizer on every rank"
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
    """Writes a job's files; on the leader the table of contents and the manifest, too.

    While ``hurry`` is set, training waits: a failed write is then tried again without a pause.
    """

    def __init__(self, storage: Storage, job: SaveJob, hurry: threading.Event) -> None:
        self._storage, self._job, self._hurry = storage, job, hurry
        self.written_bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from save to save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and tell where everything is.

        Raises:
            CheckpointError: a file cannot be written; with the storage's own words.
        """
        del plan, planner  # all in the job
        job, results = self._job, []
        if job.staged.laid:
            # Copies from a CUDA device were only queued; before they arrive the buffer holds old
            # bytes.
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
        """Write the table of contents, and then the manifest.

        Raises:
            ManifestUncertain: the manifest was not written, as far as is known.
            CheckpointError: the table was not written.
        """
        written = {result.index: result.storage_data for mine in results for result in mine}
        files = {told.place.file: told.info for told in written.values()}
        places = {index: told.place for index, told in written.items()}
        files[METADATA] = self._write(METADATA, lambda: [encode_table(metadata, places)])
        self._require_all(files)
        # As late as possible, since a run may take over while the files are written.
        self._require_latest_run()
        whole = encode(replace(self._job.manifest, files=files))
        try:
            self._write(MANIFEST, lambda: [whole])
        except CheckpointError as error:
            # A store may have kept what it reported as failed, and then the checkpoint is
            # complete.
            raise ManifestUncertain(str(error)) from None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return false: torch cannot make one by itself."""
        del checkpoint_id
        return False

    def _require_all(self, files: Iterable[str]) -> None:
        """Refuse to complete a checkpoint of which this rank does not see all files.

        Where each machine has a disk of its own at the same path, every rank writes without an
        error, and nobody could ever restore.
        """
        try:
            there = self._storage.list(str(self._job.name))
        except Exception as error:
            raise CheckpointError(f"{self._storage} cannot be listed: {_told(error)}") from None
        missing = sorted(set(files) - set(there))
        if missing:
            raise CheckpointError(
                f"rank {self._job.rank} does not see {missing[0]}, which another rank has written "
                f"to {self._storage}; give a folder that all ranks share"
            )

    def _require_latest_run(self) -> None:
        """Refuse to complete a checkpoint behind the back of a run that took over.

        A process that was stopped for a while may find that its run was started again elsewhere.
        """
        try:
            later = later_run(self._storage, self._job.name)
        except Exception as error:
            raise CheckpointError(f"{self._storage} cannot be listed: {_told(error)}") from None
        if later is not None:
            raise CheckpointError(
                f"a run that began later saves to {self._storage} as well ({later}); end one of "
                "them, and give every run a folder of its own, or delete that one if no run has "
                "made it"
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
        """Write a file, again after a pause if the store is busy."""
        name = self._job.name.file(file)

        def write_once() -> FileInfo:
            # A new digest for each try, which writes the file from its first byte on.
            digest = Digest()
            self._storage.write(name, digest.through(chunks()))
            return digest.info()

        try:
            info = tried(write_once, lasting, self._hurry.wait)
        except Exception as error:
            # A text, because not every store's errors can be sent to another rank.
            raise CheckpointError(
                f"{name} was not written to {self._storage}: {_told(error)}"
            ) from None
        self.written_bytes += info.size_bytes
        return info


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _result(index: MetadataIndex, place: ByteRange, info: FileInfo) -> WriteResult:
    return WriteResult(index, place.size_bytes, Written(place, info))


def write(job: SaveJob, writer: Writer, group: dist.ProcessGroup | None) -> None:
    """Save a checkpoint, or raise on every rank.

    Collective over the group, alone if it is ``None``.
    """
    planner = Planner(job)
    state = {laid.key: job.staged.view(laid) for laid in job.staged.laid}
    if group is None and job.manifest.world_size > 1:
        raise CheckpointError(
            f"rank {job.rank} would save alone what {job.manifest.world_size} ranks have; save "
            "before close()"
        )
    if group is not None:
        save(state, storage_writer=writer, planner=planner, process_group=group)
        return
    # torch's save would warn that there is no process group.
    planner.set_up_planner(state, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    writer.finish(metadata, [writer.write_data(plans[0], planner).wait()])


class Saver:
    """Saves in a thread of its own, at most one at a time; every rank has one.

    ``group`` is of all ranks and for nothing else, ``None`` with one process. ``failed`` is called,
    in the thread, when a save has failed.
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
        # What is copied here is written by the thread, so a save has to end before the next copy.
        self.staging = Staging()

    @property
    def busy(self) -> bool:
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

        ``timeout_s`` of ``None`` is no limit. Before that, ``wait`` waits until something is so; it
        may raise.
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
        """Let go of the group and of the memory for copies."""
        self.group = None
        self.staging.drop()

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


def _step_back() -> None:
    """Give this thread a lower priority, where threads have one of their own (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
