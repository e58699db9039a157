"""``evenstride trace``: a run for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.cli.terminal_text import say
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.report.perfetto.chrome_trace import Exported, Steps


def trace(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its trace file.", metavar="RUN")],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "--out", "-o", help="The file to write; compressed if it ends in .gz."
        ),
    ] = Path("perfetto.json.gz"),
    profiles: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="An export of torch.profiler, shown with the worker it is of; RANK=FILE where it "
            "does not tell its rank. May be given several times.",
            metavar="PROFILE.json",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            help="Show steps A up to B, B left out; either may be missing.", metavar="A:B"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a run for ui.perfetto.dev or chrome://tracing: each worker's steps, work and waiting.

    One group of tracks for each worker, with its share, its speed and its memory, and one for the
    leader, with every decision and its reason. RUN may still be training. Times are those of
    torch.profiler's exports, so --with shows both in one picture.

    Examples:
        evenstride trace runs/today -o today.json.gz

        evenstride trace runs/today --steps 1000:1200 --with rank0.json --with rank1.json
    """
    from evenstride.report.perfetto.chrome_trace import export

    made = export(run, output, profiles or (), parse_steps(steps))
    for remark in made.remarks:
        say(f"note: {_shown(remark)}", err=True)
    typer.echo(json.dumps(made.to_dict()) if as_json else tell(made))


def parse_steps(text: str | None) -> Steps | None:
    """Return the steps in ``text``: ``A:B``, ``A:`` or ``:B``; ``None`` for all."""
    from evenstride.report.perfetto.chrome_trace import Steps

    if text is None:
        return None
    found = re.fullmatch(r"(\d{0,12}):(\d{0,12})", text.strip())
    if not found:
        raise ConfigError(
            f"--steps is {text!r}; write A:B for the steps from A up to B, such as 1000:1200"
        )
    first, last = int(found[1] or 0), int(found[2]) if found[2] else None
    if last is not None and last <= first:
        raise ConfigError(f"--steps is {text!r}; the second number must be above the first")
    return Steps(first, last)


def tell(made: Exported) -> str:
    lines = [
        f"{_shown(made.path)}: {made.events:,} events, {made.steps:,} steps of {made.workers} "
        "worker(s); open it in ui.perfetto.dev, which sends nothing anywhere, or chrome://tracing"
    ]
    lines += [
        f"rank {one.rank}: {one.events:,} events of {_shown(one.path)}" for one in made.merged
    ]
    return "\n".join(lines)


def _shown(text: object) -> str:
    from evenstride.report.wording import plain

    return plain(text, 1000)
