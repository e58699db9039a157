"""Iteration times of each worker on 3, 5 and 12 cores, after Figure 3 of Dynamic Batching.

    python benchmarks/papers/iteration_times.py [--draw histograms.svg]

A ResNet trains 60 steps with BSP, with the equal split and with the paper's batches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.papers.cells import (
    ADAPTIVE,
    UNIFORM,
    PaperCell,
    PaperCluster,
    Record,
    in_turns,
    mark,
    of_cores,
)
from benchmarks.papers.experiment import PaperFigure

from evenstride.report.wording import Table

POLICIES = (UNIFORM, "dynamic-batching", "dynamic-batching:window=10", ADAPTIVE)
FIRST = 10  # steps that are left out, because the split still changes


def spread(times_ms: Sequence[float]) -> tuple[float, float, float]:
    """Return the 10 %, 50 % and 90 % quantiles of a worker's iteration times."""
    tenths = quantiles(times_ms[FIRST:], n=10)
    return tenths[0], tenths[4], tenths[8]


def ratio(record: Record) -> float:
    """Return the largest median time of a worker divided by the smallest."""
    middle = [spread(times)[1] for times in record["busy_ms"]]
    return max(middle) / min(middle)


def rows(records: Sequence[Record]) -> Table:
    """Return the quantiles of each worker's busy time, a line per policy and seed."""
    headings = ("policy", "seed", "3 cores", "5 cores", "12 cores", "largest / smallest median")
    found = []
    for record in records:
        each = [spread(times) for times in record["busy_ms"]]
        cells = ("{1:.0f} ms ({0:.0f} to {2:.0f})".format(*one) for one in each)
        found.append(
            (record["policy"] + mark(record), str(record["seed"]), *cells, f"{ratio(record):.2f}")
        )
    return Table(headings, tuple(found))


def histograms(records: Sequence[Record]) -> Any:
    """Draw the busy times of each worker, a panel per policy, over all seeds."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(record["policy"] for record in records))
    figure = Figure(figsize=(8, 1.8 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        for worker, cores in enumerate((3, 5, 12)):
            mine = [record["busy_ms"][worker] for record in records if record["policy"] == name]
            times = [one for times in mine for one in times[FIRST:]]
            axes.hist(times, bins=40, histtype="step", label=f"{cores} cores")
        axes.set_title(name, fontsize=9, loc="left")
        axes.legend(fontsize=7)
    axes.set_xlabel("busy time of a step in ms")
    return figure


FIGURE = PaperFigure(
    "iteration_times",
    str(__doc__),
    lambda: {"Fig3": PaperCluster(of_cores(3, 5, 12), steps=60)},
    tuple(
        PaperCell("resnet", "Fig3", policy, seed)
        for seed in range(3)
        for policy in in_turns(seed, POLICIES)
    ),
    rows,
    histograms,
)

if __name__ == "__main__":
    sys.exit(FIGURE.main())
