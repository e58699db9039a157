"""Which faults of a plan a worker meets, and when; with the signals that it sends itself noted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from evenstride.testing.faults.fault_injection import (
    FaultJournal,
    Injector,
    Orders,
    ScriptedFault,
    Trap,
)
from evenstride.testing.faults.fault_plan import Arrival, Fault, FaultPlan, ScriptedRoster
from tests.messages import raises_message


class Killed(BaseException):
    """This process would have ended here."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the signals that were sent; each ends the test's process, as it were."""
    signals: list[int] = []

    def kill(pid: int, number: int) -> None:
        assert pid == os.getpid()
        signals.append(number)
        raise Killed

    monkeypatch.setattr(os, "kill", kill)
    return signals


class Bench:
    """A worker of a plan for two."""

    def __init__(self, folder: Path, *faults: Fault, worker: str = "b", **other: Any) -> None:
        generation, reached = other.pop("generation", 0), other.pop("reached", 0)
        plan = FaultPlan(workers=["a", "b"], steps=40, save_every=5, faults=list(faults), **other)
        self.journal, self.worker = FaultJournal(folder / "journal"), worker
        orders = Orders(
            plan, generation, ScriptedRoster.opening(plan), self.journal.fired(), reached
        )
        self.number, self.damaged = generation, list[str]()
        self.injector = Injector(
            orders, worker, self.journal, lambda: self.damaged.append("damaged")
        )

    def held(self) -> bool:
        """Return whether the worker waits for somebody who comes."""
        progress = self.journal.progress(self.number, self.worker)
        return progress is not None and progress.held


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("kill", signal.SIGKILL),
        ("term", signal.SIGTERM),
        ("stop", signal.SIGSTOP),
        ("corrupt-newest", signal.SIGKILL),
    ],
)
def test_a_fault_hits_its_worker_at_its_step_and_is_noted_before(
    tmp_path: Path, sent: list[int], kind: Any, number: int
) -> None:
    bench = Bench(tmp_path, Fault(at=12, workers=["b"], kind=kind))
    bench.injector.begins(0)
    bench.injector.committed(11)
    assert not sent
    with pytest.raises(Killed):
        bench.injector.committed(12)

    assert sent == [number]
    assert bench.journal.fired() == (0,)
    assert bench.damaged == ["damaged"] * (kind == "corrupt-newest")


def test_a_fault_of_another_worker_is_eventful_and_nothing_more(
    tmp_path: Path, sent: list[int]
) -> None:
    bench = Bench(tmp_path, Fault(at=12, workers=["b"], kind="kill"), worker="a")
    bench.injector.begins(0)
    assert [step for step in range(20) if bench.injector.eventful(step)] == [12]
    bench.injector.committed(12)
    assert not sent
    assert bench.journal.fired() == ()


def test_without_faults_every_save_is_counted_and_joining_workers_are_waited_for(
    tmp_path: Path,
) -> None:
    calm = Bench(tmp_path / "calm")
    assert [step for step in range(1, 17) if calm.injector.counts(step)] == [5, 10, 15]
    assert not any(calm.injector.eventful(step) for step in range(1, 17))
    other = Fault(at=30, workers=["b"], kind="kill")
    visited = Bench(tmp_path / "visited", other, joins=[Arrival(at=7, workers=["c"])])
    assert [step for step in range(1, 17) if visited.injector.eventful(step)] == [7]
    assert not any(visited.injector.counts(step) for step in range(1, 17))


@pytest.mark.parametrize("generation", [0, 1])
def test_a_fault_at_a_restart_waits_for_one(
    tmp_path: Path, sent: list[int], generation: int
) -> None:
    fault = Fault(at=0, workers=["b"], kind="kill", restart=True)
    bench = Bench(tmp_path, fault, generation=generation)
    if generation:
        with pytest.raises(Killed):
            bench.injector.begins(0)
    else:
        bench.injector.begins(0)

    assert sent == [signal.SIGKILL] * generation


def test_a_fault_may_be_due_before_the_first_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Fault(at=10, workers=["b"], kind="raise"))
    with raises_message(ScriptedFault):
        bench.injector.begins(10)


def test_a_full_disk_lasts_for_one_save_and_is_noted(tmp_path: Path, sent: list[int]) -> None:
    bench = Bench(tmp_path, Fault(at=10, workers=["b"], kind="disk-full"))
    saved = tmp_path / "saved"
    saved.mkdir()
    bench.injector.begins(0)
    bench.injector.saves(10, saved)
    with raises_message(OSError):
        (saved / "one").write_text("x")
    assert bench.journal.fired() == (0,)
    bench.injector.committed(10)
    (saved / "one").write_text("x")
    assert not sent


def test_a_crash_in_a_save_comes_before_its_write_and_only_then(
    tmp_path: Path, sent: list[int]
) -> None:
    bench = Bench(tmp_path, Fault(at=10, workers=["b"], kind="crash-in-save", write=2))
    saved = tmp_path / "saved"
    saved.mkdir()
    bench.injector.begins(0)
    bench.injector.saves(10, saved)
    (saved / "one").write_text("x")
    assert bench.journal.fired() == ()
    with pytest.raises(Killed):
        (saved / "two").write_text("x")

    assert sent == [signal.SIGKILL]
    assert bench.journal.fired() == (0,)
    assert [path.name for path in saved.iterdir()] == ["one"]


def test_a_worker_that_waits_for_another_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, joins=[Arrival(at=7, workers=["c"])])

    def pause() -> None:
        raise Killed

    monkeypatch.setattr(signal, "pause", pause)
    bench.injector.begins(0)
    bench.injector.committed(6)
    assert not bench.held()
    with pytest.raises(Killed):
        bench.injector.committed(7)
    assert bench.held()


def test_a_folder_with_a_longer_name_is_another_one(tmp_path: Path) -> None:
    trap, beside = Trap(), tmp_path / "kept-aside"
    beside.mkdir()
    trap.fail(tmp_path / "kept")
    (beside / "one").write_text("fine")
    assert trap.seen == 0
    trap.open()


def test_a_path_is_one_in_whichever_way_it_is_given(tmp_path: Path) -> None:
    trap = Trap()
    (tmp_path / "one").touch()
    trap.count(tmp_path)
    os.close(os.open(tmp_path / "one", os.O_RDWR))
    os.rename(os.fsencode(tmp_path / "one"), os.fsencode(tmp_path / "two"))  # noqa: PTH104
    os.rename(tmp_path / "two", tmp_path.parent / "moved-out")  # noqa: PTH104
    assert trap.seen == 2, "what leaves the folder is written elsewhere"
    trap.open()
