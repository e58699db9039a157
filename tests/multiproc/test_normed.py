"""Batch norm under unequal shares: exact over all ranks, or warned about, or refused."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.multiproc.normed import alone, train
from tests.multiproc.training import relative_error


@pytest.mark.parametrize("policy", ["static:5,11", "static:0,4,12", "static:1,3,12"])
def test_statistics_over_all_ranks_are_those_of_one_process(ranks: RankPool, policy: str) -> None:
    expected = alone()

    for told in ranks.run(train, policy.count(",") + 1, policy, {}):
        assert len(told["steps"]) == len(expected)
        for (gradient, buffers), (true_gradient, true_buffers) in zip(
            told["steps"], expected, strict=True
        ):
            assert relative_error(gradient, true_gradient) <= 1e-12
            assert relative_error(buffers, true_buffers) <= 1e-12
        assert not any("batch norm" in text for text in told["said"])


def test_equal_numbers_of_micro_batches_are_allowed_and_unequal_ones_refused_alike(
    ranks: RankPool,
) -> None:
    for told in ranks.run(train, 2, "static:7,9", {"micro": 5}):
        # Two each; but the tail's shares of 4 and 6 would be one and two.
        assert told["step"] == 3
        assert told["error"].startswith(
            "ConfigError: shares of 4/6 samples would be trained in 1/2"
        )


def test_plain_batch_norm_under_unequal_shares_is_warned_about(ranks: RankPool) -> None:
    for told in ranks.run(train, 2, "static:5,11", {"shared": False}):
        warnings = [text for text in told["said"] if "batch norm" in text]
        assert len(warnings) == 1
        assert "stride.sync_batch_norm" in warnings[0]
        assert relative_error(told["steps"][0][0], alone()[0][0]) > 1e-3


def test_plain_batch_norm_under_equal_shares_is_not(ranks: RankPool) -> None:
    for told in ranks.run(train, 2, "static:8,8", {"shared": False}):
        assert not any("batch norm" in text for text in told["said"])


def test_a_share_of_one_is_refused(ranks: RankPool) -> None:
    one, _ = ranks.run(train, 2, "static:1,15", {"shared": False})

    assert one["step"] == 0
    assert "a BatchNorm1d got one value per channel" in one["error"]
    assert "Stride(min_share=2)" in one["error"]
