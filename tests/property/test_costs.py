"""Property: by cost, too, each position is distributed once, and costs follow the shares."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, example, given
from hypothesis import strategies as st

from evenstride.core.fleet import Shares
from evenstride.core.sampling.partition import EpochCursor, cut_by_cost, micro_batches_by_cost
from evenstride.runtime.coordination.draw_barrier import DrawBarrier
from evenstride.runtime.loading.loader_options import Costs
from evenstride.runtime.loading.micro_batch_limits import MicroBatchLimits
from evenstride.runtime.loading.position import EpochOrder
from evenstride.runtime.loading.sampler import StepSampler

costs_of = st.lists(st.floats(0.01, 100.0) | st.just(1.0), min_size=1, max_size=60)


@given(start=st.integers(0, 9), costs=costs_of, shares=st.lists(st.integers(0, 9), min_size=1))
def test_each_position_is_in_one_piece_and_costs_follow_the_shares(
    start: int, costs: list[float], shares: list[int]
) -> None:
    present = sum(share > 0 for share in shares)
    assume(0 < present <= len(costs))
    window = range(start, start + len(costs))

    pieces = cut_by_cost(window, tuple(shares), np.array(costs))

    positions = [position for piece in pieces if not piece.ghost for position in piece.positions]
    assert positions == list(window)
    for share, piece in zip(shares, pieces, strict=True):
        assert piece.ghost == (share == 0)
        assert len(piece.positions) >= 1
    if present < len(costs) / 10:  # where no worker needs to be given its only sample
        spent, wanted = 0.0, np.cumsum(shares) / sum(shares) * sum(costs)
        for end, piece in zip(wanted.tolist(), pieces, strict=True):
            spent += 0.0 if piece.ghost else sum(costs[p - start] for p in piece.positions)
            assert abs(spent - end) <= present * max(costs)


@given(count=st.integers(1, 60), shares=st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_equal_costs_are_counts(count: int, shares: list[int]) -> None:
    total = sum(shares)
    assume(total > 0)

    pieces = cut_by_cost(range(total), tuple(shares), np.ones(total))

    assert [piece.samples for piece in pieces] == shares


@given(costs=costs_of, at_most=st.floats(0.5, 150.0))
def test_micro_batches_keep_to_the_cost_and_are_as_few_as_that_allows(
    costs: list[float], at_most: float
) -> None:
    parts = micro_batches_by_cost(range(5, 5 + len(costs)), np.array(costs), at_most)

    assert [position for part in parts for position in part] == list(range(5, 5 + len(costs)))
    spent = [sum(costs[p - 5] for p in part) for part in parts]
    for part, cost, following in zip(parts, spent, [*parts[1:], range(0)], strict=True):
        assert cost <= at_most * (1 + 1e-9) or len(part) == 1
        if following:
            assert cost + costs[following[0] - 5] > at_most * (1 - 1e-9)


def _drawn(costs: list[int], shares: Shares, rank: int) -> list[list[int]]:
    """Return what a rank's sampler draws, step by step, in the data set's own order."""
    order, known = EpochOrder(len(costs), 0, shuffle=False), Costs(costs, len(costs))
    sampler = StepSampler(
        order, DrawBarrier(shares), rank, MicroBatchLimits(), seeded=False, costs=known
    )
    sampler.begin(0, EpochCursor(len(costs), sum(shares)), 0, None)
    return [np.array(keys).tolist() for keys in sampler]


@example(costs=3 * ([9] * 5 + [1] * 15), share=5)
@given(costs=st.lists(st.integers(1, 9), min_size=60, max_size=60), share=st.integers(1, 19))
def test_ranks_draw_what_costs_in_proportion_to_their_shares(costs: list[int], share: int) -> None:
    of_ranks = [_drawn(costs, (share, 20 - share), rank) for rank in range(2)]

    assert sorted(key for drawn in of_ranks for keys in drawn for key in keys) == list(range(60))
    for step, mine in enumerate(of_ranks[0]):
        total = sum(costs[20 * step : 20 * (step + 1)])
        assert abs(sum(costs[key] for key in mine) - total * share / 20) <= max(costs)
