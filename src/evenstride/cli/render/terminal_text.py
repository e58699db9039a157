"""Prose for people: on a terminal, broken between words, as terminals themselves do not."""

from __future__ import annotations

import shutil
import sys
import textwrap

import typer

from evenstride.report.wording import plain


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
    """Return a text whose long lines are broken at spaces; a word that is too long stays whole.

    Args:
        text: of any number of lines; those that fit stay as they are.
        columns: that a line may have, at least 1.
    """
    return "\n".join(_broken(line, columns) for line in text.split("\n"))


def _broken(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)
