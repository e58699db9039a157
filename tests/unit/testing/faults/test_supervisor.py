"""The supervisor of real processes, with workers that do nothing but count steps."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenstride.errors import ConfigError, LaunchError
from evenstride.runtime.launching.process_starters import (
    FromScratch,
    FromZygote,
    Starter,
    StartRequest,
)
from evenstride.runtime.launching.rank_environment import LOCAL
from evenstride.runtime.store.store_server import serve_store
from evenstride.testing.faults.fault_injection import (
    FaultJournal,
    Orders,
    ProgressFile,
    Trap,
    WorkerProgress,
)
from evenstride.testing.faults.fault_plan import (
    Arrival,
    Fault,
    FaultPlan,
    ScriptedRoster,
    simulate_plan,
)
from evenstride.testing.faults.supervisor import Job, Outcome, supervise
from tests.messages import raises_message

# Counts to STEPS, saves a number every EVERY steps, and waits for the others where it matters.
COUNTING = """
import os, signal, sys
from pathlib import Path
from evenstride.testing.faults.fault_injection import Injector

folder, steps, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
injector = Injector.from_environment(lambda: None)
saved = folder / "saved"
first = int(saved.read_text()) if saved.exists() else 0
injector.begins(first)
while injector.generation < int(os.environ.get("WAIT_BEFORE", "0")):
    signal.pause()
for step in range(first + 1, steps + 1):
    if injector.eventful(step) or step in (first + 1, steps):
        me = f"{injector.generation}-{step}-"
        (folder / (me + os.environ["RANK"])).touch()
        while len(list(folder.glob(me + "*"))) < int(os.environ["WORLD_SIZE"]):
            os.sched_yield()
    injector.saves(step, folder)
    if step % every == 0 and os.environ["RANK"] == "0":
        (folder / "aside").write_text(str(step))
        (folder / "aside").replace(saved)
    injector.committed(step)
    if injector.eventful(step) and len(os.environ["_EVENSTRIDE_FAULTS_WORKER"]) == 1:
        signal.pause()
"""
# Tells its process over a pipe, and waits to be ended.
WAITING = """
import os, signal, sys
with open(sys.argv[1], "w") as pipe:
    pipe.write(f"{os.getpid()}\\n")
print("waiting", flush=True)
signal.pause()
"""
DEADLINE_S = 60.0
STEPS, EVERY = 40, 5


def plan_of(*faults: Fault, **other: Any) -> FaultPlan:
    """Return a plan of two workers."""
    fields: dict[str, Any] = {"workers": ["a", "b"], "steps": STEPS, "save_every": EVERY}
    return FaultPlan(**{**fields, **other}, faults=list(faults))


def script(folder: Path, text: str) -> str:
    """Write a script; return its path."""
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def run(plan: FaultPlan, folder: Path, **other: Any) -> Outcome:
    """Run a plan on workers that count."""
    command = (script(folder, COUNTING), str(folder), str(plan.steps), str(plan.save_every))
    options = {"zygote": False, "deadline_s": DEADLINE_S, "hang_s": 1e3, "grace_s": 5.0, **other}
    return supervise(Job(command, plan, folder, **options))


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(),
        plan_of(Fault(at=12, workers=["b"], kind="kill"), Fault(at=23, kind="raise")),
        plan_of(Fault(at=12, kind="kill", back=22)),
        plan_of(Fault(at=12, kind="kill", back="never"), workers=["a", "b", "c"]),
        plan_of(joins=[Arrival(at=17, workers=["d"])]),
        plan_of(
            Fault(at=12, workers=["b"], kind="kill"),
            Fault(at=12, workers=["a"], kind="raise", restart=True),
        ),
        plan_of(Fault(at=15, kind="crash-in-save", write=1)),
        plan_of(Fault(at=15, kind="crash-in-save", write=2)),
    ],
    ids=["nothing", "losses", "back", "never", "join", "restart", "open", "rename"],
)
def test_a_run_comes_to_the_generations_of_its_simulation(plan: FaultPlan, tmp_path: Path) -> None:
    outcome = run(plan, tmp_path)

    assert outcome.generations == simulate_plan(plan)


def test_a_worker_that_hangs_is_found_by_the_clock_and_killed(tmp_path: Path) -> None:
    plan = plan_of(Fault(at=12, workers=["b"], kind="stop"))

    outcome = run(plan, tmp_path, hang_s=10.0)

    assert outcome.generations == simulate_plan(plan)
    assert set(outcome.lived[0].codes) == {"a", "b"}
    assert outcome.lived[0].faults == (0,)


def test_codes_and_recoveries_are_reported(tmp_path: Path) -> None:
    plan = plan_of(Fault(at=12, workers=["b"], kind="kill"))

    outcome = run(plan, tmp_path)

    assert outcome.lived[0].codes == {"a": -signal.SIGTERM, "b": -signal.SIGKILL}
    assert outcome.lived[0].recovery_s is None
    assert outcome.lived[1].codes == {"a": 0, "b": 0}
    recovery_s = outcome.lived[1].recovery_s
    assert recovery_s is not None
    assert 0 < recovery_s < outcome.seconds


def test_kills_that_no_plan_knows_of_are_restarted_too(tmp_path: Path) -> None:
    left, killed = ["b", "a"], set[int]()

    def meddle(running: Any, step: int) -> str | None:
        if not left or step < 0 or killed & set(running.values()):  # its end is not heard of yet
            return None
        killed.add(running[left[0]])
        return left.pop(0)

    outcome = run(plan_of(), tmp_path, meddle=meddle, environment={"WAIT_BEFORE": "2"})

    assert [one.ended_by for one in outcome.generations] == ["kill b", "kill a", "end"]
    assert [one.members for one in outcome.generations] == [("a", "b"), ("a", "b"), ("b", "a")]


def test_a_script_that_never_comes_up_uses_up_the_restarts(tmp_path: Path) -> None:
    command = (script(tmp_path, "raise SystemExit('no such luck')"),)
    job = Job(command, plan_of(restarts=1), tmp_path, zygote=False)

    # The log may hold one start's words or both.
    with raises_message(LaunchError, "no such luck", varies=(r"(no such luck\n?)+",)):
        supervise(job)


def test_the_deadline_ends_all_and_is_reported_with_the_last_output(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = (script(tmp_path, WAITING), str(pipe))
    job = Job(command, plan_of(workers=["a"]), tmp_path, zygote=False, deadline_s=10.0)

    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    with raises_message(LaunchError, "10 s"):
        supervise(job)

    output, _ = reader.communicate(timeout=DEADLINE_S)
    assert not Path(f"/proc/{output.strip()}").exists()


SUPERVISING = """
import sys
from pathlib import Path
from evenstride.testing.faults.supervisor import Job, supervise
from evenstride.testing.faults.fault_plan import FaultPlan

