"""Options that ``simulate`` and ``compare`` have in common, as Typer reads them.

An alias is an option that is the same in both; a function makes one whose help says more.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from evenstride.cli.arguments import MOST_LAG, MOST_STEPS, whole

POLICIES_HELP = (
    "Policies: adaptive, dbs, dynamic-batching, lb-bsp-cpu, lb-bsp-gpu, omnilearn, static "
    "(static:cores, static:flops, static:20,100), uniform. A setting follows a colon: "
    "dynamic-batching:window=5; an unknown one is answered with those there are."
)

Lag = Annotated[
    str | None,
    typer.Option(help="Steps from a measurement to its decision; each of a list is simulated."),
]
ColdLag = Annotated[
    int | None,
    typer.Option(
        help="The same for a fleet's first exchange, and while its policy opens.",
        metavar="N",
        parser=whole(1, MOST_LAG),
    ),
]
Every = Annotated[
    str | None,
    typer.Option(
        help="Steps between exchanges, or leader for the cadence that the leader sets.",
        metavar="N|leader",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object with a list of rows.")]


def policies_option(when: str) -> Any:
    """Return the option of the policies; its help opens with when and how they are given."""
    return typer.Option("--policy", "-p", help=f"{when} {POLICIES_HELP}", metavar="P[,Q...]")


def seeds_option(more: str = "") -> Any:
    """Return the option of the seeds, with more to its help."""
    what = "How many seeds (at most 10,000), or a list of them: 0,1,2, or 7, for one."
    return typer.Option(help=f"{what} {more}".rstrip())


def steps_option(more: str = "") -> Any:
    """Return the option of the steps, with more to its help."""
    what = "Steps to simulate; later events do not happen."
    return typer.Option(help=f"{what} {more}".rstrip(), metavar="N", parser=whole(1, MOST_STEPS))
