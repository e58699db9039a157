"""A plan as text and as a plot: what is worth renting, what it takes and costs, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from evenstride.core.gradients.noise_scale import Interval
from evenstride.planner.make_plan import Plan
from evenstride.planner.online_forecast import Configuration, OnlineForecast, Probe
from evenstride.planner.search.selection import Objective, length
from evenstride.planner.search.training_forecast import TrainingForecast
from evenstride.report.plotting import literal
from evenstride.report.suite_figures import check_plotting, check_writable
from evenstride.report.wording import NOTHING, Table

_MOST_ROWS = 12
_UNTIL_TIME = 4  # the last column of the first part
_SAMPLES = 7  # a column that can be left out
_MARK = "*"
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (0.0, "seconds"))


def table(plan: Plan) -> Table:
    """Return the clusters that no other beats, the quickest first; the chosen one has a star.

    Of many, some are shown: both ends, the chosen one, and evenly what is between. A mix has a line
    for each of its types.
    """
    some = _some(plan)
    places = len({one.choice.place for one in some}) > 1
    headings = ("", "cluster", "batch", "step", "time", "USD", "epochs", "samples\neach")
    rows = tuple(line for one in some for line in _rows(one, plan, places=places))
    return Table((*headings, "place") if places else headings, rows, keys=2)


def text(plan: Plan, width: int) -> str:
    """Return the table as lines; where it is too wide, all until the time first, then the rest.

    Samples of each worker are left out then, if the rest would still be too wide: JSON has them.
    """
    whole = table(plan)
    if whole.width <= width:
        return whole.text()
    columns, keys = range(len(whole.headings)), range(whole.keys)
    first = whole.part(columns[: _UNTIL_TIME + 1])
    rest = whole.part((*keys, *columns[_UNTIL_TIME + 1 :]))
    if rest.width > width:
        rest = whole.part((*keys, *(n for n in columns[_UNTIL_TIME + 1 :] if n != _SAMPLES)))
    return f"{first.text(width)}\n\n{rest.text(width)}"


def below(plan: Plan) -> str:
    """Return what is to be said of the table: how many are in it, and where all of them are."""
    some, every = _some(plan), plan.found.outlooks
    places = {one.choice.place for one in some}
    told = []
    if len(some) < len(every):
        told.append(f"{len(some)} of the {len(every)} that no other beats; --json has all")
    if len(places) == 1 and (place := places.pop()):
        told.append(f"all in {place}")
    return "; ".join(told)


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
    many = "cluster and batch was" if found.looked_at == 1 else "clusters and batches were"
    one = f"{found.looked_at:,} {many} looked at, {found.judged:,} exactly"
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
    """Raise `ConfigError` unless a plan can be drawn there."""
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
    unit_s, unit = _unit(max(one.time_s.value for one in outlooks))
    times = [one.time_s.value / unit_s for one in outlooks]
    usd = [one.cost_usd.value for one in outlooks]
    axes.errorbar(
        times,
        usd,
        xerr=_bars([one.time_s for one in outlooks], unit_s),
        yerr=_bars([one.cost_usd for one in outlooks], 1),
        fmt="o",
        color="tab:blue",
        ecolor="lightgrey",
        label="no other is quicker and cheaper",
    )
    one = plan.chosen.outlook
    axes.plot(
        one.time_s.value / unit_s,
        one.cost_usd.value,
        "D",
        color="tab:red",
        zorder=3,  # above all the others, where they lie close
        label=literal(f"chosen: {one.choice.name}"),
    )
    axes.set_xlabel(f"time in {unit}")
    axes.set_ylabel("cost in USD")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def _unit(longest_s: float) -> tuple[float, str]:
    """Return the seconds of a unit in which times are read easily, and its name."""
    each_s, name = next((each_s, name) for each_s, name in _UNITS if longest_s >= each_s)
    return each_s or 1.0, name


def _bars(figures: list[Interval], unit: float) -> list[list[float]]:
    """Return lengths of error bars; where there is no upper end, none is drawn."""
    down = [(one.value - one.low) / unit for one in figures]
    up = [(one.high - one.value) / unit if one.high < float("inf") else 0.0 for one in figures]
    return [down, up]


def _some(plan: Plan) -> list[TrainingForecast]:
    outlooks = plan.found.outlooks
    last, chosen = len(outlooks) - 1, outlooks.index(plan.chosen.outlook)
    between = {round(last * n / (_MOST_ROWS - 1)) for n in range(_MOST_ROWS)}
    return [outlooks[index] for index in sorted(between | {chosen})]


def _rows(one: TrainingForecast, plan: Plan, *, places: bool) -> list[tuple[str, ...]]:
    """Return the lines of one cluster: its figures beside the first of its types."""
    first, *others = one.choice.name.split(" + ")
    figures = (
        str(one.choice.batch),
        milliseconds(one.step.time_s),
        _within(one.time_s, _hours),
        _within(one.cost_usd, _usd),
        _epochs(one.epochs),
        "/".join(map(str, one.step.shares)),
        *((one.choice.place,) if places else ()),
    )
    mark = _MARK if one is plan.chosen.outlook else ""
    return [(mark, first, *figures), *(("", f"+ {name}", *[""] * len(figures)) for name in others)]


def _within(one: Interval, shown: Callable[[float], str]) -> str:
    """Return a figure and its interval; a unit that is that of all three is told once."""
    value, low, high = (shown(end) for end in (one.value, one.low, one.high))
    unit = value.partition(" ")[2]
    ends = [end.removesuffix(f" {unit}") if unit else end for end in (low, high)]
    same = unit and all(" " not in end for end in ends) and "any" not in ends
    return f"{value} ({' to '.join(ends if same else (low, high))})"


def _epochs(one: Interval) -> str:
    if one.low == one.value == one.high:
        return _number(one.value)
    high = "any" if one.high == float("inf") else _number(one.high)
    return f"{_number(one.value)} ({_number(one.low)} to {high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, with three digits or all before the point."""
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def _usd(usd: float) -> str:
    if usd == float("inf"):
        return "any"
    return f"{usd:,.2f}" if usd >= 1 else f"{usd:.2g}"


def _hours(seconds: float) -> str:
    return "any" if seconds == float("inf") else length(seconds)


def search_table(
    foreseen: Sequence[OnlineForecast], chosen: Configuration | None, after: Probe | None = None
) -> Table:
    """Return the configurations as they looked when the choice was made, the best first.

    The chosen one has a star; ``after`` is what it was measured to take where training stayed.
    """
    rows = tuple(_search_row(one, chosen, after) for one in foreseen)
    return Table(
        ("", "workers", "batch", "step [ms]", "left [s]", "left [USD]", "epochs", "then [ms]"),
        rows,
    )


def _search_row(
    one: OnlineForecast, chosen: Configuration | None, after: Probe | None
) -> tuple[str, ...]:
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
