"""Batch norm under unequal shares: exact over all ranks, or warned about, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.normed import alone, train
from tests.multiproc.training import relative_error


@pytest.mark.parametrize("policy", ["static:5,11", "static:0,4,12", "static:1,3,12"])
def test_statistics_over_all_ranks_are_those_of_one_process(ranks: RankPool, policy: str) -> None:
    expected = alone()

    for reported in ranks.run(train, policy.count(",") + 1, policy, {}):
        assert len(reported["steps"]) == len(expected)
        for (gradient, buffers), (true_gradient, true_buffers) in zip(
            reported["steps"], expected, strict=True
        ):
            assert relative_error(gradient, true_gradient) <= 1e-12
            assert relative_error(buffers, true_buffers) <= 1e-12
        assert not any("batch norm" in text for text in reported["said"])


# Policy, and what the loader is asked for; what is refused.
MICRO: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "shares that move": ("adaptive", {"micro": 5}, ("rank 0",)),
    "shares that move, norm first": (
        "adaptive",
        {"micro": 5, "norm_first": True},
        ("rank 0", "max_micro_batch", "rank 1"),
    ),
    # Two each; but the tail's shares of 4 and 6 would be one and two.
    "the tail": ("static:7,9", {"micro": 5}, ()),
    "costs": ("uniform", {"micro": 5, "costs": True}, ()),
}


@pytest.mark.parametrize("name", MICRO)
def test_unequal_numbers_of_micro_batches_are_refused_alike_before_training(
    ranks: RankPool, name: str
) -> None:
    policy, options, complaint = MICRO[name]

    reported, other = ranks.run(train, 2, policy, options)

    assert reported == other
    assert reported["step"] == 0
    assert reported["error"].startswith("ConfigError: ")
    check_message(reported["error"], *complaint)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("static:7,9", {"micro": 5, "drop_last": True}),
        ("uniform", {"micro": 4, "drop_last": True}),
        ("adaptive", {"micro": 15}),
    ],
)
def test_equal_numbers_of_micro_batches_are_allowed(
    ranks: RankPool, policy: str, options: dict[str, Any]
) -> None:
    for reported in ranks.run(train, 2, policy, options):
        assert "error" not in reported
        assert len(reported["steps"]) == (3 if "drop_last" in options else 4)


def test_a_tail_that_leaves_one_sample_to_a_rank_is_said_before(ranks: RankPool) -> None:
    for reported in ranks.run(train, 2, "static:8,8", {"shared": False, "length": 35}):
        assert reported["step"] == 2
        check_message(reported["said"])


def test_plain_batch_norm_under_unequal_shares_is_warned_about(ranks: RankPool) -> None:
    for reported in ranks.run(train, 2, "static:5,11", {"shared": False}):
        warnings = [text for text in reported["said"] if "batch norm" in text]
        assert len(warnings) == 1
        assert "stride.sync_batch_norm" in warnings[0]
        assert relative_error(reported["steps"][0][0], alone()[0][0]) > 1e-3


def test_plain_batch_norm_under_equal_shares_is_not(ranks: RankPool) -> None:
    for reported in ranks.run(train, 2, "static:8,8", {"shared": False}):
        assert not any("batch norm" in text for text in reported["said"])


def test_a_share_of_one_is_refused(ranks: RankPool) -> None:
    one, _ = ranks.run(train, 2, "static:1,15", {"shared": False})

    assert one["step"] == 0
    check_message(one["error"], "BatchNorm1d")
    assert "Stride(min_share=2)" in one["error"]
