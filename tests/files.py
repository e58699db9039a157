"""What is in a folder, to compare it with what was in it before."""

from __future__ import annotations

from pathlib import Path


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return bytes and time of modification of every file, and of every folder, by name."""
    return {
        str(path.relative_to(folder)): (
            b"" if path.is_dir() else path.read_bytes(),
            path.stat().st_mtime_ns,
        )
        for path in [folder, *folder.rglob("*")]
    }
