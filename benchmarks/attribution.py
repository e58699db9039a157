"""Check that `report` names the right straggler, steps and seconds, on real throttled workers.

    python benchmarks/attribution.py [--policies uniform,adaptive] [--repeats 2] [--out FOLDER]

Three workers have equal speed. In each run a CPU limit slows down another one for some steps. Every
rank records the time at which its own gradients were ready (`attribution_script.py`). The last rank
made the others wait. `report` and `top` derive the same figures from the trace alone.

Each run prints one line: the slowed worker, the named worker, the steps, and the seconds that each
other worker waited for it. `error` is the difference of the seconds relative to all waiting time of
the run. `ends` is the sum of the errors of both ends of the interval, relative to its length. The
exit code is 1 if a run names another worker, or if `error` or `ends` is above 5 %.

Under `adaptive` there is little to attribute, because shares change within a few steps. No interval
is reported for a worker that cost less than 2 % of the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path

import numpy as np

from evenstride.core.fleet import FloatArray
from evenstride.lab.comparison.lab_session import LabPlan, Session, Viewer, opened
from evenstride.lab.processes.speeds import SpeedChange, Speeds
from evenstride.report.analysis.attribution import Blame, Stretch, blames_of
from evenstride.report.analysis.run_timeline import RunTimeline

SCRIPT = Path(__file__).with_name("attribution_script.py")
SLOWED = (0.3, 0.15)
BATCH, MOST_OFF = 768, 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """An injected slow-down.

    Args:
        speeds: Speeds of the workers outside the interval.
        rank: Rank of the slowed worker.
        speed: Its speed in the interval.
        first: First step of the interval.
        last: Last step of the interval.
        steps: Steps of the run.
    """

    speeds: Speeds
    rank: int
    speed: float
    first: int
    last: int
    steps: int

    @property
    def changes(self) -> tuple[SpeedChange, ...]:
        """Speed changes for the lab. An interval up to the last step has no end."""
        slow = [s if k != self.rank else self.speed for k, s in enumerate(self.speeds)]
        begins = SpeedChange(tuple(slow), at_step=self.first)
        ends = SpeedChange(self.speeds, at_step=self.last + 1)
        return (begins, ends) if self.last + 1 < self.steps else (begins,)


@dataclass(frozen=True, slots=True)
class Row:
    """A run: the truth, recorded by the ranks, and the report, derived from the trace.

    Args:
        policy: Policy of the run.
        rank: Rank of the slowed worker.
        speed: Its speed in the interval.
        caused_most: Rank that made the others wait longest, in truth.
        named: Rank that made the others wait longest, as reported.
        first: First step of the interval, in truth.
        last: Last step of the interval, in truth.
        reported_first: First reported step; ``None`` without a reported interval.
        reported_last: Last reported step.
        waited_s: Mean waiting time of the other workers for this one in the interval, in truth.
        reported_s: The same as reported, in the reported interval.
        all_s: Waiting time for slower workers in the whole run, per other worker.
        error: Largest error of the waiting time that a worker caused, relative to ``all_s``.
        ends: Error of both ends in steps, relative to the interval; ``None`` without one.
    """

    policy: str
    rank: int
    speed: float
    caused_most: int
    named: int
    first: int
    last: int
    reported_first: int | None
    reported_last: int | None
    waited_s: float
    reported_s: float | None
    all_s: float
    error: float
    ends: float | None

    @property
    def sound(self) -> bool:
        """Whether worker, interval and seconds are reported correctly."""
        near = self.error <= MOST_OFF and (self.ends is None or self.ends <= MOST_OFF)
        return near and self.named == self.caused_most


def caused_by(folder: Path, steps: int) -> FloatArray:
    """Return the true waiting time that each worker caused, ``(steps, workers)``.

    Args:
        folder: Folder of the run.
        steps: Number of steps in the trace.
    """
    files = sorted(folder.glob("ready-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    ready_s = np.array([json.loads(path.read_text())[:steps] for path in files]).T
    caused_s = np.zeros_like(ready_s)
    latest_s = ready_s.max(axis=1, keepdims=True)
    rows = np.arange(len(ready_s))
    caused_s[rows, ready_s.argmax(axis=1)] = (latest_s - ready_s).sum(axis=1)
    return caused_s


def judge(folder: Path, case: Case, policy: str) -> Row:
    """Compare the report of a run with the truth.

    Args:
        folder: Folder of the run.
        case: Injected slow-down.
        policy: Policy of the run.
    """
    story = RunTimeline(folder)
    story.read()
    (generation,) = story.generations
    blames, others = blames_of(generation), len(case.speeds) - 1
    truth_s = caused_by(folder, generation.steps) / others
    reported_s = np.zeros(len(case.speeds))
    for blame in blames:
        reported_s[blame.rank] = blame.each_s
    last = min(case.last, generation.steps - 1)
    of_rank = next(blame for blame in blames if blame.rank == case.rank)
    slow = _slow(of_rank, case)
    reported_first = min((one.first for one in slow), default=None)
    reported_last = max((one.last for one in slow), default=None)
    ends = None
    if reported_first is not None and reported_last is not None:
        off = abs(reported_first - case.first) + abs(reported_last - last)
        ends = off / (last - case.first + 1)
    return Row(
        policy=policy,
        rank=case.rank,
        speed=case.speed,
        caused_most=int(truth_s.sum(axis=0).argmax()),
        named=blames[0].rank,
        first=case.first,
        last=last,
        reported_first=reported_first,
        reported_last=reported_last,
        waited_s=float(truth_s[case.first : last + 1, case.rank].sum()),
        reported_s=sum(one.caused_s for one in slow) / others if slow else None,
        all_s=float(truth_s.sum()),
        error=float(np.abs(truth_s.sum(axis=0) - reported_s).max() / truth_s.sum()),
        ends=ends,
    )


def _slow(blame: Blame, case: Case) -> tuple[Stretch, ...]:
    """Return the stretches in which a worker was closer to the injected speed than to its usual.

    Other processes on the machine may slow it down at other times too. Stretches that lie mostly
    outside the interval are attributed to these.
    """
    between = sqrt(case.speed / case.speeds[case.rank])

    def inside(one: Stretch) -> bool:
        common = min(one.last, case.last) - max(one.first, case.first) + 1
        return 2 * common > one.last - one.first + 1

    return tuple(one for one in blame.stretches if one.speed < between and inside(one))


def run(case: Case, policies: tuple[str, ...], folder: Path) -> Iterator[Row]:
    """Train once under each policy and yield the comparisons.

    Args:
        case: Slow-down to inject.
        policies: Names of the policies.
        folder: Folder for traces and logs.
    """
    plan = LabPlan(
        command=(str(SCRIPT), str(BATCH // 3 * len(case.speeds))),
        speeds=case.speeds,
        policies=policies,
        steps=case.steps,
        repeats=1,
        changes=case.changes,
        folder=folder,
        calibrate=False,
    )
    with opened(plan, Viewer()) as session:
        for policy in policies:
            yield _judged(session, case, policy)


def _judged(session: Session, case: Case, policy: str) -> Row:
    return judge(session.train(policy, 0).parent, case, policy)


def line(row: Row) -> str:
    """Return a run as a line of the table."""
    steps = "none" if row.reported_first is None else f"{row.reported_first}-{row.reported_last}"
    seconds = "" if row.reported_s is None else f"{row.reported_s:.2f}"
    ends = "" if row.ends is None else f"{row.ends:.1%}"
    return (
        f"{row.policy:12}{row.rank:>8}{row.speed:>7}{row.named:>7}"
        f"{f'{row.first}-{row.last}':>10}{steps:>10}{row.waited_s:>10.2f}{seconds:>10}"
        f"{row.all_s:>8.2f}{row.error:>8.1%}{ends:>7}{'' if row.sound else '  off'}"
    )


HEAD = (
    f"{'policy':12}{'slowed':>8}{'to':>7}{'named':>7}{'steps':>10}{'reported':>10}{'waited s':>10}"
    f"{'reported':>10}{'all s':>8}{'error':>8}{'ends':>7}"
)


def main() -> int:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policies", default="uniform,adaptive")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        if not args.json:
            print(HEAD, flush=True)
        for repeat in range(args.repeats):
            for number, speed in enumerate(SLOWED):
                rank, sixth = (repeat + number) % 3, args.steps // 6
                # The trace lacks the last steps, which no exchange covers. End well before them.
                case = Case((0.6,) * 3, rank, speed, sixth, 5 * sixth // 2 - 1, args.steps)
                of_case = folder / f"{repeat}-{number}"
                for row in run(case, tuple(args.policies.split(",")), of_case.resolve()):
                    rows.append(row)
                    if not args.json:
                        print(line(row), flush=True)
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0 if all(row.sound for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
