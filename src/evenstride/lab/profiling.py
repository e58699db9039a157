"""Measure a workload on this machine: one process, steps of several sizes, a minute."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from evenstride.errors import ConfigError, LaunchError, TraceError
from evenstride.lab.processes.local_launch import await_ends
from evenstride.lab.processes.trial_checkpoints import Trials, require_script
from evenstride.planner.workload.from_trace import curve_points, facts
from evenstride.planner.workload.workload_profile import DeviceProfile, Model, WorkloadProfile
from evenstride.runtime.host.network_interfaces import ON_LOOPBACK
from evenstride.runtime.launching.process_starters import (
    FromScratch,
    StartRequest,
    newest_words,
)
from evenstride.runtime.launching.rank_environment import lone_rank
from evenstride.trace.run_log import RunLog

_NOT_OURS = ("EVENSTRIDE_MAX_STEPS", "EVENSTRIDE_POLICY", "EVENSTRIDE_SYNC", "EVENSTRIDE_NOISE")
_START_S, _SLACK = 600.0, 4.0  # of the deadline: to start, and by how much stages may take longer
# What torch, Python and the kernel say; a process that was killed says nothing.
_OF_MEMORY = re.compile(r"out of memory|MemoryError|OutOfMemory|annot allocate|exit code -9")


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is measured."""

    command: tuple[str, ...]  # script and arguments
    type: str  # of this machine, as a catalogue names it
    # Of the script's global batch, above 0 and at most 1; measured from small to large.
    parts: tuple[float, ...]
    seconds: float  # in all, apart from starting
    made_on: str  # today's date
    restore: bool = False  # whether the script starts from the newest checkpoint in its own folder


def profile(
    measuring: Measuring,
    say: Callable[[str], None] = lambda _: None,
    watch: Callable[[float], None] = lambda _: None,
) -> WorkloadProfile:
    """Return the profile of a script on this machine.

    The script runs as one process and ends when all sizes have had their time. If it ends for want
    of memory at a large size, what was measured before counts, and is the limit. Its checkpoints
    go to a temporary folder.
    """
    require_script(measuring.command[0])
    parts = sorted(set(measuring.parts))
    each_s = measuring.seconds / len(parts)
    with tempfile.TemporaryDirectory(prefix="evenstride-") as name:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        trials = Trials(folder / "checkpoints", restore=measuring.restore, temporary=True)
        stages = ",".join(f"{part}:{each_s}" for part in parts)
        try:
            with lone_rank() as alone:
                environment = {**_environment(stages, trace), **trials.variables(), **alone}
                failed = _run(measuring, environment, folder / "script.log", watch)
        finally:
            for line in trials.news():
                say(line)
        return _told(measuring, trace, failed, say)


def _environment(stages: str, trace: Path) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
    ours = {"EVENSTRIDE_CALIBRATE": stages, "EVENSTRIDE_TRACE": str(trace)}
    return {**ON_LOOPBACK, **plain, **ours}


def _run(
    measuring: Measuring, environment: dict[str, str], log: Path, watch: Callable[[float], None]
) -> str:
    """Run the script to its end; return its last output if it failed, and else nothing."""
    with closing(FromScratch()) as starter:
        pid = starter.start(StartRequest(measuring.command, environment, log))
        await_ends(starter, [pid], _START_S + _SLACK * measuring.seconds, watch)
        code = starter.ended()[pid]
    if not code:
        return ""
    words = newest_words(log.parent)
    return f"the script ended with exit code {code}; its last output:\n{words}"


def _told(
    measuring: Measuring, trace: Path, failed: str, say: Callable[[str], None]
) -> WorkloadProfile:
    try:
        found, points = facts(RunLog(trace, notes_only=True)), curve_points(trace)
    except TraceError:
        if failed:
            raise LaunchError(failed) from None
        raise ConfigError(
            f"{measuring.command[0]} made no Stride or trained nothing, so there is nothing to "
            "measure; profile needs a script that uses evenstride (see examples/ddp.py)"
        ) from None
    if failed and not _OF_MEMORY.search(failed):
        raise LaunchError(failed)
    most = max(point.samples for point in points) if failed else None
    if failed:
        say(f"The script failed beyond {most} samples, which is taken as what fits:\n{failed}")
    return WorkloadProfile(
        evenstride=found.evenstride,
        torch=found.torch,
        made_on=measuring.made_on,
        script=_shown(measuring.command),
        model=Model(
            parameters=found.parameters, gradient_bytes=found.gradient_bytes, digest=found.digest
        ),
        samples=found.samples,
        global_batch=found.global_batch,
        devices=(
            DeviceProfile(
                type=measuring.type,
                device=found.device,
                points=points,
                most_samples=most,
                computed_on=found.computed_on,
            ),
        ),
    )


def _shown(command: Sequence[str]) -> str:
    """Return script and arguments as for a shell in the script's folder."""
    return shlex.join((Path(command[0]).name, *command[1:]))
