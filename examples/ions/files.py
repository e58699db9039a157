"""Files that are whole or not there, whenever the process that writes them is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

import torch


def _write(path: Path, state: Any) -> Path:
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with fresh.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return fresh


def replace_whole(path: Path, state: Any) -> None:
    """Write a file in one go, instead of the one that may be there."""
    _write(path, state).replace(path)


def add_whole(path: Path, state: Any) -> bool:
    """Write a file in one go unless it is there; return whether this call has made it."""
    fresh = _write(path, state)
    try:
        os.link(fresh, path)  # unlike a rename, it fails where there is a file
    except FileExistsError:
        return False
    finally:
        fresh.unlink()
    return True


def read_whole(path: Path) -> Any:
    """Return what was written; tensors and plain values only, so that no code is run."""
    return torch.load(path, weights_only=True)


def read_if_there(path: Path) -> Any:
    """Return what was written, ``None`` if nothing is there (any more)."""
    with contextlib.suppress(FileNotFoundError):
        return read_whole(path)
    return None
