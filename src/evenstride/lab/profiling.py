"""Measure a workload on this machine: steps of several sizes in one process, for a minute."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from evenstride.errors import ConfigError, LaunchError, TraceError
from evenstride.lab.processes.local_launch import await_ends
from evenstride.lab.processes.trial_checkpoints import Trials, require_script
from evenstride.planner.workload.from_trace import curve_points, facts
from evenstride.planner.workload.model_store import command_text
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
_START_S, _SLACK = 600.0, 4.0  # for the deadline: start-up time, and factor on measuring time
# Messages of torch and Python, and the exit code after the kernel kills a process.
_OF_MEMORY = re.compile(r"out of memory|MemoryError|OutOfMemory|annot allocate|exit code -9")


@dataclass(frozen=True, slots=True)
class Measuring:
    """The request for a profile."""

    command: tuple[str, ...]  # script and arguments
    type: str  # machine type, as in a catalogue
    # Fractions of the script's global batch, above 0 and at most 1; measured in ascending order.
    parts: tuple[float, ...]
    seconds: float  # of measuring, without the start-up
    made_on: str  # today's date
    restore: bool = False  # whether the script starts from the newest checkpoint in its own folder


def profile(
    measuring: Measuring,
    say: Callable[[str], None] = lambda _: None,
    watch: Callable[[float], None] = lambda _: None,
) -> WorkloadProfile:
    """Return the profile of a script on this machine.

    The script runs as one process and ends after all sizes are measured. If it runs out of memory
    at a large size, the profile contains the sizes before it, and the largest of them as a limit.
    Its checkpoints go to a temporary folder.
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
        return _measured(measuring, trace, failed, say)


def _environment(stages: str, trace: Path) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
    ours = {"EVENSTRIDE_CALIBRATE": stages, "EVENSTRIDE_TRACE": str(trace)}
    return {**ON_LOOPBACK, **plain, **ours}


def _run(
    measuring: Measuring, environment: dict[str, str], log: Path, watch: Callable[[float], None]
) -> str:
    """Run the script to its end; return its last output if it failed, else an empty string."""
    with closing(FromScratch()) as starter:
        pid = starter.start(StartRequest(measuring.command, environment, log))
        await_ends(starter, [pid], _START_S + _SLACK * measuring.seconds, watch)
        code = starter.ended()[pid]
    if not code:
        return ""
    words = newest_words(log.parent)
    return f"the script ended with exit code {code}; its last output:\n{words}"


def _measured(
    measuring: Measuring, trace: Path, failed: str, say: Callable[[str], None]
) -> WorkloadProfile:
    try:
        found, points = facts(RunLog(trace, notes_only=True)), curve_points(trace)
    except TraceError:
        if failed:
            raise LaunchError(failed) from None
        raise ConfigError(
            f"{measuring.command[0]} created no Stride or trained no step, so there is no step "
            "time to measure; run a script that uses evenstride, such as examples/ddp.py"
        ) from None
    if failed and not _OF_MEMORY.search(failed):
        raise LaunchError(failed)
    most = max(point.samples for point in points) if failed else None
    if failed:
        say(f"The script failed above {most} samples, which becomes the limit:\n{failed}")
    return WorkloadProfile(
        evenstride=found.evenstride,
        torch=found.torch,
        made_on=measuring.made_on,
        script=command_text(measuring.command),
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
