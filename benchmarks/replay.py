"""Replay a recorded spot trace on real processes, and compare it with the simulator.

    python benchmarks/replay.py [--trace NAME] [--part 2819:2855] [--tick 3] [--every 20] [--json]

Machines are processes of unequal speed, by CPU limits or, without the right to set them, by unequal
work. They are killed with SIGKILL and return as in the trace, in compressed time: one tick takes
`--tick` seconds. The same job is trained in three ways, one after another:

* scratch: on all machines without checkpoints; a loss restarts it from the beginning
* slowest: on all machines, from the last checkpoint, as soon as all are present again
* evenstride: survivors continue from the last checkpoint; a machine that returns joins after the
  next checkpoint

The benchmark compares each way with `benchmarks.spot_replay.replay` of the same compressed trace.
The simulator gets step and save times that were measured before, and the median restart time of the
runs. In a way that finishes, the committed trajectory must have each sample once per epoch. The
weights must be those of an undisturbed process. Otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.errors import ConfigError, EvenstrideError, LimitError
from evenstride.lab.processes.cpu_limits import CgroupLimits
from evenstride.lab.processes.speeds import check_fit, parse_speeds, usable_cpus
from evenstride.runtime.launching.process_starters import FromZygote, Starter
from evenstride.runtime.launching.rank_environment import LOCAL
from evenstride.sim.scenario.recordings import Machines, SpotTrace, machines, spot_traces
from evenstride.testing.faults.fault_injection import FaultJournal
from evenstride.testing.faults.fault_plan import FaultPlan
from evenstride.testing.faults.supervisor import Job, Meddle, supervise

# A script has only its own folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import replay_script as script
from benchmarks.replay_script import BATCH, PER_EPOCH, Asked, Segment, members_of, name_of
from benchmarks.spot_replay import SpotOutcome, Way, replay

TRACE, PART = "preemption/4-node/aws-08-03-2023/us-west-2c_v100_1", "2819:2855"
WAYS = ("scratch", "slowest", "evenstride")
LENGTH = 0.4  # of the undisturbed job, relative to the window
MOST_ERROR = 1e-9  # relative error of the weights, in float64
HANG_S, LOOK_S = 60.0, 0.02


class Changed(Exception):
    """Ends a segment before the training does: a loss, a new machine, or the end of the trace."""


@dataclass(frozen=True, slots=True)
class Lab:
    """Objects that all ways share.

    Args:
        window: Machines of the trace, with ticks of compressed time.
        starter: Starter of the processes.
        limits: Limits of the speeds; ``None`` if slow processes do more work instead.
        work: For each such worker, how often it computes a batch.
        folder: Folder of all files.
        deadline_s: Deadline by the monotonic clock.
        gone: Processes that are under their limit and were released.
    """

    window: Machines
    starter: Starter
    limits: CgroupLimits | None
    work: dict[str, int]
    folder: Path
    deadline_s: float
    gone: set[int] = field(default_factory=set)

    def live(self, folder: Path, number: int, names: Sequence[str], meddle: Meddle) -> None:
        """Run a segment to its end.

        Raises:
            Changed: The trace ended the segment before.
            LaunchError: A worker failed, or the deadline passed.
        """
        plan = FaultPlan(workers=list(names), steps=1, save_every=1, restarts=0)
        place = folder / f"segment-{number}"
        place.mkdir()
        left_s = max(self.deadline_s - time.monotonic(), 0.0)
        command = (str(script.__file__), str(folder), str(number))
        job = Job(command, plan, place, deadline_s=left_s, hang_s=HANG_S, meddle=meddle)
        supervise(job, self.starter)

    def let_go(self, folder: Path, number: int, running: Mapping[str, int]) -> bool:
        """Limit the processes that are ready and release them. Return whether all are released."""
        for name, pid in running.items():
            if pid in self.gone or not (folder / f"ready-{number}-{name}").exists():
                continue
            if self.limits is not None:
                with suppress(LimitError):  # the process has ended; the supervisor handles that
                    self.limits.join(int(name[1:]), pid)
            self.gone.add(pid)
            (folder / f"go-{number}-{name}").touch()
        return self.gone.issuperset(running.values())


class Replay:
    """One way of training, driven by the clock of the trace."""

    def __init__(self, lab: Lab, way: Way, steps: int, every: int | str) -> None:
        self._lab, self._way, self._steps = lab, way, steps
        self._folder = lab.folder / way.name
        self._folder.mkdir()
        self._kept = self._folder / "kept"
        Asked(steps, every if way.saving else None, str(self._kept), lab.work).write(self._folder)
        self.segments: list[Segment] = []
        self.error: float | None = None
        self._members: list[int] = []
        self._losses, self._wait_s, self._restart_s = 0, 0.0, 0.0
        self._begun_s: float | None = None
        self._zero_s, self._zero_wall_s = time.monotonic(), time.time()

    def run(self) -> SpotOutcome:
        """Train until the job or the trace ends, and check the result."""
        horizon_s = len(self._lab.window.who) * self._lab.window.gap_s
        while self._now_s() < horizon_s and not self._is_over():
            self._members = members_of(self._lab.window, self._tick(), self._way)
            if self._members:
                self._live()
            else:
                begun_s = self._now_s()
                time.sleep(LOOK_S)
                self._wait_s += self._now_s() - begun_s
        return self._outcome(horizon_s)

    def meddle(self, running: Mapping[str, int], _step: int) -> None:
        """Apply the trace to the running processes. Raise `Changed` if the segment must end."""
        if self._lab.let_go(self._folder, len(self.segments), running) and self._begun_s is None:
            self._begun_s = self._now_s()
        if self._is_over():
            return
        tick, window = self._tick(), self._lab.window
        if tick >= len(window.who):
            raise Changed("window")
        lost = [one for one in self._members if window.gone[one] <= tick]
        for one in lost:
            with suppress(KeyError, ProcessLookupError):
                os.kill(running[name_of(window.slot[one])], signal.SIGKILL)
        if lost:
            self._losses += len(lost)
            raise Changed("loss")
        came = [one for one in members_of(window, tick, self._way) if one not in self._members]
        if came and self._saved_since(int(window.came[came].min())):
            raise Changed("join")

    def _live(self) -> None:
        number, started_s = len(self.segments), self._now_s()
        names = tuple(name_of(slot) for slot in self._lab.window.slot[self._members])
        self._begun_s, why = None, "end"
        try:
            self._lab.live(self._folder, number, names, self.meddle)
        except Changed as changed:
            why = str(changed)
        journal = FaultJournal(self._folder / f"segment-{number}" / "journal")
        noted = [one for name in names if (one := journal.progress(0, name))]
        first = min((one.first_step for one in noted), default=self._step())
        last = max((one.step for one in noted), default=first)
        restart_s = None if self._begun_s is None else self._begun_s - started_s
        self._restart_s += self._now_s() - started_s if restart_s is None else restart_s
        self.segments.append(Segment(number, names, restart_s, first, last, why))
        say(f"{self._way.name}, {self._now_s():.1f} s: {self.segments[-1]}")

    def _outcome(self, total_s: float) -> SpotOutcome:
        """Return the outcome. Training time is the time that nothing else took."""
        begun, finished = script.begun(self.segments), self._is_over()
        if finished:
            end = json.loads((self._folder / "end.json").read_text())
            total_s = end["ended_s"] - self._zero_s
            script.audit(self._folder, begun, self._steps)
            self.error = script.error_of(end["weights"], self._steps)
            assert self.error < MOST_ERROR, f"the weights are off by {self.error:.1e} (relative)"
        saves_s = [s for one in begun for s in script.saves_s_of(self._folder, one.number)]
        spent_s = sum(saves_s) + self._restart_s + self._wait_s
        return SpotOutcome(
            way=self._way.name,
            finished=finished,
            committed=(self._steps if finished else self._step()) * BATCH,
            recomputed=script.steps_again(begun) * BATCH,
            interrupted=0,  # an interrupted step leaves no note
            lost=0,
            losses=self._losses,
            saves=len(saves_s),
            restarts=len(self.segments),
            train_s=total_s - spent_s,
            save_s=sum(saves_s),
            restart_s=self._restart_s,
            wait_s=self._wait_s,
            machine_s=script.held_s(self._lab.window, total_s),
        )

    def _saved_since(self, tick: int) -> bool:
        """Return whether a checkpoint was completed since the start of a tick."""
        since_s = self._zero_wall_s + tick * self._lab.window.gap_s
        times_s = [0.0]
        for manifest in self._kept.glob("*/manifest.json"):
            with suppress(FileNotFoundError):  # an old checkpoint is being deleted
                times_s.append(manifest.stat().st_mtime)
        return max(times_s) > since_s

    def _now_s(self) -> float:
        return time.monotonic() - self._zero_s

    def _tick(self) -> int:
        return int(self._now_s() / self._lab.window.gap_s)

    def _step(self) -> int:
        return self.segments[-1].last_step if self.segments else 0

    def _is_over(self) -> bool:
        return (self._folder / "end.json").exists()


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def ways_of(chosen: Sequence[str], every_s: float | None) -> list[Way]:
    """Return the ways in the form of the simulator. ``None`` seconds are "auto"."""
    saving = Saving() if every_s is None else every_s
    return [
        Way(name, name == "evenstride", memory=False, saving=None if name == "scratch" else saving)
        for name in chosen
    ]


def calibrated(lab: Lab, every: int | str) -> list[dict[str, Any]]:
    """Return the measurements of all machines together, without losses."""
    folder = lab.folder / "calibration"
    folder.mkdir()
    every = every if isinstance(every, int) else script.STRETCH // 2
    Asked(1, every, str(folder / "kept"), lab.work, calibrate=True).write(folder)

    def go(running: Mapping[str, int], _step: int) -> None:
        lab.let_go(folder, 0, running)

    lab.live(folder, 0, [name_of(slot) for slot in range(lab.window.who.shape[1])], go)
    found: list[dict[str, Any]] = json.loads((folder / "end.json").read_text())["found"]
    return found


def performed(lab: Lab, given: argparse.Namespace) -> dict[str, Any]:
    """Calibrate, train in all ways, and simulate these."""
    found = calibrated(lab, given.every)
    job = script.job_of(found)
    ticks, slots = lab.window.who.shape
    step_s, window_s = job.step_s(np.arange(slots)), ticks * lab.window.gap_s
    steps = given.steps or PER_EPOCH * max(1, round(LENGTH * window_s / step_s / PER_EPOCH))
    every_s = None if given.every == "auto" else given.every * step_s
    say(f"{steps} steps of {step_s:.4f} s on all machines; a save takes {job.save_s:.4f} s")
    ways = ways_of(given.ways, every_s)
    runs, reals = [], []
    for way in ways:
        runs.append(Replay(lab, way, steps, given.every))
        reals.append(runs[-1].run())
    restarts_s = [one.restart_s for run in runs for one in run.segments if one.restart_s]
    job = replace(job, samples=steps * BATCH, restart_s=median(restarts_s or [0.0]))
    simulated = replay(lab.window, job, ways)
    outcomes = [compared(*pair) for pair in zip(reals, simulated, strict=True)]
    for one, run in zip(outcomes, runs, strict=True):
        one |= {"error": run.error, "segments": [asdict(segment) for segment in run.segments]}
    times = {"fixed_s": job.fixed_s, "per_sample_s": job.per_sample_s, "save_s": job.save_s}
    kind = "extra work" if lab.limits is None else lab.limits.kind
    length = {"steps": steps, "step_s": step_s, "every_s": every_s, "window_s": window_s}
    return {**length, **times, "restart_s": job.restart_s, "limits": kind, "ways": outcomes}


def compared(real: SpotOutcome, simulated: SpotOutcome) -> dict[str, Any]:
    """Return the figures of a way side by side. Deviations are real / simulated - 1."""
    pair = {"real": real, "simulated": simulated}
    both = {name: asdict(one) | {"total_s": one.total_s} for name, one in pair.items()}
    deviation = {
        name: both["real"][name] / both["simulated"][name] - 1.0
        for name in ("total_s", "machine_s", "committed", "recomputed")
        if both["simulated"][name]
    }
    return {**both, "deviation": deviation}


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures as text. The second of each pair is simulated."""
    text = [
        f"{found['trace']}, ticks {found['part']}: 1 h in {3600 / found['factor']:.0f} s (factor "
        f"{found['factor']:.0f}), {found['window_s']:.0f} s in total",
        f"{found['steps']} steps of {found['step_s']:.4f} s; a save takes {found['save_s']:.4f} s, "
        f"a restart {found['restart_s']:.2f} s; speeds {found['speeds']} by {found['limits']}",
        "way, real and simulated: total s | recomputed samples | machine-s | restarts | saves",
    ]
    for one in found["ways"]:
        totals = [script.total_of(one[name], found["steps"]) for name in ("real", "simulated")]
        both = one["real"]["finished"] and one["simulated"]["finished"]
        by = f" ({one['deviation']['total_s']:+.1%})" if both else ""
        rest = " | ".join(
            f"{one['real'][name]:.0f}, {one['simulated'][name]:.0f}"
            for name in ("recomputed", "machine_s", "restarts", "saves")
        )
        error = "" if one["error"] is None else f" | weights off by {one['error']:.1e}"
        text.append(f"{one['real']['way']:10} {', '.join(totals)}{by} | {rest}{error}")
    return text


