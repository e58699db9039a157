"""The ions example on real processes: data that grow while they are trained, workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples.ions.bag import Bag, Design, make_bag, spread, work
from examples.ions.simulate import Settings
from examples.ions.surrogate import Feed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evenstride
from evenstride import Checkpointer
from evenstride.testing import RankPool

ROOT = Path(__file__).parents[2]
SETTINGS = Settings(ions=6, replicas=2, equilibrate=1, sweeps=2, bins=4)
GROWTH = ([0, 1, 2], [0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 6], list(range(10)))


class Growing:
    """A bag whose simulations seem to be finished at certain epochs, one look after another."""

    def __init__(self, folder: Path, growth: tuple[list[int], ...]) -> None:
        self._bag, self._looks = Bag(folder), iter(growth)
        self.design = self._bag.design

    def finished(self) -> list[int]:
        return next(self._looks)

    def result(self, job: int) -> dict[str, Any]:
        return self._bag.result(job)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten finished simulations."""
    path = tmp_path_factory.mktemp("bag")
    bag = make_bag(path, Design(spread(10, 0), SETTINGS, 0, 60.0))
    work(bag, "one", lambda: False, lambda _: None)
    return path


def trained(
    rank: int, folder: Path, growth: tuple[list[int], ...], epochs: int, steps: int, saved: Path
) -> list[tuple[int, int]]:
    """Train as the example does, and save after the last step.

    Returns:
        (epoch, simulation) of what this rank trained, in order.
    """
    # Another rank's look at the folder is never asked for.
    looks = growth if rank == 0 else ()
    bag: Any = Growing(folder, looks)
    torch.manual_seed(0)
    net = nn.Linear(3, 2 * SETTINGS.bins)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    stride = evenstride.Stride(global_batch=4, seed=0, policy="static:3,1")
    model = stride.watch(DistributedDataParallel(net))
    feed = Feed(bag, stride, least=1)
    checkpoint = Checkpointer(
        saved, stride, model=model, optimizer=optimizer, every=steps, extra={"feed": feed}
    )
    checkpoint.restore()
    every, _ = feed.results.tensors(list(range(10)))
    seen = []
    while stride.epoch < epochs and steps:
        for x, y in feed.loader():
            rows = [int((every == row).all(-1).nonzero()) for row in x]
            seen += [(stride.epoch, job) for job in rows[: stride.samples]]
            stride.scale(F.mse_loss(model(x), y)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
            steps -= 1
            if not steps:
                break
    checkpoint.close()
    stride.close()
    return seen


def of_epoch(seen: list[list[tuple[int, int]]], epoch: int) -> list[int]:
    return sorted(job for rank in seen for number, job in rank if number == epoch)


def expected(epoch: int) -> list[int]:
    return [job for job in GROWTH[epoch] if job != 7]  # the one that is held out


def test_each_epoch_trains_every_finished_sample_once_while_the_data_grow(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    seen = ranks.run(trained, 2, folder, GROWTH, 4, 100, tmp_path)

    for epoch in range(4):
        assert of_epoch(seen, epoch) == expected(epoch)
    assert len(seen[0]) > len(seen[1]), "the split is unequal"


def test_a_restart_in_mid_epoch_keeps_to_the_list_the_epoch_began_with(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    before = ranks.run(trained, 2, folder, GROWTH, 4, 2, tmp_path)
    # Everything is finished by now, but the epoch under way has begun with six.
    after = ranks.run(trained, 2, folder, GROWTH[3:], 3, 100, tmp_path)

    assert len(of_epoch(before, 1)) == 4
    assert sorted(of_epoch(before, 1) + of_epoch(after, 1)) == expected(1)
    assert of_epoch(after, 2) == expected(3)


def test_a_restart_between_epochs_includes_what_has_finished_meanwhile(
    ranks: RankPool, folder: Path, tmp_path: Path
) -> None:
    ranks.run(trained, 2, folder, GROWTH, 4, 1, tmp_path)
    after = ranks.run(trained, 2, folder, GROWTH[3:], 2, 100, tmp_path)

    assert of_epoch(after, 1) == expected(3)


def start_worker(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.ions.bag", "work", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for_a_state(worker: subprocess.Popen[bytes], folder: Path) -> None:
    while not list((folder / "states").glob("[0-9]*.pt")):
        try:
            code = worker.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the worker ended with code {code} before it had saved anything")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_what_a_worker_had_done_outlives_it(tmp_path: Path, how: signal.Signals) -> None:
    # So long that no worker comes to the end of it.
    settings = Settings(ions=20, replicas=2, equilibrate=0, sweeps=10**6, bins=8)
    bag = make_bag(tmp_path, Design(spread(1, 0), settings, 0, 5.0, beat_sweeps=1, save_sweeps=20))
    worker = start_worker(tmp_path)
    try:
        wait_for_a_state(worker, tmp_path)
        worker.send_signal(how)
        code = worker.wait(30)
    finally:
        worker.kill()
        worker.wait()
    past_s = 6.0 if how is signal.SIGKILL else 0.0  # a claim that is handed back is free at once

    claim = Bag(tmp_path, clock=lambda: bag.clock() + past_s).claim("next")

    assert claim is not None
    assert code == (-signal.SIGKILL if how is signal.SIGKILL else 0)
    status = claim.bag.status()
    assert (status["finished"], status["claims"], status["resumed"]) == (0, 2, 1)
    assert (status["taken_over"], status["handed_back"]) == ((1, 0) if code else (0, 1))
    state, alone = claim.state(), bag.design.simulation(0)
    assert state is not None
    alone.advance(state["sweeps"])
    assert state["sweeps"] > 0
    assert torch.equal(state["counts"], alone.state_dict()["counts"])
