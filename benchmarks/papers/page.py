"""Write the documentation of the papers' experiments from the stored results.

    python benchmarks/papers/page.py [--check]

It writes `docs/records/papers.md`, its plots in `docs/images`, and in `docs/records/claims.md` the
column "Ours, real, other machine" of the rows that these experiments are about. A row without a
result stays as it is. `--check` writes nothing. It returns 1 if a page is not up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from types import MappingProxyType

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.papers import (
    changing_speeds,
    iteration_times,
    oscillation,
    search,
    throughput,
    to_accuracy,
)
from benchmarks.papers.cells import (
    ADAPTIVE,
    JOBS,
    MARKS,
    UNIFORM,
    Record,
    cell_of,
    disturbed,
    mark,
)
from benchmarks.papers.comparing import (
    PolicyRow,
    compared,
    faster,
    marks,
    paired,
    speedups,
    step_s,
    with_mark,
)
from benchmarks.papers.experiment import PaperFigure

from evenstride.lab.comparison.paired_ratios import geometric_mean
from evenstride.report.wording import Table

DOCS = Path(__file__).parents[2] / "docs"
PAGE, CLAIMS = DOCS / "records" / "papers.md", DOCS / "records" / "claims.md"
FIGURES = (
    *(to_accuracy.FIGURE, changing_speeds.FIGURE, iteration_times.FIGURE),
    *(oscillation.FIGURE, throughput.FIGURE),
)
Results = dict[str, list[Record]]
"""The results of each figure."""
DYNAMIC = (
    *("static:cores", "dynamic-batching", "dynamic-batching:every=1"),
    *("dynamic-batching:window=10", ADAPTIVE),
)
GPUS = ("lb-bsp-gpu", "lb-bsp-gpu:version=2018", ADAPTIVE)
ROW = re.compile(r"^\| ([A-Z]{2}\d+) \|.*\|$", re.MULTILINE)
LINK = "([papers](papers.md))"
SEARCH = "papers-search.svg"
COLUMN = 7  # of "Ours, real, other machine", counted from the empty text before the first bar
TITLES = MappingProxyType(
    {"resnet": "a small ResNet", "cnn": "a CNN", "linear": "linear regression"}
)


def levels(job: str, cluster: str, policies: Sequence[str] = DYNAMIC) -> Callable[..., str | None]:
    """Return what gives the speed-ups of a job on a cluster."""

    def text(results: Results) -> str | None:
        found = speedups(results["to_accuracy"], policies, job, cluster, "bsp")
        return found and f"{TITLES[job]} at these ratios: {found}"

    return text


def times_of(job: str, policy: str, cluster: str) -> Callable[..., str | None]:
    """Return what gives a policy's step on a cluster over the equal split's at H1, by seed."""

    def text(results: Results) -> str | None:
        pairs = paired(results["to_accuracy"], job, (UNIFORM, "H1"), (policy, cluster))
        if not pairs:
            return None
        ratio = geometric_mean([(step_s(mine) / step_s(even),) for even, mine in pairs])
        at = f"{TITLES[job]}: `{policy}` at {cluster}"
        return f"{at} {ratio:.2f}{marks(pairs)} times the equal split at H1"

    return text


def both(*parts: Callable[..., str | None]) -> Callable[..., str | None]:
    """Return what joins the texts that have results."""
    return lambda results: "; ".join(filter(None, (part(results) for part in parts))) or None


def changing(job: str, cluster: str, policies: Sequence[str]) -> Callable[..., str | None]:
    """Return what gives the speed-ups on workers whose speeds change."""

    def text(results: Results) -> str | None:
        found = speedups(results["changing_speeds"], policies, job, cluster, "bsp")
        return found and f"{TITLES['cnn']} on such workers: {found}"

    return text


def dynamic_over_static(job: str) -> Callable[..., str | None]:
    """Return what gives how much less time the controller takes than its open loop."""

    def text(results: Results) -> str | None:
        static, moving = ((policy, "P100+Xeon") for policy in DYNAMIC[:2])
        pairs = paired(results["to_accuracy"], job, static, moving)
        if not pairs:
            return None
        less, note = 1 - 1 / geometric_mean([(faster(*pair),) for pair in pairs]), marks(pairs)
        return f"{TITLES[job]} at this ratio: {less:.1%} less time than static shares{note}"

    return text


def changes_of(policy: str) -> Callable[..., str | None]:
    """Return what gives the changes of the split after the workers became uneven."""

    def text(results: Results) -> str | None:
        mine = [record for record in results["oscillation"] if record["policy"] == policy]
        if not mine:
            return None
        counts = [oscillation.adjustments(record) for record in mine]
        until, later = (", ".join(map(str, sorted(part))) for part in zip(*counts, strict=True))
        found = f"{until} changes, then {later}{mark(*mine)}"
        return f"a CNN, 80 steps after H1 became H6, `{policy}`: {found}"

    return text


def iteration_spread(results: Results) -> str | None:
    """Return the ratio of the slowest and the fastest worker's median times."""
    found: dict[str, list[Record]] = {}
    for record in results["iteration_times"]:
        found.setdefault(record["policy"], []).append(record)
    parts = ", ".join(
        f"`{policy}` {mean(map(iteration_times.ratio, records)):.2f}{mark(*records)}"
        for policy, records in found.items()
    )
    return (
        f"a small ResNet at these ratios, largest over smallest median: {parts}" if parts else None
    )


