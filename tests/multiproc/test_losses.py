"""A loss that `scale` would weigh wrongly is noticed in the first step, and has a right form."""

from __future__ import annotations

import pytest

from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.losses import (
    alone,
    constant,
    divided,
    first_step,
    refused,
    summed,
    two_losses,
    unchecked,
    weighted,
)
from tests.multiproc.training import relative_error

REFUSED = {
    "sum": 'call stride.scale(loss, reduction="sum")',
    "sum of squares": 'call stride.scale(loss, reduction="sum")',
    "sum and a penalty": 'call stride.scale(loss, reduction="sum")',
    "a mean as a sum": "this one is a mean over the local samples",
}
WARNED = {
    "sum over a constant": "a sum divided by 1009, but this rank's batch has 4 samples",
    "sum over the global batch": "a sum divided by 12, which is the global batch",
    "a mean over some": "a mean over 23 elements of 4 samples",
    "class weights": "weight=class_weights[target].sum()",
    "ignored targets": "weight=(target != ignore_index).sum()",
}
RIGHT = [
    "mean",
    "mean and a penalty",
    "sum over the samples",
    "sum over the elements",
    "smoothed labels",
    "rows, then a mean",
    "a mean of several",
    "a sum of means",
    "equal class weights",
    "checkpointed",
    "weighted by its weight",
]
SPLIT = "static:4,3,5"


@pytest.mark.parametrize("policy", [SPLIT, "static:11,1,0"], ids=["three", "one and a ghost"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_surely_no_mean_is_refused_on_every_rank(
    ranks: RankPool, name: str, policy: str
) -> None:
    answers = [answer for answer, _ in ranks.run(first_step, 3, name, policy)]

    assert answers[0] == answers[1] == answers[2]
    kind, text = answers[0]
    assert kind == "ScaleError"
    assert REFUSED[name] in text


@pytest.mark.parametrize("name", WARNED)
def test_a_loss_that_is_maybe_no_mean_is_a_warning_of_one_rank(ranks: RankPool, name: str) -> None:
    answers = ranks.run(first_step, 3, name, SPLIT)

    assert [answer for answer, _ in answers] == [("", "")] * 3
    reported, *silent = [log for _, log in answers]
    assert len(reported) == 1
    assert WARNED[name] in reported[0]
    assert silent == [[], []]


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_is_a_mean_is_neither(ranks: RankPool, name: str) -> None:
    assert ranks.run(first_step, 3, name, SPLIT) == [(("", ""), [])] * 3


def test_the_look_can_be_switched_off(ranks: RankPool) -> None:
    assert ranks.run(unchecked, 2) == [(("", ""), [])] * 2


def test_a_divisor_that_does_not_follow_the_batch_is_a_warning(ranks: RankPool) -> None:
    for log in ranks.run(constant, 2, False):
        assert len(log) == 1
        check_message(log[0])


def test_a_divisor_that_follows_the_batch_is_not_reported(ranks: RankPool) -> None:
    assert ranks.run(constant, 2, True) == [[], []]


@pytest.mark.parametrize(
    ("name", "micro", "what"),
    [
        ("by ranks", None, "backward()"),
        ("by 3", 2, "backward()"),
    ],
)
def test_a_scaled_loss_that_is_divided_again_is_a_warning_of_rank_0(
    ranks: RankPool, name: str, micro: int | None, what: str
) -> None:
    reported, silent = ranks.run(divided, 2, name, micro)

    assert len(reported) == 1
    check_message(reported[0], what)
    assert silent == []


@pytest.mark.parametrize("name", ["not", "by a gradient scaler", "by 3"])
def test_other_factors_are_not_reported(ranks: RankPool, name: str) -> None:
    assert ranks.run(divided, 2, name, None) == [[], []]


def test_two_losses_may_count_half_each(ranks: RankPool) -> None:
    assert ranks.run(two_losses, 2) == [[], []]


@pytest.mark.parametrize("micro", [None, 2], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("policy", [SPLIT, "static:11,1,0"], ids=["three", "one and a ghost"])
@pytest.mark.parametrize("kind", ["sum", "tokens"])
def test_a_loss_that_adds_up_is_exact(
    ranks: RankPool, kind: str, policy: str, micro: int | None
) -> None:
    for gradients in ranks.run(summed, 3, kind, policy, micro):
        for step, expected in zip(gradients, alone(kind), strict=True):
            assert relative_error(step, expected) <= 1e-12


@pytest.mark.parametrize("micro", [None, 2], ids=["argument", "weight_fn"])
@pytest.mark.parametrize(
    "kind", ["class weights", "ignored", "smoothed", "class weights, smoothed"]
)
def test_weights_as_the_guide_gives_them_are_exact(
    ranks: RankPool, kind: str, micro: int | None
) -> None:
    for gradients in ranks.run(weighted, 3, kind, SPLIT, micro):
        for step, expected in zip(gradients, alone(kind), strict=True):
            assert relative_error(step, expected) <= 1e-12


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unknown", 'use "mean"'),
        ("a weight", "takes no weight"),
        ("a weight_fn", "takes no weight"),
    ],
)
def test_forms_that_cannot_be_are_refused(ranks: RankPool, name: str, text: str) -> None:
    answers = ranks.run(refused, 2, name)

    assert answers[0] == answers[1]
    assert answers[0][0] == "ScaleError"
    assert text in answers[0][1]
