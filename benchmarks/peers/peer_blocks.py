"""Run the workers of one system under CPU limits, and measure a block."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from benchmarks.peers.peer_figures import (
    Note,
    Notes,
    first_s,
    lost_s,
    pause_s,
    samples_of_updates,
    samples_per_s,
    tail,
    to_loss_s,
    update_times_s,
)
from benchmarks.peers.peer_worker import RUNNER_VARIABLE, PeerPlan

from evenstride.core.allocation.integer_splits import apportion
from evenstride.lab.demo.demo_script import load_task
from evenstride.lab.processes.cpu_limits import open_limits
from evenstride.lab.processes.speeds import Speeds, pin, place, usable_cpus
from evenstride.runtime.launching.rank_environment import STEADY, rank_variables
from evenstride.runtime.store.store_server import serve_store

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
UNEVEN: Speeds = (1.0, 0.5, 0.2)
SWAPPED: Speeds = (0.2, 0.5, 1.0)
EQUAL: Speeds = (0.5, 0.5, 0.5)
FREE: Speeds = (1.0, 1.0, 1.0)
BATCH = 192
GOAL_LOSS = 0.5
START_S, FIRST_STEP_S = 120.0, 60.0
HUNG_S, WATCH_S = 30.0, 15.0
PROBE_S = 45.0
BY_HAND = (7, 4, 1)
SECOND = 2  # in the first update, torchft uses one worker's gradient only
TAIL_ROWS, TAIL_BATCH = 29, 24
EXCEPTION = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b")
LOST = 1  # the worker that is killed


class PeerError(Exception):
    """A system did not train."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Seconds of the phases of a block, from the first step.

    Args:
        settle: Before the measurement begins.
        swap: Until the speeds change.
        end: Until the end.
        equal_settle: As ``settle``, on equal workers.
        equal_end: As ``end``, on equal workers.
        alone_settle: As ``settle``, for workers alone.
        alone_end: As ``end``, for workers alone.
        killed: Until a worker is killed.
    """

    settle: float = 8.0
    swap: float = 16.0
    end: float = 26.0
    equal_settle: float = 4.0
    equal_end: float = 11.0
    alone_settle: float = 1.0
    alone_end: float = 4.0
    killed: float = 8.0


@dataclass(slots=True)
class Workers:
    """The processes of one system.

    Args:
        python: The interpreter of its virtual environment.
        script: Its adapter.
        plan: What to train.
        folder: Where the records go.
    """

    python: Path
    script: Path
    plan: PeerPlan
    folder: Path
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _limits: Any = None

    @contextlib.contextmanager
    def running(self, speeds: Speeds) -> Iterator[None]:
        """Start the workers, wait until all are ready, and let them train; end them at the end."""
        self.folder.mkdir(parents=True)
        (self.folder / "plan.json").write_text(json.dumps(asdict(self.plan)))
        self._limits, _ = open_limits(len(speeds))
        with contextlib.ExitStack() as stack:
            stack.callback(self._limits.close)
            stack.callback(self.end)
            store = stack.enter_context(serve_store())
            for rank in range(len(speeds)):
                self._start(rank, len(speeds), store)
            self.wait(self._all_ready, START_S, "the workers did not start")
            for rank, process in enumerate(self._processes):
                self._limits.join(rank, process.pid)
            self.set(speeds)
            (self.folder / "go").touch()
            yield

    def _start(self, rank: int, world: int, store: tuple[str, int]) -> None:
        environment = {
            **STEADY,
            **os.environ,
            **rank_variables(rank, world, store),
            # Lightning asks for these to see that its ranks are started from outside.
            RUNNER_VARIABLE: str(os.getpid()),
            "TORCHELASTIC_RUN_ID": "peers",
            "GROUP_RANK": "0",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        }
        with (self.folder / f"worker-{rank}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [self.python, self.script, self.folder],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def set(self, speeds: Speeds) -> None:
        """Give the workers these speeds, and cores with enough capacity."""
        cores = place(speeds, usable_cpus())
        for rank, process in enumerate(self._processes):
            for pid in tree_of(process.pid):
                with contextlib.suppress(FileNotFoundError):  # it has ended
                    pin(pid, cores[rank] if cores else None)
            self._limits.set_speed(rank, speeds[rank])

    def kill(self, rank: int) -> None:
        """End a worker and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._processes[rank].pid, signal.SIGKILL)
        self._processes[rank].wait()

    def end(self) -> None:
        """End all workers."""
        for rank in range(len(self._processes)):
            self.kill(rank)

    def ended(self, but: int | None = None) -> list[int]:
        """Return the workers that have ended, apart from one."""
        states = enumerate(self._processes)
        return [rank for rank, one in states if rank != but and one.poll() is not None]

    def notes(self) -> Notes:
        """Return all notes so far."""
        found: Notes = []
        for rank in range(len(self.plan.sizes)):
            file = self.folder / f"notes-{rank}.jsonl"
            lines = file.read_text().splitlines(keepends=True) if file.exists() else []
            found.append([Note.of(json.loads(line)) for line in lines if line.endswith("\n")])
        return found

    def wait(self, until: Callable[[], bool], seconds: float, problem: str) -> None:
        """Wait for something, unless a worker ends before."""
        end_s = time.monotonic() + seconds
        while not until():
            if self.ended():
                raise PeerError(self.last_words())
            if time.monotonic() > end_s:
                raise PeerError(f"{problem} within {seconds:.0f} s")
            time.sleep(0.05)

    def until(self, at_s: float) -> None:
        """Wait for a time."""
        with contextlib.suppress(TimeoutError):
            self.wait(lambda: time.monotonic() >= at_s, 3600.0, "")

    def first_step(self) -> float:
        """Wait until any worker has trained a step; return when."""
        self.wait(lambda: first_s(self.notes()) < 1e18, FIRST_STEP_S, "no worker trained a step")
        return first_s(self.notes())

    def last_words(self, but: int | None = None) -> str:
        """Return the line with which the first worker ended that did."""
        for rank in self.ended(but):
            lines = (self.folder / f"worker-{rank}.log").read_text(errors="replace").splitlines()
            said = [line for line in lines if EXCEPTION.match(line)]
            code = self._processes[rank].returncode
            return f"worker {rank} ended with exit code {code}: {(said or lines or ['-'])[-1]}"
        return "no worker has ended"

    def _all_ready(self) -> bool:
        return all((self.folder / f"ready-{r}").exists() for r in range(len(self._processes)))


