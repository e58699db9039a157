"""A lab session: runs of a user's script on limited workers, each with a trace of its own."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from evenstride.core.policies import policy_from_spec
from evenstride.core.policies.static import GivenShares
from evenstride.core.sync_modes.mode_specs import SyncMode
from evenstride.errors import ConfigError, TraceError
from evenstride.lab.comparison.step_blocks import measured_curve
from evenstride.lab.comparison.worker_curves import Curve
from evenstride.lab.limits.cpu_limits import PERIOD_S, Limits, open_limits
from evenstride.lab.limits.speeds import SpeedChange, Speeds, check_fit, usable_cpus
from evenstride.lab.processes.local_launch import Launch, LaunchProgress, run
from evenstride.lab.processes.trial_checkpoints import (
    Trials,
    make_folder,
    require_script,
    temporary_trials,
)

LEAST_PERIODS = 10
"""A step should span so many periods of the limits."""
_SIZE_S = 2.0
_NOT_OURS = {"EVENSTRIDE_CALIBRATE": "", "EVENSTRIDE_TRACE": "", "EVENSTRIDE_MAX_STEPS": ""}
# Runs are compared at one batch: of a script that leaves it open, the lower bound.
_ONE_BATCH = "EVENSTRIDE_GLOBAL_BATCH"


@dataclass(frozen=True, slots=True)
class LabPlan:
    """What one lab session does."""

    command: tuple[str, ...]  # script and arguments
    speeds: Speeds  # of the workers
    policies: tuple[str, ...]  # to compare, in the order they alternate
    steps: int  # per run; the first 40 count as cold
    repeats: int  # runs of each policy
    changes: tuple[SpeedChange, ...]  # of speed during each run
    folder: Path  # for traces and logs
    calibrate: bool  # whether to measure the workers' true curves before and after
    # Whether to run the calibrated optimum, and where ``adaptive`` ended, as fixed splits beside
    # the policies; needs ``calibrate``.
    fixed_splits: bool = True
    # Of synchronisation to compare, each under every policy; the script's own if empty.
    modes: tuple[SyncMode, ...] = ()
    # Whether every run starts from the newest checkpoint in the script's own folder; else from
    # scratch.
    restore: bool = False


@dataclass(slots=True)
class Viewer:
    """Told what goes on."""

    say: Callable[[str], None] = lambda _: None  # a line for people
    # A run's trace and title, as it begins.
    begins: Callable[[Path, str], None] = lambda _path, _title: None
    # Called some 20 times a second with the run's standing.
    watch: Callable[[LaunchProgress], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Session:
    """Runs the script of a plan, over and over."""

    plan: LabPlan  # what is to be done
    limits: Limits  # of the workers
    caveat: str  # what makes them less than they could be; empty if nothing does
    viewer: Viewer  # told what goes on
    trials: Trials  # the folder of the runs' checkpoints; runs share none

    def calibrate(self, name: str) -> list[Curve]:
        """Return every worker's curve, all measured at once, each running the script alone."""
        self.viewer.say(f"calibrating ({name}) ...")
        folder, total = self.plan.folder / name, sum(self.plan.speeds)
        workers = len(self.plan.speeds)
        parts = [
            sorted({round(p, 4) for p in (0.6 * s / total, s / total, 1 / workers)})
            for s in self.plan.speeds
        ]
        alone = tuple(
            {
                "EVENSTRIDE_CALIBRATE": ",".join(f"{part}:{_SIZE_S}" for part in mine),
                "EVENSTRIDE_TRACE": str(folder / f"worker-{worker}.jsonl"),
                **self.trials.variables(f"{name}/worker-{worker}"),
            }
            for worker, mine in enumerate(parts)
        )
        same = {**_NOT_OURS, _ONE_BATCH: os.environ.get(_ONE_BATCH) or "low"}
        launch = Launch(self.plan.command, self.plan.speeds, environment=same, alone=alone)
        for worker in range(workers):
            (folder / f"worker-{worker}.jsonl").unlink(missing_ok=True)
        self._run(launch, folder)
        return [
            measured_curve(self._made(folder / f"worker-{worker}.jsonl"))
            for worker in range(workers)
        ]

    def train(self, policy: str, repeat: int, sync: str = "") -> Path:
        trace = self.trace(policy, repeat, sync)
        trace.unlink(missing_ok=True)  # of an earlier session in this folder
        self.viewer.begins(trace, f"{sync} {policy}".strip())
        environment = {
            **_NOT_OURS,
            _ONE_BATCH: os.environ.get(_ONE_BATCH) or "low",
            "EVENSTRIDE_POLICY": policy,
            "EVENSTRIDE_MAX_STEPS": str(self.plan.steps),
            "EVENSTRIDE_TRACE": str(trace),
            **({"EVENSTRIDE_SYNC": sync} if sync else {}),
            **self.trials.variables(trace.parent.name),
        }
        launch = Launch(self.plan.command, self.plan.speeds, self.plan.changes, environment)
        self._run(launch, trace.parent, self.viewer.watch)
        return self._made(trace)

    def trace(self, policy: str, repeat: int, sync: str = "") -> Path:
        parts = (re.sub(r"[^\w.=+-]+", "-", part).strip("-") for part in (sync, policy) if part)
        return self.plan.folder / f"{'-'.join(parts)}-{repeat + 1}" / "trace.jsonl"

    def _run(
        self, launch: Launch, folder: Path, watch: Callable[[LaunchProgress], None] = lambda _: None
    ) -> None:
        try:
            run(launch, self.limits, folder, watch)
        finally:
            for line in self.trials.news():
                self.viewer.say(line)

    def _made(self, trace: Path) -> Path:
        if not trace.is_file():
            raise TraceError(
                f"{self.plan.command[0]} made no Stride, so there is nothing to measure; the lab "
                "needs a script that uses evenstride (see examples/ddp.py)"
            )
        return trace


