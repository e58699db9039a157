"""Reads a checkpoint through torch's own load, with any number of ranks.

`torch.distributed.checkpoint.load` determines which stored parts overlap with this rank's tensors.
This module reads only those bytes and copies them into the tensors. All other state is JSON, so
no pickle is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from evenstride.errors import CheckpointDamaged, CheckpointError
from evenstride.runtime.checkpoint.format.manifest import METADATA, Manifest, Name, digest
from evenstride.runtime.checkpoint.format.state_codec import from_bytes
from evenstride.runtime.checkpoint.format.storage import PatientReader
from evenstride.runtime.checkpoint.format.tensor_index import (
    MOST_TABLE_BYTES,
    ByteRange,
    decode_table,
)

# The largest read, and the largest gap between two reads that are merged into one: a request to an
# object store takes as long as reading some megabytes.
SPAN_BYTES, GAP_BYTES = 64 << 20, 1 << 20


@dataclass(frozen=True, slots=True)
class _Read:
    """Requested rows of a tensor, and their location in the file."""

    item: ReadItem
    file: str
    start_bytes: int
    size_bytes: int
    dtype: torch.dtype
    sizes: tuple[int, ...]


class Reader(StorageReader):
    """Reads the parts of one checkpoint that a plan requests; its manifest is already checked."""

    def __init__(self, storage: PatientReader, name: Name, manifest: Manifest) -> None:
        self._storage, self._name, self._manifest = storage, name, manifest
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: no state is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index.

        Raises:
            CheckpointDamaged: its digest differs from that in the manifest.
        """
        del args, kwargs
        # torch's load and `item` request it repeatedly.
        if self._metadata is not None:
            return self._metadata
        info = self._manifest.files.get(METADATA)
        if info is None or info.size_bytes > MOST_TABLE_BYTES:
            raise CheckpointDamaged("its index is missing or too large")
        data = self._storage.read(self._name.file(METADATA), 0, info.size_bytes)
        if digest([data]) != info.digest:
            raise CheckpointDamaged(f"{self._name.file(METADATA)} differs from what was written")
        file_bytes = {name: info.size_bytes for name, info in self._manifest.files.items()}
        self._metadata = decode_table(data, file_bytes)
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the requested parts into the plan's tensors.

        Raises:
            CheckpointError: a file cannot be read; with the storage's own message.
        """
        try:
            for span in _spans(self._reads(plan)):
                self._read_span(span, planner)
        except CheckpointError:
            raise
        except Exception as error:  # as text: some stores' errors cannot be sent to other ranks
            raise CheckpointError(
                f"{self._name} cannot be read from {self._storage}: {type(error).__name__}: {error}"
            ) from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return false: torch cannot create a reader from an identifier."""
        del checkpoint_id
        return False

    def item(self, key: str) -> Any:
        """Return an item that is not a tensor, as JSON types.

        Raises:
            CheckpointDamaged: it is missing, or not JSON.
        """
        place = self.read_metadata().storage_data.get(MetadataIndex(key))
        if place is None:
            raise CheckpointDamaged(f"the checkpoint index does not list {key}")
        return from_bytes(self._bytes(place), key)

    def _place(self, item: ReadItem) -> ByteRange:
        place: ByteRange = self.read_metadata().storage_data[item.storage_index]
        return place

    def _bytes(self, place: ByteRange) -> bytes:
        file = self._name.file(place.file)
        data = self._storage.read(file, place.start_bytes, place.size_bytes)
        if len(data) != place.size_bytes:
            raise CheckpointDamaged(f"{file} has become shorter since it was checked")
        return data

    def _reads(self, plan: LoadPlan) -> list[_Read]:
        reads: list[_Read] = []
        for item in plan.items:
            reads += self._split(item)
        # In the order of the files, so that neighbouring reads can be merged.
        return sorted(reads, key=lambda read: (read.file, read.start_bytes))

    def _split(self, item: ReadItem) -> Iterator[_Read]:
        """Yield the reads of an item: whole rows of the stored block, in limited numbers."""
        entry = self.read_metadata().state_dict_metadata[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata), "the plan requests a tensor"
        offset = torch.Size(item.storage_index.offset or ())
        sizes = next(tuple(c.sizes) for c in entry.chunks if c.offsets == offset)
        place, dtype = self._place(item), entry.properties.dtype
        if not sizes:
            yield _Read(item, place.file, place.start_bytes, dtype.itemsize, dtype, ())
            return
        row_bytes = prod(sizes[1:]) * dtype.itemsize
        first, end = item.storage_offsets[0], item.storage_offsets[0] + item.lengths[0]
        # In several reads, so that a large tensor is never in memory twice.
        most = max(1, SPAN_BYTES // max(row_bytes, 1))
        for low in range(first, end, most):
            rows = min(most, end - low)
            yield _Read(
                _rows_of(item, low - first, rows),
                place.file,
                place.start_bytes + low * row_bytes,
                rows * row_bytes,
                dtype,
                (rows, *sizes[1:]),
            )

    def _read_span(self, span: list[_Read], planner: LoadPlanner) -> None:
        start_bytes = span[0].start_bytes
        end_bytes = max(read.start_bytes + read.size_bytes for read in span)
        data = bytearray(self._bytes(ByteRange(span[0].file, start_bytes, end_bytes - start_bytes)))
        for read in span:
            if read.size_bytes:
                _copy(read, data, read.start_bytes - start_bytes, planner)


def _rows_of(item: ReadItem, skip: int, rows: int) -> ReadItem:
    """Return an item for some of its rows; its stored block begins with them."""
    into = (item.dest_offsets[0] + skip, *item.dest_offsets[1:])
    return replace(
        item,
        dest_offsets=torch.Size(into),
        storage_offsets=torch.Size((0, *item.storage_offsets[1:])),
        lengths=torch.Size((rows, *item.lengths[1:])),
    )


def _copy(read: _Read, data: bytearray, offset: int, planner: LoadPlanner) -> None:
    count = read.size_bytes // read.dtype.itemsize
    flat = torch.frombuffer(data, dtype=torch.uint8, count=read.size_bytes, offset=offset)
    if offset % read.dtype.itemsize:  # torch requires an aligned start for a view as another dtype
        flat = flat.clone()
    block: Tensor = flat.view(read.dtype)[:count].view(read.sizes)
    for dim, (first, length) in enumerate(
        zip(read.item.storage_offsets, read.item.lengths, strict=True)
    ):
        if read.sizes:
            block = block.narrow(dim, first, length)
    target = planner.resolve_tensor(read.item).detach()
    target.copy_(block)
    planner.commit_tensor(read.item, target)


def _spans(reads: list[_Read]) -> Iterator[list[_Read]]:
    """Group neighbouring reads of the same file."""
    span: list[_Read] = []
    end_bytes = 0
    for read in reads:
        if span and (
            read.file != span[0].file
            or read.start_bytes > end_bytes + GAP_BYTES
            or read.start_bytes + read.size_bytes > span[0].start_bytes + SPAN_BYTES
        ):
            yield span
            span = []
        end_bytes = max(end_bytes if span else 0, read.start_bytes + read.size_bytes)
        span.append(read)
    if span:
        yield span


def read(targets: dict[str, Tensor], reader: Reader, group: dist.ProcessGroup | None) -> None:
    """Load a checkpoint into tensors by key, in place, or raise on every rank.

    Collective over the group; local if it is ``None``. All tensors must be in the checkpoint. They
    may differ from rank to rank.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state: dict[str, Any] = dict(targets)
    if group is not None:
        load(state, storage_reader=reader, planner=planner, process_group=group)
        return
    # torch's load would warn that there is no process group.
    planner.set_up_planner(state, reader.read_metadata(), is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
