"""``evenstride estimate``: the possible gain of balancing, before any setup."""

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
        typer.Option("--global-batch", "-b", help="Samples per step. Default: 64 per worker."),
    ] = None,
    fixed: Annotated[
        float,
        typer.Option(
            help="Fraction of the fastest worker's equal step that does not depend on its batch."
        ),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the steps of the equal and of the balanced split for workers of given speeds.

    Speeds are relative: samples per second, TFLOP/s or cores. The command runs no training.

    Examples:
        evenstride estimate 1,1,0.4

        evenstride estimate 312,312,121 --global-batch 512 --fixed 0.1
    """
    from evenstride.core.allocation.speedup import prospect_of_speeds

    values = _numbers(speeds)
    prospect = prospect_of_speeds(values, global_batch=global_batch, fixed=fixed)
    if as_json:
        figures = {
            "speeds": values,
            "global_batch": sum(prospect.equal_shares),
            "equal": {"shares": prospect.equal_shares, "step": prospect.equal_s},
            "balanced": {"shares": prospect.best_shares, "step": prospect.best_s},
            "bound": prospect.bound,
            "linear_bound": prospect.linear_bound,
            "gain": prospect.gain,
            "worth_it": prospect.worth_it,
        }
        typer.echo(json.dumps(figures))
        return
    _print(prospect)


def _print(prospect: Prospect) -> None:
    from evenstride.core.allocation.speedup import WORTH_IT

    typer.echo(f"{'':10}{'samples per step':<34}{'step':>8}")
    for name, shares, step in (
        ("equal", prospect.equal_shares, prospect.equal_s),
        ("balanced", prospect.best_shares, prospect.best_s),
    ):
        typer.echo(f"{name:10}{_shares(shares):<34}{step:>8.3f}")
    if len(prospect.equal_shares) == 1:
        typer.echo("There is one worker, so there is nothing to balance.")
        return
    say(
        f"Balanced steps are {prospect.bound:.2f} times as fast and take {prospect.gain:.0%} less "
        "time. A step of 1 is the fastest worker's equal step, without communication."
    )
    if not prospect.worth_it:
        say(f"The gain is under {WORTH_IT:.0%}, so balancing is not worth it.")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"SPEEDS is {text!r}: expected one positive number per worker, such as 1,1,0.4"
        ) from None


def _shares(shares: tuple[int, ...]) -> str:
    text = " / ".join(map(str, shares[:6]))
    return f"{text} / ..." if len(shares) > 6 else text
