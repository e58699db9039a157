"""Compare `adaptive` with the equal and the best fixed split on real workers that change.

    python benchmarks/real_controller.py [--case compiled,interference,busy] [--rounds N]
        [--seconds S] [--quick] [--json] [--out FILE] [--keep FOLDER]

Three cases, on processes under CPU limits that this benchmark changes while they train:

* compiled: Three workers train a model under `torch.compile` with static shapes, and one of them
  falls to half its speed. Every share that is new to a worker is compiled again, under its limit.
* interference: One of three workers runs at half speed for 8 of every 16 steps.
* busy: Two equal workers, one on each core, while another process takes CPU time at random.

In each round, the equal split, the best fixed split and `adaptive` train the same number of steps.
The best fixed split follows from the calibrated speeds and from the known changes, so no user could
know it. In `compiled`, each block is a whole run with its first steps. In the other cases, each arm
continues from block to block, and the first block of each is `cold`. Calibrations before and after
each round show whether the machine's own speed changed by more than 10 %. Such a round is counted
as disturbed, kept in the file, and repeated while there is time.

`to equal` and `to fixed` are ratios of samples per second from pairs of blocks, with 95 % intervals
of Student's t. `all rounds` includes the disturbed ones. `first steps` is the time of steps that
take over three times the median of their block.

The exit code is 1 if `adaptive` is surely slower than the equal split in a case, and 3 if an
interval of `to equal` is wider than 10 % to either side, so that the run cannot tell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from evenstride.core.arrays import Shares
from evenstride.lab.comparison.paired_ratios import (
    UNCERTAIN,
    Ratio,
    geometric_mean,
    paired_ratio,
)
from evenstride.lab.processes.cpu_limits import Limits, open_limits
from evenstride.lab.processes.local_launch import Launch, LaunchProgress, run
from evenstride.lab.processes.speeds import check_fit, pin, usable_cpus
from evenstride.report.wording import Table
from evenstride.trace.read import LineTail

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.real_controller_ranks import (
    ADAPTIVE,
    ARMS,
    FIXED,
    NEWS,
    PLAN,
    REPORT,
    UNIFORM,
    CaseBlock,
    CaseReport,
    CaseRound,
    RealCase,
)

SCRIPT = Path(__file__).with_name("real_controller_ranks.py")
EQUAL, SLOWED = (0.5, 0.5, 0.5), (0.5, 0.5, 0.25)
PERIOD, ON = 16, 8
FIRST_STEP = 3.0
BURST_S, PAUSE_S = 0.4, 0.6
GRACE_S, WARM_S = 180.0, 240.0
DISTURBED = 3
NOT_OURS = dict.fromkeys(
    ("EVENSTRIDE_TRACE", "EVENSTRIDE_POLICY", "EVENSTRIDE_MAX_STEPS", "EVENSTRIDE_SYNC"), ""
)
BURN = """
from evenstride.runtime.launching.die_with_parent import die_with_parent
die_with_parent()
while True:
    pass
