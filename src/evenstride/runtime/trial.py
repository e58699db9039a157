"""A trial: a run of a user's script that only measures, and must not change results of training.

``evenstride lab``, ``profile`` and ``plan --online`` set ``EVENSTRIDE_CHECKPOINTS`` to a folder of
their own. Every `Checkpointer` writes there instead of to the script's folder. The run reports to
the command through a file in that folder (`NOTES`).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from evenstride.runtime.environment import Environment

NOTES = "notes.jsonl"
"""In the command's folder: reports of a run to the command, as JSON lines."""
BEGUN = "begun"
"""In the same folder: an empty file, last modified when the command began."""


def keep_apart(environment: Environment) -> Environment:
    """Return the environment of a run, with a folder for its checkpoints if it is a trial.

    A process that a user starts with ``EVENSTRIDE_CALIBRATE`` gets a temporary folder, which is
    deleted when the process ends.
    """
    if environment.calibrate is None or environment.checkpoints is not None:
        return environment
    folder = tempfile.mkdtemp(prefix="evenstride-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return replace(environment, checkpoints=Path(folder))


def sentence(folder: str, replaced: str, *, read: bool) -> str:
    """Return one line on where a run writes its checkpoints instead of in the script's folder.

    ``read`` is whether the run may start from a checkpoint in the script's folder.
    """
    kept = "read, but not changed" if read else "not read or changed"
    return f"Checkpoints of this run go to {folder}; those in {replaced} are {kept}."


def note(folder: Path, what: Mapping[str, object]) -> None:
    """Report to the command that owns a folder; does nothing if the folder cannot be written."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / NOTES).open("a", encoding="utf-8") as notes:
            notes.write(json.dumps(what) + "\n")


def notes_in(file: Path) -> Iterator[dict[str, Any]]:
    """Yield what a run has reported in its `NOTES`; nothing if the file is missing."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):  # else it is still being written
            yield json.loads(line)
