"""Protects the checkpoints that a script saves by itself (by `torch.save`, say) in a trial.

A `Checkpointer` can be redirected to another folder. A script's own saves cannot, because the code
that loads them would not know. So a trial refuses to overwrite, move or delete a checkpoint file
that is older than the command. It also notes which files the script writes, for the command's
report.

Python reports every file that it opens, moves or deletes to audit hooks. This covers
`torch.distributed.checkpoint`, Lightning and the Trainer's rotation of checkpoints. `torch.save`
and safetensors open their files in native code, so both are wrapped. Saves by native code of other
libraries, and by other programs that the script starts, are not noticed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from evenstride.errors import ConfigError
from evenstride.runtime.trial import BEGUN, NOTES, note, notes_in

_SUFFIXES = (".bin", ".ckpt", ".distcp", ".pt", ".pth", ".safetensors")
_CACHES = (f"{os.sep}.cache{os.sep}", "torchinductor")
_WRITES = os.O_WRONLY | os.O_RDWR
_NO_FOLDER = -1  # for a path that is not relative to an open folder


class _Guard:
    """Which files a script may change and read in one trial, which owns ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = f"{folder}{os.sep}"
        try:
            self._begun_ns = (folder / BEGUN).stat().st_mtime_ns
        except OSError:
            self._begun_ns = time.time_ns()
        self._written: set[str] = set()

    def write(self, path: str) -> None:
        """Refuse to change a file that is older than the command; note any other."""
        self._refuse_if_older(path, "overwrites")
        if path not in self._written:
            self._written.add(path)
            note(self.folder, {"saved": path})

    def remove(self, path: str) -> None:
        """Refuse to move or delete a file that is older than the command."""
        self._refuse_if_older(path, "removes")

    def read(self, path: str) -> None:
        """Refuse to load a file that another run of the same command has saved."""
        modified_ns = _modified_ns(path)
        if modified_ns is None or modified_ns <= self._begun_ns or path in self._written:
            return
        if any(one.get("saved") == path for one in notes_in(self.folder / NOTES)):
            return
        raise ConfigError(
            f"the script loads {path}, which another run of this command has saved, so the runs "
            "would not start from the same state. Give the script an argument that turns this off. "
            "If the file is data rather than a model, run the command again"
        )

    def concerns(self, path: str) -> bool:
        """Return whether a path is that of a checkpoint file outside the command's own folder."""
        return (
            path.endswith(_SUFFIXES)
            and not path.startswith(self._own)
            and not any(cache in path for cache in _CACHES)
        )

    def _refuse_if_older(self, path: str, does: str) -> None:
        modified_ns = _modified_ns(path)
        if modified_ns is not None and modified_ns <= self._begun_ns:
            raise ConfigError(
                f"the script {does} {path}, which is older than this command. A command that only "
                "tries a script out must not change such files. Let the script save elsewhere, or "
                "move that file"
            )


_active: _Guard | None = None


def guard_saves(folder: Path | None) -> None:
    """Guard checkpoint files in this process from now on, for a trial; ``None`` ends it.

    Costs under 1 us for each file that Python opens, and nothing in processes without a trial.
    """
    global _active
    if folder is None or _active is None or _active.folder != folder:
        _active = None if folder is None else _Guard(folder)
    if folder is not None:
        _install()


@functools.cache
def _install() -> None:
    sys.addaudithook(_audit)
    _wrap("torch", "save", 1, "f")
    if importlib.util.find_spec("safetensors") is not None:
        # All functions of safetensors that write files call it, under any name a script knows.
        _wrap("safetensors.torch", "serialize_file", 1, "filename")


def _wrap(module: str, name: str, position: int, keyword: str) -> None:
    """Make a function that saves to a path ask the guard first."""
    holder = importlib.import_module(module)
    save: Callable[..., Any] = getattr(holder, name)

    @functools.wraps(save)
    def saved(*args: Any, **kwargs: Any) -> Any:
        target = args[position] if len(args) > position else kwargs.get(keyword)
        if _active is not None and (path := _path(target)) and _active.concerns(path):
            _active.write(path)
        return save(*args, **kwargs)

    setattr(holder, name, saved)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    look = _EVENTS.get(event)
    if look is not None and _active is not None:
        look(_active, *args)


def _opened(guard: _Guard, target: Any, _mode: Any, flags: Any) -> None:
    path = _path(target)
    if guard.concerns(path):
        (guard.write if isinstance(flags, int) and flags & _WRITES else guard.read)(path)


def _moved(guard: _Guard, source: Any, target: Any, source_in: int, target_in: int) -> None:
    old, new = _path(source, source_in), _path(target, target_in)
    if guard.concerns(old):
        guard.remove(old)
    if guard.concerns(new):
        guard.write(new)


def _removed(guard: _Guard, target: Any, folder: int = _NO_FOLDER) -> None:
    path = _path(target, folder)
    if guard.concerns(path):
        guard.remove(path)


def _removed_tree(guard: _Guard, target: Any, _folder: Any = None) -> None:
    for path in filter(guard.concerns, _files(_path(target))):
        guard.remove(path)


_EVENTS: dict[str, Callable[..., None]] = {
    "open": _opened,
    "os.rename": _moved,
    "os.remove": _removed,
    "shutil.rmtree": _removed_tree,
}


def _files(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in names)  # noqa: PTH118


def _path(target: Any, folder: int = _NO_FOLDER) -> str:
    """Return an absolute path; empty for other objects, and relative to another open folder."""
    if folder != _NO_FOLDER or not isinstance(target, str | bytes | os.PathLike):
        return ""
    return os.path.abspath(os.fsdecode(target))  # noqa: PTH100


def _modified_ns(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return None
