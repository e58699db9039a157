"""Writing a checkpoint through torch's own save: the plan, the files, and last the manifest.

`torch.distributed.checkpoint.save` gathers the ranks' plans, has them written, and tells every
rank of a failure on any. What a file looks like, and that the manifest comes last, is ours.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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

from evenstride.errors import EvenstrideError, RanksDisagree
from evenstride.runtime.checkpoint.checkpoint_errors import CheckpointError, ManifestUncertain
from evenstride.runtime.checkpoint.format.manifest import (
    MANIFEST,
    METADATA,
    Digest,
    FileInfo,
    Manifest,
    Name,
    encode,
    items_file,
    tensors_file,
)
from evenstride.runtime.checkpoint.format.retention import later_run
from evenstride.runtime.checkpoint.format.storage import (
    FIRST_PAUSE_S,
    TRIES,
    Bytes,
    Storage,
    lasting,
)
from evenstride.runtime.checkpoint.format.tensor_index import ByteRange, encode_table
from evenstride.runtime.checkpoint.save.staging import Laid, Staged


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One rank's part of one save, copied aside.

    Args:
        name: of the attempt.
        rank: of the writer.
        staged: its tensors.
        items: what else it saves, each as JSON in bytes, by key.
        outline: equal on ranks whose states fit together.
        manifest: all but the files; the leader's counts.
        error: why this rank's part could not be copied, if so.
    """

    name: Name
    rank: int
    staged: Staged
    items: Mapping[str, bytes]
    outline: str
    manifest: Manifest
    error: EvenstrideError | None = None


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
        """Return this rank's plan.

        Raises:
            EvenstrideError: this rank's part could not be copied.
        """
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
        """Return all ranks' plans.

        Raises:
            RanksDisagree: the ranks' states do not fit together.
        """
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

    Args:
        storage: to write to.
        job: of this rank.
        hurry: set when nothing should be waited for any more: a write is then not tried again
            after a pause, but at once.
    """

    def __init__(self, storage: Storage, job: SaveJob, hurry: threading.Event) -> None:
        self._storage, self._job, self._hurry = storage, job, hurry
        self.written_bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from save to save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans."""
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
        """Write a file, again after a pause if the store is busy, and return what it is like."""
        name, pause_s = self._job.name.file(file), FIRST_PAUSE_S
        for left in reversed(range(TRIES)):
            # A new one for each try, which writes the file from its first byte on.
            digest = Digest()
            try:
                self._storage.write(name, digest.through(chunks()))
            except Exception as error:
                if not left or lasting(error):
                    # A text, because not every store's errors can be sent to another rank.
                    raise CheckpointError(
                        f"{name} was not written to {self._storage}: {_told(error)}"
                    ) from None
                self._hurry.wait(pause_s)
                pause_s *= 2
            else:
                self.written_bytes += digest.size_bytes
                return digest.info()
        raise AssertionError("the last try returns or raises")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _result(index: MetadataIndex, place: ByteRange, info: FileInfo) -> WriteResult:
    return WriteResult(index, place.size_bytes, Written(place, info))


def write(job: SaveJob, writer: Writer, group: dist.ProcessGroup | None) -> None:
    """Save a checkpoint; collective over the group, alone if it is ``None``.

    Raises:
        Exception: it was not saved; on every rank.
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
