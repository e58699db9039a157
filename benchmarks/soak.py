"""Does a run survive a hundred kills? Random workers, at random moments, with restarts.

    python benchmarks/soak.py [--kills 100] [--seed 0] [--workers 3] [--epochs 120] [--out FILE]

Real processes on this machine train a small model in float64 with unequal shares and a checkpoint
every five steps (`tests/faults/elastic_script.py`), and are killed with SIGKILL: at any moment, in
a step, in a save, or while they start. Afterwards the weights must be those of one process that
nothing befell, and every sample must have been trained once in each epoch of the committed
trajectory; else the benchmark fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from evenstride.lab.elastic.supervisor import Job, Outcome, supervise
from evenstride.sim.faults import FaultPlan, Generation, steps_again

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the script and its checks belong to the tests

from tests.faults.elastic_script import PER_EPOCH, audit, check_the_end  # noqa: E402

SCRIPT = ROOT / "tests" / "faults" / "elastic_script.py"
EVERY = 5
IN_START = 0.15  # part of the kills that come while the workers start
DEADLINE_S = 3600.0
MOST_ERROR = 1e-9  # of the weights after thousands of steps in float64


class Killer:
    """Decides whom to kill, and when: as soon as so many steps are committed.

    Args:
        kills: how many.
        steps: of the whole run, over which the kills are spread.
        seed: of the choices.
    """

    def __init__(self, kills: int, steps: int, seed: int) -> None:
        self._left, self._random = kills, random.Random(seed)
        self._mean = 0.9 * steps / max(kills, 1)
        self._furthest, self._dying = 0, frozenset[int]()
        self._at = self._next()

    def __call__(self, running: Mapping[str, int], step: int) -> str | None:
        """Return whom to kill now."""
        self._furthest = max(self._furthest, step)
        known = frozenset(running.values())
        if not self._left or known & self._dying or step < self._at:
            return None
        self._dying, self._left = known, self._left - 1
        self._at = self._next()
        return self._random.choice(sorted(running))

    def _next(self) -> int:
        """Return the step at which the next kill is due; -1 for as soon as there are workers."""
        if self._random.random() < IN_START:
            return -1
        return self._furthest + self._random.randint(1, max(1, round(2 * self._mean)))


def soak(kills: int, seed: int, workers: int, epochs: int, folder: Path) -> dict[str, Any]:
    """Run it; return its figures."""
    steps = epochs * PER_EPOCH
    names = [f"w{number}" for number in range(workers)]
    plan = FaultPlan(workers=names, steps=steps, save_every=EVERY, restarts=10 * kills + 10)
    job = Job(
        (str(SCRIPT), str(folder), str(epochs), str(EVERY)),
        plan,
        folder,
        deadline_s=DEADLINE_S,
        meddle=Killer(kills, steps, seed),
    )
    outcome = supervise(job)
    return figures(outcome, folder, epochs)


def figures(outcome: Outcome, folder: Path, epochs: int) -> dict[str, Any]:
    """Check the end of a run; return what it took."""
    generations = outcome.generations
    error = check_the_end(folder, generations, epochs, MOST_ERROR)
    recoveries = sorted(one.recovery_s for one in outcome.lived if one.recovery_s is not None)
    return {
        "kills": sum(one.ended_by.count("kill ") for one in generations),
        "other_ends": [one.ended_by for one in generations[:-1] if "kill " not in one.ended_by],
        "generations": len(generations),
        "without_a_step": sum(one.first_step == one.last_step for one in generations),
        "steps": generations[-1].last_step,
        "steps_again": steps_again(generations),
        "samples_again": samples_again(generations, folder),
        "recovery_median_s": median(recoveries) if recoveries else None,
        "recovery_most_s": recoveries[-1] if recoveries else None,
        "seconds": outcome.seconds,
        "weights_error": error,
    }


def samples_again(generations: list[Generation], folder: Path) -> int:
    """Return how many samples were trained in steps that a later generation trained again."""
    trajectory = audit(folder, generations)
    again = 0
    for before, after in itertools.pairwise(generations):
        for step in range(after.first_step + 1, before.last_step + 1):
            again += len(trajectory[step][1])
    return again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3, choices=(1, 2, 3, 4))
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory(prefix="soak-") as folder:
        found = soak(options.kills, options.seed, options.workers, options.epochs, Path(folder))
    for name, value in found.items():
        print(f"{name:20} {value:.3g}" if isinstance(value, float) else f"{name:20} {value}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
