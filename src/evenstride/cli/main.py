"""The ``evenstride`` command."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from evenstride._version import __version__
from evenstride.cli.commands.compare import compare
from evenstride.cli.commands.demo import demo
from evenstride.cli.commands.doctor import doctor
from evenstride.cli.commands.estimate import estimate
from evenstride.cli.commands.lab import lab
from evenstride.cli.commands.launch import launch
from evenstride.cli.commands.plan import plan
from evenstride.cli.commands.profile import profile
from evenstride.cli.commands.report import report
from evenstride.cli.commands.simulate import simulate
from evenstride.cli.commands.top import top
from evenstride.cli.commands.trace import trace
from evenstride.cli.render.terminal_text import say
from evenstride.errors import EvenstrideError

USAGE_ERROR = 2
"""Exit code of a request that cannot be served."""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Even steps from uneven workers: balanced, exact data-parallel training on PyTorch.",
    epilog="Exit codes: 0 done, 1 a bug, 2 the request cannot be served, 3 measured but disturbed, "
    "130 interrupted with Ctrl-C.",
)
app.command()(estimate)
app.command()(demo)
app.command(context_settings={"ignore_unknown_options": True})(lab)
# What stands behind the script is the script's own.
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    launch
)
app.command()(simulate)
app.command()(compare)
app.command(context_settings={"ignore_unknown_options": True})(profile)
app.command()(plan)
app.command()(top)
app.command()(report)
app.command()(trace)
app.command()(doctor)


def _version(asked: bool) -> None:
    if asked:
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
    """Unwind, so that limits are lifted and workers ended, when told to end."""
    sys.exit(128 + number)


def main() -> None:
    """Run the command line; our own errors become one line on stderr and exit code 2."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _leave)
    try:
        app(prog_name="evenstride")
    except EvenstrideError as error:
        say(f"evenstride: {error}", err=True)
        sys.exit(USAGE_ERROR)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # What is still buffered would be tried once more at exit, and fail with a traceback.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
        say(f"evenstride: the output cannot be written: {error.strerror}", err=True)
        sys.exit(USAGE_ERROR)
