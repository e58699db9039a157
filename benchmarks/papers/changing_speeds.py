"""Clusters whose speeds change: those of LB-BSP, DBS and OmniLearn.

    python benchmarks/papers/changing_speeds.py [--only load] [--minutes 10]

* load: four workers with assumed speeds of three EC2 types, under the recorded load of PlanetLab
  machines, after LB-BSP. A sample of five minutes lasts 10 steps.
* disturbance: four workers, of which three share one of two processors, after DBS. In each epoch
  each worker is slowed down with probability 0.1, by 5 to 10 s of 20, for 4 to 20 epochs.
* schedule: four containers whose cores change with OmniLearn's levels 1, 2, 4, 8, 8, 4, 2, 1, each
  for 5 epochs and the last for 10.

All changes are tied to steps, so every policy has the same speeds in the same step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.modes import LEVELS, SCHEDULE
from benchmarks.papers.cells import (
    ADAPTIVE,
    FIXED,
    JOBS,
    UNIFORM,
    PaperCell,
    PaperCluster,
    in_turns,
    of_cores,
)
from benchmarks.papers.comparing import bars, table
from benchmarks.papers.experiment import PaperFigure

from evenstride.lab.processes.speeds import Speeds
from evenstride.sim.scenario.recordings import load_recording

DAY = "20110322"
TYPES = (400, 560, 430, 760)  # samples/s in lb-bsp-cpu-mix.yaml
SAMPLES, SAMPLE_STEPS = 15, 10
EPOCHS, CHANCE, SEED = 16, 0.1, 1
POLICIES = {
    "load": ("cnn", ("lb-bsp-cpu", "lb-bsp-cpu:predictor=ema")),
    "disturbance": ("cnn", ("dbs", "dynamic-batching")),
    "schedule": ("short-cnn", ("omnilearn", "dynamic-batching")),
}


def stepwise(phases: list[Speeds], lengths: list[int]) -> PaperCluster:
    """Return workers with the given speeds, each for a number of steps."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return PaperCluster(phases[0], tuple(zip(starts, phases, strict=True))[1:], sum(lengths))


def load() -> PaperCluster:
    """Return LB-BSP's kind of workers, each with what a recorded machine leaves over."""
    used = load_recording(DAY)
    chosen = random.Random(SEED).sample(range(len(used)), len(TYPES))
    full, phases = of_cores(*TYPES), list[Speeds]()
    for moment in range(SAMPLES):
        left = [1 - min(float(used[one, moment]), 75.0) / 100 for one in chosen]
        phases.append(tuple(a * b for a, b in zip(full, left, strict=True)))
    return stepwise(phases, [SAMPLE_STEPS] * SAMPLES)


def disturbance() -> PaperCluster:
    """Return the workers of DBS's example with its random slowdowns, of a fixed seed."""
    dice, full = random.Random(SEED), of_cores(1, 1, 1, 3)
    until, factor = [0] * len(full), [1.0] * len(full)
    phases = list[Speeds]()
    for epoch in range(EPOCHS):
        for worker in range(len(full)):
            if epoch >= until[worker]:
                factor[worker] = 1.0
                if dice.random() < CHANCE:
                    until[worker] = epoch + dice.randint(4, 20)
                    factor[worker] = 20 / (20 + dice.uniform(5, 10))
        phases.append(tuple(a * b for a, b in zip(full, factor, strict=True)))
    return stepwise(phases, [JOBS["cnn"].epoch_steps] * EPOCHS)


def schedule() -> PaperCluster:
    """Return OmniLearn's containers and levels, the last of which is twice as long."""
    steps = JOBS["short-cnn"].epoch_steps
    lengths = [5 * steps] * (len(SCHEDULE) - 1) + [10 * steps]
    return stepwise([of_cores(*LEVELS[level]) for level in SCHEDULE], lengths)


def changing_cells() -> Iterator[PaperCell]:
    """Yield the cells, all clusters in each seed."""
    for seed in range(3):
        for cluster, (job, published) in POLICIES.items():
            for policy in in_turns(seed, (UNIFORM, *published, FIXED, ADAPTIVE)):
                yield PaperCell(job, cluster, policy, seed)


FIGURE = PaperFigure(
    "changing_speeds",
    str(__doc__),
    lambda: {"load": load(), "disturbance": disturbance(), "schedule": schedule()},
    tuple(changing_cells()),
    table,
    bars,
    compares=True,
)

if __name__ == "__main__":
    sys.exit(FIGURE.main())
