"""Time to an accuracy or loss at H1, H2, H6 and H10, after Figure 6 of Dynamic Batching.

    python benchmarks/papers/to_accuracy.py [--only cnn,H6,0] [--minutes 10]

Three workers have the cores of the paper, scaled to 1.5 in total. Two more clusters have the speed
ratios of two GPU papers: P100 and Xeon, and the four GPUs of LBB. Every exact policy trains the
same samples in the same order, so it needs the same steps but for rounding, which matters where an
accuracy stays just below the target. `dbs` cuts the data by its shares. `asp` has no common steps.
ACSOS' jobs are ResNet-50, a CNN for MNIST, and linear regression.

`every=1` decides before every step, as published, and each step waits for that. Without it, a
policy decides at exchanges, which become rarer while nothing changes.

`adaptive` opens with equal batches. At H10, this first step takes as long as 5.7 steps of the best
split. In a training of 50 steps, as that of the ResNet, this limits the efficiency to about 0.91.

A balanced step of linear regression takes 5 to 20 ms, one to two periods of the CPU limits. The
speed of a worker changes by more than 10 % in most of its trainings. Their figures say little, and
the calibrated split is not the best one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.papers.cells import (
    ADAPTIVE,
    FIXED,
    UNIFORM,
    PaperCell,
    PaperCluster,
    in_turns,
    of_cores,
)
from benchmarks.papers.comparing import bars, table
from benchmarks.papers.experiment import PaperFigure

CLUSTERS = {
    "H1": PaperCluster(of_cores(13, 13, 13)),
    "H2": PaperCluster(of_cores(9, 12, 18)),
    "H6": PaperCluster(of_cores(4, 11, 24)),
    "H10": PaperCluster(of_cores(2, 17, 20)),
    "P100+Xeon": PaperCluster((0.9, 0.9 * 0.187 / 0.813)),
    "LBB": PaperCluster(of_cores(1 / 81.8, 1 / 81.5, 1 / 85.4, 1 / 392.9)),
}
LEVELS = ("H6", "H10", "H2", "H1")
PUBLISHED = (
    *("static:cores", "dynamic-batching", "dynamic-batching:every=1", "dynamic-batching:window=10"),
    *("lb-bsp-cpu", "lb-bsp-cpu:every=1", "dbs", "omnilearn"),
)
POLICIES = (UNIFORM, *PUBLISHED, FIXED, ADAPTIVE)
GPUS = (UNIFORM, "lb-bsp-gpu", "lb-bsp-gpu:version=2018", FIXED, ADAPTIVE)
ASYNCHRONOUS = (UNIFORM, "static:cores", "dynamic-batching", ADAPTIVE)
COMPUTE_BOUND = ("cnn", "resnet")


def accuracy_cells() -> Iterator[PaperCell]:
    """Yield the most valuable cells first: levels with much to gain, and jobs that compute."""
    levels = [(job, level, POLICIES) for job in (*COMPUTE_BOUND, "linear") for level in LEVELS]
    ratios = [(job, "P100+Xeon", POLICIES) for job in COMPUTE_BOUND]
    for seed in range(3):
        for job, cluster, policies in (*levels, *ratios, ("cnn", "LBB", GPUS)):
            for policy in in_turns(seed, policies):
                yield PaperCell(job, cluster, policy, seed)
        for level in ("H6", "H10"):
            for policy in in_turns(seed, ASYNCHRONOUS):
                yield PaperCell("cnn", level, policy, seed, "asp")


FIGURE = PaperFigure(
    "to_accuracy",
    str(__doc__),
    lambda: CLUSTERS,
    tuple(accuracy_cells()),
    table,
    bars,
    compares=True,
)

if __name__ == "__main__":
    sys.exit(FIGURE.main())
