"""The tables of hard clusters: what is compared, and what counts as stuck."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from benchmarks import controller

from evenstride.core.policies import policy_from_spec
from evenstride.sim.engine.lockstep import Simulation
from evenstride.sim.engine.virtual_workers import Cluster
from evenstride.sim.scenario.timeline import Timeline
from tests.unit.sim.clusters import FAST, SLOW, scenario
from tests.unit.sim.recording import Recording


def test_every_table_has_cases_with_names_of_their_own() -> None:
    for name, make in controller.TABLES.items():
        cases = list(make())

        assert {case.table for case in cases} == {name}
        assert len({case.name for case in cases}) == len(cases) > 2


def test_the_best_fixed_split_is_the_best_of_all_over_the_whole_run() -> None:
    event = {"kind": "periodic", "at": 3, "workers": [0, 1], "speed": 0.3, "period": 7}
    made = scenario(workers=[FAST, SLOW, {**FAST, "wave": 4}], global_batch=24, events=[event])
    curves, timeline = Cluster(made, 0).usual, Timeline(made, 0)
    speeds = [timeline.speed(step) for step in range(made.steps)]

    def total_s(split: tuple[int, ...]) -> float:
        return sum(float(curves.at_speed(s).at(np.array(split)).max()) for s in speeds)

    found = controller.best_fixed(made, 0)

    splits = [s for s in product(range(1, 24), repeat=3) if sum(s) == 24]
    assert found is not None
    assert total_s(found) == pytest.approx(min(map(total_s, splits)), rel=1e-9)


def test_with_a_changing_fleet_there_is_no_fixed_split() -> None:
    made = scenario(events=[{"kind": "leave", "at": 3, "workers": 0}])

    assert controller.best_fixed(made, 0) is None


def test_a_line_has_means_over_seeds_and_the_worst_of_them() -> None:
    made = scenario(workers=[{**FAST, "noise": 0.1}, SLOW])

    line = controller.perform((controller.Case("calm", "made", made), 2))

    assert set(line.real) == {"adaptive", "uniform", "informed", "fixed"}
    assert line.noise_free["informed"] <= line.noise_free["fixed"] == pytest.approx(1.0)
    assert 1 < line.worst_real <= line.real["adaptive"] / line.real["uniform"] * 1.01
    assert "made" in controller.text(line)


def test_a_bad_start_says_nothing_about_speed() -> None:
    usual, bad = (Recording(policy_from_spec("adaptive")) for _ in range(2))

    Simulation(scenario(), usual, 0).run()
    controller.BadStart(scenario(), bad, 0).run()

    assert (usual.steps[:2], bad.steps[:2]) == ([0, 1], [1, 2])


@pytest.mark.parametrize("arguments", [["--table", "waves,magic"], ["--seeds", "0"]])
def test_invalid_requests_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert controller.main(arguments) == 2
    assert "expected" in capsys.readouterr().err
