"""``evenstride trace``: export a run for Perfetto and chrome://tracing."""

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
    run: Annotated[
        Path,
        typer.Argument(help="A run's folder, a folder with one run, or a trace.", metavar="PATH"),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "--out", "-o", help="The file to write, compressed if it ends in .gz."
        ),
    ] = Path("perfetto.json.gz"),
    profiles: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="An export of torch.profiler, shown with its worker. Give RANK=FILE if the file "
            "does not contain its rank. Repeatable.",
            metavar="PROFILE.json",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            help="Export the steps from A up to B, without B. Both are optional.", metavar="A:B"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export a run for ui.perfetto.dev or chrome://tracing.

    Each worker has a group of tracks with its steps, busy times, waits, share, speed and memory.
    The leader has one with every decision and its reason. The run may still train. The clock is
    that of torch.profiler's exports, which --with adds.

    Examples:
        evenstride trace runs/today -o today.json.gz

        evenstride trace runs/demo/adaptive.jsonl

        evenstride trace runs/today --steps 1000:1200 --with rank0.json --with rank1.json
    """
    from evenstride.report.analysis.run_folder import one_trace_at
    from evenstride.report.perfetto.chrome_trace import export

    made = export(one_trace_at(run), output, profiles or (), parse_steps(steps))
    for remark in made.remarks:
        say(f"note: {_shown(remark)}", err=True)
    typer.echo(json.dumps(made.to_dict()) if as_json else text_of(made))


def parse_steps(text: str | None) -> Steps | None:
    """Return the steps in ``A:B``, ``A:`` or ``:B``; ``None`` without a text."""
    from evenstride.report.perfetto.chrome_trace import Steps

    if text is None:
        return None
    found = re.fullmatch(r"(\d{0,12}):(\d{0,12})", text.strip())
    if not found:
        raise ConfigError(
            f"--steps is {text!r}: expected A:B for the steps from A up to B, such as 1000:1200"
        )
    first, last = int(found[1] or 0), int(found[2]) if found[2] else None
    if last is not None and last <= first:
        raise ConfigError(f"--steps is {text!r}: expected a second number above the first")
    return Steps(first, last)


def text_of(made: Exported) -> str:
    lines = [
        f"{_shown(made.path)}: {made.events:,} events, {made.steps:,} steps of {made.workers} "
        "worker(s); open it in ui.perfetto.dev, which uploads nothing, or in chrome://tracing"
    ]
    lines += [
        f"rank {one.rank}: {one.events:,} events of {_shown(one.path)}" for one in made.merged
    ]
    return "\n".join(lines)


def _shown(text: object) -> str:
    from evenstride.report.wording import plain

    return plain(text, 1000)
