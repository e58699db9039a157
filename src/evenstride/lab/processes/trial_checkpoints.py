"""Folders for the runs that a command makes of a script, apart from the user's checkpoints."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evenstride.errors import ConfigError
from evenstride.runtime.trial import BEGUN, NOTES, notes_in, sentence


class Trials:
    """A folder for the checkpoints of a command's runs, created if it does not exist.

    With ``restore``, a run starts from the newest checkpoint in the script's own folder. A
    ``temporary`` folder is deleted when the command ends.
    """

    def __init__(self, folder: Path, *, restore: bool, temporary: bool = False) -> None:
        self._folder, self._restore, self._temporary = folder, restore, temporary
        self._begun_ns = _begun_ns(folder)
        self._reported: set[str] = set()

    def variables(self, run: str = "") -> dict[str, str]:
        folder = self._folder / run
        _begun_ns(folder)
        os.utime(folder / BEGUN, ns=(self._begun_ns, self._begun_ns))
        return {
            "EVENSTRIDE_CHECKPOINTS": str(folder),
            "EVENSTRIDE_RESTORE": "1" if self._restore else "",
        }

    def news(self) -> list[str]:
        """Return lines about the checkpoints of the runs since the last call."""
        files = sorted(self._folder.rglob(NOTES))
        lines = dict.fromkeys(self._line(note) for file in files for note in notes_in(file))
        new = [line for line in lines if line and line not in self._reported]
        self._reported.update(new)
        return new

    def _line(self, note: dict[str, Any]) -> str:
        if "saved" in note:
            saved = note["saved"]
            if not self._temporary or not Path(saved).exists():
                return ""
            return (
                f"warning: the script itself saved {saved} in a run that only measures; delete "
                "it, so that no training loads it"
            )
        place = f"{self._folder}, which is deleted afterwards" if self._temporary else ""
        return sentence(place or note["folder"], note["replaced"], read=note["read"])


@contextlib.contextmanager
def temporary_trials(within: Path | None, *, restore: bool) -> Iterator[Trials]:
    """Yield a new folder for checkpoints, in ``within`` or the system's temporary folder."""
    with tempfile.TemporaryDirectory(
        prefix="checkpoints-", dir=within, ignore_cleanup_errors=True
    ) as name:
        yield Trials(Path(name), restore=restore, temporary=True)


def _begun_ns(folder: Path) -> int:
    """Create a folder, and return its creation time by the clock of its file system."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / BEGUN
        if not marker.exists():
            marker.touch()
        return marker.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(
            f"cannot create the folder {folder} for checkpoints ({error.strerror}); give the "
            "command another folder"
        ) from None


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the folder {folder} ({error.strerror}); give another one with --out"
        ) from None


def require_script(script: str) -> None:
    if not Path(script).is_file():
        raise ConfigError(f"script {script} does not exist; give the path of a Python file")
