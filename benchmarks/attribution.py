"""Whether the worker that is named, the steps and the seconds are those that were.

    python benchmarks/attribution.py [--policies uniform,adaptive] [--repeats 2] [--out FOLDER]

Three workers of one speed, of which one is slowed down by a real CPU limit for some steps, another
one in each run. Every rank notes by itself when it had its own gradients (`attribution_script.py`);
the last one made the others wait. What `report` and `top` tell is worked out from the trace alone.

One line per run: who was slowed down, who is named, in which steps, and for how many seconds each
of the others waited for it. `error` is the difference of the seconds, as a part of all waiting in
that run; `ends` is how many steps both ends of the interval are off together, as a part of it. The
exit code is 1 if a run names another worker, or is off by more than 5 %.

Under `adaptive` there is little to attribute: shares are changed within a few steps. Where a worker
cost under 2 % of the time, no interval is told.
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
    """What is injected.

    Args:
        speeds: of the workers, but in the interval.
        rank: of the worker that is slowed down.
        speed: that it has then.
        first: first step of the interval.
        last: last step of it.
        steps: of the run.
    """

    speeds: Speeds
    rank: int
    speed: float
    first: int
    last: int
    steps: int

    @property
    def changes(self) -> tuple[SpeedChange, ...]:
        """What the lab is to do; an interval up to the last step has no end."""
        slow = [s if k != self.rank else self.speed for k, s in enumerate(self.speeds)]
        begins = SpeedChange(tuple(slow), at_step=self.first)
        ends = SpeedChange(self.speeds, at_step=self.last + 1)
        return (begins, ends) if self.last + 1 < self.steps else (begins,)


@dataclass(frozen=True, slots=True)
class Row:
    """A run: what was, and what is told.

    Args:
        policy: of the run.
        rank: of the worker that was slowed down.
        speed: it was slowed down to.
        caused_most: who made the others wait longest, by the ranks' own moments.
        named: who did by the trace.
        first: first step of the interval.
        last: last step of it.
        told_first: the same by the trace; ``None`` where no interval is told.
        told_last: the last.
        waited_s: each of the others for that worker in the interval, on average.
        told_s: the same by the trace, in its own interval.
        all_s: all workers' waiting for slower ones in the whole run, by one of the others.
        error: the largest difference of what a worker caused in the run, as a part of ``all_s``.
        ends: steps that both ends are off, as a part of the interval; ``None`` without one.
    """

    policy: str
    rank: int
    speed: float
    caused_most: int
    named: int
    first: int
    last: int
    told_first: int | None
    told_last: int | None
    waited_s: float
    told_s: float | None
    all_s: float
    error: float
    ends: float | None

    @property
    def sound(self) -> bool:
        """Whether worker, interval and seconds are those that were."""
        near = self.error <= MOST_OFF and (self.ends is None or self.ends <= MOST_OFF)
        return near and self.named == self.caused_most


def caused_by(folder: Path, steps: int) -> FloatArray:
    """Return what each worker made the others wait by the ranks' own moments, ``(steps, workers)``.

    Args:
        folder: of the run.
        steps: that the trace tells of.
    """
    files = sorted(folder.glob("ready-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    ready_s = np.array([json.loads(path.read_text())[:steps] for path in files]).T
    caused_s = np.zeros_like(ready_s)
    latest_s = ready_s.max(axis=1, keepdims=True)
    rows = np.arange(len(ready_s))
    caused_s[rows, ready_s.argmax(axis=1)] = (latest_s - ready_s).sum(axis=1)
    return caused_s


def judge(folder: Path, case: Case, policy: str) -> Row:
    """Return what a run comes to.

    Args:
        folder: of the run.
        case: that was injected.
        policy: of the run.
    """
    story = RunTimeline(folder)
    story.read()
    (generation,) = story.generations
    blames, others = blames_of(generation), len(case.speeds) - 1
    truth_s = caused_by(folder, generation.steps) / others
    told_s = np.zeros(len(case.speeds))
    for blame in blames:
        told_s[blame.rank] = blame.each_s
    last = min(case.last, generation.steps - 1)
    of_rank = next(blame for blame in blames if blame.rank == case.rank)
    slow = _slow(of_rank, case)
    first_told = min((one.first for one in slow), default=None)
    last_told = max((one.last for one in slow), default=None)
    ends = None
    if first_told is not None and last_told is not None:
        off = abs(first_told - case.first) + abs(last_told - last)
        ends = off / (last - case.first + 1)
    return Row(
        policy=policy,
        rank=case.rank,
        speed=case.speed,
        caused_most=int(truth_s.sum(axis=0).argmax()),
        named=blames[0].rank,
        first=case.first,
        last=last,
        told_first=first_told,
        told_last=last_told,
        waited_s=float(truth_s[case.first : last + 1, case.rank].sum()),
        told_s=sum(one.caused_s for one in slow) / others if slow else None,
        all_s=float(truth_s.sum()),
        error=float(np.abs(truth_s.sum(axis=0) - told_s).max() / truth_s.sum()),
        ends=ends,
    )


def _slow(blame: Blame, case: Case) -> tuple[Stretch, ...]:
    """Return the stretches in which a worker was nearer to the injected speed than to its usual.

    Other processes on the machine may slow it down at other times, too; what lies mostly outside of
    the interval is left to them.
    """
    between = sqrt(case.speed / case.speeds[case.rank])

    def inside(one: Stretch) -> bool:
        common = min(one.last, case.last) - max(one.first, case.first) + 1
        return 2 * common > one.last - one.first + 1

    return tuple(one for one in blame.stretches if one.speed < between and inside(one))


def run(case: Case, policies: tuple[str, ...], folder: Path) -> Iterator[Row]:
    """Train once under each policy, and judge.

    Args:
        case: to inject.
        policies: by name.
        folder: for traces and logs.
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
    told = "none" if row.told_first is None else f"{row.told_first}-{row.told_last}"
    seconds = "" if row.told_s is None else f"{row.told_s:.2f}"
    ends = "" if row.ends is None else f"{row.ends:.1%}"
    return (
        f"{row.policy:12}{row.rank:>8}{row.speed:>7}{row.named:>7}"
        f"{f'{row.first}-{row.last}':>10}{told:>10}{row.waited_s:>10.2f}{seconds:>8}"
        f"{row.all_s:>8.2f}{row.error:>8.1%}{ends:>7}{'' if row.sound else '  off'}"
    )


HEAD = (
    f"{'policy':12}{'slowed':>8}{'to':>7}{'named':>7}{'steps':>10}{'told':>10}{'waited s':>10}"
    f"{'told':>8}{'all s':>8}{'error':>8}{'ends':>7}"
)


def main() -> int:
    """Run all cases, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policies", default="uniform,adaptive")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.out or Path(scratch)
        if not asked.json:
            print(HEAD, flush=True)
        for repeat in range(asked.repeats):
            for number, speed in enumerate(SLOWED):
                rank, sixth = (repeat + number) % 3, asked.steps // 6
                # The last steps are in no exchange, so the interval ends well before.
                case = Case((0.6,) * 3, rank, speed, sixth, 5 * sixth // 2 - 1, asked.steps)
                of_case = folder / f"{repeat}-{number}"
                for row in run(case, tuple(asked.policies.split(",")), of_case.resolve()):
                    rows.append(row)
                    if not asked.json:
                        print(line(row), flush=True)
    if asked.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0 if all(row.sound for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