def falling(results: Results) -> str | None:
    """Return how far the throughput falls beyond its highest point."""
    parts = []
    for job, workers in throughput.curves(results["throughput"]).items():
        falls = [1 - rates[max(rates)] / max(rates.values()) for rates in workers]
        note = mark(*(record for record in results["throughput"] if record["job"] == job))
        parts.append(f"{TITLES[job]}, largest fall up to 1,024 samples: {max(falls):.0%}{note}")
    return "; ".join(parts) or None


def claims() -> dict[str, Callable[[Results], str | None]]:
    """Return what fills the column, by the number of the claim."""
    found = dict[str, Callable[[Results], str | None]]()
    for first, job in ((11, "resnet"), (15, "cnn"), (19, "linear")):
        for number, level in enumerate(("H1", "H2", "H6", "H10")):
            found[f"DB{first + number}"] = levels(job, level)
    for names, job in ((("DB2",), "resnet"), (("DB4",), "cnn")):
        found |= dict.fromkeys(names, levels(job, "P100+Xeon"))
    found |= {"DB30": dynamic_over_static("cnn"), "DB31": dynamic_over_static("resnet")}
    for row, job in (("DB27", "resnet"), ("DB28", "cnn"), ("DB29", "linear")):
        found[row] = times_of(job, ADAPTIVE, "H6")
    for row, job in (("DB32", "linear"), ("DB33", "cnn"), ("DB34", "resnet")):
        found[row] = both(times_of(job, UNIFORM, "H6"), times_of(job, UNIFORM, "H10"))
    window = "dynamic-batching:window=10,every=1"
    found["DB36"] = both(changes_of("dynamic-batching:every=1"), changes_of(window))
    found["DB40"], found["DB42"] = iteration_spread, falling
    found["DB41"] = changes_of("dynamic-batching:dead_band=0,every=1")
    found["LB1"] = changing("cnn", "load", ("lb-bsp-cpu", "lb-bsp-cpu:predictor=ema", ADAPTIVE))
    found["DS1"] = changing("cnn", "disturbance", ("dbs", ADAPTIVE))
    found["OL1"] = changing("short-cnn", "schedule", ("omnilearn", ADAPTIVE))
    found["RL14"] = levels("cnn", "LBB", GPUS)
    return found


def claims_page(page: str, results: Results) -> str:
    """Return the page of the claims with the present figures."""
    known = claims()

    def row(match: re.Match[str]) -> str:
        text = known[match[1]](results) if match[1] in known else None
        if text is None:
            return match[0]
        cells = match[0].split(" | ")
        return " | ".join([*cells[: COLUMN - 1], f"{text} {LINK}", *cells[COLUMN:]])

    return ROW.sub(row, page)


def markdown(table: Table) -> list[str]:
    """Return a table as lines of Markdown."""
    return [
        "| " + " | ".join(table.headings) + " |",
        "|" + "---|" * len(table.headings),
        *("| " + " | ".join(row) + " |" for row in table.rows),
    ]


def by_place(records: Iterable[Record]) -> Table:
    """Return a line per place: speed-up and efficiency of each policy of the first comparison."""
    places: dict[tuple[str, str, str], dict[str, PolicyRow]] = {}
    for row in compared(records):
        places.setdefault(row.place, {})[row.policy] = row
    names = [name for name in to_accuracy.POLICIES if name != UNIFORM]
    others = [name for name in to_accuracy.GPUS if name not in to_accuracy.POLICIES]
    shown = (*names, *(name for name in others if any(name in by for by in places.values())))
    headings = ("job, workers, mode", "seeds", "equal split", *(f"`{name}`" for name in shown))
    rows = []
    for place, by in places.items():
        equal = by[UNIFORM]
        figures = [in_words(by.get(name), equal.seeds) for name in shown]
        rows.append(
            (", ".join(place), str(equal.seeds), f"{equal.time_s:.1f} s{equal.mark}", *figures)
        )
    return Table(headings, tuple(rows))


def in_words(row: PolicyRow | None, seeds: int) -> str:
    """Return the speed-up and the efficiency of a policy; its seeds, too, if they are others."""
    if row is None:
        return "-"
    text = f"{row.speedup:.2f}x{row.mark}, {with_mark(row.efficiency, row.efficiency_mark)}"
    return text if row.seeds == seeds else f"{text} ({row.seeds} of {seeds} seeds)"