@contextlib.contextmanager
def opened(plan: LabPlan, viewer: Viewer) -> Iterator[Session]:
    """Check a plan, and yield its session; the limits are lifted afterwards.

    Raises:
        ConfigError: the speeds do not fit this machine, or the script cannot be compared.
        LimitError: a limit could not be kept.
    """
    for speeds in (plan.speeds, *(change.speeds for change in plan.changes)):
        check_fit(speeds, usable_cpus())
    for policy in map(policy_from_spec, plan.policies):
        if isinstance(policy, GivenShares):
            policy.check_workers(len(plan.speeds))
    require_script(plan.command[0])
    make_folder(plan.folder)
    limits, caveat = open_limits(len(plan.speeds))
    viewer.say(f"Workers are slowed down by {limits.kind}." + (f" {caveat}" if caveat else ""))
    try:
        with temporary_trials(plan.folder, restore=plan.restore) as trials:
            yield Session(plan, limits, caveat, viewer, trials)
    finally:
        limits.close()


def check_own_choice(what: str, asked: str, found: str, variable: str) -> None:
    """Raise if the script did not do what the lab asked of it.

    Raises:
        ConfigError: the script sets it itself.
    """
    if found != asked:
        raise ConfigError(
            f"the script was run under {what} {asked}, but it sets {found} itself; leave {what}= "
            f"out of its Stride, so that {variable} counts"
        )


def short_steps(steps_s: Iterable[float]) -> str:
    """Return a sentence if a step spans so few periods of the limits that they blur it."""
    least_s, step_s = LEAST_PERIODS * PERIOD_S, min(steps_s)
    if step_s >= least_s:
        return ""
    return (
        f"a step of {step_s * 1e3:.0f} ms is shorter than {LEAST_PERIODS} periods of the "
        f"CPU limits ({least_s * 1e3:.0f} ms), which makes it uneven; use a larger global batch or "
        "model"
    )
