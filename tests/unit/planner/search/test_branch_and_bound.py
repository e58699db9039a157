"""The search, against looking at everything."""

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.gradients.noise_scale import Interval
from evenstride.errors import InfeasibleShares
from evenstride.planner.search.branch_and_bound import Space, search
from evenstride.planner.search.selection import Objective, Wishes, frontier
from evenstride.planner.search.training_forecast import (
    ClusterChoice,
    Kind,
    TrainingForecast,
    outlook,
    undominated,
)
from evenstride.planner.workload.step_time import exact_step, lateness, least_compute_s
from tests.effort import expensive
from tests.unit.planner.kinds import kind, task

BATCHES = (64, 256, 1024)
KINDS = (("a", 0.001, 1.0), ("b", 0.0011, 1.05), ("c", 0.0023, 0.4), ("d", 0.0007, 1.5))

kinds = st.builds(
    kind,
    name=st.sampled_from("abcdefgh"),
    per_sample_s=st.sampled_from([0.0005, 0.001, 0.002, 0.004]),
    usd_per_h=st.sampled_from([0.5, 1.0, 1.7, 3.0]),
    fixed_s=st.sampled_from([0.0, 0.01, 0.05]),
    workers=st.sampled_from([1, 2]),
    place=st.sampled_from(["here", "there"]),
    most=st.sampled_from([None, 40]),
    losses_per_h=st.sampled_from([None, None, None, 0.1, 1.0]),
)


def everything(some: tuple[Kind, ...], most: int) -> list[TrainingForecast]:
    """Return the outlook of every cluster of at most two kinds in a place."""
    found = list[TrainingForecast | None]()
    for one, two in combinations_with_replacement(some, 2):
        for first in range(1, most + 1):
            for second in range(most - first + 1) if one is not two else (0,):
                if one.place != two.place:
                    continue
                for batch in BATCHES:
                    if second:
                        found.append(judged(ClusterChoice((one, two), (first, second), batch)))
                        found.append(judged(ClusterChoice((two,), (second,), batch)))
                    else:
                        found.append(judged(ClusterChoice((one,), (first,), batch)))
    return [one for one in found if one is not None]


def judged(choice: ClusterChoice) -> TrainingForecast | None:
    try:
        return outlook(choice, task())
    except InfeasibleShares:
        return None


