"""The index of a checkpoint: torch's `Metadata` as JSON, and back.

It is checked before it is used: every tensor must be covered exactly once, and no byte of a file
may be used twice. So an index cannot request more memory than the files have bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from evenstride.errors import CheckpointDamaged, CheckpointError
from evenstride.runtime.checkpoint.format.state_codec import DTYPES, from_bytes, to_bytes

# Close to torch's own limits; a size with zeros could still need impossible strides.
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 2**62
# Four million parts. A longer index is neither written nor read.
MOST_TABLE_BYTES = 256 << 20


class ByteRange(NamedTuple):
    """The location of an item's bytes."""

    file: str
    start_bytes: int
    size_bytes: int


def encode_table(metadata: Metadata, places: dict[MetadataIndex, ByteRange]) -> bytes:
    """Return the index as the bytes of a file.

    Raises:
        CheckpointError: it is too long to be read again.
    """
    tensors: dict[str, Any] = {}
    items: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            items[key] = list(places[MetadataIndex(key)])
            continue
        chunks = [
            [list(chunk.offsets), list(chunk.sizes), *places[MetadataIndex(key, chunk.offsets)][:2]]
            for chunk in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[key] = {"dtype": dtype, "size": list(entry.size), "chunks": chunks}
    data = to_bytes({"tensors": tensors, "items": items})
    if len(data) > MOST_TABLE_BYTES:
        raise CheckpointError(
            f"the checkpoint index would have {len(data)} bytes, more than the "
            f"{MOST_TABLE_BYTES} that can be read; save from fewer ranks"
        )
    return data


def decode_table(data: bytes, file_bytes: dict[str, int]) -> Metadata:
    """Return the index in the bytes of a file; ``storage_data`` is a `ByteRange` for each entry.

    ``file_bytes`` are the sizes of the checkpoint's files, by name.

    Raises:
        CheckpointDamaged: it is not an index, or does not match the files.
    """
    plain = from_bytes(data, "the checkpoint index")
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, ByteRange] = {}
    try:
        for key, place in plain["items"].items():
            entries[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = _checked(ByteRange(*place), file_bytes)
        for key, listed in plain["tensors"].items():
            if key in entries:
                raise CheckpointDamaged(f"the checkpoint index lists {key[:200]} twice")
            entries[key] = _tensor_entry(key, listed, file_bytes, places)
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise CheckpointDamaged("the checkpoint index has missing or invalid entries") from error
    _refuse_shared_bytes(places.values())
    return Metadata(entries, storage_data=places)


def _tensor_entry(
    key: str, listed: Any, file_bytes: dict[str, int], places: dict[MetadataIndex, ByteRange]
) -> TensorStorageMetadata:
    dtype, size = DTYPES[listed["dtype"]], _size(listed["size"])
    chunks: list[ChunkStorageMetadata] = []
    for offset, sizes, file, start_bytes in listed["chunks"]:
        offset, sizes = _whole_numbers(offset), _whole_numbers(sizes)
        ends = zip(offset, sizes, size, strict=True)
        if any(o + s > whole for o, s, whole in ends):
            raise CheckpointDamaged(f"the checkpoint index has a part outside of {key}")
        place = ByteRange(file, start_bytes, prod(sizes) * dtype.itemsize)
        places[MetadataIndex(key, offset)] = _checked(place, file_bytes)
        chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
    _require_covered(key, size, chunks)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)


def _size(listed: Any) -> list[int]:
    size = _whole_numbers(listed)
    if len(size) > _MOST_DIMENSIONS or prod(max(one, 1) for one in size) > _MOST_ELEMENTS:
        raise CheckpointDamaged("the checkpoint index has an impossible tensor size")
    return size


def _require_covered(key: str, size: Sequence[int], chunks: list[ChunkStorageMetadata]) -> None:
    """Refuse parts with gaps or overlaps: each element must occur exactly once."""
    elements = [prod(chunk.sizes) for chunk in chunks]
    if sum(elements) != prod(size):
        raise CheckpointDamaged(f"the checkpoint index lacks parts of {key}")
    if prod(size) and not all(elements):
        raise CheckpointDamaged(f"the checkpoint index has an empty part of {key}")
    if prod(size) and any(_overlaps(chunks)):
        raise CheckpointDamaged(f"the checkpoint index has overlapping parts of {key}")


def _overlaps(chunks: list[ChunkStorageMetadata]) -> Iterator[bool]:
    """Yield for each part whether it overlaps an earlier one.

    Takes ``O(n log n)`` for parts that are split along one dimension, as FSDP's are.
    """
    dims = range(len(chunks[0].offsets))
    along = max(dims, key=lambda dim: len({c.offsets[dim] for c in chunks}), default=None)
    if along is None:
        return
    near: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda c: c.offsets[along]):
        near = [c for c in near if c.offsets[along] + c.sizes[along] > chunk.offsets[along]]
        yield any(_overlap(chunk, other) for other in near)
        near.append(chunk)


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    ends = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < c + d and c < a + b for a, b, c, d in ends)


def _refuse_shared_bytes(places: Iterable[ByteRange]) -> None:
    """Refuse two parts with the same bytes: they would need more memory than the files."""
    used = sorted(place for place in places if place.size_bytes)
    for one, after in pairwise(used):
        if one.file == after.file and one.start_bytes + one.size_bytes > after.start_bytes:
            raise CheckpointDamaged(f"the checkpoint index uses bytes of {one.file} twice")


def _whole_numbers(values: Any) -> list[int]:
    if not isinstance(values, list | tuple):
        raise CheckpointDamaged("the checkpoint index contains an invalid size")
    if not all(type(value) is int and 0 <= value < 2**62 for value in values):
        raise CheckpointDamaged("the checkpoint index contains an invalid size")
    return list(values)


def _checked(place: ByteRange, file_bytes: dict[str, int]) -> ByteRange:
    start_bytes, size_bytes = _whole_numbers(place[1:])
    if start_bytes + size_bytes > file_bytes[place.file]:
        raise CheckpointDamaged(f"the checkpoint index exceeds the end of {place.file}")
    return place
