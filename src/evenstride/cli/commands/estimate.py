"""``evenstride estimate``: what balancing can give, before anything is set up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.cli.terminal_text import say
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.core.allocation.speedup import Prospect


def estimate(
    speeds: Annotated[
        str,
        typer.Argument(help="Relative speeds of the workers, such as 1,1,0.4.", metavar="SPEEDS"),
    ],
    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", "-b", help="Samples per step; 64 per worker if not given."),
    ] = None,
    fixed: Annotated[
        float,
        typer.Option(
            help="Part of the fastest worker's equal step that does not grow with its batch."
        ),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What equal and balanced batches would reach on workers of these speeds.

    Speeds are relative: samples per second, TFLOP/s or cores will do. Nothing is run.

    Examples:
        evenstride estimate 1,1,0.4

        evenstride estimate 312,312,121 --global-batch 512 --fixed 0.1
    """
    from evenstride.core.allocation.speedup import prospect_of_speeds

    values = _numbers(speeds)
    hope = prospect_of_speeds(values, global_batch=global_batch, fixed=fixed)
    if as_json:
        figures = {
            "speeds": values,
            "global_batch": sum(hope.equal_shares),
            "equal": {"shares": hope.equal_shares, "step": hope.equal_s},
            "balanced": {"shares": hope.best_shares, "step": hope.best_s},
            "bound": hope.bound,
            "linear_bound": hope.linear_bound,
            "gain": hope.gain,
            "worth_it": hope.worth_it,
        }
        typer.echo(json.dumps(figures))
        return
    _tell(hope)


def _tell(hope: Prospect) -> None:
    from evenstride.core.allocation.speedup import WORTH_IT

    typer.echo(f"{'':10}{'samples per step':<34}{'step':>8}")
    for name, shares, step in (
        ("equal", hope.equal_shares, hope.equal_s),
        ("balanced", hope.best_shares, hope.best_s),
    ):
        typer.echo(f"{name:10}{_shares(shares):<34}{step:>8.3f}")
    if len(hope.equal_shares) == 1:
        typer.echo("There is one worker, so there is nothing to balance.")
        return
    say(
        f"Balancing would make steps {hope.bound:.2f} times as fast, {hope.gain:.0%} less time "
        "(1 is the fastest worker's equal step; communication comes on top)."
    )
    if not hope.worth_it:
        say(f"That is a gain under {WORTH_IT:.0%}, not worth it.")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"speeds {text!r} are not understood; give one positive number per worker, such as "
            "1,1,0.4"
        ) from None


def _shares(shares: tuple[int, ...]) -> str:
    text = " / ".join(map(str, shares[:6]))
    return f"{text} / ..." if len(shares) > 6 else text
