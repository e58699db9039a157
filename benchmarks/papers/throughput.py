"""Throughput of a worker over its batch, after Figure 5 of Dynamic Batching.

    python benchmarks/papers/throughput.py [--draw throughput.svg]

Three workers of 0.9, 0.4 and 0.2 of a core train alone, at sizes of 1 to 1,024 samples.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.papers.cells import CURVE, PaperCell, PaperCluster, Record, mark
from benchmarks.papers.experiment import PaperFigure

from evenstride.report.wording import Table

SPEEDS = (0.9, 0.4, 0.2)


def curves(records: Sequence[Record]) -> dict[str, list[dict[int, float]]]:
    """Return the samples per second by size, for each job and worker; the last seed counts."""
    return {
        record["job"]: [
            {int(size): int(size) / float(s) for size, s in curve.items()}
            for curve in record["curves"]
        ]
        for record in records
    }


def rows(records: Sequence[Record]) -> Table:
    """Return the samples per second, a line per job and worker."""
    found = []
    for job, workers in curves(records).items():
        note = mark(*(record for record in records if record["job"] == job))
        for speed, rates in zip(SPEEDS, workers, strict=True):
            best = max(rates, key=lambda size: rates[size])
            cells = (f"{rates[size]:.0f}" for size in sorted(rates))
            fall = f"{1 - rates[max(rates)] / rates[best]:.0%} from {best} on"
            found.append((f"{job}{note}, {speed:g} of a core", *cells, fall))
    sizes = sorted({size for workers in curves(records).values() for size in workers[0]})
    return Table(("samples/s at", *map(str, sizes), "fall"), tuple(found))


def lines(records: Sequence[Record]) -> Any:
    """Draw throughput over size, a panel per job."""
    from matplotlib.figure import Figure

    found = curves(records)
    figure = Figure(figsize=(8, 2.6 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), sharex=True, squeeze=False)[:, 0]
    for axes, (job, workers) in zip(panels, found.items(), strict=True):
        for speed, rates in zip(SPEEDS, workers, strict=True):
            axes.plot(list(rates), list(rates.values()), "o-", label=f"{speed:g} of a core")
        axes.set(title=job, xscale="log", ylabel="samples/s")
        axes.legend(fontsize=7)
    axes.set_xlabel("samples per step")
    return figure


FIGURE = PaperFigure(
    "throughput",
    str(__doc__),
    lambda: {"alone": PaperCluster(SPEEDS)},
    tuple(PaperCell(job, "alone", CURVE, seed) for seed in range(3) for job in ("resnet", "cnn")),
    rows,
    lines,
)

if __name__ == "__main__":
    sys.exit(FIGURE.main())
