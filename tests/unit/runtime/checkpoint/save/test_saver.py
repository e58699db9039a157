"""The saving thread: its outcomes, its calls, and the files that it leaves."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint.format.manifest import Name, items_file, tensors_file
from evenstride.runtime.checkpoint.format.retention import Lineage
from evenstride.runtime.checkpoint.save import checkpoint_writer as module
from evenstride.runtime.checkpoint.save.checkpoint_writer import ManifestUncertain, Saver
from evenstride.runtime.checkpoint.save.save_job import one_line
from evenstride.runtime.checkpoint.save.save_statistics import SaveResult
from tests.messages import check_message
from tests.unit.runtime.checkpoint.kept import MemoryStorage

NAME = Name(20, "0123456789ab", 0)
LINEAGE = Lineage(NAME)


class Bench:
    """A saver of one rank, with replaced functions for writing and pruning."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None]) -> None:
        self.storage, self.pruned = MemoryStorage(), list[tuple[Any, ...]]()
        self.failed: list[SaveResult] = []
        self.pruning: Exception | None = None
        monkeypatch.setattr(module, "write", lambda _, writer, __: write(self, writer))
        monkeypatch.setattr(module, "prune", self._prune)
        self.saver = Saver(self.storage, None, 3, self.failed.append)

    def _prune(self, *given: Any) -> None:
        self.pruned.append(given)
        if self.pruning is not None:
            raise self.pruning

    def start(self, rank: int = 0) -> None:
        """Start a save."""
        self.saver.start(cast(Any, SimpleNamespace(name=NAME, rank=rank)), LINEAGE)

    def save(self, rank: int = 0) -> SaveResult:
        """Save, and return the outcome."""
        self.start(rank)
        outcome = self.saver.take()
        assert outcome is not None
        return outcome


def _writes(bench: Bench, writer: Any) -> None:
    writer.written_bytes = 9


def _fails(failure: BaseException) -> Callable[..., None]:
    def write(bench: Bench, writer: Any) -> None:
        for file in (tensors_file(0), items_file(0)):
            bench.storage.write(NAME.file(file), [b"x"])
        raise failure

    return write


def test_only_the_leader_deletes_older_checkpoints_after_a_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, _writes)

    assert bench.save(rank=1).error == ""
    assert not bench.pruned
    outcome = bench.save(rank=0)

    assert (outcome.name, outcome.error, outcome.written_bytes) == (NAME, "", 9)
    assert outcome.took_s >= 0
    assert bench.pruned == [(bench.storage, NAME, 3, LINEAGE)]
    assert not bench.failed
    assert bench.saver.take() is None


def test_older_checkpoints_that_cannot_be_deleted_cause_a_warning_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch, _writes)
    bench.pruning = OSError("busy")

    assert bench.save().error == ""
    check_message(caplog.messages)


class Stopped(BaseException):
    """An error that does not inherit from `Exception`."""


@pytest.mark.parametrize("failure", [OSError("full"), Stopped("now")])
def test_a_failed_save_is_reported_and_frees_its_space(
    monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    bench = Bench(monkeypatch, _fails(failure))

    outcome = bench.save()

    assert outcome.error == f"{type(failure).__name__}: {failure}"
    assert bench.failed == [outcome]
    assert not bench.pruned
    assert not bench.storage.files


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_attempt_that_may_be_complete_is_kept(
    monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    failure: BaseException = ManifestUncertain("it may be there")
    if wrapped:
        failure = CheckpointException("", {0: (failure, cast(Any, None))})
    bench = Bench(monkeypatch, _fails(failure))

    assert bench.save().error.endswith("it may be there")
    assert len(bench.storage.files) == 2


def test_waiting_for_a_save_hurries_that_save_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, hurried = threading.Event(), list[bool]()

    def write(bench: Bench, writer: Any) -> None:
        assert go_on.wait(60)
        hurried.append(writer._hurry.is_set())

    bench = Bench(monkeypatch, write)
    bench.start()
    busy = [bench.saver.busy]
    assert bench.saver.take(0.0) is None
    go_on.set()
    assert bench.saver.take() is not None
    busy.append(bench.saver.busy)
    bench.start()
    for thread in threading.enumerate():
        if thread.name == "evenstride-checkpoint":
            thread.join()

    assert busy == hurried == [True, False]
    assert bench.saver.take() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_the_saving_thread_has_a_lower_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []

    def write(bench: Bench, writer: Any) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    Bench(monkeypatch, write).save()

    assert before > 10 or found == [10]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def _of_ranks(**failures: BaseException) -> CheckpointException:
    by_rank = {int(rank[1:]): (failure, cast(Any, None)) for rank, failure in failures.items()}
    return CheckpointException("", cast(Any, by_rank))


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (OSError("no\n  space"), "OSError: no space"),
        (ConfigError("give\nanother"), "give another"),
        (ManifestUncertain(), "ManifestUncertain: "),
        (_of_ranks(r3=OSError("full"), r1=ConfigError("give less")), "rank 1: give less"),
        (_of_ranks(r2=OSError("full")), "rank 2: OSError: full"),
    ],
    ids=["lines", "ours", "nothing said", "lowest rank", "of a rank"],
)
def test_an_error_is_reported_in_one_line(failure: BaseException, line: str) -> None:
    assert one_line(failure) == line
