"""Numbers of micro-batches that must be equal on all ranks, foreseen from what shares may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.sampling.partition import numbered_micro_batches
from evenstride.errors import ConfigError
from evenstride.runtime.loading.micro_batch_limits import (
    MicroBatchLimits,
    RankLayout,
    Spans,
    tail_spans,
)
from tests.messages import raises_message

MOVING = ((1, 15), (1, 15))
EVEN = ((8, 8), (8, 8))

# Spans, micro-batches asked for, samples of the tail; and what is refused, if anything.
LAID_OUT: dict[str, tuple[Spans, list[int | None], int, tuple[str, ...] | None]] = {
    "no micro-batches": (MOVING, [None, None], 5, None),
    "as large as any share": (MOVING, [15, 20], 5, None),
    "a share that may be larger": (
        MOVING,
        [14, 14],
        0,
        ("1 on rank 0", "2 on rank 1", "max_micro_batch=14", "max_share="),
    ),
    "on one rank only": (MOVING, [None, 4], 0, ("1 on rank 0", "4 on rank 1")),
    "two each, always": (((5, 8), (6, 8)), [4, 4], 0, None),
    "two each, but in the tail": (((5, 8), (6, 8)), [4, 4], 6, ("drop_last=True",)),
    "equal and fixed": (EVEN, [4, 4], 0, None),
    "equal and fixed, and so in the tail": (EVEN, [4, 4], 10, None),
    "equal and fixed, but not in the tail": (
        EVEN,
        [4, 4],
        9,
        ("1 on rank 1", "2 on rank 0"),
    ),
    "fixed, of the same number": (((7, 7), (9, 9)), [5, 5], 0, None),
    "fixed, of different numbers": (((5, 5), (11, 11)), [5, 5], 0, ("1 on rank 0", "3 on rank 1")),
    "unequal sizes that make it even": (((4, 4), (12, 12)), [2, 6], 0, None),
    "a rank left out": (((0, 0), (16, 16)), [8, 8], 0, ("1 on rank 0", "2 on rank 1")),
    "one rank between the others' ends": (
        ((5, 9), (8, 8)),
        [4, 4],
        0,
        ("2 on rank 1", "3 on rank"),
    ),
    "one process": (((16, 16),), [4], 3, None),
}


@pytest.mark.parametrize("name", LAID_OUT)
@pytest.mark.parametrize("norm_first", [True, False])
def test_numbers_that_may_differ_are_refused_when_loader_and_norm_meet(
    name: str, norm_first: bool
) -> None:
    spans, asked, tail, complaint = LAID_OUT[name]
    fit = MicroBatchLimits(layout=RankLayout(spans))
    if norm_first:
        fit.require_even()
    else:
        fit.lay_out(asked, tail, by_cost=False)
    before = MicroBatchLimits(layout=fit.layout, even=fit.even, micro=fit.micro)

    def meet() -> None:
        if norm_first:
            fit.lay_out(asked, tail, by_cost=False)
        else:
            fit.require_even()

    if complaint is None:
        meet()
        assert (fit.even, fit.layout.asked, fit.layout.tail) == (len(spans) > 1, tuple(asked), tail)
    else:
        with raises_message(ConfigError, *complaint):
            meet()
        assert fit == before, "a refusal changes nothing"


@pytest.mark.parametrize("norm_first", [True, False])
def test_shares_of_an_open_batch_may_become_any(norm_first: bool) -> None:
    """So equal shares that fit into one micro-batch now need not fit later."""
    fit = MicroBatchLimits(layout=RankLayout(((4, 4), (4, 4)), open=True))
    if norm_first:
        fit.require_even()
    else:
        fit.lay_out([4, 4], 0, by_cost=False)

    with raises_message(ConfigError, "global_batch"):
        fit.lay_out([4, 4], 0, by_cost=False) if norm_first else fit.require_even()

    MicroBatchLimits(layout=RankLayout(((1, 7), (1, 7)), open=True)).require_even()
    MicroBatchLimits(layout=RankLayout(((8, 8),), open=True)).lay_out([4], 0, by_cost=False)


@pytest.mark.parametrize(("asked", "refused"), [([None, 900], True), ([None, None], False)])
def test_micro_batches_by_cost_are_refused_on_every_rank(
    asked: list[int | None], refused: bool
) -> None:
    fit = MicroBatchLimits(layout=RankLayout(EVEN))
    fit.lay_out(asked, 0, by_cost=True)

    if refused:
        with raises_message(ConfigError):
            fit.require_even()
    else:
        fit.require_even()
    assert fit.even != refused


def test_ranks_are_named_that_can_differ() -> None:
    fit = MicroBatchLimits(layout=RankLayout(((1, 15), (8, 8))), even=True)

    with raises_message(ConfigError, "rank 0", "rank 1"):
        fit.lay_out([4, 4], 0, by_cost=False)


@pytest.mark.parametrize("tail", [1, 2, 5, 9])
def test_the_spans_of_a_tail_hold_whatever_the_shares_are(tail: int) -> None:
    spans = ((2, 6), (4, 8))

    of_tail = tail_spans(spans, tail)

    for first in range(2, 7):
        fixed = tail_spans(((first, first), (10 - first, 10 - first)), tail)
        assert sum(share for share, _ in fixed) == tail
        for (low, high), (share, _) in zip(of_tail, fixed, strict=True):
            assert low <= share <= high


@given(start=st.integers(0, 50), length=st.integers(0, 60), number=st.integers(1, 12))
def test_a_given_number_of_micro_batches_covers_a_share(
    start: int, length: int, number: int
) -> None:
    parts = numbered_micro_batches(range(start, start + length), number)

    assert len(parts) == number
    assert [place for part in parts for place in part] == list(range(start, start + length))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(batch=st.integers(1, 60), number=st.integers(1, 8), window=st.integers(1, 60))
def test_a_short_step_has_as_many_batches_as_its_samples_need(
    batch: int, number: int, window: int
) -> None:
    window = min(window, batch)
    found = MicroBatchLimits(number=number).batches_in(window, batch)

    assert found is not None
    assert 1 <= found <= number
    assert (found == number) >= (window == batch)
    assert (found - 1) * batch < window * number <= found * batch


def test_memory_follows_the_share_unless_the_size_of_batches_is_set() -> None:
    by_number, by_size = MicroBatchLimits(), MicroBatchLimits()
    by_number.ask(None, 4, by_cost=False)
    by_size.lay_out([4], 0, by_cost=False)
    by_size.ask(4, None, by_cost=False)

    assert by_number.micro
    assert by_number.follows_share
    assert not by_size.follows_share
    by_number.exceeded(3)
    assert not by_number.follows_share
