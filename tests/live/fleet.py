"""Workers of live mode as real processes under a Lighthouse of their own."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.live.training import Plan, train

DEADLINE_S = 90.0

Line = dict[str, Any]


class Fleet:
    """Some workers, and what they have written so far.

    Args:
        lighthouse: its address.
        folder: they write to.
    """

    def __init__(self, lighthouse: str, folder: Path) -> None:
        self.lighthouse, self.folder = lighthouse, folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["evenstride.integrations.torchft.live_stride"])
        self.processes: dict[str, Any] = {}
        self._ends_s = time.monotonic() + DEADLINE_S

    def start(self, plans: dict[str, dict[str, Any]]) -> None:
        """Start workers that train together from their first step."""
        # Kept, as its semaphores go with it.
        together = self._together = self._context.Barrier(len(plans), timeout=DEADLINE_S)
        for name, plan in plans.items():
            self._start(name, plan, together)

    def start_again(self, name: str, **plan: Any) -> None:
        """Start a worker that joins the others."""
        self._start(name, plan, None)

    def _start(self, name: str, plan: dict[str, Any], together: Any) -> None:
        whole = replace(Plan(name, self.lighthouse, str(self.folder)), **plan)
        process = self._context.Process(target=train, args=(whole, together), name=name)
        process.start()
        self.processes[name] = process

    def wait(self) -> dict[str, int | None]:
        """Return the exit codes, once all workers have ended."""
        for process in self.processes.values():
            process.join(max(self._ends_s - time.monotonic(), 0.0))
        return {name: process.exitcode for name, process in self.processes.items()}

    def until(self, happened: Callable[[list[Line]], bool]) -> None:
        """Wait until the diaries say that something has happened."""
        while not happened(self.diary()):
            assert time.monotonic() < self._ends_s, f"it never happened: {self.diary()[-5:]}"
            for process in self.processes.values():
                process.join(0.02)

    def diary(self) -> list[Line]:
        """Return all lines of all workers."""
        lines = list[Line]()
        for file in sorted(self.folder.glob("*.jsonl")):
            text = file.read_text()
            lines += [
                json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"
            ]
        return lines

    def end(self) -> None:
        """End every process that is still there."""
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join()


@contextmanager
def fleet_of(folder: Path) -> Iterator[Fleet]:
    """Yield a fleet without workers; all its processes have ended afterwards."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="localhost:0",
        min_replicas=1,
        join_timeout_ms=2000,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=1000,
    )
    port = lighthouse.address().rpartition(":")[2]
    fleet = Fleet(f"http://localhost:{port}", folder)
    try:
        yield fleet
    finally:
        fleet.end()
        lighthouse.shutdown()


def kept(lines: list[Line]) -> dict[int, int]:
    """Return the generation in which each step was kept for good.

    A worker may keep a step that all others dropped, and die: then a later generation keeps it.
    """
    found: dict[int, int] = {}
    for line in lines:
        if line["kind"] == "voted" and line["kept"]:
            step, generation = line["step"], line["generation"]
            found[step] = max(found.get(step, generation), generation)
    return found


def trained(lines: list[Line]) -> dict[int, list[int]]:
    """Return the samples of each step, as drawn by all workers in the generation that kept it."""
    where, samples = kept(lines), dict[int, list[int]]()
    for line in lines:
        if line["kind"] == "drew" and where.get(line["step"]) == line["generation"]:
            samples.setdefault(line["step"], []).extend(line["ids"])
    return {step: sorted(ids) for step, ids in samples.items()}
