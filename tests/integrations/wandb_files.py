"""Reads the transaction log of a W&B run, a file in the log format of LevelDB after a header."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK, _HEAD = 7, 32768, struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4  # kinds of fragments with which a record ends


def records(folder: Path) -> Iterator[Any]:
    """Yield the records of all runs below a folder, as W&B's own messages, in order of creation."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("**/*.wandb")):
        for data in _payloads(path.read_bytes()):
            yield Record.FromString(data)


def history(folder: Path) -> list[dict[str, Any]]:
    """Return all rows of the history, without W&B's own columns."""
    rows = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    return rows


def _payloads(data: bytes) -> Iterator[bytes]:
    at, parts = _HEADER, b""
    while at + _HEAD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:  # the rest of a block is padding
            at += left
            continue
        _, length, kind = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        parts += data[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