plan = FaultPlan(workers=["a", "b"], steps=10, save_every=5)
folder = Path(sys.argv[1])
supervise(Job((sys.argv[2], sys.argv[3]), plan, folder, zygote=sys.argv[4] == "zygote"))
"""


@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("plain", signal.SIGKILL, -signal.SIGKILL),
        ("zygote", signal.SIGKILL, -signal.SIGKILL),
        ("plain", signal.SIGTERM, 128 + signal.SIGTERM),
    ],
)
def test_no_worker_outlives_its_supervisor(
    tmp_path: Path, how: str, number: int, code: int
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-c", SUPERVISING, str(tmp_path), script(tmp_path, WAITING)]
    supervisor = subprocess.Popen([*command, str(pipe), how])
    try:
        workers: list[int] = []
        while len(workers) < 2:  # a worker may come after the former one has closed the pipe
            workers += [int(line) for line in pipe.read_text().splitlines()]
        watched = [os.pidfd_open(pid) for pid in workers]
        supervisor.send_signal(number)
        for descriptor in watched:
            assert select.select([descriptor], [], [], DEADLINE_S)[0], "a worker outlives"
            os.close(descriptor)
        assert supervisor.wait(DEADLINE_S) == code
    finally:
        supervisor.kill()
        supervisor.wait()


@pytest.fixture(scope="module", params=["plain", "zygote"])
def starter(request: pytest.FixtureRequest) -> Iterator[Starter]:
    """Both ways to start a process."""
    made: Starter
    made = FromScratch() if request.param == "plain" else FromZygote({**os.environ, **LOCAL})
    yield made
    made.close()


def ended(starter: Starter, text: str, folder: Path, **variables: str) -> tuple[int, str]:
    """Run a script as a worker to its end; return its exit code and its output."""
    log = folder / "log"
    command = (script(folder, text), "--lr", "0.1")
    pid = starter.start(StartRequest(command, {**os.environ, **variables}, log))
    ends: dict[int, int] = {}
    while pid not in ends:
        ends |= starter.ended(DEADLINE_S)
    return ends[pid], log.read_text()


def test_a_worker_is_the_main_program_with_its_own_arguments_and_environment(
    starter: Starter, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("word = 'beside'")
    text = """