"""


def cases() -> dict[str, RealCase]:
    """Return the cases by name."""
    steps = 3 * PERIOD
    changes = range(0, steps, ON)
    waves = tuple((step, SLOWED if step % PERIOD else EQUAL) for step in changes)
    found = (
        RealCase("compiled", ((0, EQUAL), (40, SLOWED)), 240, 0.08, 3, 330.0, compiled=True),
        RealCase("interference", waves, steps, 0.1, 6, 150.0),
        RealCase("busy", ((0, (0.9, 0.9)),), steps, 0.1, 6, 140.0, busy=True),
    )
    return {case.name: case for case in found}


def quick(case: RealCase) -> RealCase:
    """Return a case with a few short blocks, to rehearse it."""
    steps = 8 if case.compiled else 2 * ON
    phases = tuple((min(first, steps // 2), speeds) for first, speeds in case.phases[:2])
    return replace(case, phases=phases, steps=steps, rounds=1, seconds=5.0, size_s=0.1, drift=1.0)


class Bursts:
    """Which core a neighbour uses at a time: the same for the same seed."""

    def __init__(self, seed: int, cores: int) -> None:
        self._dice, self._cores = random.Random(seed), cores
        self._begin_s, self._end_s, self._core = 0.0, 0.0, 0

    def at(self, now_s: float) -> int | None:
        """Return the core in use at a time, which must not be before that of the last call."""
        while now_s >= self._end_s:
            self._begin_s = self._end_s + self._dice.expovariate(1.0 / PAUSE_S)
            self._end_s = self._begin_s + self._dice.expovariate(1.0 / BURST_S)
            self._core = self._dice.randrange(self._cores)
        return self._core if now_s >= self._begin_s else None


class NoisyNeighbour:
    """Processes that compute without end, one for each core, of which at most one runs at a time.

    They are stopped until `look` lets one run.
    """

    def __init__(self, cores: int) -> None:
        self._burning = list[subprocess.Popen[bytes]]()
        self._running: int | None = None
        self._bursts: Bursts | None = None
        self._begun_s = 0.0
        try:
            for core in range(cores):
                self._burning.append(subprocess.Popen([sys.executable, "-c", BURN]))
                pin(self._burning[-1].pid, core)
                self._burning[-1].send_signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def begin(self, seed: int, now_s: float) -> None:
        """Begin the bursts of a seed."""
        self._bursts, self._begun_s = Bursts(seed, len(self._burning)), now_s

    def end(self) -> None:
        """Stop."""
        self._bursts = None
        self._let_run(None)

    def look(self, now_s: float) -> None:
        """Continue and stop the processes as the bursts say."""
        if self._bursts is not None:
            self._let_run(self._bursts.at(now_s - self._begun_s))

    def close(self) -> None:
        """End the processes."""
        for process in self._burning:
            process.kill()
            process.wait()

    def _let_run(self, core: int | None) -> None:
        if core == self._running:
            return
        if self._running is not None:
            self._burning[self._running].send_signal(signal.SIGSTOP)
        if core is not None:
            self._burning[core].send_signal(signal.SIGCONT)
        self._running = core


@dataclass(frozen=True, slots=True)
class Conductor:
    """Applies what rank 0 reports: speeds, and when the neighbour takes CPU time."""

    limits: Limits
    tail: LineTail
    neighbour: NoisyNeighbour | None
    name: str

    def look(self, progress: LaunchProgress) -> None:
        """Read the news and act on them."""
        for news in self.tail.records():
            if "speeds" in news:
                for worker, speed in enumerate(news["speeds"]):
                    self.limits.set_speed(worker, speed)
            if self.neighbour is not None and news["what"] == "begin":
                self.neighbour.begin(news["number"], progress.elapsed_s)
            elif self.neighbour is not None and news["what"] == "end":
                self.neighbour.end()
            if (line := self.line(news)) is not None:
                say(f"{progress.elapsed_s:6.1f} s {self.name}: {line}")
        if self.neighbour is not None:
            self.neighbour.look(progress.elapsed_s)

    @staticmethod
    def line(news: dict[str, Any]) -> str | None:
        """Return a line on a record for the screen."""
        if news["what"] == "batch":
            return f"{news['batch']} samples per step, best fixed split {split(news['fixed'])}"
        if news["what"] == "round":
            return f"round {news['number'] + 1}: drift {news['drift']:.1%}"
        if news["what"] != "block":
            return None
        place = "cold" if news["number"] < 0 else f"round {news['number'] + 1}"
        return (
            f"{place}, {news['arm']}: {news['whole_s']:.1f} s, {news['moves']} moves, samples "
            f"{split(news['shares'])}"
        )


def measure(case: RealCase, folder: Path) -> tuple[CaseReport, str]:
    """Train all rounds of a case; return the report, and how the limits are enforced."""
    check_fit(case.speeds, usable_cpus())
    for old in (NEWS, REPORT):
        (folder / old).unlink(missing_ok=True)
    case.save(folder / PLAN)
    limits, caveat = open_limits(len(case.speeds))
    say(f"{case.name}: CPU limits by {limits.kind}. {caveat}".strip())
    launch = Launch(
        (str(SCRIPT), str(folder)),
        case.speeds,
        environment={**NOT_OURS, **compiler(folder)},
        deadline_s=2 * case.seconds + GRACE_S,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(limits.close)
        neighbour = None
        if case.busy:
            neighbour = stack.enter_context(contextlib.closing(NoisyNeighbour(usable_cpus())))
        conductor = Conductor(limits, LineTail(folder / NEWS), neighbour, case.name)
        run(launch, limits, folder, conductor.look)
        conductor.look(LaunchProgress(0, 0.0))
    return CaseReport.load(folder / REPORT), limits.kind


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """What an arm reached in a case.

    Args:
        arm: Its name.
        samples_per_s: Samples per second of a block, the geometric mean.
        to_equal: Samples per second divided by those of the equal split.
        to_fixed: Samples per second divided by those of the best fixed split.
        all_rounds: `to_equal` with the disturbed rounds.
        late_to_equal: `to_equal` over the last quarter of each block.
        cold: `to_equal` in the cold round; ``None`` without one.
        first_s: Mean seconds per block in steps that take over three times its median step.
        moves: Mean changes of the split per block.
        shares: Shares at the end of the last block.
    """

    arm: str
    samples_per_s: float
    to_equal: Ratio
    to_fixed: Ratio
    all_rounds: Ratio
    late_to_equal: Ratio
    cold: float | None
    first_s: float
    moves: float
    shares: Shares


@dataclass(frozen=True, slots=True)
class CaseFigures:
    """The figures of a case.

    Args:
        case: Its name.
        batch: Samples per step.
        rounds: Rounds that were trained.
        disturbed: Rounds among them in which the machine's speed changed too much.
        drift: Largest change of a worker's speed in any round.
        arms: Figures of each arm.
    """

    case: str
    batch: int
    rounds: int
    disturbed: int
    drift: float
    arms: list[ArmFigures]

    @property
    def ours(self) -> Ratio:
        """`adaptive` compared with the equal split."""
        return next(arm.to_equal for arm in self.arms if arm.arm == ADAPTIVE)

    @property
    def harmful(self) -> bool:
        """Whether `adaptive` is surely slower than the equal split."""
        return self.ours.interval is not None and self.ours.interval[1] < 1.0

    @property
    def uncertain(self) -> bool:
        """Whether the interval is too wide to tell, or no round was undisturbed."""
        half = self.ours.half_width
        return self.disturbed == self.rounds or half is None or half > UNCERTAIN


def judge(case: RealCase, report: CaseReport) -> CaseFigures:
    """Return the figures of a case. If all rounds are disturbed, they are those of all."""
    kept = [one for one in report.rounds if one.drift <= case.drift] or report.rounds
    return CaseFigures(
        case=case.name,
        batch=report.batch,
        rounds=len(report.rounds),
        disturbed=sum(one.drift > case.drift for one in report.rounds),
        drift=max(one.drift for one in report.rounds),
        arms=[arm_figures(case, report, kept, arm) for arm in ARMS],
    )


def arm_figures(
    case: RealCase, report: CaseReport, kept: Sequence[CaseRound], arm: str
) -> ArmFigures:
    """Return the figures of an arm."""
    mine = blocks_of(kept, arm)
    cold = {block.arm: block.whole_s for block in report.cold}
    return ArmFigures(
        arm=arm,
        samples_per_s=report.batch * case.steps / geometric_mean(whole_s(kept, arm)),
        to_equal=paired_ratio(whole_s(kept, UNIFORM), whole_s(kept, arm)),
        to_fixed=paired_ratio(whole_s(kept, FIXED), whole_s(kept, arm)),
        all_rounds=paired_ratio(whole_s(report.rounds, UNIFORM), whole_s(report.rounds, arm)),
        late_to_equal=paired_ratio(late_s(kept, UNIFORM), late_s(kept, arm)),
        cold=cold[UNIFORM] / cold[arm] if cold else None,
        first_s=sum(map(first_steps_s, mine)) / len(mine),
        moves=sum(block.moves for block in mine) / len(mine),
        shares=mine[-1].shares,
    )


def blocks_of(rounds: Sequence[CaseRound], arm: str) -> list[CaseBlock]:
    """Return the block of an arm in each round."""
    return [block for one in rounds for block in one.blocks if block.arm == arm]


def whole_s(rounds: Sequence[CaseRound], arm: str) -> list[tuple[float]]:
    """Return the time of an arm's block in each round."""
    return [(block.whole_s,) for block in blocks_of(rounds, arm)]


