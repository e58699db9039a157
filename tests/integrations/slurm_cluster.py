"""A Slurm cluster on this machine: one controller and several nodes, on loopback."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.ending import end
from tests.free_ports import free_ports

_START_S, _END_S = 30.0, 10.0
_ASK_AGAIN_S = 0.2
# Slurm refuses a job that starts in the second in which it was ended, as "credential revoked".
_HELD = timedelta(seconds=2)
_CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
SchedulerParameters=bf_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
"""


class SlurmCluster:
    """A running cluster.

    Args:
        folder: of its files; short, and without spaces.
        nodes: name and feature of each node, which is the type of its machine.
    """

    def __init__(self, folder: Path, nodes: Mapping[str, str]) -> None:
        self._folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        self._nodes = nodes
        path = f"{self._programs()}{os.pathsep}{os.environ['PATH']}"
        self._environment = {
            **os.environ,
            "PATH": path,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }

    def start(self) -> None:
        """Start the daemons, and return when all nodes are idle."""
        (self._folder / "state").mkdir()
        ports = free_ports(1 + len(self._nodes))
        user = getpass.getuser()
        lines = [_CONFIG.format(port=ports[0], user=user, folder=self._folder)]
        for (name, feature), port in zip(self._nodes.items(), ports[1:], strict=True):
            where = f"NodeHostname={socket.gethostname().partition('.')[0]} NodeAddr=127.0.0.1"
            lines.append(f"NodeName={name} {where} Port={port} CPUs=2 Feature={feature}\n")
        lines.append("PartitionName=all Nodes=ALL Default=YES State=UP\n")
        (self._folder / "slurm.conf").write_text("".join(lines))
        self._daemon("slurmctld", "-D")
        for name in self._nodes:
            self._daemon("slurmd", "-D", "-N", name)
        self._until(self._idle, _START_S)

    def ask(self, *command: str) -> str:
        """Return the output of a command of Slurm; empty if the controller does not answer."""
        return self._call(*command).stdout

    def _call(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self._environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
        )

    def run(self, file: Path, deadline_s: float, **variables: str) -> str:
        """Submit a batch script, wait for its end, and return its state.

        A job that is queued again starts soon after the nodes are idle, not after Slurm's two
        minutes.
        """
        output = f"--output={self._folder}/job-%j.out"
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
        job = self.ask("sbatch", "--parsable", output, f"--export={exported}", str(file)).strip()
        assert job, "sbatch refused the file"
        try:
            self._until(lambda: self._ended(job), deadline_s)
        finally:
            self.ask("scancel", "--full", "--signal=KILL", job)
        return self._state(job)["JobState"]

    def accepts(self, file: Path) -> bool:
        """Return whether ``sbatch`` would take a file."""
        said = self._call("sbatch", "--test-only", str(file))
        return said.returncode == 0

    def output(self) -> str:
        return "".join(file.read_text() for file in self._folder.glob("job-*.out"))

    def stop(self) -> None:
        for process in reversed(self._processes):
            end(process, _END_S)

    def _idle(self) -> bool:
        states = self.ask("sinfo", "--noheader", "--Node", "--format=%T").split()
        return states == ["idle"] * len(self._nodes)

    def _ended(self, job: str) -> bool:
        state = self._state(job)
        if state["JobState"] == "PENDING" and state["Restarts"] != "0" and self._idle():
            self._hasten(job)
        return state["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")

    def _hasten(self, job: str) -> None:
        """Let all components of a job start soon, if Slurm would still hold them for long.

        Slurm's scheduler looks at a job whose time has come only after another change.
        """
        for state in self._states(job):
            held = datetime.fromisoformat(state["EligibleTime"]) - datetime.now()
            sooner = f"StartTime=now+{_HELD.seconds}" if held > 2 * _HELD else "Comment=again"
            self.ask("scontrol", "update", f"JobId={state['JobId']}", sooner)

    def _state(self, job: str) -> dict[str, str]:
        return self._states(job)[0]

    def _states(self, job: str) -> list[dict[str, str]]:
        """Return the state of each component of a job, its first component first."""
        lines = self.ask("scontrol", "--oneliner", "show", "job", job).splitlines()
        return [dict(pair.split("=", 1) for pair in line.split() if "=" in pair) for line in lines]

    def _daemon(self, *command: str) -> None:
        with (self._folder / f"{len(self._processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "-f", str(self._folder / "slurm.conf")],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)

    def _until(self, true: Callable[[], bool], deadline_s: float) -> None:
        if not wait_until(true, deadline_s):
            pytest.fail(f"not in {deadline_s:.0f} s:\n{self.ask('squeue')}{self.output()[-4000:]}")

    def _programs(self) -> Path:
        """Return a folder with the program ``evenstride``, of these sources."""
        programs = self._folder / "bin"
        programs.mkdir()
        program = programs / "evenstride"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m evenstride "$@"\n')
        program.chmod(0o755)
        return programs


def wait_until(true: Callable[[], bool], deadline_s: float) -> bool:
    """Wait until something outside this process holds; return whether it did by the deadline."""
    last = time.monotonic() + deadline_s
    while not true():
        if time.monotonic() > last:
            return False
        time.sleep(_ASK_AGAIN_S)
    return True


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: Mapping[str, str]) -> Iterator[SlurmCluster]:
    """Run a cluster; skip the test if Slurm is not installed."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch"))):
        pytest.skip("Slurm is not installed: apt-get install slurm-wlm")
    cluster = SlurmCluster(folder, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
