"""Measure the cost of finding workers and batch during training.

    python benchmarks/online.py --data FOLDER [--minutes 4] [--rounds 3] [--speeds ...] [--json]

A small network trains on Fashion-MNIST, on workers that are limited to parts of a core. Each round
trains the same number of samples twice: once with ``evenstride plan --online``, and once entirely
in the configuration that the search chose. Both are timed from the first step to the end of their
processes. Their order alternates: a known run that comes first uses the configuration of the
previous round. The benchmark prints two overheads: the one that the command reports, and the
relative difference of the two times, with the range over the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from evenstride.lab.online.online_search import search
from evenstride.lab.online.search_journal import OnlineRequest, OnlineResult
from evenstride.lab.processes.speeds import Speeds, parse_speeds
from evenstride.planner.online_forecast import Configuration
from evenstride.planner.search.selection import Objective

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.online_script import prepare

SCRIPT = Path(__file__).with_name("online_script.py")
GOAL, LIMIT = 0.02, 0.10


@dataclass(frozen=True, slots=True)
class Setting:
    """The data, workers, batches and length of the trainings."""

    data: Path
    speeds: Speeds
    batches: tuple[int, ...]
    objective: Objective
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class Round:
    """A training with a search and one without."""

    chosen: str
    searched_s: float
    known_s: float
    reckoned: float
    switches: tuple[float, ...]
    foreseen_step_s: float
    measured_step_s: float

    @property
    def overhead(self) -> float:
        """Relative increase of the time by the search."""
        return self.searched_s / self.known_s - 1


def say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def train(setting: Setting, workers: tuple[int, ...], batches: tuple[int, ...]) -> OnlineResult:
    """Train once, with a search among some workers and batches."""
    with TemporaryDirectory(prefix="evenstride-online-") as name:
        folder = Path(name)
        command = (str(SCRIPT), str(folder / "saved"), str(setting.data), str(setting.epochs))
        request = OnlineRequest(
            command=command,
            workers=workers,
            batches=batches,
            epochs=setting.epochs,
            objective=setting.objective,
            usd_per_h=1.0,
            speeds=setting.speeds[: max(workers)],
            folder=folder / "run",
        )
        return search(request, say)


def train_all(setting: Setting) -> OnlineResult:
    """Train once with a search among all configurations."""
    return train(setting, tuple(range(1, len(setting.speeds) + 1)), setting.batches)


def epochs_of(setting: Setting, minutes: float) -> int:
    """Return the number of epochs in some minutes with all workers and the middle batch."""
    batch = setting.batches[len(setting.batches) // 2]
    found = train(setting, (len(setting.speeds),), (batch,))
    assert found.after is not None, "the run trained an epoch"
    return max(ceil(minutes * 60 / (60_000 / batch * found.after.step_s)), 1)


def measured(
    setting: Setting, number: int, before: Configuration | None
) -> tuple[Round, Configuration]:
    """Return a round and its chosen configuration."""
    known = None
    if number % 2 and before is not None:
        known = train(setting, (before.workers,), (before.batch,))
    found = train_all(setting)
    chosen = found.journal.chosen
    assert chosen is not None, "the training lasts long enough for a choice"
    assert found.overhead is not None, "there is a choice"
    assert found.after is not None, "there is a choice"
    if known is None or before != chosen:
        known = train(setting, (chosen.workers,), (chosen.batch,))
    step = next(one.step_s.value for one in found.foreseen if one.choice == chosen)
    return Round(
        chosen=str(chosen),
        searched_s=found.total_s,
        known_s=known.total_s,
        reckoned=found.overhead.part,
        switches=tuple(one.cost_s for one in found.journal.switches),
        foreseen_step_s=step,
        measured_step_s=found.after.step_s,
    ), chosen


def all_rounds(setting: Setting, count: int, minutes: float) -> list[Round]:
    """Return ``count`` rounds of trainings that last about ``minutes``."""
    setting = replace(setting, epochs=epochs_of(setting, minutes))
    rounds, chosen = list[Round](), None
    for number in range(count):
        print(f"round {number + 1}: {setting.epochs} epochs", file=sys.stderr, flush=True)
        one, chosen = measured(setting, number, chosen)
        rounds.append(one)
        say(f"{one.searched_s:.1f} s with a search, {one.known_s:.1f} s without")
    return rounds


def summarised(rounds: list[Round]) -> dict[str, Any]:
    """Return the rounds and their summary as JSON types."""
    parts = [one.overhead for one in rounds]
    middle = median(parts)
    return {
        "rounds": [{**asdict(one), "overhead": one.overhead} for one in rounds],
        "overhead": middle,
        "overhead_low": min(parts),
        "overhead_high": max(parts),
        "reckoned": median(one.reckoned for one in rounds),
        "goal": "met" if middle <= GOAL else "limit met" if middle <= LIMIT else "over",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds fashion-mnist")
    parser.add_argument("--minutes", type=float, default=4.0, help="length of one training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--speeds", default="0.8,0.5,0.25,0.25")
    parser.add_argument("--batches", default="64,256,1024")
    parser.add_argument("--objective", default="time", choices=["time", "cost"])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    batches = tuple(sorted(map(int, given.batches.split(","))))
    setting = Setting(
        given.data.resolve(), parse_speeds(given.speeds), batches, Objective(given.objective)
    )
    with TemporaryDirectory(prefix="evenstride-data-") as name:
        prepare(setting.data, Path(name))
        rounds = all_rounds(replace(setting, data=Path(name)), given.rounds, given.minutes)
    result = summarised(rounds)
    if given.json:
        print(json.dumps(result))
        return
    for one in rounds:
        print(
            f"{one.chosen}: {one.searched_s:.1f} s searched, {one.known_s:.1f} s known, overhead "
            f"{one.overhead:+.1%} (reported {one.reckoned:.1%}), step {one.foreseen_step_s:.4f} s "
            f"forecast and {one.measured_step_s:.4f} s measured, switches "
            + ", ".join(f"{cost:.2f} s" for cost in one.switches)
        )
    print(
        f"overhead {result['overhead']:+.1%} ({result['overhead_low']:+.1%} to "
        f"{result['overhead_high']:+.1%}), goal {GOAL:.0%}, limit {LIMIT:.0%}: {result['goal']}"
    )


if __name__ == "__main__":
    main()