import atexit, os, sys, threading
from beside import word
atexit.register(print, "at exit")
print(__name__, sys.argv[1:], os.environ["MINE"], word, threading.active_count())
print(sys.stdin.read() == "")
"""

    code, output = ended(starter, text, tmp_path, MINE="5")

    assert code == 0
    assert output.splitlines() == ["__main__ ['--lr', '0.1'] 5 beside 1", "True", "at exit"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise SystemExit(3)", 3),
        ("raise ValueError('broken')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os._exit(7)", 7),
    ],
)
def test_the_end_of_a_worker_is_reported(
    starter: Starter, tmp_path: Path, text: str, expected: int
) -> None:
    code, output = ended(starter, text, tmp_path)

    assert code == expected
    assert ("ValueError: broken" in output) is (expected == 1)


def test_what_a_worker_started_ends_with_it(starter: Starter, tmp_path: Path) -> None:
    text = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
"""

    _, output = ended(starter, text, tmp_path)

    descriptor = _pidfd(int(output))
    if descriptor is not None:
        assert select.select([descriptor], [], [], DEADLINE_S)[0]
        os.close(descriptor)


def _pidfd(pid: int) -> int | None:
    """Return what tells of a process's end; ``None`` if it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def test_a_zygote_with_threads_is_refused(tmp_path: Path) -> None:
    thread = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    (tmp_path / "sitecustomize.py").write_text(thread)
    path = os.pathsep.join([str(tmp_path), *sys.path])

    with raises_message(LaunchError):
        FromZygote({**os.environ, **LOCAL, "PYTHONPATH": path})


def test_orders_and_progress_survive_their_files(tmp_path: Path) -> None:
    plan = plan_of(Fault(at=12, kind="kill"), joins=[Arrival(at=9, workers=["d"])])
    orders = Orders(plan, 3, ScriptedRoster(("b", "a"), (("d", 9),)), (0,), 17)
    journal = FaultJournal(tmp_path / "journal")

    assert Orders.from_json(journal.order(orders).read_text()) == orders
    assert journal.progress(3, "b") is None
    own = ProgressFile(journal, 3, "b")
    own.note(10)
    assert journal.progress(3, "b") == WorkerProgress(10, 10)
    own.note(11)
    own.note(12, held=True)
    progress = journal.progress(3, "b")
    assert progress is not None
    assert (progress.first_step, progress.step, progress.held) == (10, 12, True)
    assert progress.committed_s > 0


def test_a_fault_of_two_workers_is_noted_once(tmp_path: Path) -> None:
    journal = FaultJournal(tmp_path)

    assert journal.fired() == ()
    for fault, worker in ((2, "a"), (0, "b"), (2, "b")):
        journal.fire(fault, worker)
    assert journal.fired() == (0, 2)


def test_a_full_disk_fails_what_is_written_below_one_folder_until_it_is_opened(
    tmp_path: Path,
) -> None:
    trap, inside, outside = Trap(), tmp_path / "in" / "file", tmp_path / "out"
    inside.parent.mkdir()
    trap.fail(inside.parent)

    outside.write_text("fine")
    for write in (lambda: inside.write_text("x"), lambda: outside.rename(inside)):
        with raises_message(OSError) as refusal:
            write()
        assert refusal.value.errno == errno.ENOSPC
    trap.open()
    inside.write_text("fine")
    assert inside.read_text() == outside.read_text() == "fine"


def test_writes_are_counted_and_reads_are_not(tmp_path: Path) -> None:
    trap = Trap()
    trap.count(tmp_path)

    (tmp_path / "one").write_text("x")
    (tmp_path / "one").read_text()
    (tmp_path / "one").rename(tmp_path / "two")
    os.close(os.open(tmp_path / "three", os.O_WRONLY | os.O_CREAT))
    assert trap.seen == 3
    trap.open()


def test_a_store_listens_on_the_one_address_it_is_given() -> None:
    with serve_store("127.0.0.1") as (host, port):
        assert host == "127.0.0.1"
        socket.create_connection((host, port), timeout=DEADLINE_S).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=DEADLINE_S)
        with raises_message(ConfigError, "127.0.0.1", port):
            serve_store("127.0.0.1", port).__enter__()


@pytest.mark.parametrize("host", ["203.0.113.9", "no.such.host.invalid"])
def test_a_store_at_an_address_of_another_machine_is_refused(host: str) -> None:
    with raises_message(ConfigError, "--store", "HOST", "PORT"):
        serve_store(host, 29400).__enter__()


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::"])
def test_a_store_at_every_address_is_refused(host: str) -> None:
    with raises_message(ConfigError):
        serve_store(host, 29400).__enter__()