@dataclass(frozen=True, slots=True)
class Block:
    """Where and how to run a block.

    Args:
        python: The interpreter.
        script: The adapter.
        option: For the adapter.
        folder: For the records; must not exist.
        lengths: Of the phases.
    """

    python: Path
    script: Path
    option: str
    folder: Path
    lengths: Lengths

    def workers(self, plan: PeerPlan, part: str = "") -> Workers:
        """Return workers that have not started."""
        return Workers(self.python, self.script, plan, self.folder / (part or "run"))

    def plan(self, sizes: tuple[int, ...], **more: Any) -> PeerPlan:
        """Return a plan."""
        return PeerPlan(sum(sizes), sizes, option=self.option, **more)

    def uneven(self) -> dict[str, Any]:
        """Return throughput, time to the loss, and what a swap of speeds costs."""
        workers, lengths = self.workers(self.plan(equal_sizes(BATCH))), self.lengths
        with workers.running(UNEVEN):
            begun_s = workers.first_step()
            workers.until(begun_s + lengths.swap)
            workers.set(SWAPPED)
            swapped_s = time.monotonic()
            workers.until(begun_s + lengths.end)
            ended_s = time.monotonic()
        notes = workers.notes()
        rate = samples_per_s(notes, begun_s + lengths.settle, swapped_s)
        after = samples_per_s(notes, swapped_s, ended_s)
        before = [[note for note in own if note.at_s <= swapped_s] for own in notes]
        return {
            "samples_per_s": rate,
            "to_loss_s": to_loss_s(before, GOAL_LOSS, len(load_task(None).train)),
            "swap_samples_per_s": after,
            "swap_lost_s": lost_s(rate, after, ended_s - swapped_s) if rate else None,
        }

    def equal(self) -> dict[str, Any]:
        """Return throughput on equal workers."""
        lengths = self.lengths
        return {"samples_per_s": self._rate(EQUAL, lengths.equal_settle, lengths.equal_end)}

    def alone(self, speeds: Speeds) -> float:
        """Return the sum of the workers' speeds, each alone."""
        lengths = self.lengths
        return self._rate(speeds, lengths.alone_settle, lengths.alone_end, proportional(speeds))

    def _rate(
        self, speeds: Speeds, settle_s: float, end_s: float, sizes: tuple[int, ...] | None = None
    ) -> float:
        workers = self.workers(self.plan(sizes or equal_sizes(BATCH)))
        with workers.running(speeds):
            begun_s = workers.first_step()
            workers.until(begun_s + end_s)
        return samples_per_s(workers.notes(), begun_s + settle_s, begun_s + end_s)

    def by_hand(self) -> dict[str, Any]:
        """Return the error of a gradient where a user gives each worker another batch."""
        workers = self.workers(self.plan(BY_HAND, by_hand=True, rows=240, probe=True))
        notes = self._probe(workers, SECOND)
        taken = [each for own in notes for each in samples_of_updates(own).get(SECOND, [])]
        return {"error": gradient_error(workers.folder, SECOND, taken), "samples": len(taken)}

    def tail(self) -> dict[str, Any]:
        """Return the error of the last gradient of an epoch that has some samples too few."""
        workers = self.workers(
            self.plan(equal_sizes(TAIL_BATCH), rows=TAIL_ROWS, probe=True), "tail"
        )
        found = tail(self._probe(workers, 3), TAIL_ROWS)
        if found is None:
            return {"error": None, "repeated": None}
        update, due, repeated = found
        return {"error": gradient_error(workers.folder, update, due), "repeated": repeated}

    def _probe(self, workers: Workers, updates: int) -> Notes:
        def enough() -> bool:
            return all(own and own[-1].updates >= updates for own in workers.notes())

        with workers.running(FREE):
            workers.wait(enough, PROBE_S, f"not all workers made {updates} updates")
        return workers.notes()

    def death(self) -> dict[str, Any]:
        """Return the seconds lost when a worker is killed, and what the others do."""
        plan = self.plan(equal_sizes(BATCH))
        workers = self.workers(plan)
        with workers.running(EQUAL):
            workers.until(workers.first_step() + self.lengths.killed)
            killed_s = time.monotonic()
            workers.kill(LOST)
            what, words = self._after(workers, killed_s)
        notes = workers.notes()
        survivors = [own for rank, own in enumerate(notes) if rank != LOST]
        if what == "continues":
            return {"lost_s": pause_s(survivors, killed_s), "how": what, "words": ""}
        again = self.workers(plan, "again")
        with again.running(EQUAL):
            again.wait(
                lambda: any(update_times_s(again.notes())), FIRST_STEP_S, "no update after it"
            )
        last_s = max(update_times_s(survivors))
        return {
            "lost_s": min(update_times_s(again.notes())) - last_s,
            "how": what,
            "words": words,
        }

    @staticmethod
    def _after(workers: Workers, killed_s: float) -> tuple[str, str]:
        """Watch the survivors; return what they do, and the last words of one that ends."""
        while True:
            now_s = time.monotonic()
            if workers.ended(but=LOST):
                return "ends", workers.last_words(LOST)
            notes = [own for rank, own in enumerate(workers.notes()) if rank != LOST]
            # An update whose gradients were exchanged before the kill may still end.
            later = [at_s for at_s in update_times_s(notes) if at_s > killed_s + 1.0]
            if later and now_s > killed_s + WATCH_S and max(later) > now_s - HUNG_S:
                return "continues", ""
            if now_s > killed_s + HUNG_S and not later:
                return "hangs", ""
            time.sleep(0.25)


