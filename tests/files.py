"""The contents of a folder, to check that a test did not change it."""

from __future__ import annotations

from pathlib import Path


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the bytes and the modification time of every file and folder, by name."""
    return {
        str(path.relative_to(folder)): (
            b"" if path.is_dir() else path.read_bytes(),
            path.stat().st_mtime_ns,
        )
        for path in [folder, *folder.rglob("*")]
    }
