"""Replicas that drift apart are noticed, brought together, and counted."""

from __future__ import annotations

import numpy as np
import pytest

from evenstride.testing import RankPool
from tests.messages import check_message, lines_with
from tests.multiproc.drifting import refused, train
from tests.multiproc.training import relative_error


def test_a_last_digit_up_and_down_is_noticed_and_mended(ranks: RankPool) -> None:
    one, other = ranks.run(train, 2, {"every": 5, "off": True})

    for reported in (one, other):
        assert (reported["checks"], reported["drifts"]) == (2, 2)
        check_message(lines_with(reported["reported"], "weights differed"))
    # One step after the last comparison, and two weights of that step.
    differing = [a != b for a, b in zip(one["weights"], other["weights"], strict=True)]
    assert 0 < sum(differing) <= 2
    # Without being mended, they would be eleven steps' digits apart.
    for a, b in zip(one["weights"], other["weights"], strict=True):
        assert abs(a - b) <= np.spacing(np.float32(max(abs(a), abs(b))))


def test_equal_replicas_are_left_alone(ranks: RankPool) -> None:
    one, other = ranks.run(train, 2, {"every": 5, "off": False})

    assert one["weights"] == other["weights"]
    assert (one["checks"], one["drifts"]) == (2, 0)


@pytest.mark.parametrize("every", [None, 0])
def test_ranks_on_one_kind_of_device_do_not_compare(ranks: RankPool, every: int | None) -> None:
    one, other = ranks.run(train, 2, {"every": every, "off": True})

    assert one["checks"] == 0
    assert one["weights"] != other["weights"]


def test_compressed_gradients_are_weighted_as_well(ranks: RankPool) -> None:
    plain, _ = ranks.run(train, 2, {"every": 0, "off": False})
    compressed, other = ranks.run(train, 2, {"every": 1, "off": False, "compress": "bf16"})

    assert compressed["drifts"] == 0
    assert compressed["weights"] == other["weights"]
    assert 0 < relative_error(compressed["weights"], plain["weights"]) < 0.01


@pytest.mark.parametrize(
    ("every", "says"),
    [([5, 6], ("RanksDisagree", "drift_check")), ([-1, 5], ("ConfigError",))],
)
def test_invalid_calls_are_refused_on_every_rank(
    ranks: RankPool, every: list[int], says: tuple[str, ...]
) -> None:
    one, other = ranks.run(refused, 2, every)

    check_message(one, *says)
    assert one == other
