"""Compare synchronisation modes on throttled workers: time and updates to a test accuracy.

    python benchmarks/modes.py [--modes bsp,asp] [--speeds 1,0.5,0.2] [--seeds 3] [--out FILE]

Each mode trains Fashion-MNIST (from EVENSTRIDE_DATA) with equal and with balanced shares in turns,
once per seed. A training ends when an epoch ends with the test accuracy. CPU limits slow down the
workers, but not the parameter servers. If each worker updates the weights alone, its learning rate
is that of a global batch divided by the number of workers. So a sample moves the weights equally
far in every mode. `--schedule hl` changes the speeds of four workers by OmniLearn's schedule of
levels, 1, 2, 4, 8, 8, 4, 2, 1, each for `--phase` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from evenstride.core.spec import split_specs
from evenstride.core.sync_modes.mode_specs import (
    SYNC_NAMES,
    Asynchronous,
    StaleSynchronous,
    sync_from_spec,
)
from evenstride.lab.processes.cpu_limits import open_limits
from evenstride.lab.processes.local_launch import Launch, run
from evenstride.lab.processes.speeds import (
    SpeedChange,
    Speeds,
    check_fit,
    parse_speeds,
    usable_cpus,
)

SCRIPT = Path(__file__).with_name("modes_script.py")
MODES = "bsp,bsp-ps,asp,ssp(staleness=3),local-sgd(every=8),delayed"
SHARES = ("uniform", "adaptive")
LEVELS = {1: (12, 12, 12, 12), 2: (12, 12, 8, 16), 4: (9, 9, 6, 24), 8: (6, 6, 4, 32)}
"""Cores of four workers, 48 in total, at each level of unevenness, as published by OmniLearn."""
SCHEDULE = (1, 2, 4, 8, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Trained:
    """One run.

    Args:
        mode: Synchronisation mode.
        policy: Policy of the shares.
        seed: Seed of weights and sample order.
        reached: Whether the accuracy was reached.
        time_s: Training time without tests.
        updates: Updates of the model, or steps of each worker with local SGD.
        epochs: Trained epochs.
        epoch_s: Median time of an epoch.
        accuracy: Test accuracy before the first epoch and after each.
        staleness: Mean and maximum; 0 in synchronous modes.
        shares: Shares at the end.
    """

    mode: str
    policy: str
    seed: int
    reached: bool
    time_s: float
    updates: int
    epochs: int
    epoch_s: float
    accuracy: tuple[float, ...]
    staleness: tuple[float, int]
    shares: tuple[int, ...]


def trained(mode: str, policy: str, seed: int, end: dict[str, Any]) -> Trained:
    """Return a run from the file that it wrote."""
    stale = end["staleness"] or {"mean": 0.0, "maximum": 0}
    return Trained(
        mode=mode,
        policy=policy,
        seed=seed,
        reached=end["reached"],
        time_s=end["time_s"],
        updates=end["updates"],
        epochs=len(end["epochs_s"]),
        epoch_s=median(end["epochs_s"]),
        accuracy=tuple(end["accuracy"]),
        staleness=(stale["mean"], stale["maximum"]),
        shares=tuple(end["shares"]),
    )


def alone(mode: str) -> bool:
    """Return whether each worker updates the weights alone."""
    return isinstance(sync_from_spec(mode), Asynchronous | StaleSynchronous)


def hl_speeds(level: int, most: float = 1.0) -> Speeds:
    """Return the speeds of four workers at a level, relative to the fastest of all levels."""
    return tuple(cores * most / max(LEVELS[8]) for cores in LEVELS[level])


def hl_changes(phase_s: float) -> tuple[SpeedChange, ...]:
    """Return the changes of the schedule after its first phase, repeated for an hour."""
    moments = range(1, int(3600 / phase_s))
    return tuple(
        SpeedChange(hl_speeds(SCHEDULE[moment % len(SCHEDULE)]), at_s=moment * phase_s)
        for moment in moments
    )


def table(runs: list[Trained]) -> str:
    """Return a table of medians over the seeds, a line per mode and policy."""
    lines = [
        f"{'mode':24}{'shares':10}{'time':>10}{'range':>16}{'updates':>9}{'epochs':>8}"
        f"{'an epoch':>10}{'staleness':>14}  at the end"
    ]
    for mode, policy in dict.fromkeys((one.mode, one.policy) for one in runs):
        mine = [one for one in runs if (one.mode, one.policy) == (mode, policy)]
        times_s = sorted(one.time_s for one in mine)
        stale = f"{mean(one.staleness[0] for one in mine):.2f}, {max(o.staleness[1] for o in mine)}"
        missed = sum(not one.reached for one in mine)
        lines.append(
            f"{mode:24}{policy:10}{median(times_s):>8.1f} s"
            f"{f'{times_s[0]:.1f} to {times_s[-1]:.1f}':>16}"
            f"{median(one.updates for one in mine):>9.0f}{median(one.epochs for one in mine):>8.0f}"
            f"{median(one.epoch_s for one in mine):>8.2f} s{stale:>14}  "
            f"{'/'.join(map(str, mine[-1].shares))}" + (f"  ({missed} missed)" if missed else "")
        )
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Verbatim)
    parser.add_argument("--modes", default=MODES)
    parser.add_argument("--speeds", default="1,0.5,0.2")
    parser.add_argument("--schedule", choices=("none", "hl"), default="none")
    parser.add_argument("--phase", type=float, default=4.0, help="seconds per level")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=15_000, help="training images to use")
    parser.add_argument("--accuracy", type=float, default=0.8)
    parser.add_argument("--most-epochs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=768)
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate of a global batch")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    """Run all trainings in turns and print the table."""
    args = parsed()
    data = Path(os.environ.get("EVENSTRIDE_DATA", "data"), "fashion-mnist")
    if not data.is_dir():
        print(f"{data} does not exist; set EVENSTRIDE_DATA to the folder that holds fashion-mnist")
        return 2
    hl = args.schedule == "hl"
    speeds = hl_speeds(1) if hl else parse_speeds(args.speeds)
    for one in (speeds, hl_speeds(8)) if hl else (speeds,):
        check_fit(one, usable_cpus())
    modes = [str(sync_from_spec(text)) for text in split_specs(args.modes, SYNC_NAMES)]
    limits, _ = open_limits(len(speeds))
    runs: list[Trained] = []
    try:
        for seed in range(args.seeds):
            for mode in modes:
                for policy in SHARES:
                    with tempfile.TemporaryDirectory() as folder:
                        words = (seed, args.accuracy, args.most_epochs, args.samples, args.batch)
                        rate = args.rate / len(speeds) if alone(mode) else args.rate
                        launch = Launch(
                            (str(SCRIPT), folder, str(data), *map(str, words), str(rate)),
                            speeds,
                            hl_changes(args.phase) if hl else (),
                            {"EVENSTRIDE_SYNC": mode, "EVENSTRIDE_POLICY": policy},
                        )
                        run(launch, limits, Path(folder))
                        end = json.loads(Path(folder, "end.json").read_text())
                    runs.append(trained(mode, policy, seed, end))
                    print(runs[-1], file=sys.stderr, flush=True)
                    if args.out is not None:
                        args.out.write_text(json.dumps([asdict(one) for one in runs]))
    finally:
        limits.close()
    print(table(runs))
    return 0


class _Verbatim(argparse.RawDescriptionHelpFormatter):
    """Shows the docstring without wrapping."""


if __name__ == "__main__":
    sys.exit(main())
