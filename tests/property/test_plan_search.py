"""The planner's search against looking at everything, and its bounds against exact figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.fleet import FloatArray
from evenstride.core.gradients.noise_scale import Interval
from evenstride.errors import InfeasibleShares
from evenstride.planner.search.branch_and_bound import (
    SMALL,
    Bounds,
    Cells,
    Pair,
    Space,
    cells,
    price,
    search,
)
from evenstride.planner.search.selection import (
    NothingFits,
    Objective,
    ParetoFront,
    Wishes,
    at_most,
    choose,
    frontier,
)
from evenstride.planner.search.training_forecast import (
    ClusterChoice,
    Kind,
    TrainingForecast,
    TrainingTask,
    outlook,
)
from evenstride.planner.spot_losses import (
    PreemptionRate,
    SaveCosts,
    high_stretches,
    mean_stretches,
    slowdown,
)
from evenstride.planner.workload.step_time import Curve
from tests.effort import expensive
from tests.unit.planner.kinds import exactly, task, transience

_parts = st.floats(0.0, 0.3)


@st.composite
def _intervals(draw: st.DrawFn, values: st.SearchStrategy[float]) -> Interval:
    value = draw(values)
    return Interval(value, value * (1 - draw(_parts)), value * (1 + draw(_parts)))


@st.composite
def _curves(draw: st.DrawFn) -> Curve:
    per_sample_s = draw(st.sampled_from([1e-9, 2e-4, 5e-4, 1e-3, 3e-3, 0.04]))
    fixed_s = draw(st.sampled_from([0.0, 1e-3, 0.02, 0.3]))
    unit = draw(st.sampled_from([0.0, per_sample_s**2]))
    spread = (1000.0 * unit, -8.0 * unit, 0.1 * unit)
    error, noise = draw(st.floats(0.005, 0.6)), draw(st.sampled_from([0.0, 0.02, 0.1, 0.4]))
    return Curve(fixed_s or per_sample_s, per_sample_s, error, noise, spread=spread)


@st.composite
def _losses(draw: st.DrawFn) -> PreemptionRate | None:
    if draw(st.booleans()):
        return None
    low, factor = draw(st.sampled_from([1e-4, 0.02, 0.3])), draw(st.sampled_from([1.0, 3.0, 1e3]))
    return transience(*np.geomspace(low, low * factor, 20).tolist())


@st.composite
def _kinds(draw: st.DrawFn, name: str) -> Kind:
    return Kind(
        name,
        draw(st.sampled_from(["here", "here", "there"])),
        draw(st.sampled_from([1, 2, 8])),
        draw(_curves()),
        draw(_intervals(st.floats(0.1, 5.0))),
        draw(st.sampled_from([None, None, 3, 17, 100])),
        draw(_losses()),
    )


_saves = st.sampled_from(
    [
        SaveCosts(2.0, (120.0,)),
        SaveCosts(10.0, (60.0, 3600.0), drift=0.6),
        SaveCosts(5.0, (30.0,), 400.0),
    ]
)
_tasks = st.builds(
    lambda one, saves, linked, servers, beside_s: replace(
        one,
        saves=saves,
        links=one.links if linked else None,
        servers=servers,
        beside_s=beside_s,
    ),
    st.just(task()),
    _saves,
    st.booleans(),
    st.sampled_from([0, 0, 1, 3]),
    st.sampled_from([0.0, 0.5, 60.0]),
)
_quick_tasks = _tasks.map(lambda one: replace(one, saves=replace(one.saves, drift=0.0)))
_batches = st.lists(st.integers(1, 5000), min_size=1)
_confidences = st.sampled_from([0.5, 0.5, 0.75, 0.9, 0.975, 0.99])


def _bounds(bounds: Bounds, pair: Pair, grid: Cells) -> tuple[FloatArray, FloatArray]:
    """Return the bounds, which are at least the quick ones."""
    least = bounds.least(pair, grid)
    quick = (least.useful_s, least.useful_s / 3600.0 * price(pair, grid, "value"))
    whole = bounds.of(pair, grid, least.compute_s, least.error)
    for rough, close in zip(quick, whole, strict=True):
        assert (rough * (1 - 1e-12) <= np.where(np.isnan(close), inf, close)).all()
    return whole


def _judged(choice: ClusterChoice, one: TrainingTask) -> TrainingForecast | None:
    try:
        return outlook(choice, one)
    except InfeasibleShares:
        return None


def _choices(space: Space) -> Iterator[ClusterChoice]:
    """Yield every cluster of at most two kinds in a place, with every batch."""
    most = space.most_machines
    for batch in space.batches:
        for kind in space.kinds:
            yield from (ClusterChoice((kind,), (n,), batch) for n in range(1, most + 1))
        for one, two in combinations_with_replacement(space.kinds, 2):
            if one is not two and one.place == two.place:
                yield from (
                    ClusterChoice((one, two), (n, m), batch)
                    for n in range(1, most)
                    for m in range(1, most - n + 1)
                )


@expensive
@given(_kinds("a"), _kinds("b"), _quick_tasks, _confidences, _batches)
def test_no_choice_is_better_than_its_bound(
    one: Kind, two: Kind, what: TrainingTask, confidence: float, batches: list[int]
) -> None:
    """Whatever the curves, noise, memory, machines, losses, servers and batches."""
    batches, most = sorted(set(batches))[:2], 4
    bounds = Bounds(what, batches, most * max(one.workers, two.workers), confidence)
    for pair in ((one, one), (one, replace(two, place=one.place))):
        grid = cells(most, len(batches), mixed=pair[0] is not pair[1])
        rough = _bounds(bounds, pair, grid)
        for index in range(0, len(grid), 5):
            n, m = grid.machines[:, index].tolist()
            kinds, counts = (pair, (n, m)) if m else (pair[:1], (n,))
            found = _judged(ClusterChoice(kinds, counts, batches[grid.batch[index]]), what)
            if found is None:
                continue
            times = [at_most(end, confidence) for end in (found.time_s, found.cost_usd)]
            assert rough[0][index] <= times[0] * (1 + 1e-9)
            assert rough[1][index] <= times[1] * (1 + 1e-9)


@pytest.mark.parametrize("beside_s", [0.0, 0.5, 60.0, 6000.0])
@pytest.mark.parametrize("per_sample_s", [1e-9, 1e-6, 1e-4, 1e-3])
def test_the_bound_holds_where_links_are_not_known(per_sample_s: float, beside_s: float) -> None:
    """Shares that are not whole take less compute, whose end may lie later."""
    kind = Kind("a", "here", 2, Curve(per_sample_s, per_sample_s, 0.5), exactly(1.0))
    what = replace(task(links=None), beside_s=beside_s)
    grid = cells(1, 1, mixed=False)
    rough = _bounds(Bounds(what, [5], 2, 0.975), (kind, kind), grid)

    found = _judged(ClusterChoice((kind,), (1,), 5), what)

    assert found is not None
    assert rough[0][0] <= at_most(found.time_s, 0.975) * (1 + 1e-9)


def test_small_figures_keep_their_digits() -> None:
    assert at_most(Interval(1e-10, 0.5e-10, 4e-10), 0.75) == pytest.approx(1.6114e-10, rel=1e-4)


@pytest.mark.parametrize("machines", [1, 7, 40])
def test_the_bound_is_close_where_shares_are_large(machines: int) -> None:
    one = Kind("a", "here", 1, Curve(0.01, 0.001, 0.02, 0.05), exactly(1.0))
    two = replace(one, type="b", curve=Curve(0.02, 0.0023, 0.02, 0.05))
    bounds = Bounds(task(), [20_000], 80, 0.9)
    grid = cells(80, 1, mixed=True)
    rough = _bounds(bounds, (one, two), grid)
    (index,) = np.flatnonzero((grid.machines == machines).all(axis=0))

    found = _judged(ClusterChoice((one, two), (machines, machines), 20_000), task())

    assert found is not None
    assert rough[0][index] >= 0.99 * at_most(found.time_s, 0.9)


@expensive
@given(_losses(), _losses(), _saves, st.integers(1, 40), st.integers(0, 40), st.floats(60, 1e6))
def test_losses_cost_at_least_what_the_tables_say(
    one: PreemptionRate | None,
    two: PreemptionRate | None,
    saves: SaveCosts,
    n: int,
    m: int,
    useful_s: float,
) -> None:
    rates = [kind.rates_per_s if kind else (0.0,) * 20 for kind in (one, two)]
    together = [n * a + m * b for a, b in zip(*rates, strict=True)]
    if not any(together):
        return
    exact = slowdown(
        replace(transience(*[1.0] * 20), rates_per_s=tuple(together)), 1, useful_s, saves, 0.95
    )
    machines = np.array([[n], [m]])
    mean = mean_stretches(saves, one, two, machines)[0]
    fine = mean_stretches(saves, one, two, machines, fine=True)[0]
    high = high_stretches(saves, one, two, machines, np.array([useful_s]))[0]

    assert mean <= fine * (1 + 1e-12)
    assert fine <= exact.value * (1 + 1e-9)
    assert high <= exact.high * (1 + 1e-9)


_wishes = st.builds(
    Wishes,
    st.sampled_from([None, *Objective]),
    st.sampled_from([inf, inf, 300.0, 3600.0]),
    st.sampled_from([inf, inf, 0.5, 10.0]),
    _confidences,
)


@expensive
@given(_kinds("a"), _kinds("b"), _kinds("c"), _quick_tasks, _wishes, st.integers(1, 3))
def test_a_small_space_is_searched_to_the_end(
    one: Kind, two: Kind, three: Kind, what: TrainingTask, wishes: Wishes, most: int
) -> None:
    """The frontier is that of all choices, and so is the choice among them, limits kept or not."""
    space = Space((one, two, three), (48, 2000), most)
    judged = (_judged(choice, what) for choice in _choices(space))
    every = [each for each in judged if each is not None]
    best = frontier(every, wishes.confidence)

    found = search(space, what, wishes)

    assert found.looked_at <= SMALL
    assert found.gap == found.front_gap == 0.0
    assert _beaten(best, found.outlooks, wishes)
    assert _beaten(found.outlooks, best, wishes)
    twins = len(found.outlooks) != len(best)  # of which one is better by rounding alone
    if not best or (twins and wishes.aim is Objective.KNEE):
        return
    if not any(_keeps(one, wishes) for one in best):
        with pytest.raises(NothingFits, match="no cluster"):
            choose(found.outlooks, wishes)
        return
    mine, chosen = (choose(some, wishes).outlook for some in (found.outlooks, best))
    assert _figures([mine], wishes) == pytest.approx(_figures([chosen], wishes), rel=1e-7)


def _beaten(
    some: Sequence[TrainingForecast], others: Sequence[TrainingForecast], wishes: Wishes
) -> bool:
    """Return whether each of some is neither quicker nor cheaper than one of others."""
    figures = np.array(_figures(some, wishes)).reshape(-1, 2)
    return bool((ParetoFront.of(others, wishes).gains(*figures.T) <= 1e-7).all())


def _keeps(one: TrainingForecast, wishes: Wishes) -> bool:
    time_s, usd = _figures([one], wishes)
    return time_s <= wishes.deadline_s and usd <= wishes.budget_usd


def _figures(some: Sequence[TrainingForecast], wishes: Wishes) -> list[float]:
    ends = [(one.time_s, one.cost_usd) for one in some]
    return [at_most(end, wishes.confidence) for both in ends for end in both]


_points = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=12)


@given(_points, _points)
def test_what_a_point_gains_is_how_much_it_must_grow_to_be_beaten(
    front: list[tuple[float, float]], points: list[tuple[float, float]]
) -> None:
    some = ClusterChoice((Kind("a", "here", 1, Curve(0.01, 0.001, 0.02), exactly(1.0)),), (1,), 256)
    made = _judged(some, task())
    assert made is not None
    best = ParetoFront.of(
        (replace(made, time_s=exactly(t), cost_usd=exactly(c)) for t, c in front), Wishes()
    )

    gains = best.gains(*np.array(points).T)

    for (t, c), gain in zip(points, gains.tolist(), strict=True):
        grown = [max(time_s / t, usd / c) for time_s, usd in front]
        assert gain == pytest.approx(max(min(grown) - 1.0, 0.0), abs=1e-7)
