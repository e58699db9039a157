"""Compare the time to a loss of a batch that follows the gradient noise with fixed batches.

    python benchmarks/open_batch.py --data FOLDER [--rounds 2] [--batches 32,128,512] [--json]

Real, throttled workers of unequal speeds train a small transformer to a loss on held-out text. They
use fixed batches, and one that is chosen between the smallest and the largest of these. The arms of
a round run one after another, in alternating order, and are compared with each other. The learning
rate scales with the square root of the batch. A time covers all training up to the target, without
evaluation. It is interpolated linearly between two epochs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory

from evenstride.lab.processes.cpu_limits import open_limits
from evenstride.lab.processes.local_launch import Launch, run
from evenstride.lab.processes.speeds import Speeds, parse_speeds
from evenstride.report.wording import Table

SCRIPT = Path(__file__).with_name("open_batch_script.py")
TARGET, MOST_EPOCHS = 2.2, 40


@dataclass(frozen=True, slots=True)
class Training:
    """One training.

    Args:
        arm: Batch, or bounds of the batch.
        time_s: Time to the target; ``None`` if it was not reached.
        epochs: Trained epochs.
        batches: Batch of each epoch.
    """

    arm: str
    time_s: float | None
    epochs: int
    batches: tuple[int, ...]


def reached_s(course: list[tuple[float, float]], target: float) -> float | None:
    """Return the time at which a course of (seconds, loss) reached a loss, or ``None``.

    >>> reached_s([(1.0, 3.0), (2.0, 2.0)], 2.25)
    1.75
    """
    before_s, before = 0.0, course[0][1]
    for at_s, loss in course:
        if loss <= target:
            part = (before - target) / (before - loss) if before > loss else 1.0
            return before_s + part * (at_s - before_s)
        before_s, before = at_s, loss
    return None


def train(arm: str, data: Path, speeds: Speeds, seed: int) -> Training:
    """Train once."""
    with TemporaryDirectory(prefix="evenstride-open-") as name:
        folder = Path(name)
        command = (str(SCRIPT), name, str(data), str(seed), str(TARGET), str(MOST_EPOCHS), arm)
        environment = {"EVENSTRIDE_TRACE": "", "EVENSTRIDE_GLOBAL_BATCH": ""}
        limits, _ = open_limits(len(speeds))
        try:
            run(Launch(command, speeds, environment=environment), limits, folder)
        finally:
            limits.close()
        end = json.loads((folder / "end.json").read_text())
    return Training(
        arm, reached_s(end["course"], TARGET), len(end["course"]), tuple(end["batches"])
    )


def shown(arms: list[str], trainings: list[Training]) -> str:
    """Return a table of the arms."""
    of = {arm: [one for one in trainings if one.arm == arm] for arm in arms}
    rows = [_row(arm, of[arm], of[arms[-1]]) for arm in arms]
    headings = ("batch", "time to loss", "relative to chosen", "epochs", "batch of each epoch")
    return Table(headings, tuple(rows)).text()


def _row(arm: str, mine: list[Training], chosen: list[Training]) -> tuple[str, ...]:
    pairs = [
        (a.time_s, b.time_s)
        for a, b in zip(mine, chosen, strict=True)
        if a.time_s is not None and b.time_s is not None
    ]
    return (
        arm,
        " ".join("not reached" if t.time_s is None else f"{t.time_s:.1f} s" for t in mine),
        f"{geometric_mean(a / b for a, b in pairs):.2f}" if pairs else "",
        " ".join(str(t.epochs) for t in mine),
        "; ".join(" ".join(map(str, t.batches)) for t in mine) if "-" in arm else "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("EVENSTRIDE_DATA", "../data"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", default="32,128,512")
    parser.add_argument("--speeds", default="0.8,0.4,0.2")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    speeds = parse_speeds(args.speeds)
    sizes = sorted(map(int, args.batches.split(",")))
    arms = [*map(str, sizes), f"{sizes[0]}-{sizes[-1]}"]
    trainings = list[Training]()
    for number in range(args.rounds):
        for arm in arms if number % 2 else arms[::-1]:
            trainings.append(train(arm, args.data, speeds, number))
            print(trainings[-1], file=sys.stderr, flush=True)
    plain = [asdict(one) for one in trainings]
    print(json.dumps(plain, indent=1) if args.json else shown(arms, trainings))


if __name__ == "__main__":
    main()