INTRODUCTION = """\
# Experiments of the papers

Each experiment trains for real, on processes under CPU limits that share two cores. The workers
have the *ratios* of a paper, not its machines, jobs or data. [Claims](claims.md) has these figures
next to those of the papers.

- A *cell* is one training: a job, workers, a policy, a mode and a seed. All policies of a seed run
  one after the other in the same processes: a *group*. A cell that is repeated later runs in
  another group. Figures compare results of one group where possible, and of these the least
  disturbed.
- **Speed-up** is the time of the equal split divided by that of the policy, in the same seed.
  Rounding may move the epoch that reaches a target, so trainings with the same samples in each step
  are compared over the steps that both of them have. `dbs` has other samples, so chance moves its
  epoch.
- **Efficiency** is the time of the fastest fixed split that ran in that seed, divided by that of
  the policy. Openings and changes count. The fastest of several equally good splits is partly luck,
  so the efficiency is rather too low. A dash means that `fixed` did not run.
- `fixed` is the best split by a calibration of the same workers before training, at their mean
  speeds if these change.
- Time is that of all steps until the target, without tests. The targets are {targets}.
{marks}

All policies are evenstride's own implementations. `adaptive` has changed between some of these
days. If the cells of a group were measured again for that, its older results were removed. The
[log](log.md) has what changed.

`python benchmarks/papers/page.py` writes this page from `benchmarks/papers/results`. A later run of
an experiment adds missing cells.
"""
HEADINGS = {
    "to_accuracy": "Time to accuracy",
    "changing_speeds": "Speeds that change",
    "iteration_times": "Iteration times",
    "oscillation": "Adjustments from equal batches",
    "throughput": "Throughput by batch",
}


def section(figure: PaperFigure, records: Sequence[Record]) -> list[str]:
    """Return the lines about an experiment."""
    about = " ".join(figure.about.split("\n\n")[0].split())
    rest = "\n\n".join(figure.about.strip().split("\n\n")[2:]).split("\n")
    lines = ["", f"## {HEADINGS[figure.name]}: `python benchmarks/papers/{figure.name}.py`", ""]
    lines += [about, "", *rest, ""]
    every = figure.store.records()
    if not records:
        return [*lines, f"No cell of {len(figure.cells)} has a result yet."]
    days = sorted({record["date"] for record in records})
    cells = len(set(map(cell_of, records)))
    counts = f"{cells} of {len(figure.cells)} cells, {days[0]} to {days[-1]}"
    quiet = f"{sum(not disturbed(one) for one in every)} of {len(every)} results are undisturbed"
    lines += [f"{counts}; {quiet}.", ""]
    table = by_place(records) if figure is to_accuracy.FIGURE else figure.rows(records)
    return [*lines, *markdown(table), "", f"![{HEADINGS[figure.name]}](../images/{image(figure)})"]


def search_section() -> list[str]:
    """Return the lines about Scavenger's search, which trains no cells."""
    title, _, *about = (search.__doc__ or "").strip().split("\n\n")
    return [
        *("", "## Scavenger's search: `python benchmarks/papers/search.py`", "", title),
        *(line for part in about[:-1] for line in ("", *part.split("\n"))),
        *("", *markdown(search.table(search.stored())), ""),
        "Time, cost and knee are the objectives. Each percentage is the mean excess over the",
        "oracle's choice. At the knee, time or cost alone may be below the oracle's. *Best chosen*",
        "counts, for time / cost / knee, the jobs in which the search chose the oracle's",
        "configuration.",
        *("", f"![Scavenger's search](../images/{SEARCH})", ""),
        "[Benchmarks](benchmarks.md) has the cost of a search during training",
        "(`python benchmarks/online.py`), and choices among measured mixes of unequal workers",
        "(`python benchmarks/forecast.py`).",
    ]


def image(figure: PaperFigure) -> str:
    """Return the file name of an experiment's plot."""
    return f"papers-{figure.name.replace('_', '-')}.svg"


def papers_page(results: Results) -> str:
    """Return the page of the experiments."""
    targets = ", ".join(
        f"a {'loss' if name == 'linear' else 'test accuracy'} of {JOBS[name].target:g} ({title})"
        for name, title in TITLES.items()
    )
    lines = [INTRODUCTION.format(targets=targets, marks=MARKS).rstrip()]
    for figure in FIGURES:
        lines += section(figure, results[figure.name])
    return "\n".join([*lines, *search_section()]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the pages. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(arguments)
    results = {figure.name: figure.results() for figure in FIGURES}
    fresh = {PAGE: papers_page(results), CLAIMS: claims_page(CLAIMS.read_text(), results)}
    stale = [path for path, text in fresh.items() if path.read_text() != text]
    if args.check:
        for path in stale:
            print(f"{path} is not up to date; run python benchmarks/papers/page.py")
        return bool(stale)
    for path in stale:
        path.write_text(fresh[path])
    for figure in FIGURES:
        if results[figure.name]:
            figure.write_plot(results[figure.name], DOCS / "images" / image(figure))
    search.draw(search.stored(), DOCS / "images" / SEARCH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
