"""The kernel's own control groups: a limit that holds, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstride.errors import LaunchError
from evenstride.lab.processes.cpu_limits import (
    CgroupFiles,
    CgroupLimits,
    Limits,
    cgroup_candidates,
    open_limits,
)
from tests.unit.lab.stage import interpreter

# A process that makes groups removes those of processes that have ended, which is waited for here.
pytestmark = [pytest.mark.cgroups, pytest.mark.alone]

# Burns some CPU time, and tells how much of a core it got meanwhile by its own two clocks.
BUSY = """
import sys, time
print("up", flush=True)
sys.stdin.readline()
wall_s, cpu_s = time.perf_counter(), time.process_time()
while time.process_time() < cpu_s + 0.2: pass
print((time.process_time() - cpu_s) / (time.perf_counter() - wall_s), flush=True)
sys.stdin.readline()
"""

# The whole command, with workers that are played without torch.
LAB = """
import signal
import sys
# As a terminal would start it: a shell that runs the tests in the background ignores these.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.executable = sys.argv.pop(1)
from evenstride.cli.main import main
main()
"""


@pytest.fixture(autouse=True)
def files() -> CgroupFiles:
    """Where groups can be made; without such a place the test is skipped."""
    limits, caveat = open_limits(1)
    limits.close()
    if not isinstance(limits, CgroupLimits):
        pytest.skip(caveat)
    return next(files for files in cgroup_candidates() if files.kind == limits.kind)


def _groups(files: CgroupFiles, pid: int) -> list[str]:
    return [path.name for path in files.base.glob(f"evenstride-{pid}-*")]


@contextlib.contextmanager
def _busy() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child
        finally:
            child.kill()


def _throttled(files: CgroupFiles) -> int:
    """Return in how many periods the limit of a worker held it up."""
    (top,) = _groups(files, os.getpid())
    lines = (files.base / top / "worker-0" / "cpu.stat").read_text().splitlines()
    return int(dict(map(str.split, lines))["nr_throttled"])


def _part(child: subprocess.Popen[str]) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    print(file=child.stdin, flush=True)
    return float(child.stdout.readline())


def _limited(child: subprocess.Popen[str], speed: float) -> Limits:
    limits, _ = open_limits(1)
    limits.join(0, child.pid)
    limits.set_speed(0, speed)
    return limits


def test_a_busy_process_gets_a_quarter_of_a_core_when_it_is_given_that(files: CgroupFiles) -> None:
    with _busy() as child:
        limits = _limited(child, 0.25)
        try:
            part = _part(child)
            held = _throttled(files)
        finally:
            limits.close()

    assert part < 0.35
    assert held > 0, "the limit alone, and not other processes, made it slow"
    assert _groups(files, os.getpid()) == []


def test_a_process_outlives_its_limit_and_is_free_again(files: CgroupFiles) -> None:
    with _busy() as child:
        _limited(child, 0.1).close()
        group = Path(f"/proc/{child.pid}/cgroup").read_text()
        assert _part(child) > 0, "it goes on"

    assert "evenstride-" not in group, "where no limit of ours is"
    assert _groups(files, os.getpid()) == []


def test_after_an_exception_no_group_is_left(files: CgroupFiles) -> None:
    def broken() -> None:
        with _busy() as child, contextlib.closing(_limited(child, 0.5)):
            assert len(_groups(files, os.getpid())) == 1
            raise LaunchError("something else went wrong")

    with pytest.raises(LaunchError):
        broken()

    assert _groups(files, os.getpid()) == []


@contextlib.contextmanager
def _lab(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield ``evenstride lab`` with one limited worker at work, and a descriptor of that worker."""
    (folder / "train.py").write_text("")
    os.mkfifo(folder / "leash")
    leash = os.open(folder / "leash", os.O_RDONLY | os.O_NONBLOCK)
    arguments = ["lab", "--speeds", "0.5", "--policies", "adaptive", "--no-calibrate", "--out"]
    lab = subprocess.Popen(
        [
            *[sys.executable, "-c", LAB, str(interpreter(folder))],
            *arguments,
            str(folder),
            "--",
            "train.py",
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "STAND_IN": json.dumps(
                {"leash": str(folder / "leash"), "facts": str(folder), "hang": True}
            ),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert _hears(leash) == b"loose\n"
        worker = os.pidfd_open(json.loads((folder / "worker-0.json").read_text())["pid"])
        yield lab, worker
        os.close(worker)
    finally:
        lab.kill()
        lab.wait()
        os.close(leash)


def _hears(leash: int) -> bytes:
    assert select.select([leash], [], [], 30.0)[0], "not a word from the worker"
    return os.read(leash, 100)


def _ended(worker: int) -> bool:
    return bool(select.select([worker], [], [], 30.0)[0])


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ],
)
def test_a_lab_that_is_asked_to_end_leaves_no_group_and_no_worker(
    files: CgroupFiles, tmp_path: Path, number: signal.Signals
) -> None:
    with _lab(tmp_path) as (lab, worker):
        assert len(_groups(files, lab.pid)) == 1

        lab.send_signal(number)
        lab.wait(30.0)

        assert _ended(worker)
        assert _groups(files, lab.pid) == []
        assert lab.returncode != 0


def test_what_a_lab_that_was_killed_has_left_is_removed_by_the_next(
    files: CgroupFiles, tmp_path: Path
) -> None:
    with _lab(tmp_path) as (lab, worker):
        lab.kill()
        lab.wait(30.0)

        assert _ended(worker)
        assert len(_groups(files, lab.pid)) == 1
        open_limits(1)[0].close()
        assert _groups(files, lab.pid) == []
