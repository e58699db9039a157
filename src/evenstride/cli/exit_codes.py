"""How a comparison ends: its figures on stdout, and whether they may be quoted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from evenstride.cli.render.terminal_text import say

if TYPE_CHECKING:
    from evenstride.lab.comparison.comparison_result import Comparison
    from evenstride.lab.comparison.mode_comparison import ModesComparison

DISTURBED = 3
"""Exit code of a measurement that ran to its end on a machine that changed meanwhile."""


def conclude(
    outcome: Comparison,
    story: Callable[[Comparison], str],
    as_json: bool,
    plain: Callable[[Comparison], dict[str, Any]] | None = None,
) -> None:
    """Print the outcome and leave with its exit code.

    Args:
        outcome: of a comparison on real processes.
        story: returns it as people read it.
        as_json: whether to print JSON instead.
        plain: returns what that holds; all of the outcome if not given.
    """
    figures = outcome.to_dict() if plain is None else plain(outcome)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        say(story(outcome))
    end_with(outcome)


def end_with(outcome: Comparison | ModesComparison) -> None:
    """Tell what makes the figures less than they could be, and leave with the exit code.

    Raises:
        typer.Exit: the machine changed meanwhile.
    """
    for caveat in outcome.caveats:
        say(f"note: {caveat}", err=True)
    if outcome.disturbed:
        say(
            f"disturbed: the workers' own speeds changed by {outcome.drift:.0%} between the "
            "calibration before and the one after, so the figures are not to be quoted",
            err=True,
        )
        raise typer.Exit(DISTURBED)