def late_s(rounds: Sequence[CaseRound], arm: str) -> list[tuple[float]]:
    """Return the time of the last quarter of an arm's steps in each round."""
    last = [block.steps_s[-max(1, len(block.steps_s) // 4) :] for block in blocks_of(rounds, arm)]
    return [(sum(steps_s),) for steps_s in last]


def first_steps_s(block: CaseBlock) -> float:
    """Return the time of steps that take much longer than others of their block."""
    usual_s = median(block.steps_s)
    return sum(step_s for step_s in block.steps_s if step_s > FIRST_STEP * usual_s)


def table(found: Sequence[CaseFigures]) -> str:
    """Return a table of the figures, a line per case and arm."""
    headings = (
        *("case", "arm", "samples/s", "to equal", "to fixed", "all rounds", "last quarter"),
        *("cold", "first steps", "moves", "samples"),
    )
    rows = [
        (
            one.case if arm is one.arms[0] else "",
            arm.arm,
            f"{arm.samples_per_s:.0f}",
            *map(shown, (arm.to_equal, arm.to_fixed, arm.all_rounds, arm.late_to_equal)),
            "" if arm.cold is None else f"{arm.cold:.2f}",
            f"{arm.first_s:.1f} s",
            f"{arm.moves:.1f}",
            split(arm.shares),
        )
        for one in found
        for arm in one.arms
    ]
    notes = [
        f"{one.case}: {one.rounds} rounds, {one.disturbed} disturbed, largest drift {one.drift:.1%}"
        for one in found
    ]
    return "\n".join([Table(headings, tuple(rows)).text(), *notes])


def shown(ratio: Ratio) -> str:
    """Return a ratio with its interval."""
    if ratio.interval is None:
        return f"{ratio.value:.3f}"
    return "{:.3f} ({:.3f} to {:.3f})".format(ratio.value, *ratio.interval)


def split(shares: Sequence[int]) -> str:
    """Return shares as text."""
    return "/".join(map(str, shares))


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def compiler(folder: Path) -> dict[str, str]:
    """Return settings of torch's compiler: no processes outside of the limits, and its folder."""
    return {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def compile_time_s(folder: Path) -> float | None:
    """Return the time of a compilation at full speed; ``None`` without a C++ compiler.

    The first one of a machine also compiles torch's headers. They are kept for later ones, and so
    is in the folder what torch finds out about the processor.
    """
    if not any(map(shutil.which, ("g++", "clang++"))):
        return None
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, **compiler(folder)},
        stdout=subprocess.PIPE,
        timeout=WARM_S,
        check=True,
    )
    return float(done.stdout)


def chosen(args: argparse.Namespace) -> Iterator[RealCase]:
    """Yield the cases to run."""
    for name in args.case.split(","):
        case = quick(cases()[name]) if args.quick else cases()[name]
        case = replace(case, rounds=args.rounds or case.rounds)
        yield replace(case, seconds=args.seconds or case.seconds)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Verbatim)
    parser.add_argument("--case", default=",".join(cases()), help="some of the cases")
    parser.add_argument("--rounds", type=int, help="undisturbed rounds to train (by the case)")
    parser.add_argument("--seconds", type=float, help="time for the rounds of a case (by the case)")
    parser.add_argument("--quick", action="store_true", help="rehearse; figures mean nothing")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="file for the JSON, with all step times")
    parser.add_argument("--keep", type=Path, help="folder for traces and logs")
    args = parser.parse_args(arguments)
    for name in args.case.split(","):
        if name not in cases():
            parser.error(f"unknown case {name!r}: expected some of {', '.join(cases())}")
    return args