def test_a_space_too_large_to_judge_says_what_may_be_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With no time for exact looks but the first ones, the gap covers what was not judged."""
    some = tuple(kind(name, s, usd, noise=0.1) for name, s, usd in KINDS)
    space = Space(some, BATCHES, most_machines=12)
    every = everything(some, 12)
    monkeypatch.setattr("evenstride.planner.search.branch_and_bound.SMALL", 0)
    whole = search(space, task(), Wishes(Objective.COST))
    for limit in ("_MOST_WORK", "_SEEDS"):
        monkeypatch.setattr(f"evenstride.planner.search.branch_and_bound.{limit}", 1)

    hasty = search(space, task(), Wishes(Objective.COST))

    best = min(one.cost_usd.value for one in every)
    mine = min(one.cost_usd.value for one in hasty.outlooks)
    assert whole.gap == 0.0
    assert whole.outlooks[-1].cost_usd.value == pytest.approx(best)
    assert hasty.judged < whole.judged
    assert 0.0 < mine / best - 1.0 <= hasty.gap
    assert hasty.front_gap > 0.0


@expensive
@given(st.lists(kinds, min_size=1, max_size=3, unique_by=lambda k: (k.name, k.place)))
def test_no_cluster_beats_those_that_are_found(some: list[Kind]) -> None:
    found = search(Space(tuple(some), BATCHES, most_machines=3), task())
    best = frontier(everything(tuple(some), 3))

    assert [one.time_s.value for one in found.outlooks] == pytest.approx(
        [one.time_s.value for one in best]
    )
    assert found.gap == found.front_gap == 0.0


def test_of_two_kinds_the_mix_is_quicker_than_either() -> None:
    space = Space((kind("a"), kind("b", 0.002, 0.3)), (1024,), most_machines=3)

    found = search(space, task())

    assert found.outlooks[0].choice.name == "3 x a"
    assert any(len(one.choice.kinds) == 2 for one in found.outlooks)
    alone = search(Space(space.kinds, (1024,), 3, mixed=False), task())
    assert all(len(one.choice.kinds) == 1 for one in alone.outlooks)
    assert alone.looked_at < found.looked_at


def test_machines_of_one_cluster_are_in_one_place() -> None:
    some = (kind("a", place="east"), kind("b", 0.002, 0.3, place="west"))

    found = search(Space(some, (256, 1024), most_machines=8), task())

    assert all(len(one.choice.kinds) == 1 for one in found.outlooks)


def test_a_frontier_has_what_nothing_beats() -> None:
    found = search(Space((kind("a"),), (256,), most_machines=16), task()).outlooks

    times_s, usd = ([getattr(o, name).value for o in found] for name in ("time_s", "cost_usd"))
    assert times_s == sorted(times_s)
    assert usd == sorted(usd, reverse=True)
    assert len(found) > 3


def test_beaten_kinds_are_left_out_and_no_others() -> None:
    good, dear, slow, small = (
        kind("good"),
        kind("dear", usd_per_h=2.0),
        kind("slow", 0.002),
        kind("small", most=10),
    )
    cheap_slow, double = kind("cheap", 0.002, 0.4), kind("double", workers=2, usd_per_h=3.0)

    kept = undominated([dear, slow, small, good, cheap_slow, double])

    assert {k.type for k in kept} == {"good", "cheap", "double"}


def test_a_less_certain_cluster_beats_none_at_the_end_of_the_intervals() -> None:
    good = kind("good")
    unsure = replace(
        kind("unsure", usd_per_h=0.9), curve=replace(good.curve, error=0.5, per_sample_s=0.0009)
    )
    rising = replace(kind("rising", usd_per_h=0.9), usd_per_h=Interval(0.9, 0.9, 2.0))

    for other in (unsure, rising):
        assert [k.type for k in undominated([good, other])] == [other.type]
        assert len(undominated([good, other], ends=True)) == 2


def test_spot_and_on_demand_machines_of_a_type_are_different_kinds() -> None:
    kept = undominated([kind("a"), kind("a", usd_per_h=0.3, losses_per_h=0.1)])

    assert len(kept) == 2


def test_a_kind_with_recorded_waits_does_not_beat_one_without() -> None:
    """A cluster waits as all of its kinds do, so being lost as often says nothing then."""
    cheap = kind("cheap", usd_per_h=0.3, losses_per_h=0.1)
    other = kind("other", usd_per_h=0.4, losses_per_h=0.1)
    assert cheap.transience is not None
    waits = replace(cheap, transience=replace(cheap.transience, waits_s=(7200.0,)))

    assert len(undominated([cheap, other])) == 1
    assert len(undominated([waits, other])) == 2


def test_nothing_fits_memory() -> None:
    found = search(Space((kind("a", most=4),), (256,), most_machines=8), task())

    assert found.outlooks == ()


def test_a_rough_step_is_never_longer_than_the_exact_one() -> None:
    one, two = kind("a", fixed_s=0.03, most=200), kind("b", 0.003, fixed_s=0.001, workers=2)
    counts = np.array([[1, 2, 5, 3], [0, 1, 4, 7]])
    batches = np.array([150, 333, 1000, 64])
    workers, most = counts * [[1], [2]], (200, np.inf)
    rough, _ = least_compute_s(one.curve, two.curve, workers, batches, most, lateness(32))

    for column, batch, least_s in zip(counts.T.tolist(), batches.tolist(), rough, strict=True):
        both = [k.machines(n) for k, n in zip((one, two), column, strict=True) if n]
        exact_s = exact_step(both, batch, task().ring).compute_s
        assert exact_s * 0.9 <= least_s <= exact_s * (1 + 1e-12)


def test_a_rough_step_that_cannot_be_is_infinite() -> None:
    curve = kind("a").curve
    counts = np.array([[4, 4, 2, 1], [0, 4, 2, 0]])

    batches = np.array([401, 7, 400, 100])

    rough, _ = least_compute_s(curve, curve, counts, batches, (100.0, 100.0), lateness(8))

    assert np.isinf(rough).tolist() == [True, True, False, False]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_noise_makes_many_workers_late(noise: float) -> None:
    quiet = exact_step([kind("a").machines(8)], 800, task().ring)
    noisy = exact_step([kind("a", noise=noise).machines(8)], 800, task().ring)

    assert noisy.compute_s == pytest.approx(quiet.compute_s * (1 + 1.424 * noise), rel=0.01)
