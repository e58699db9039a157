"""Print texts and tables, wrapped to the width of the terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from evenstride.report.wording import plain

if TYPE_CHECKING:
    from evenstride.core.sync_modes.mode_specs import SyncMode
    from evenstride.report.wording import Table


def say(text: str, *, err: bool = False) -> None:
    """Print a text, word-wrapped on a terminal and unchanged elsewhere.

    Control characters are replaced, because names of files and hosts may hold them. Do not use it
    for lines that users copy, such as commands.
    """
    text = "\n".join(plain(line, max(len(line), 1)) for line in text.split("\n"))
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        text = wrapped(text, shutil.get_terminal_size().columns)
    typer.echo(text, err=err)


def wrapped(text: str, columns: int) -> str:
    """Return a text with long lines broken at spaces. Words stay whole."""
    return "\n".join(_broken(line, columns) for line in text.split("\n"))


def _broken(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)


def print_drawbacks(modes: Iterable[SyncMode]) -> None:
    """Print what each synchronisation mode gives up, on stderr."""
    for mode in dict.fromkeys(modes):
        for sentence in mode.forgoes:
            say(f"note: {mode}: {sentence}", err=True)


def print_table(table: Table) -> None:
    """Print a table, in parts if the terminal is too narrow."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        typer.echo(table.text())
        return
    for number, part in enumerate(table.parts(console.width)):
        if number:
            console.print()
        console.print(part.drawn(), crop=False)
