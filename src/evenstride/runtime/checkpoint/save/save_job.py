"""One rank's part of a save: the pieces that it writes, copied so that training can continue.

Tensors that several ranks hold are split by bytes. All ranks concatenate them in the same order and
cut the sequence into one equal range per rank. A cut inside a tensor is moved to the next row. So
every rank knows its part without communication, and the sizes of two parts differ by at most a row.

The copy is the content of the file: one buffer, reused by each save, that holds the pieces in
order. Writing it holds the GIL only for moments.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Replicate

from evenstride._version import __version__
from evenstride.errors import CheckpointError, ConfigError, EvenstrideError
from evenstride.runtime.checkpoint.format.manifest import CHUNK_BYTES, FORMAT, Manifest, Name
from evenstride.runtime.checkpoint.format.state_codec import pack, to_bytes
from evenstride.runtime.checkpoint.restore.saved_state import (
    RANDOM,
    Collected,
    SavedObjects,
    Sources,
    capture_random,
    collect,
)

Shape = tuple[int, ...]

# A view as any dtype may start at a multiple of it.
_ALIGN_BYTES = 64
_PORTABLE = 1  # CUDA's flag for memory that is locked for all devices


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """A block of a tensor that this rank writes."""

    key: str  # of the tensor
    data: Tensor  # the block, on any device
    offset: Shape  # of the block in the whole tensor
    whole: Shape  # shape of the whole tensor


def pieces_of(sources: Sources, rank: int, world_size: int) -> list[TensorBlock]:
    """Return the blocks that this rank writes."""
    plain = [
        TensorBlock(key, tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        for key, tensor in sources.shared.items()
        if not isinstance(tensor, DTensor)
    ]
    pieces = list(part_of(plain, rank, world_size))
    for (index, count), blocks in _replicas(sources.shared).items():
        pieces += part_of(blocks, index, count)
    pieces += [
        TensorBlock(key, tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        for key, tensor in sources.leader.items()
        if rank == 0
    ]
    return pieces


def part_of(blocks: list[TensorBlock], index: int, count: int) -> Iterator[TensorBlock]:
    """Yield the part that one of ``count`` ranks with the same blocks in the same order writes."""
    total_bytes, start_bytes = sum(piece.data.nbytes for piece in blocks), 0
    for piece in blocks:
        cuts = total_bytes * index // count, total_bytes * (index + 1) // count
        yield from _within(piece, start_bytes, *cuts)
        if not piece.data.numel() and index == 0 and not prod(piece.whole):
            yield piece  # the whole tensor is empty, but the index must list it
        start_bytes += piece.data.nbytes


def _within(piece: TensorBlock, start_bytes: int, first: int, end: int) -> Iterator[TensorBlock]:
    """Yield the rows of a block whose first byte is in a range, if any."""
    data = piece.data
    if not data.numel():
        return
    # Rows along the first dimension with several elements, so that they stay contiguous.
    dim = next((d for d, size in enumerate(data.shape) if size > 1), None)
    rows = 1 if dim is None else data.shape[dim]
    row_bytes = data.nbytes // rows
    low, high = (min(max(_ceil(cut - start_bytes, row_bytes), 0), rows) for cut in (first, end))
    if low >= high:
        return
    if dim is None or high - low == rows:
        yield piece
        return
    offset = list(piece.offset)
    offset[dim] += low
    yield TensorBlock(piece.key, data.narrow(dim, low, high - low), tuple(offset), piece.whole)


def _ceil(distance: int, row_bytes: int) -> int:
    return -(-distance // row_bytes)


def _replicas(tensors: Mapping[str, Tensor]) -> dict[tuple[int, int], list[TensorBlock]]:
    """Return this rank's blocks of sharded tensors, grouped by their replication.

    The key is this rank's index among the ranks with the same blocks, and the number of these.
    """
    groups: dict[tuple[int, int], list[TensorBlock]] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
            blocks = groups.setdefault(_place(key, tensor), [])
            blocks += _blocks(key, tensor)
    return groups


def _place(key: str, tensor: DTensor) -> tuple[int, int]:
    mesh, index, count = tensor.device_mesh, 0, 1
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "called only on ranks of the mesh"
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            index, count = index * mesh.size(dim) + coordinate[dim], count * mesh.size(dim)
        elif placement.is_partial():
            raise ConfigError(
                f"{key} is a pending sum over the ranks ({placement}), so no rank has its value; "
                "save only sharded or replicated tensors"
            )
    return index, count


def _blocks(key: str, tensor: Any) -> Iterator[TensorBlock]:
    """Yield this rank's blocks of a sharded tensor, by torch's own protocol."""
    items: list[WriteItem] = tensor.__create_write_items__(key, tensor)
    for item in items:
        assert item.tensor_data is not None, "write items of a tensor have tensor data"
        chunk = item.tensor_data.chunk
        data = tensor.to_local() if len(items) == 1 else tensor.__get_tensor_shard__(item.index)
        yield TensorBlock(key, data, tuple(chunk.offsets), tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class Laid:
    """The location of a piece in a file."""

    key: str  # of the tensor
    offset: Shape  # of the piece in the whole tensor
    sizes: Shape  # shape of the piece
    whole: Shape  # shape of the whole tensor
    dtype: torch.dtype
    start_bytes: int

    @property
    def size_bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of a rank's pieces."""

    laid: tuple[Laid, ...]
    buffer: Tensor  # (N,) uint8 on the CPU; the file
    wait: Callable[[], object]  # returns when the copies are complete; for the writing thread

    def chunks(self) -> Iterator[memoryview]:
        """Yield the file's bytes."""
        data = self.buffer.numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]

    def view(self, laid: Laid) -> Tensor:
        """Return a piece of the copy, as a tensor."""
        return _view(self.buffer, laid)


