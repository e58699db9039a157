"""The folder a comparison keeps its traces and logs in."""

from __future__ import annotations

from pathlib import Path

from evenstride.errors import ConfigError


def make_folder(folder: Path) -> None:
    """Make the folder, if it is not there yet.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {folder} ({error.strerror}); name another one with --out"
        ) from None
