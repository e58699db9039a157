"""Adjustments of the batches from equal ones, after Figure 4 of Dynamic Batching.

    python benchmarks/papers/oscillation.py [--draw oscillation.svg]

Three workers start with equal cores and equal batches. After 10 of 90 steps they have the cores of
H6. The controller acts at every iteration, as the paper's, with and without its dead-band.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.papers.cells import (
    ADAPTIVE,
    PaperCell,
    PaperCluster,
    Record,
    in_turns,
    mark,
    of_cores,
)
from benchmarks.papers.experiment import PaperFigure

from evenstride.report.wording import Table

CHANGED, NEAR = 10, 0.1
CORES = (4, 11, 24)
POLICIES = (
    *("dynamic-batching:every=1", "dynamic-batching:dead_band=0,every=1"),
    *("dynamic-batching:window=10,every=1", ADAPTIVE),
)


def adjustments(record: Record) -> tuple[int, int]:
    """Return the changes of the split until the slowest worker is near its share, and later ones.

    Near is within 10 % of the median share that it has in the last 40 steps.
    """
    changes = [(step, shares[0]) for step, shares in record["splits"] if step > CHANGED]
    final = sorted(shares[0] for shares in held(record)[-40:])[20]
    near = [number for number, (_, share) in enumerate(changes) if abs(share / final - 1) <= NEAR]
    until = near[0] + 1 if near else len(changes)
    return until, len(changes) - until


def held(record: Record) -> list[list[int]]:
    """Return the split of every step."""
    steps, splits = len(record["busy_ms"][0]), record["splits"]
    ends = [first for first, _ in splits[1:]] + [steps]
    return [
        shares
        for (first, shares), end in zip(splits, ends, strict=True)
        for _ in range(end - first)
    ]


def rows(records: Sequence[Record]) -> Table:
    """Return the number of changes and the time, a line per policy and seed."""
    headings = ("policy", "seed", "changes until near", "later changes", "time", "samples")
    return Table(
        headings,
        tuple(
            (
                record["policy"] + mark(record),
                str(record["seed"]),
                *map(str, adjustments(record)),
                f"{record['time_s']:.1f} s",
                "/".join(map(str, record["shares"])),
            )
            for record in records
        ),
    )


def tracks(records: Sequence[Record]) -> Any:
    """Draw the share of each worker by step, a panel per policy, of the first seed."""
    from matplotlib.figure import Figure

    first = [record for record in records if record["seed"] == 0]
    figure = Figure(figsize=(8, 1.8 * len(first)), layout="constrained")
    panels = figure.subplots(len(first), sharex=True, squeeze=False)[:, 0]
    for axes, record in zip(panels, first, strict=True):
        for cores, shares in zip(CORES, zip(*held(record), strict=True), strict=True):
            axes.step(range(len(shares)), shares, where="post", label=f"13, then {cores} cores")
        axes.set_title(record["policy"], fontsize=9, loc="left")
        axes.legend(fontsize=7)
    axes.set_xlabel("step")
    return figure


FIGURE = PaperFigure(
    "oscillation",
    str(__doc__),
    lambda: {"H1 to H6": PaperCluster(of_cores(13, 13, 13), ((CHANGED, of_cores(*CORES)),), 90)},
    tuple(
        PaperCell("cnn", "H1 to H6", policy, seed)
        for seed in range(3)
        for policy in in_turns(seed, POLICIES)
    ),
    rows,
    tracks,
)

if __name__ == "__main__":
    sys.exit(FIGURE.main())
