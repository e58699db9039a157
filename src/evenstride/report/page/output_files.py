"""Where a report goes, and what it may overwrite."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from evenstride.errors import ConfigError
from evenstride.report.page.html_page import MARK

REPORT_NAME = "report.html"
_LOOKED_AT = 4096
_TRACE = b'{"kind":"header"'


def place_of(trace: Path, given: Path | None) -> Path:
    """Return the file that a report is written to: the given one, or one beside the trace."""
    return trace.parent / REPORT_NAME if given is None else given


def check_place(path: Path, *, force: bool) -> None:
    """Raise unless a report may be written there.

    Raises:
        ConfigError: it is a folder, or a file that is no report of ours.
    """
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder; name a file for the report, such as {path / REPORT_NAME}"
        )
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no plain file; name one for the report")
    if _is_trace(path):
        raise ConfigError(f"{path} is the trace of a run; name another file for the report")
    if force or not path.exists():
        return
    try:
        with path.open("rb") as file:
            ours = MARK.encode() in file.read(_LOOKED_AT)
    except OSError as error:
        raise ConfigError(f"cannot look into {path} ({error.strerror})") from None
    if not ours:
        raise ConfigError(
            f"{path} exists and is no report of evenstride; name another file with -o, or give "
            "--force to overwrite it"
        )


def check_folder(path: Path) -> None:
    """Raise unless figures can be written into a folder, which is made where it is not there.

    Raises:
        ConfigError: it cannot be made, or not be written into.
    """
    there = path.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{there} is no folder; name another one for the figures than {path}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{there} may not be written into; name another folder for the figures than {path}"
        )


def _is_trace(path: Path) -> bool:
    """Return whether a file begins like a trace, which nothing brings back."""
    try:
        with path.open("rb") as file:
            return file.read(len(_TRACE)) == _TRACE
    except OSError:  # there is none
        return False


def write_page(text: str, path: Path) -> None:
    """Write a page, whole or not at all.

    Raises:
        ConfigError: it cannot be written, for which reason.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise ConfigError(f"cannot write {path} ({error.strerror})") from None
