"""Sequences of different lengths: the gradient is the mean over all tokens, however batched."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from evenstride.testing import RankPool
from tests.multiproc.sequences import BLOCK, MOST, alone_on, train
from tests.multiproc.training import relative_error


def _steps(results: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [list(parts) for parts in zip(*results, strict=True)]


@pytest.mark.parametrize("how", ["padded", "bucketed", "packed", "blocks"])
def test_the_gradient_is_the_mean_over_all_tokens(ranks: RankPool, how: str) -> None:
    results = ranks.run(train, 2, how, "static:5,19")

    for parts in _steps(results):
        truth = alone_on(how, [i for part in parts for i in part["ids"]])
        for part in parts:
            assert relative_error(part["gradient"], truth) <= 1e-12
            assert how == "blocks" or max(part["sizes"]) <= MOST or how == "padded"
    padding = sum(part["padding"] for part in chain.from_iterable(results))
    assert (padding == 0) == (how in ("packed", "blocks"))


def test_buckets_change_no_steps_samples_and_save_padding(ranks: RankPool) -> None:
    padded, bucketed = (
        _steps(ranks.run(train, 2, how, "static:5,19")) for how in ("padded", "bucketed")
    )

    for one, other in zip(padded, bucketed, strict=True):
        assert [sorted(part["ids"]) for part in one] == [sorted(part["ids"]) for part in other]
        assert [part["ids"] for part in one] != [part["ids"] for part in other]
    spent = [sum(part["padding"] for parts in run for part in parts) for run in (padded, bucketed)]
    assert spent[1] < spent[0] / 2


def test_blocks_are_full_and_each_is_trained_once(ranks: RankPool) -> None:
    results = ranks.run(train, 2, "blocks", "adaptive")

    ids = [i for parts in _steps(results) for part in parts for i in part["ids"]]
    assert ids == list(range(len(ids)))
    assert {size % BLOCK for part in chain.from_iterable(results) for size in part["sizes"]} == {0}
