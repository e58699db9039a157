"""Machines that come and go, and what is told at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from examples.ions.bag import Bag, Design, make_bag, spread, work
from examples.ions.run import Slots, learning_curve, made_up, noise, replay
from examples.ions.simulate import Settings
from examples.ions.surrogate import Results, is_held_out


class Fleet:
    """Workers that are only names; remembers what happened."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.slots = Slots(self._start, self._kill)

    def _start(self) -> int:
        self.told.append(f"start {self.slots.started}")
        return self.slots.started

    def _kill(self, worker: int) -> None:
        self.told.append(f"kill {worker}")

    def live(self, who: list[list[int]], ticks: int) -> list[str]:
        left = iter([False] * ticks + [True])
        replay(np.array(who), self.slots, lambda: next(left), lambda: None)
        return self.told


def test_a_worker_lives_as_long_as_its_machine() -> None:
    fleet = Fleet()

    told = fleet.live([[0, -1], [0, 1], [-1, 1], [2, 1]], ticks=4)

    assert told == ["start 0", "start 1", "kill 0", "start 2"]
    assert (fleet.slots.started, fleet.slots.killed) == (3, 1)
    assert fleet.slots.here == {0: (2, 2), 1: (1, 1)}


def test_a_machine_in_the_place_of_another_is_a_new_worker() -> None:
    assert Fleet().live([[0], [1]], ticks=2) == ["start 0", "kill 0", "start 1"]


def test_a_trace_that_has_ended_begins_again_with_other_machines() -> None:
    assert Fleet().live([[0], [0]], ticks=3) == ["start 0", "kill 0", "start 1"]


def test_made_up_machines_come_and_go_by_their_seed() -> None:
    who = made_up(2, 2000, seed=0)

    assert who.shape == (2000, 2)
    assert np.array_equal(who, made_up(2, 2000, seed=0))
    assert not np.array_equal(who, made_up(2, 2000, seed=1))
    assert (who >= 0).mean() == pytest.approx(0.75, abs=0.1)
    assert 150 < who.max() < 400


@pytest.fixture(scope="module")
def bag(tmp_path_factory: pytest.TempPathFactory) -> Bag:
    """Eighteen small simulations, all finished."""
    settings = Settings(ions=6, replicas=2, equilibrate=1, sweeps=2, bins=8)
    filled = make_bag(tmp_path_factory.mktemp("bag"), Design(spread(18, 0), settings, 0, 10.0))
    work(filled, "one", lambda: False, lambda _: None)
    return filled


def test_the_curve_trains_more_and_more_and_never_what_is_held_out(
    bag: Bag, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[torch.Tensor] = []

    def keep(points: torch.Tensor, *_: object) -> None:
        trained.append(points)

    monkeypatch.setattr("examples.ions.run.fit", keep)
    curve = learning_curve(bag, steps=1, seed=0)

    assert [point["simulations"] for point in curve] == [8, 16]
    assert [len(points) for points in trained] == [8, 16]
    held_out, _ = Results(bag).tensors([7, 15])
    assert not any((row == trained[-1]).all(-1).any() for row in held_out)


def test_every_eighth_is_held_out() -> None:
    assert [job for job in range(20) if is_held_out(job)] == [7, 15]


def test_the_noise_is_that_of_the_held_out_simulations(bag: Bag) -> None:
    parts = []
    for job in (7, 15):
        result = bag.result(job)
        square = result["error_molar"].square().mean(-1) / 2
        parts.append((square.sqrt() / result["density_molar"].mean(-1)).mean())

    assert noise(bag) == pytest.approx(float(torch.stack(parts).mean()))


def test_results_are_trained_per_salt_and_with_both_walls_alike(bag: Bag) -> None:
    inputs, outputs = Results(bag).tensors([3])

    salt = bag.design.points[3][1]
    density = bag.result(3)["density_molar"]
    expected = (density + density.flip(-1)) / 2 / salt
    torch.testing.assert_close(outputs[0].reshape(2, -1), expected.float())
    assert 0 <= inputs.min() <= inputs.max() <= 1


def test_growth_is_judged_by_nothing_before_something_held_out_is_finished(
    tmp_path: Path,
) -> None:
    settings = Settings(ions=4, replicas=2, equilibrate=1, sweeps=1, bins=8)
    bag = make_bag(tmp_path, Design(spread(3, 0), settings, 0, 10.0))
    work(bag, "one", lambda: False, lambda _: None)

    assert Results(bag).error(torch.nn.Linear(3, 16)) is None
