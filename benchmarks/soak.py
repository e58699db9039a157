"""Check that a training survives a hundred random kills, or random damage to checkpoints.

    python benchmarks/soak.py [--kills 100] [--seed 0] [--workers 3] [--epochs 120] [--out FILE]
    python benchmarks/soak.py --kills 40 --flips     a bit flips in a checkpoint at every kill
    python benchmarks/soak.py --damages 1000         damaged folders of three checkpoints

Real processes on this machine train a small model in float64, with unequal shares and a checkpoint
every five steps (`tests/faults/elastic_script.py`). Random workers are killed with SIGKILL at
random moments: in a step, in a save, or during the start. At the end, the weights must be those of
one undisturbed process, and the committed trajectory must have every sample once in each epoch.
Otherwise the benchmark fails.

With ``--flips``, each kill also flips a bit in a file of the newest checkpoint, if an older one is
still intact. Half of the flips are in the manifest. A damaged checkpoint may be deleted only by the
training that wrote it, after it has written newer ones.

With ``--damages``, no process is killed. Each case damages a copy of a folder of three checkpoints
(`tests/faults/damages.py`), restarts, and continues the training. The outcome must be an exact
restart, a fallback with a warning, or a refusal that changes nothing. A case depends on its number
alone, so parts can run at different times. ``--damages 250`` with seeds 0 to 3 has the cases of
``--damages 1000``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from evenstride.errors import CheckpointError
from evenstride.runtime.checkpoint.format import storage
from evenstride.runtime.checkpoint.format.manifest import (
    Name,
    check_file,
    parse_name,
    read_manifest,
)
from evenstride.runtime.checkpoint.format.storage import LocalStorage
from evenstride.testing.faults.fault_plan import FaultPlan, Generation, steps_again
from evenstride.testing.faults.supervisor import Job, Outcome, supervise

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the script and its checks belong to the tests

from tests.faults.damages import judge, saved  # noqa: E402
from tests.faults.elastic_script import PER_EPOCH, audit, check_the_end  # noqa: E402

SCRIPT = ROOT / "tests" / "faults" / "elastic_script.py"
EVERY = 5
IN_START = 0.15  # fraction of the kills during the start of the workers
DEADLINE_S = 3600.0
MOST_ERROR = 1e-9  # of the weights after thousands of steps in float64


class Flipper:
    """Flips a bit in the newest intact checkpoint if there is another intact one.

    Args:
        folder: Folder of the checkpoints.
        choose: Random generator.
    """

    def __init__(self, folder: Path, choose: random.Random) -> None:
        self._folder, self._choose = folder, choose
        self.flipped: list[Path] = []

    def __call__(self) -> None:
        """Flip a bit if that leaves an intact checkpoint."""
        names = (parse_name(path.name) for path in self._folder.glob("step-*"))
        found = sorted((name for name in names if name is not None), reverse=True)
        whole = [name for name in found if is_whole(self._folder, name)]
        if len(whole) < 2:
            return
        inside = sorted((self._folder / str(whole[0])).iterdir())
        manifest = self._choose.random() < 0.5
        path = self._choose.choice([p for p in inside if (p.name == "manifest.json") == manifest])
        data = bytearray(path.read_bytes())
        data[self._choose.randrange(len(data))] ^= 1 << self._choose.randrange(8)
        path.write_bytes(data)
        self.flipped.append(path)


def is_whole(folder: Path, name: Name) -> bool:
    """Return whether all files of a checkpoint are intact."""
    kept = LocalStorage(folder)
    try:
        files = read_manifest(kept, name).files
        return all(check_file(kept, name.file(f), info) is None for f, info in files.items())
    except (CheckpointError, OSError):
        return False


class Killer:
    """Decides which worker to kill, and after how many committed steps.

    Args:
        kills: Number of kills.
        steps: Steps of the whole run, over which the kills are spread.
        seed: Seed of the choices.
        flip: Called at each kill.
    """

    def __init__(
        self, kills: int, steps: int, seed: int, flip: Callable[[], None] = lambda: None
    ) -> None:
        self._flip = flip
        self._left, self._random = kills, random.Random(seed)
        self._mean = 0.9 * steps / max(kills, 1)
        self._furthest, self._dying = 0, frozenset[int]()
        self._at = self._next()

    def __call__(self, running: Mapping[str, int], step: int) -> str | None:
        """Return the worker to kill now, or ``None``."""
        self._furthest = max(self._furthest, step)
        known = frozenset(running.values())
        if not self._left or known & self._dying or step < self._at:
            return None
        self._dying, self._left = known, self._left - 1
        self._at = self._next()
        self._flip()
        return self._random.choice(sorted(running))

    def _next(self) -> int:
        """Return the step at which the next kill is due, or -1 for the next start of workers."""
        if self._random.random() < IN_START:
            return -1
        return self._furthest + self._random.randint(1, max(1, round(2 * self._mean)))


def soak(
    kills: int, seed: int, workers: int, epochs: int, folder: Path, *, flips: bool = False
) -> dict[str, Any]:
    """Run the training with kills and return the figures."""
    steps = epochs * PER_EPOCH
    names = [f"w{number}" for number in range(workers)]
    plan = FaultPlan(workers=names, steps=steps, save_every=EVERY, restarts=10 * kills + 10)
    flipper = Flipper(folder / "checkpoints", random.Random(seed))
    flip = flipper if flips else lambda: None
    job = Job(
        (str(SCRIPT), str(folder), str(epochs), str(EVERY)),
        plan,
        folder,
        deadline_s=DEADLINE_S,
        meddle=Killer(kills, steps, seed, flip),
    )
    outcome = supervise(job)
    found = figures(outcome, folder, epochs)
    return found | (flip_figures(flipper.flipped, folder) if flips else {})


def flip_figures(flipped: list[Path], folder: Path) -> dict[str, Any]:
    """Return the number of flipped bits, of logged events and of deleted checkpoints."""
    gone = [path for path in flipped if not path.exists()]
    logs = "".join(path.read_text(errors="replace") for path in folder.glob("*.log"))
    wrong = [p for p in gone if f"checkpoint {p.parent.name} is skipped" in logs]
    assert not wrong, f"deleted after a run has skipped them: {wrong}"
    return {
        "flipped_in_manifests": sum(path.name == "manifest.json" for path in flipped),
        "flipped_in_others": sum(path.name != "manifest.json" for path in flipped),
        "superseded_and_deleted": len(gone),
        "passed_over": logs.count(" is skipped: "),
        "from_scratch": logs.count("starts from scratch"),
    }


def damages(cases: int, seed: int, folder: Path) -> dict[str, Any]:
    """Restart from damaged folders and return the outcomes.

    Raises:
        AssertionError: A case restarted from scratch or inexactly, or deleted a file wrongly.
    """
    logging.getLogger("evenstride").addHandler(logging.NullHandler())  # no warnings on stderr
    storage.FIRST_PAUSE_S = 0.0  # circular links are errors that are retried
    known, outcomes, kinds = saved(folder / "origin"), Counter[str](), Counter[str]()
    for case in range(seed * cases, (seed + 1) * cases):
        verdict = judge(folder / "origin", known, folder / "case", case)
        outcomes[verdict.outcome] += 1
        kinds.update(kind.partition(" ")[0] for kind in verdict.done)
        shutil.rmtree(folder / "case")
        if outcomes.total() % 50 == 0:
            print(f"after case {case}:", *outcomes.items(), file=sys.stderr, flush=True)
    return {"cases": cases, **outcomes, "kinds": dict(kinds.most_common())}


def figures(outcome: Outcome, folder: Path, epochs: int) -> dict[str, Any]:
    """Check the end of a run and return its figures."""
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
    """Return the number of samples in steps that a later generation trained again."""
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
    parser.add_argument("--flips", action="store_true")
    parser.add_argument("--damages", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory(prefix="soak-") as name:
        folder, (kills, workers) = Path(name), (options.kills, options.workers)
        if options.damages:
            found = damages(options.damages, options.seed, folder)
        else:
            flips = options.flips
            found = soak(kills, options.seed, workers, options.epochs, folder, flips=flips)
    for name, value in found.items():
        print(f"{name:20} {value:.3g}" if isinstance(value, float) else f"{name:20} {value}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
