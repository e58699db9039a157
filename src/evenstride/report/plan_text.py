"""A plan as text and as a plot: the candidates, their times and costs, and the choice."""

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
_ALIKE = (0.1, 0.2, 0.4, 0.8)  # fractions of time and cost within which candidates are alike
_WIDEST = 100
_OPTIONAL = ("epochs", "step", "place")  # columns, in the order in which they are left out
_MARK = "*"
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (0.0, "seconds"))


def distinct(plan: Plan) -> list[TrainingForecast]:
    """Return the candidates of the table: the chosen one, and those that clearly differ.

    A candidate is left out if another one is at most 10 % slower and at most 10 % more expensive.
    The tolerance grows until at most 12 candidates are left.
    """
    candidates = sorted(plan.found.outlooks, key=lambda one: one.time_s.value * one.cost_usd.value)
    for alike in _ALIKE:
        kept = [plan.chosen.outlook]
        for one in candidates:
            if not any(_covers(other, one, 1.0 + alike) for other in kept):
                kept.append(one)
        if len(kept) <= _MOST_ROWS:
            break
    return sorted(kept, key=lambda one: one.time_s.value)


def _covers(one: TrainingForecast, other: TrainingForecast, factor: float) -> bool:
    quick = one.time_s.value <= factor * other.time_s.value
    return quick and one.cost_usd.value <= factor * other.cost_usd.value


def text(plan: Plan, width: int) -> str:
    """Return the table of candidates, the quickest first; a star marks the chosen one.

    It has at most 100 columns. A cluster of two types has two lines.
    """
    candidates = distinct(plan)
    headings = ("", "cluster", "batch", "step", "time", "USD", "epochs")
    places = len({one.choice.place for one in candidates}) > 1
    rows = tuple(line for one in candidates for line in _rows(one, plan, places=places))
    table = Table((*headings, "place") if places else headings, rows, keys=2)
    width = min(width, _WIDEST)
    for name in _OPTIONAL:
        if table.width > width and name in table.headings:
            table = table.part([n for n, one in enumerate(table.headings) if one != name])
    return table.text(width)


def below(plan: Plan) -> str:
    """Return how many candidates the table has, and their place if it is the same for all."""
    candidates, every = distinct(plan), plan.found.outlooks
    places = {one.choice.place for one in candidates}
    sentences = []
    if len(places) == 1 and (place := places.pop()):
        sentences.append(f"All are in {place}.")
    if left_out := len(every) - len(candidates):
        sentences.append(
            f"{left_out} more candidates are nearly equal to one of these or worse; --json has all."
        )
    return " ".join(sentences)


def story(plan: Plan) -> str:
    """Return the chosen cluster and the reason."""
    one = plan.chosen.outlook
    where = f" in {one.choice.place}" if one.choice.place else ""
    return (
        f"Chosen: {one.choice.name}{where}, batch {one.choice.batch}, {_epochs(one.epochs)} "
        f"epochs: {_hours(one.time_s.value)}, {_usd(one.cost_usd.value)} USD. It is "
        f"{plan.chosen.reason}."
    )


def looked(plan: Plan) -> str:
    """Return the extent of the search, and how much better another cluster could be at most."""
    found, wishes = plan.found, plan.wishes
    count = f"{found.looked_at:,} combination{'' if found.looked_at == 1 else 's'}"
    limited = wishes.deadline_s < float("inf") or wishes.budget_usd < float("inf")
    within = " within the limits" if limited else ""
    better = {
        Objective.TIME: f"no other cluster{within} is quicker than the chosen one",
        Objective.COST: f"no other cluster{within} is cheaper than the chosen one",
        Objective.KNEE: f"no other cluster{within} is both quicker and cheaper than a candidate",
    }[wishes.aim]
    by = f" by more than {_percent(plan.gap)}" if plan.gap else ""
    rest = ""
    if found.front_gap and wishes.aim is not Objective.KNEE:
        rest = (
            "; another cluster may be quicker and cheaper than one of the other candidates, by up "
            f"to {_percent(found.front_gap)}"
        )
    return (
        f"the search covered {count} of cluster and batch, {found.judged:,} of them exactly; "
        f"{better}{by} (gap {_percent(plan.gap)}){rest}"
    )


def _percent(part: float) -> str:
    return "an unknown fraction" if part == float("inf") else f"{part:.2%}"


def check_plot(path: Path) -> None:
    """Raise `ConfigError` unless a plan can be drawn into the file."""
    check_plotting(path)
    check_writable(path)


def draw(plan: Plan, path: Path) -> None:
    """Draw the cost of all candidates over their times, with intervals and a mark on the choice."""
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
        label="no cluster is quicker and cheaper",
    )
    one = plan.chosen.outlook
    axes.plot(
        one.time_s.value / unit_s,
        one.cost_usd.value,
        "D",
        color="tab:red",
        zorder=3,  # above the other candidates
        label=literal(f"chosen: {one.choice.name}"),
    )
    axes.set_xlabel(f"time in {unit}")
    axes.set_ylabel("cost in USD")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def _unit(longest_s: float) -> tuple[float, str]:
    """Return the length in seconds and the name of a suitable unit of time."""
    each_s, name = next((each_s, name) for each_s, name in _UNITS if longest_s >= each_s)
    return each_s or 1.0, name


def _bars(figures: list[Interval], unit: float) -> list[list[float]]:
    """Return the lengths of error bars; 0 without an upper end."""
    down = [(one.value - one.low) / unit for one in figures]
    up = [(one.high - one.value) / unit if one.high < float("inf") else 0.0 for one in figures]
    return [down, up]


def _rows(one: TrainingForecast, plan: Plan, *, places: bool) -> list[tuple[str, ...]]:
    """Return the lines of one cluster; the first one has its figures."""
    first, *others = one.choice.name.split(" + ")
    figures = (
        str(one.choice.batch),
        milliseconds(one.step.time_s),
        _within(one.time_s, _hours),
        _within(one.cost_usd, _usd),
        _number(one.epochs.value),
        *((one.choice.place,) if places else ()),
    )
    mark = _MARK if one is plan.chosen.outlook else ""
    return [(mark, first, *figures), *(("", f"+ {name}", *[""] * len(figures)) for name in others)]


def _within(one: Interval, shown: Callable[[float], str]) -> str:
    """Return a figure and its interval, with a common unit only once."""
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
    """Return a time in milliseconds, with three digits or without decimals."""
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def _usd(usd: float) -> str:
    if usd == float("inf"):
        return "any"
    return f"{usd:,.0f}" if usd >= 100 else f"{usd:.3g}"


def _hours(seconds: float) -> str:
    return "any" if seconds == float("inf") else length(seconds)


def search_table(
    foreseen: Sequence[OnlineForecast], chosen: Configuration | None, after: Probe | None = None
) -> Table:
    """Return the forecasts at the time of the choice, the best first; a star marks the choice.

    ``after`` is the measured time of the chosen configuration, if training stayed there.
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