class Staging:
    """Copies pieces into a reused buffer: each copy invalidates the previous one."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unlock: Callable[[], object] = int  # what unlocks the buffer's pages

    def copy(self, pieces: list[TensorBlock]) -> Staged:
        """Return a copy of the pieces.

        Copies from CUDA devices are queued in the current stream and do not block the CPU.
        """
        laid, size_bytes = lay_out(pieces)
        on_cuda = [piece.data.device for piece in pieces if piece.data.is_cuda]
        if len(self._buffer) < size_bytes:
            self.drop()  # frees the old buffer first
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8)
            if on_cuda:  # unless locked, a copy from the device would block the training thread
                self._lock(on_cuda[0])
        buffer = self._buffer[:size_bytes]
        with torch.no_grad():
            for piece, where in zip(pieces, laid, strict=True):
                _view(buffer, where).copy_(piece.data, non_blocking=piece.data.is_cuda)
        return Staged(laid, buffer, partial(_arrived, _marks(on_cuda)))

    def drop(self) -> None:
        """Free the buffer."""
        self._unlock()
        self._buffer, self._unlock = torch.empty(0, dtype=torch.uint8), int

    def _lock(self, device: torch.device) -> None:
        """Lock the buffer's pages, so that a device copies into them on its own."""
        # Torch's allocator of locked memory takes the next power of two: 32 GB for 17 GB.
        address = self._buffer.data_ptr()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, len(self._buffer), _PORTABLE)) == 0:
            # Before the memory is freed, which happens after this object is gone.
            self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)
        else:  # such as a limit of the system on locked pages
            # The next kernel reports the error of this call, too, and is not to be the training's.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            self._buffer = torch.empty_like(self._buffer, pin_memory=True)


def lay_out(pieces: list[TensorBlock]) -> tuple[tuple[Laid, ...], int]:
    """Return the locations of the pieces in a file, and the file's size in bytes."""
    laid: list[Laid] = []
    end_bytes = 0
    for piece in pieces:
        start_bytes = end_bytes + -end_bytes % _ALIGN_BYTES
        sizes, dtype = tuple(piece.data.shape), piece.data.dtype
        laid.append(Laid(piece.key, piece.offset, sizes, piece.whole, dtype, start_bytes))
        end_bytes = start_bytes + laid[-1].size_bytes
    return tuple(laid), end_bytes


def _view(buffer: Tensor, laid: Laid) -> Tensor:
    stretch = buffer[laid.start_bytes : laid.start_bytes + laid.size_bytes]
    return stretch.view(laid.dtype).view(laid.sizes)


def _marks(devices: list[torch.device]) -> list[torch.cuda.Event]:
    marks = []
    for device in dict.fromkeys(devices):
        with torch.cuda.device(device):
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record()
        marks.append(mark)
    return marks


def _arrived(marks: list[torch.cuda.Event]) -> None:
    for mark in marks:
        mark.synchronize()


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One rank's part of one save, as a copy."""

    name: Name
    rank: int
    staged: Staged
    items: Mapping[str, bytes]  # its state other than tensors, as encoded JSON, by key
    outline: str  # equal on ranks with matching states
    manifest: Manifest  # without the files; the leader's is used
    error: EvenstrideError | None = None  # why this rank's part could not be copied


def manifest_of(state: dict[str, Any], step: int, world_size: int) -> Manifest:
    """Return a manifest with a `Stride`'s own state; the leader adds the other fields."""
    return Manifest(
        format=FORMAT,
        step=step,
        created_unix_s=time.time(),
        world_size=world_size,
        versions={"evenstride": __version__, "torch": str(torch.__version__)},
        stride=state,
        data={},
        workers={},
        files={},
    )


def copy_part(
    name: Name, training: SavedObjects, manifest: Manifest, rank: int, staging: Staging
) -> SaveJob:
    """Return a copy of this rank's part of a save.

    An error becomes part of the job, so that all ranks learn of it when it is written.
    """
    error: EvenstrideError | None = None
    try:
        found = collect(training)
        staged = staging.copy(pieces_of(found.sources, rank, manifest.world_size))
        items = {key: to_bytes(value) for key, value in found.items.items() if rank == 0}
        # The only item that differs between ranks, so each writes its own.
        own = f"{RANDOM}/{rank}"
        items[own] = to_bytes(pack(capture_random(training.device), own, {}))
    except Exception as failure:
        error = failure if isinstance(failure, EvenstrideError) else _ours(failure)
        found, items, staged = Collected(Sources({}, {}), {}), {}, staging.copy([])
    return SaveJob(name, rank, staged, items, found.sources.outline(), manifest, error)


def one_line(failure: BaseException) -> str:
    """Return an error's message in one line, with the rank if torch names it."""
    if isinstance(failure, CheckpointException) and failure.failures:
        rank, wrapped = next(iter(sorted(failure.failures.items())))
        return f"rank {rank}: {one_line(wrapped[0])}"
    text = " ".join(str(failure).split())
    ours = type(failure).__module__.startswith("evenstride")
    return text if ours and text else f"{type(failure).__name__}: {text}"


def _ours(failure: Exception) -> CheckpointError:
    return CheckpointError(f"the state could not be copied: {one_line(failure)}")
