"""Which rank writes what: tensors that several ranks have are dealt out by bytes.

All ranks lay the tensors in question end to end and cut the line into as many equal stretches as
there are of them; where a cut falls into a tensor, it is moved to the next row. So every rank
knows its part without asking, copies and writes no more than that, and no part is larger than
another one by more than a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Replicate

from evenstride.errors import ConfigError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """A block of a tensor that this rank writes.

    Args:
        key: of the tensor.
        data: the block, on any device.
        offset: of the block in the whole tensor.
        whole: shape of the whole tensor.
    """

    key: str
    data: Tensor
    offset: Shape
    whole: Shape


@dataclass(frozen=True, slots=True)
class Sources:
    """The tensors of a state.

    Args:
        shared: the same on every rank, or sharded; dealt out.
        leader: of which the first rank's count, such as buffers, which every rank updates itself.
    """

    shared: Mapping[str, Tensor]
    leader: Mapping[str, Tensor]

    def outline(self) -> str:
        """Return a text that is equal on ranks whose tensors fit together."""
        both = ((key, t) for part in (self.shared, self.leader) for key, t in part.items())
        told = repr([(key, tuple(t.shape), str(t.dtype)) for key, t in both])
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def pieces_of(sources: Sources, rank: int, world_size: int) -> list[TensorBlock]:
    """Return what this rank writes.

    Raises:
        ConfigError: a sharded tensor is one that cannot be written, such as a partial sum.
    """
    plain = [
        TensorBlock(key, tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        for key, tensor in sources.shared.items()
        if not isinstance(tensor, DTensor)
    ]
    pieces = list(deal(plain, rank, world_size))
    for (index, count), blocks in _replicas(sources.shared).items():
        pieces += deal(blocks, index, count)
    pieces += [
        TensorBlock(key, tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        for key, tensor in sources.leader.items()
        if rank == 0
    ]
    return pieces


def deal(blocks: list[TensorBlock], index: int, count: int) -> Iterator[TensorBlock]:
    """Yield what one of several ranks that all have the same blocks writes of them.

    Args:
        blocks: the same on all of these ranks, in the same order.
        index: of this rank among them.
        count: of the ranks.
    """
    total_bytes, start_bytes = sum(piece.data.nbytes for piece in blocks), 0
    for piece in blocks:
        cuts = total_bytes * index // count, total_bytes * (index + 1) // count
        yield from _within(piece, start_bytes, *cuts)
        if not piece.data.numel() and index == 0 and not prod(piece.whole):
            yield piece  # empty altogether, so that it is known to be there
        start_bytes += piece.data.nbytes


def _within(piece: TensorBlock, start_bytes: int, first: int, end: int) -> Iterator[TensorBlock]:
    """Yield the rows of a block whose first byte is in a stretch of the line, if there are any."""
    data = piece.data
    if not data.numel():
        return
    # Rows are taken along the first dimension that has several, so that they stay contiguous.
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
    """Return this rank's blocks of the sharded tensors, by who else has the same blocks.

    The key is this rank's index among them, and their number.
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
    assert coordinate is not None, "asked of ranks in the mesh only"
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            index, count = index * mesh.size(dim) + coordinate[dim], count * mesh.size(dim)
        elif placement.is_partial():
            raise ConfigError(
                f"{key} is a sum that the ranks have not made yet ({placement}), so no rank has "
                "its value; save what is sharded or replicated"
            )
    return index, count


def _blocks(key: str, tensor: Any) -> Iterator[TensorBlock]:
    """Yield the blocks that a sharded tensor says it has here, by torch's own protocol."""
    items: list[WriteItem] = tensor.__create_write_items__(key, tensor)
    for item in items:
        assert item.tensor_data is not None, "a tensor's write items are of tensors"
        chunk = item.tensor_data.chunk
        data = tensor.to_local() if len(items) == 1 else tensor.__get_tensor_shard__(item.index)
        yield TensorBlock(key, data, tuple(chunk.offsets), tuple(tensor.shape))
