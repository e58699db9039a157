"""A search for a configuration, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from evenstride.core.gradients.noise_scale import Interval
from evenstride.planner.tuning.online_forecast import Configuration, OnlineForecast, Probe
from evenstride.report.text_tables import NOTHING, Table

_MARK = "*"


def table(
    foreseen: Sequence[OnlineForecast], chosen: Configuration | None, after: Probe | None = None
) -> Table:
    """Return the configurations as they looked when the choice was made, the best first.

    Args:
        foreseen: of each, what was left.
        chosen: configuration; marked by a star.
        after: what the chosen one was measured to take where training stayed.
    """
    rows = tuple(_row(one, chosen, after) for one in foreseen)
    return Table(
        ("", "workers", "batch", "step [ms]", "left [s]", "left [USD]", "epochs", "then [ms]"),
        rows,
    )


def _row(one: OnlineForecast, chosen: Configuration | None, after: Probe | None) -> tuple[str, ...]:
    here = one.choice == chosen
    then = f"{after.step_s * 1e3:.3g}" if here and after is not None else NOTHING
    return (
        _MARK if here else "",
        str(one.choice.workers),
        str(one.choice.batch),
        _between(one.step_s, 1e3, ".3g"),
        _between(one.time_s, 1.0, ".0f"),
        _between(one.cost_usd, 1.0, ".3g"),
        f"{one.epochs:.3g}",
        then,
    )


def _between(one: Interval, factor: float, form: str) -> str:
    value, low, high = (format(factor * end, form) for end in (one.value, one.low, one.high))
    return f"{value} ({low} to {high})"
