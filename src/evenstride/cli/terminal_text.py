"""Texts and tables for people: on a terminal, no wider than it is."""

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
    """Print a text; on a terminal with no line longer than it is wide.

    Elsewhere lines stay whole, for scripts. Not for lines that people copy, such as commands.
    What a terminal would act on is replaced: names of files and hosts are others' texts.
    """
    text = "\n".join(plain(line, max(len(line), 1)) for line in text.split("\n"))
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        text = wrapped(text, shutil.get_terminal_size().columns)
    typer.echo(text, err=err)


def wrapped(text: str, columns: int) -> str:
    """Return a text whose long lines are broken at spaces; a word that is too long stays whole."""
    return "\n".join(_broken(line, columns) for line in text.split("\n"))


def _broken(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)


def tell_forgone(modes: Iterable[SyncMode]) -> None:
    """Tell on stderr what each mode of synchronisation does without."""
    for mode in dict.fromkeys(modes):
        for sentence in mode.forgoes:
            say(f"note: {mode}: {sentence}", err=True)


def print_table(table: Table) -> None:
    """Print a table, as wide as the terminal if there is one."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        typer.echo(table.text())
        return
    for number, part in enumerate(table.parts(console.width)):
        if number:
            console.print()
        console.print(part.drawn(), crop=False)
