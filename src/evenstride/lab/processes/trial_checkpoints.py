"""A command's own runs of a script: its folder, and checkpoints apart from the user's training."""

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
    """A folder for the checkpoints of a command's runs, made if it is not there yet.

    With ``restore``, a run starts from the newest checkpoint in the script's own folder. A
    ``temporary`` folder is deleted when the command ends.
    """

    def __init__(self, folder: Path, *, restore: bool, temporary: bool = False) -> None:
        self._folder, self._restore, self._temporary = folder, restore, temporary
        self._begun_ns = _begun_ns(folder)
        self._told: set[str] = set()

    def variables(self, run: str = "") -> dict[str, str]:
        folder = self._folder / run
        _begun_ns(folder)
        os.utime(folder / BEGUN, ns=(self._begun_ns, self._begun_ns))
        return {
            "EVENSTRIDE_CHECKPOINTS": str(folder),
            "EVENSTRIDE_RESTORE": "1" if self._restore else "",
        }

    def news(self) -> list[str]:
        """Return what the runs have told since the last call, one line for each thing."""
        files = sorted(self._folder.rglob(NOTES))
        lines = dict.fromkeys(self._line(told) for file in files for told in notes_in(file))
        new = [line for line in lines if line and line not in self._told]
        self._told.update(new)
        return new

    def _line(self, told: dict[str, Any]) -> str:
        if "saved" in told:
            saved = told["saved"]
            if not self._temporary or not Path(saved).exists():
                return ""
            return (
                f"warning: the script saved {saved} itself, in a run that only measures; delete "
                "it before a training loads it"
            )
        place = f"{self._folder}, which is deleted afterwards" if self._temporary else ""
        return sentence(place or told["folder"], told["replaced"], read=told["read"])


@contextlib.contextmanager
def temporary_trials(within: Path | None, *, restore: bool) -> Iterator[Trials]:
    """Yield a new folder for checkpoints, in another or that of temporary files; see `Trials`."""
    with tempfile.TemporaryDirectory(
        prefix="checkpoints-", dir=within, ignore_cleanup_errors=True
    ) as name:
        yield Trials(Path(name), restore=restore, temporary=True)


def _begun_ns(folder: Path) -> int:
    """Make a folder, and return when it was made, by the clock of its file system."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker = folder / BEGUN
        if not marker.exists():
            marker.touch()
        return marker.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {folder} for checkpoints ({error.strerror}); give the command "
            "another folder"
        ) from None


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {folder} ({error.strerror}); name another one with --out"
        ) from None


def require_script(script: str) -> None:
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script}; give the path of a Python file")
