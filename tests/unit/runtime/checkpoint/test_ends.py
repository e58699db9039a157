"""Calls that a Checkpointer refuses at its creation and after its end."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import evenstride
from evenstride import Checkpointer
from evenstride.core.reliability.checkpoint_interval import Saving
from evenstride.core.reliability.lifetimes import Exponential
from evenstride.errors import ConfigError, UsageError
from evenstride.runtime.checkpoint.run_binding import RunBinding
from evenstride.runtime.checkpoint.save.preparing import parse_every
from tests.messages import check_message, raises_message
from tests.unit.runtime.checkpoint.kept import MemoryStorage, Runs


def test_a_closed_checkpointer_refuses_calls(runs: Runs) -> None:
    storage = MemoryStorage()
    run = runs(storage, every=2)
    run.train(2)
    run.checkpoint.close()
    before = dict(storage.files)
    with raises_message(UsageError, "step()", "close()"):
        run.train(2)
    with raises_message(UsageError, "save()"):
        run.checkpoint.save()
    with raises_message(UsageError, "restore()"):
        run.checkpoint.restore()
    assert storage.files == before


def test_close_restores_signal_handlers(runs: Runs) -> None:
    former = signal.getsignal(signal.SIGTERM)
    run = runs(MemoryStorage(), every=2)
    during = signal.getsignal(signal.SIGTERM)
    run.checkpoint.close()
    assert during != former
    assert signal.getsignal(signal.SIGTERM) == former


def test_a_second_checkpointer_is_refused_until_the_first_is_closed(runs: Runs) -> None:
    run = runs(MemoryStorage(), every=2)
    made = {"model": run.model, "optimizer": run.optimizer}
    with raises_message(ConfigError):
        Checkpointer("memory://second", run.stride, **made)
    run.checkpoint.close()
    Checkpointer("memory://second", run.stride, **made).close()


def test_after_a_refused_setting_another_checkpointer_can_be_created(runs: Runs) -> None:
    run = runs(MemoryStorage(), every=2)
    made = {"model": run.model, "optimizer": run.optimizer}
    run.checkpoint.close()
    former = signal.getsignal(signal.SIGTERM)
    with raises_message(ConfigError):
        Checkpointer("memory://refused", run.stride, notices="skynet", **made)
    second = Checkpointer("memory://second", run.stride, notices="off", **made)
    assert signal.getsignal(signal.SIGTERM) is former, "nothing is watched"
    second.close()


def test_worker_profiles_are_recalled_only_before_the_first_step(
    runs: Runs,
) -> None:
    run = runs(MemoryStorage(), every=100)
    ties = RunBinding(run.stride)
    ties.recall({"losses": {"failures": 4, "expected": 1.0}})
    assert ties.remember()["losses"]["failures"] == 5
    run.train(1)
    ties.recall({"losses": {"failures": 40, "expected": 1.0}})
    assert ties.remember()["losses"]["failures"] == 5


def test_time_of_agreements_is_waiting_time(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs(MemoryStorage(), every=100)
    ties, reported = RunBinding(run.stride), list[str]()

    @contextmanager
    def waiting() -> Iterator[None]:
        reported.append("waits")
        yield
        reported.append("works")

    monkeypatch.setattr(ties, "waiting", waiting)

    def judge(shown: list[dict[str, Any]]) -> dict[str, Any]:
        reported.append("judges")
        return shown[0]

    ties.agree("a call", dict, judge)
    assert reported == ["waits", "judges", "works"]


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    stride = evenstride.Stride(global_batch=4)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    with raises_message(ConfigError, "LBFGS"):
        Checkpointer("memory://lbfgs", stride, model=model, optimizer=optimizer)
    stride.close()


def test_restoring_before_a_loader_exists_causes_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stride = evenstride.Stride(global_batch=4)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    checkpoint = Checkpointer("memory://early", stride, model=model, optimizer=optimizer)
    with caplog.at_level(logging.WARNING, logger="evenstride"):
        assert checkpoint.restore() is None
    check_message(caplog.messages)
    checkpoint.close()
    stride.close()


def test_the_interval_may_follow_from_a_custom_model(runs: Runs) -> None:
    saving = Saving(lifetime=Exponential(3600.0), longest_s=300.0)
    assert parse_every(saving).saving is saving
    hourly, daily = (runs(MemoryStorage(), every=every).checkpoint for every in (saving, "auto"))
    assert hourly.interval_s(0.5) < daily.interval_s(0.5)
