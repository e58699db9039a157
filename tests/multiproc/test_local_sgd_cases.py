"""Local SGD beyond plain training: buffers, early ends, states, several optimizers, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenstride.testing import RankPool
from tests.multiproc.local_sgd_cases import (
    TABLE,
    buffered,
    divided,
    limited,
    refused,
    resumed,
    saved_and_kept,
    settled,
)
from tests.multiproc.training import FEATURES, relative_error, rows

OUTER = "outer_rate=0.7,outer_momentum=0.9"


def test_running_statistics_are_averaged_and_what_never_changes_stays(ranks: RankPool) -> None:
    first, second = ranks.run(buffered, 2, "local-sgd(every=2)")

    norms = [nn.BatchNorm1d(FEATURES, dtype=torch.float64) for _ in range(2)]
    data = rows(120)
    for (ids, buffers), (other_ids, _), norm in zip(first, second, [0, 1, 0, 1], strict=True):
        for rank, mine in enumerate((ids, other_ids)):
            norms[rank](data[mine][1])
        if norm:  # the step ends a round
            means = torch.stack([n.running_mean for n in norms if n.running_mean is not None])
            mean = torch.tensor([[1 / 3], [2 / 3]], dtype=torch.float64).mul(means).sum(0)
            for n in norms:
                n.running_mean = mean.clone()
            assert relative_error(buffers["norm.running_mean"], mean.tolist()) <= 1e-12
    alike = [mine == others for (_, mine), (_, others) in zip(first, second, strict=True)]
    assert alike == [False, True, False, True]
    assert first[1][1]["norm.num_batches_tracked"] == 2, "whole numbers are rank 0's"
    assert {tuple(buffers["table"]) for _, buffers in first + second} == {TABLE}


def test_before_local_steps_begin_statistics_are_averaged_with_each_epoch(ranks: RankPool) -> None:
    first, second = ranks.run(buffered, 2, "local-sgd(every=2,after=100)")

    alike = [mine == others for (_, mine), (_, others) in zip(first, second, strict=True)]
    assert alike == [False, False, False, True]


def test_a_round_can_be_settled_early_and_the_others_end_where_they_would(ranks: RankPool) -> None:
    first, second = ranks.run(settled, 2)

    alike = [mine == others for (_, mine), (_, others) in zip(first, second, strict=True)]
    # After steps 1 and 2, the early end, and steps 3 to 7.
    assert alike == [False, False, True, False, True, False, False, True]
    assert [done for done, _ in first] == alike
    assert [done for done, _ in second] == alike


def test_invalid_uses_are_refused_on_every_rank(ranks: RankPool) -> None:
    everywhere = ranks.run(refused, 2)

    for texts in everywhere:
        loader, drift, compress, scale = texts
        assert "weights ranks by their samples" in loader
        assert "differ between the steps" in drift
        assert "compress" in compress
        assert "weights ranks by their samples" in scale


@pytest.mark.parametrize("sync", ["local-sgd(every=3,after=2)", f"local-sgd(every=3,{OUTER})"])
def test_several_optimizers_do_what_one_does(ranks: RankPool, sync: str) -> None:
    one = ranks.run(divided, 2, sync, 1)
    three = ranks.run(divided, 2, sync, 3)

    assert three == one


@pytest.mark.parametrize("stop", [7, 11])
def test_a_run_goes_on_where_it_was_saved(ranks: RankPool, stop: int) -> None:
    sync = f"local-sgd(every=4,after=2,{OUTER})"
    whole = ranks.run(resumed, 2, sync, None, None)

    before = ranks.run(resumed, 2, sync, stop, None)
    after = ranks.run(resumed, 2, sync, None, before[0])

    assert before[0] == before[1], "the outer optimizer's state is the same on all ranks"
    assert after == whole
    assert before[0][0][0]["step"] == stop


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_restored_run_goes_on_as_the_one_that_was_saved(ranks: RankPool, kind: str) -> None:
    whole = ranks.run(saved_and_kept, 2, kind, 9, None)
    assert whole[0][1] == whole[1][1], "what is saved is the same on all ranks"

    restored = ranks.run(saved_and_kept, 2, kind, 9, whole[1][0])

    assert [mine[2] for mine in restored] == [mine[2] for mine in whole]


def test_a_run_that_may_go_no_further_ends_with_one_model(ranks: RankPool) -> None:
    first, second = ranks.run(limited, 2, 6)

    assert first == second
