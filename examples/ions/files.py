"""Atomic file writes: a file is complete or absent, even if the writing process is killed."""

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
    """Write a file atomically, replacing an existing one."""
    _write(path, state).replace(path)


def add_whole(path: Path, state: Any) -> bool:
    """Write a file atomically unless it exists. Return whether this call created it."""
    fresh = _write(path, state)
    try:
        os.link(fresh, path)  # unlike a rename, it fails if the file exists
    except FileExistsError:
        return False
    finally:
        fresh.unlink()
    return True


def read_whole(path: Path) -> Any:
    """Return the contents, tensors and plain values only, so that loading runs no code."""
    return torch.load(path, weights_only=True)


def read_if_there(path: Path) -> Any:
    """Return the contents, or ``None`` if the file does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return read_whole(path)
    return None
