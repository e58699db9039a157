"""The ``evenstride`` command: a group that loads its commands by name on demand."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from evenstride._version import __version__
from evenstride.cli.terminal_text import say
from evenstride.errors import EvenstrideError

USAGE_ERROR = 2
"""Exit code of an invalid request."""

_SCRIPT = {"ignore_unknown_options": True}  # a script and its arguments follow ours
COMMANDS: dict[str, dict[str, Any]] = {
    "estimate": {},
    "demo": {},
    "lab": _SCRIPT,
    # Options after the script go to the script.
    "launch": {**_SCRIPT, "allow_interspersed_args": False},
    "simulate": {},
    "compare": {},
    "profile": _SCRIPT,
    "plan": {},
    "top": {},
    "grafana": {},
    "report": {},
    "trace": {},
    "doctor": {},
}
"""Modules of `cli.commands`, each with a function of its name, and the settings of its parser."""


class _Modules(Mapping[str, Any]):
    """The commands by name. A lookup imports the module."""

    def __getitem__(self, name: str) -> Any:
        settings = COMMANDS[name]
        module = import_module(f"evenstride.cli.commands.{name}")
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
        alone.command(name, context_settings=settings)(getattr(module, name))
        return get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyGroup(TyperGroup):
    """A group that imports its commands one by one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Modules()  # type: ignore[assignment]  # never modified


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Even steps from uneven workers: balanced, exact data-parallel training on PyTorch.",
    epilog="Exit codes: 0 success, 1 a bug, 2 an invalid request, 3 a disturbed measurement, 130 "
    "interrupted with Ctrl-C.",
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"evenstride {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version


def _leave(number: int, _: object) -> None:
    """Unwind the stack on a signal, so that CPU limits are removed and workers end."""
    sys.exit(128 + number)


def main() -> None:
    """Run the command line. Errors of evenstride become one line on stderr and exit code 2."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _leave)
    sys.path.append(str(Path.cwd()))  # for policies of the user's own; `python -m` does the same
    try:
        app(prog_name="evenstride")
    except EvenstrideError as error:
        say(f"evenstride: {error}", err=True)
        sys.exit(USAGE_ERROR)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # Python would write the rest of the buffer at exit, and fail with a traceback.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
        say(f"evenstride: cannot write the output: {error.strerror}", err=True)
        sys.exit(USAGE_ERROR)