def case_figures(case: RealCase, folder: Path, plain: dict[str, Any]) -> CaseFigures | None:
    """Measure a case and add its report to the JSON; ``None`` if it cannot run here."""
    folder.mkdir(parents=True, exist_ok=True)
    if case.compiled:
        plain["compile_s"] = compile_time_s(folder)
        if plain["compile_s"] is None:
            say(f"{case.name} is left out, because there is no C++ compiler; install g++")
            return None
        say(f"{case.name}: a compilation takes {plain['compile_s']:.2f} s at full speed")
    report, plain["limits"] = measure(case, folder)
    figures = judge(case, report)
    plain["reports"][case.name] = {**asdict(case), **asdict(report)}
    plain["results"].append(asdict(figures))
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Return the exit code."""
    args, found = parsed(arguments), list[CaseFigures]()
    plain: dict[str, Any] = {"results": [], "reports": {}, "cores": usable_cpus()}
    with tempfile.TemporaryDirectory(prefix="evenstride-") as temporary:
        for case in chosen(args):
            folder = Path(args.keep or temporary) / case.name
            if (figures := case_figures(case, folder, plain)) is not None:
                found.append(figures)
                if args.out is not None:
                    args.out.write_text(json.dumps(plain, indent=1) + "\n")
    if args.json:
        print(json.dumps({**plain, "reports": None}, indent=1))
    elif found:
        print(table(found))
    if any(one.harmful for one in found):
        return 1
    return DISTURBED if any(one.uncertain for one in found) else 0


class _Verbatim(argparse.RawDescriptionHelpFormatter):
    """Shows the docstring without wrapping."""


if __name__ == "__main__":
    sys.exit(main())
