"""The table of a checkpoint's contents: torch's `Metadata` as JSON, and back.

Whatever it says is checked against the sizes of the files, so that a table cannot ask for more
memory than there are bytes to fill it with.
"""

from __future__ import annotations

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

from evenstride.runtime.checkpoint.codec import DTYPES, from_bytes, to_bytes
from evenstride.runtime.checkpoint.errors import CheckpointDamaged


class Place(NamedTuple):
    """Where an item's bytes are."""

    file: str
    start_bytes: int
    size_bytes: int


def encode_table(metadata: Metadata, places: dict[MetadataIndex, Place]) -> bytes:
    """Return what is in a checkpoint, and where, as the bytes of a file."""
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
    return to_bytes({"tensors": tensors, "items": items})


def decode_table(data: bytes, file_bytes: dict[str, int]) -> Metadata:
    """Return the table in the bytes of a file; ``storage_data`` is a `Place` for each index.

    Args:
        data: the bytes.
        file_bytes: sizes of the checkpoint's files, by name.

    Raises:
        CheckpointDamaged: it is not a table, or does not fit the files.
    """
    plain = from_bytes(data, "the table of contents")
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, Place] = {}
    try:
        for key, place in plain["items"].items():
            entries[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = _checked(Place(*place), file_bytes)
        for key, told in plain["tensors"].items():
            entries[key] = _tensor_entry(key, told, file_bytes, places)
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise CheckpointDamaged("the table of contents lacks what it must hold") from error
    return Metadata(entries, storage_data=places)


def _tensor_entry(
    key: str, told: Any, file_bytes: dict[str, int], places: dict[MetadataIndex, Place]
) -> TensorStorageMetadata:
    dtype, size = DTYPES[told["dtype"]], _whole_numbers(told["size"])
    chunks, elements = [], 0
    for offset, sizes, file, start_bytes in told["chunks"]:
        offset, sizes = _whole_numbers(offset), _whole_numbers(sizes)
        ends = zip(offset, sizes, size, strict=True)
        if any(o + s > whole for o, s, whole in ends):
            raise CheckpointDamaged(f"the table of contents has a part outside of {key}")
        elements += prod(sizes)
        place = Place(file, start_bytes, prod(sizes) * dtype.itemsize)
        places[MetadataIndex(key, offset)] = _checked(place, file_bytes)
        chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
    if elements != prod(size):
        raise CheckpointDamaged(f"the table of contents lacks parts of {key}")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)


def _whole_numbers(values: Any) -> list[int]:
    if not all(type(value) is int and 0 <= value < 2**62 for value in values):
        raise CheckpointDamaged("the table of contents has a size that is none")
    return list(values)


def _checked(place: Place, file_bytes: dict[str, int]) -> Place:
    start_bytes, size_bytes = _whole_numbers(place[1:])
    if start_bytes + size_bytes > file_bytes[place.file]:
        raise CheckpointDamaged(f"the table of contents goes beyond the end of {place.file}")
    return place
