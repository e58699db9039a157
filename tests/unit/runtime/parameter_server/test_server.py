"""A server steps with each gradient, and counts the staleness of its weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenstride.runtime.parameter_server.server import Server, part_of, settings_of
from evenstride.runtime.parameter_server.work_dispatcher import WorkDispatcher
from tests.messages import raises_message


def _serving(rate: str = "constant", workers: int = 3) -> tuple[Server, torch.optim.Optimizer]:
    """Return a server with one parameter, 1.0, and its optimizer, which steps by the gradient."""
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    server = Server(workers, WorkDispatcher(workers, None), rate)
    server.begin(0, part_of(optimizer, [parameter]), [7])
    assert server.dispatcher is not None
    for worker in range(workers):
        server.dispatcher.take(worker, 0, 100, 4)
    return server, optimizer


def _push(server: Server, worker: int, optimizer: torch.optim.Optimizer) -> float:
    gradient = torch.full((1,), 0.25, dtype=torch.float64)
    weights, _ = server.push_all(0, worker, settings_of(optimizer), [gradient])
    assert server.dispatcher is not None
    server.dispatcher.take(worker, 0, 100, 4)
    return float(weights[0])


def test_staleness_counts_the_updates_between_a_pull_and_its_push() -> None:
    server, optimizer = _serving()

    for worker in (0, 0, 1, 0):
        _push(server, worker, optimizer)
    server.pull(2)
    _push(server, 2, optimizer)

    assert server.dispatcher is not None
    report = server.dispatcher.report()
    assert [each["maximum"] for each in report["workers"]] == [1, 2, 0]
    assert [each["count"] for each in report["workers"]] == [3, 1, 1]
    assert report["mean"] == pytest.approx(3 / 5)


def test_an_old_update_can_be_made_smaller_by_its_staleness() -> None:
    server, optimizer = _serving("staleness")

    weights = [_push(server, worker, optimizer) for worker in (0, 1, 2)]

    assert weights == pytest.approx([0.75, 0.5, 0.375])


def test_sent_weights_do_not_change() -> None:
    server, optimizer = _serving()
    gradient = torch.full((1,), 0.25, dtype=torch.float64)

    sent, _ = server.push_now(0, 0, settings_of(optimizer), [gradient])
    _push(server, 1, optimizer)

    assert sent[0].tolist() == [0.75]
    assert server.pull(0)[7].tolist() == [0.5]


def test_the_update_of_a_lost_worker_changes_nothing() -> None:
    server, optimizer = _serving()
    server.leave(1)

    with raises_message(RuntimeError):
        _push(server, 1, optimizer)

    assert server.pull(0)[7].tolist() == [1.0]


def test_a_server_without_a_dispatcher_also_refuses_a_lost_worker() -> None:
    server, optimizer = _serving()
    server.dispatcher = None
    server.leave(1)

    with raises_message(RuntimeError):
        server.push_now(0, 1, settings_of(optimizer), [torch.ones(1, dtype=torch.float64)])

    assert server.pull(0)[7].tolist() == [1.0]


def test_pulled_weights_do_not_change() -> None:
    server, optimizer = _serving()

    pulled = server.pull(0)
    _push(server, 1, optimizer)

    assert pulled[7].tolist() == [1.0]


def test_a_step_that_waits_for_an_ended_worker_raises() -> None:
    server, optimizer = _serving(workers=2)
    gradients = [torch.zeros(1, dtype=torch.float64)]

    waiting = server.push(0, 0, settings_of(optimizer), gradients)
    server.leave(1)

    with raises_message(RuntimeError):
        waiting.value()
    with pytest.raises(RuntimeError, match="have ended"):
        server.push(0, 0, settings_of(optimizer), gradients)