def tree_of(pid: int) -> list[int]:
    """Return a process and what it started; a limit holds for all of them."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def equal_sizes(batch: int) -> tuple[int, ...]:
    """Return equal parts of a batch."""
    return (batch // len(UNEVEN),) * len(UNEVEN)


def proportional(speeds: Speeds) -> tuple[int, ...]:
    """Return parts of the batch in proportion to speeds."""
    none = np.zeros(len(speeds), dtype=np.int64)
    return tuple(int(n) for n in apportion(np.array(speeds), BATCH, none, none + BATCH))


def gradient_error(folder: Path, update: int, ids: list[int]) -> float:
    """Return the largest relative error of the gradient that any worker used.

    The true gradient is that of the mean loss of the samples, at the weights of that worker.
    """
    task, errors = load_task(None), []
    _, x, y = task.train[torch.tensor(ids)]
    for file in sorted(folder.glob(f"update-*-{update}.pt")):
        kept, net = torch.load(file), task.net().double()
        torch.nn.utils.vector_to_parameters(kept["weights"].double(), net.parameters())
        F.cross_entropy(net(x.double()), y).backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        true = torch.nn.utils.parameters_to_vector(grads)
        errors.append(float((kept["grads"].double() - true).norm() / true.norm()))
    return max(errors)
