"""The full search compares measured clusters only, at their measured steps."""

from __future__ import annotations

import pytest

from evenstride.errors import ConfigError
from evenstride.planner.search.full_search import full_search, gaps
from evenstride.planner.search.selection import Objective, Wishes
from evenstride.planner.workload.workload_profile import MeasuredCluster
from tests.messages import check_message, raises_message
from tests.unit.planner.kinds import kind, task

QUICKEST = Wishes(Objective.TIME)


def trained(count: int, batch: int, step_s: float, of: str = "box") -> MeasuredCluster:
    return MeasuredCluster(types=(of,) * count, batch=batch, step_s=step_s)


def test_it_chooses_by_measured_steps_whatever_the_curves_say() -> None:
    """By their curves, four workers need half the time of two. They were slower."""
    measured = [trained(2, 256, 0.2), trained(4, 256, 0.3)]

    found = full_search([kind("box"), kind("other")], task(), measured, QUICKEST)

    assert (found.looked_at, found.gap) == (2, 0.0)
    (best,) = found.outlooks
    assert best.name == "2 x box"
    steps = 10 * -(-100_000 // 256)
    assert best.time_s.value == pytest.approx(steps * 0.2)
    assert best.step.time_s == pytest.approx(0.2)
    assert 0.97 < best.time_s.low / best.time_s.value < 1.0, "a measured step is known well"
    assert best.cost_usd.value == pytest.approx(2 * steps * 0.2 / 3600)


def test_several_runs_of_a_cluster_have_their_mean_step() -> None:
    measured = [trained(2, 256, 0.1), trained(2, 256, 0.3)]

    found = full_search([kind("box")], task(), measured, QUICKEST)

    assert found.looked_at == 1
    assert found.outlooks[0].step.time_s == pytest.approx(0.2)


def test_machines_with_several_workers_and_mixes_are_rented_as_measured() -> None:
    mixed = MeasuredCluster(types=("pair", "pair", "box"), batch=256, step_s=0.2)
    kinds = [kind("pair", workers=2), kind("box"), kind("box", losses_per_h=0.01)]

    found = full_search(kinds, task(), [mixed, trained(3, 256, 0.1, "pair")], QUICKEST)

    assert found.looked_at == 2, "on demand, and with a spot machine; 3 workers fill no pairs"
    assert found.outlooks[0].name == "1 x box + 1 x pair"


def test_missing_combinations_are_said() -> None:
    measured = [trained(1, 64, 0.1), trained(2, 64, 0.1), trained(2, 256, 0.3)]

    check_message(gaps(measured), "1 of the 4")
    assert not gaps([*measured, trained(1, 256, 0.4)])


@pytest.mark.parametrize("measured", [[], [trained(2, 256, 0.2, "unknown")]])
def test_without_a_measured_cluster_it_is_refused(measured: list[MeasuredCluster]) -> None:
    with raises_message(ConfigError):
        full_search([kind("box")], task(), measured, QUICKEST)
