"""A plan as text and as a plot: what is worth renting, what it takes and costs, and why."""

from __future__ import annotations

from pathlib import Path

from evenstride.core.gradient_noise import Interval
from evenstride.planner.choosing import Objective
from evenstride.planner.outlook import Outlook
from evenstride.planner.plan import Plan
from evenstride.report.figures import check_plotting, check_writable
from evenstride.report.tables import Table

_MOST_ROWS = 12


def table(plan: Plan) -> Table:
    """Return the clusters that no other beats, the quickest first; the chosen one is marked.

    Of many, some are shown: both ends, the chosen one, and evenly what is between.
    """
    rows = tuple(_row(one, plan) for one in _some(plan))
    headings = ("cluster", "place", "batch", "epochs", "samples\neach", "step", "time", "USD", "")
    return Table(headings, rows)


def story(plan: Plan) -> str:
    """Return what was chosen, and what to know about the figures, in lines."""
    one = plan.chosen.outlook
    first = (
        f"Chosen: {one.choice.name}, batch {one.choice.batch}, {_epochs(one.epochs)} epochs: "
        f"{_hours(one.time_s.value)}, {_usd(one.cost_usd.value)} USD. It is {plan.chosen.reason}."
    )
    notes = [f"- {caveat}" for caveat in plan.caveats]
    return "\n".join([first, looked(plan), *notes])


def looked(plan: Plan) -> str:
    """Return how well was searched, and what another cluster could gain at most."""
    found, wishes = plan.found, plan.wishes
    one = f"{found.looked_at:,} clusters and batches were looked at, {found.judged:,} exactly"
    limited = wishes.deadline_s < float("inf") or wishes.budget_usd < float("inf")
    within = " within the limits" if limited else ""
    better = {
        Objective.TIME: f"none{within} is quicker than the chosen one",
        Objective.COST: f"none{within} is cheaper than the chosen one",
        Objective.KNEE: f"none{within} is both quicker and cheaper than one that is shown",
    }[wishes.aim]
    by = f" by more than {_percent(plan.gap)}" if plan.gap else ""
    rest = ""
    if found.front_gap and wishes.aim is not Objective.KNEE:
        rest = f"; others that are shown may be beaten in both, by {_percent(found.front_gap)}"
    return f"{one}; {better}{by} (gap {_percent(plan.gap)}){rest}."


def _percent(part: float) -> str:
    return "an unknown part" if part == float("inf") else f"{part:.2%}"


def check_plot(path: Path) -> None:
    """Raise unless a plan can be drawn there.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    check_plotting(path)
    check_writable(path)


def draw(plan: Plan, path: Path) -> None:
    """Draw the frontier: cost over time with intervals, the chosen one marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    outlooks = plan.found.outlooks
    hours = [one.time_s.value / 3600 for one in outlooks]
    usd = [one.cost_usd.value for one in outlooks]
    axes.errorbar(
        hours,
        usd,
        xerr=_bars([one.time_s for one in outlooks], 3600),
        yerr=_bars([one.cost_usd for one in outlooks], 1),
        fmt="o",
        color="tab:blue",
        ecolor="lightgrey",
        label="no other is quicker and cheaper",
    )
    one = plan.chosen.outlook
    axes.plot(
        one.time_s.value / 3600,
        one.cost_usd.value,
        "D",
        color="tab:red",
        label=f"chosen: {one.choice.name}".replace("$", r"\$"),
    )
    axes.set_xlabel("time in hours")
    axes.set_ylabel("cost in USD")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def _bars(figures: list[Interval], unit: float) -> list[list[float]]:
    """Return lengths of error bars; where there is no upper end, none is drawn."""
    down = [(one.value - one.low) / unit for one in figures]
    up = [(one.high - one.value) / unit if one.high < float("inf") else 0.0 for one in figures]
    return [down, up]


def _some(plan: Plan) -> list[Outlook]:
    outlooks = plan.found.outlooks
    last, chosen = len(outlooks) - 1, outlooks.index(plan.chosen.outlook)
    between = {round(last * n / (_MOST_ROWS - 1)) for n in range(_MOST_ROWS)}
    return [outlooks[index] for index in sorted(between | {chosen})]


def _row(one: Outlook, plan: Plan) -> tuple[str, ...]:
    return (
        one.choice.name,
        one.choice.place,
        str(one.choice.batch),
        _epochs(one.epochs),
        "/".join(map(str, one.step.shares)),
        f"{one.step.time_s * 1e3:.0f} ms",
        f"{_hours(one.time_s.value)} ({_hours(one.time_s.low)} to {_hours(one.time_s.high)})",
        f"{_usd(one.cost_usd.value)} ({_usd(one.cost_usd.low)} to {_usd(one.cost_usd.high)})",
        "chosen" if one is plan.chosen.outlook else "",
    )


def _epochs(one: Interval) -> str:
    if one.low == one.value == one.high:
        return f"{one.value:.4g}"
    high = "any" if one.high == float("inf") else f"{one.high:.4g}"
    return f"{one.value:.4g} ({one.low:.4g} to {high})"


def _usd(usd: float) -> str:
    if usd == float("inf"):
        return "any"
    return f"{usd:.2f}" if usd >= 1 else f"{usd:.2g}"


def _hours(seconds: float) -> str:
    if seconds == float("inf"):
        return "any"
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.3g} s"