def window_of(trace: str, part: str, tick_s: float) -> tuple[SpotTrace, Machines]:
    """Return a part of a recording, and its machines in compressed time.

    Raises:
        ConfigError: The recording or the part does not exist.
    """
    whole, *others = spot_traces(trace)
    if others:
        raise ConfigError(
            f"{trace!r} matches {1 + len(others)} recordings; give the name of one, such as "
            f"{whole.name}"
        )
    first, _, last = part.partition(":")
    ticks = slice(*(int(text) if text.isdecimal() else 0 for text in (first, last)))
    cut = SpotTrace(whole.name, whole.gap_s, whole.up[ticks])
    if ticks.stop > len(whole.up) or not cut.up.any():
        raise ConfigError(
            f"invalid part {part!r} of {whole.name}: expected ticks FIRST:LAST within "
            f"0:{len(whole.up)}, with machines up in some of them"
        )
    return cut, replace(machines([cut]), gap_s=tick_s)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line. Adds the part as `cut` and `window`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", default=TRACE, help="name of a recording")
    parser.add_argument("--part", default=PART, help="ticks of it, FIRST:LAST")
    parser.add_argument("--tick", type=float, default=3.0, help="seconds per tick")
    parser.add_argument("--every", default="20", help="steps between saves, or auto")
    parser.add_argument("--speeds", default="0.35,0.3,0.2,0.15", help="fractions of a core")
    parser.add_argument("--steps", type=int, default=0, help="of the job (default: by the part)")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument(
        "--deadline", type=float, default=900.0, help="of the whole run, in seconds"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    given = parser.parse_args(arguments)
    try:
        check(given)
    except ConfigError as error:
        parser.error(str(error))
    return given


def check(given: argparse.Namespace) -> None:
    """Check the options against each other and the trace, and complete them.

    Raises:
        ConfigError: An option is invalid.
    """
    given.ways = given.ways.split(",")
    if strange := set(given.ways) - set(WAYS):
        raise ConfigError(f"unknown way {min(strange)!r}: expected some of {', '.join(WAYS)}")
    given.every = int(given.every) if given.every.isdecimal() else given.every
    if not given.every or (isinstance(given.every, str) and given.every != "auto"):
        raise ConfigError(f"invalid --every {given.every}: expected a number of steps, or auto")
    if min(given.tick, given.deadline) <= 0.0 or given.steps < 0:
        raise ConfigError(
            f"invalid --tick {given.tick:g}, --deadline {given.deadline:g} or --steps "
            f"{given.steps}: expected seconds above 0, and at least 0 steps"
        )
    given.cut, given.window = window_of(given.trace, given.part, given.tick)
    speeds, slots = parse_speeds(given.speeds), given.window.who.shape[1]
    if len(speeds) < slots:
        raise ConfigError(
            f"--speeds {given.speeds} has {len(speeds)} speeds for {slots} machines; give {slots}"
        )
    given.speeds = speeds[:slots]
    check_fit(given.speeds, usable_cpus())


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay and print. Return the exit code, 1 if a check or a run failed."""
    given = parse(arguments)
    deadline_s = time.monotonic() + given.deadline
    limits, work = script.limits_of(given.speeds)
    with ExitStack() as stack:
        if limits is not None:
            stack.callback(limits.close)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="replay-")))
        try:
            starter = stack.enter_context(closing(FromZygote({**LOCAL, **os.environ})))
            lab = Lab(given.window, starter, limits, work, folder, deadline_s)
            found = performed(lab, given)
        except (AssertionError, EvenstrideError) as error:
            say(f"{type(error).__name__}: {error}")
            return 1
    found |= {"trace": given.cut.name, "part": given.part, "speeds": given.speeds}
    found |= {"factor": given.cut.gap_s / given.tick, "load": os.getloadavg()}
    print(json.dumps(found) if given.json else "\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
