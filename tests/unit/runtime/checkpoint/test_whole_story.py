"""Messages and outcomes after a user's mistake or the repair of a disk."""

from __future__ import annotations

import errno
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.core.reliability.lifetimes import Exponential
from evenstride.errors import ConfigError
from evenstride.runtime.checkpoint import Checkpointer, CheckpointError
from evenstride.runtime.checkpoint.format.storage import open_storage
from evenstride.runtime.checkpoint.run_binding import RunBinding
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.failures.peer_link import LossReport
from tests.messages import check_message, raises_message
from tests.unit.runtime.checkpoint.kept import FullStorage, MemoryStorage, Runs
from tests.unit.runtime.quiet import channel


def test_a_cause_that_is_gone_at_the_end_costs_nothing(runs: Runs) -> None:
    storage = FullStorage()
    run = runs(storage, every=2)
    run.train(2)
    run.settle()
    storage.error = PermissionError(1, "not now")
    run.train(4)
    run.settle()
    storage.error = None
    run.train(1)

    run.checkpoint.close()

    assert run.checkpoint.report()["failed"] >= 1
    again = runs(storage)
    restored = again.restore()
    assert restored is not None
    assert restored.step == 7, "the state as it was at the end, saved though none was due"
    assert again.weights() == run.weights()


def test_an_end_without_a_checkpoint_is_reported(runs: Runs) -> None:
    storage = FullStorage()
    run = runs(storage, every=2)
    storage.error = PermissionError(1, "not now")
    run.train(3)

    with raises_message(CheckpointError, "step 3"):
        run.checkpoint.close()


@pytest.mark.parametrize("restarted", [False, True])
def test_the_newest_checkpoint_is_named(runs: Runs, restarted: bool) -> None:
    storage = FullStorage()
    run = runs(storage, every=2)
    run.train(2)
    run.checkpoint.wait()
    if restarted:
        run = runs(storage, every=2)
        run.restore()
    storage.error = PermissionError(1, "not now")
    run.train(2)

    with raises_message(CheckpointError):
        run.checkpoint.close()


class OwnDisk(MemoryStorage):
    """The store of a leader that does not see one file of another rank."""

    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder without that file."""
        return [name for name in super().list(folder) if not name.startswith("tensors")]


def test_parts_on_several_disks_do_not_complete_a_checkpoint(runs: Runs) -> None:
    storage = OwnDisk()
    run = runs(storage, every=2)
    run.train(2)

    with raises_message(CheckpointError, "rank 0"):
        run.checkpoint.close()

    assert not storage.checkpoints()


class Plan:
    """A scheduler with this state."""

    def __init__(self, **state: Any) -> None:
        self.state, self.loaded = state, False

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load any state, as torch's schedulers do."""
        self.state, self.loaded = state, True


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (Plan(last=1), Plan(last=0, shapes=[])),
        (Plan(last=1, size=3), Plan(last=0)),
    ],
)
def test_a_scheduler_of_another_kind_is_refused_before_anything_is_loaded(
    runs: Runs, saved: Plan, own: Plan
) -> None:
    storage = MemoryStorage()
    run = runs(storage, scheduler=saved)
    run.train(2)
    run.checkpoint.save()
    again = runs(storage, scheduler=own)
    before = again.weights()

    with raises_message(ConfigError):
        again.restore()

    assert not own.loaded
    assert again.weights() == before


def test_saved_objects_that_are_not_passed_again_are_reported(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    storage = MemoryStorage()
    run = runs(storage, extra={"ema": torch.nn.Linear(1, 1)})
    run.train(1)
    run.checkpoint.save()

    with caplog.at_level(logging.WARNING, "evenstride"):
        runs(storage).restore()

    check_message(caplog.messages)


def test_a_file_is_refused_as_a_folder(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_message(ConfigError):
        runs(tmp_path / "file")


def test_a_folder_without_permission_is_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat = os.stat

    def denied(path: Any, *rest: Any, **more: Any) -> Any:
        if str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *rest, **more)

    monkeypatch.setattr(os, "stat", denied)
    assert str(open_storage(tmp_path / "later")) == str(tmp_path / "later")


def test_other_objects_than_a_stride_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with raises_message(ConfigError, "evenstride.Stride"):
        Checkpointer(tmp_path, 5, model=model, optimizer=optimizer)  # type: ignore[arg-type]


def test_the_interval_model_ends_with_its_checkpointer(runs: Runs) -> None:
    run = runs(MemoryStorage(), every=Saving(Exponential(3600.0)))
    ties = RunBinding(run.stride)
    short_s = ties.interval_s(0.5)
    run.checkpoint.close()

    ties.begin(5.0, "off", None)

    assert ties.interval_s(0.5) > 2 * short_s


def test_a_rank_that_ends_does_not_report_its_own_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "last_value", ConfigError("no"), raising=False)
    report = LossReport(channel(rank=1), DrawBarrier((3, 4)), lambda: ("idle", 0))

    assert report.heard("rank 1 is gone: it ended with ConfigError: no")
    assert not caplog.records
    other = LossReport(channel(rank=1), DrawBarrier((3, 4)), lambda: ("idle", 0))
    assert other.heard("rank 10 is gone: it ended")
    assert "rank 10 is gone" in caplog.text
