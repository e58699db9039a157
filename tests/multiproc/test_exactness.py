"""Promise 1: on real processes the reduced gradient is that of one process on the union batch.

Every case is run a second time with the weighting broken on purpose, and must then fail.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evenstride.testing import RankPool
from tests.multiproc.exactness import alone, train
from tests.multiproc.training import Loop, relative_error

FLOAT64 = 1e-12

CASES = {
    "two unequal shares": (2, Loop(30, 90, "static:7,23")),
    "a share of 1": (3, Loop(20, 60, "static:1,12,7")),
    "a share of 0": (3, Loop(30, 90, "static:0,20,10")),
    "a share of 0 whose loss is infinite": (3, Loop(30, 90, "static:0,20,10", poison=0)),
    "micro-batches in unequal number": (2, Loop(16, 48, "static:3,13", micro=4)),
    "micro-batches in equal number": (2, Loop(16, 48, "static:3,13", pieces=4)),
    "tokens in micro-batches in equal number": (
        3,
        Loop(14, 42, "static:0,3,11", kind="tokens", pieces=4),
    ),
    "micro-batches with a share of 0": (3, Loop(16, 48, "static:0,3,13", micro=4)),
    "a short last batch": (2, Loop(30, 70, "static:7,23", steps=4)),
    "a tail smaller than the workers": (4, Loop(12, 26, "static:1,5,3,3", steps=4)),
    "token weights with padding": (2, Loop(14, 42, "static:3,11", kind="tokens")),
    "token weights in micro-batches": (3, Loop(14, 42, "static:1,9,4", kind="tokens", micro=3)),
    "token weights given to scale": (2, Loop(14, 42, "static:3,11", kind="tokens-argument")),
    "token weights with a share of 0": (3, Loop(14, 42, "static:0,9,5", kind="tokens")),
    "gradient clipping": (2, Loop(30, 90, "static:7,23", clip=1e-3)),
    "a gradient scaler": (2, Loop(30, 90, "static:7,23", scaler=True)),
    "a static graph in micro-batches": (2, Loop(16, 48, "static:3,13", micro=4, static_graph=True)),
    "memory for less on one rank": (2, Loop(30, 90, "static:7,23", fits=(99, 6))),
    "memory for less on all ranks": (3, Loop(30, 90, "static:7,11,12", fits=(3, 4, 1))),
    "memory for less, tokens": (2, Loop(14, 42, "static:3,11", kind="tokens", fits=(2, 4))),
    "memory for less with a share of 0": (3, Loop(30, 90, "static:0,20,10", fits=(1, 6, 9))),
    "memory for less than a micro-batch": (2, Loop(30, 90, "static:7,23", micro=9, fits=(3, 5))),
    "whole micro-batches": (2, Loop(44, 132, "static:13,31", micro=4, quanta=(8, 4))),
    "memory that ends in the loss": (2, Loop(30, 90, "static:7,23", fits=(99, 6), late=True)),
    "in the loss, with unused parameters": (
        2,
        Loop(30, 90, "static:7,23", fits=(3, 99), late=True, unused=True),
    ),
    "in the loss, with micro-batches": (
        2,
        Loop(30, 90, "static:7,23", micro=9, fits=(3, 5), late=True),
    ),
    "by cost": (3, Loop(30, 80, "static:7,11,12", costs="array", steps=5)),
    "by cost in micro-batches": (2, Loop(30, 80, "static:7,23", costs="function", micro=60)),
    "by cost with a share of 0": (3, Loop(30, 90, "static:0,20,10", costs="array")),
    "by cost, memory for less": (2, Loop(30, 90, "static:7,23", costs="array", fits=(3, 5))),
    "adaptive shares": (3, Loop(30, 90, "adaptive", steps=8)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_union_batch(ranks: RankPool, name: str) -> None:
    world_size, loop = CASES[name]

    everywhere = ranks.run(train, world_size, loop)

    expected = alone(loop)
    for gradients in everywhere:
        assert len(gradients) == len(expected)
        for actual, truth in zip(gradients, expected, strict=True):
            assert relative_error(actual, truth) <= FLOAT64


@pytest.mark.parametrize("name", [name for name in CASES if name != "adaptive shares"])
def test_a_broken_weight_is_noticed(ranks: RankPool, name: str) -> None:
    world_size, loop = CASES[name]
    loop = replace(loop, broken=True, poison=None)

    gradients = ranks.run(train, world_size, loop)[0]

    worst = max(map(relative_error, gradients, alone(replace(loop, broken=False))))
    assert not worst <= 1e4 * FLOAT64


def test_half_precision_on_the_wire_is_as_exact_as_half_precision(ranks: RankPool) -> None:
    loop = Loop(30, 90, "static:7,23", hook="fp16")

    gradients = ranks.run(train, 2, loop)[0]
    broken = ranks.run(train, 2, replace(loop, broken=True))[0]

    expected = alone(loop)
    assert max(map(relative_error, gradients, expected)) <= 4 * 2.0**-11
    assert max(map(relative_error, broken, expected)) > 0.05


def test_single_precision_is_within_what_reordering_the_sum_makes(ranks: RankPool) -> None:
    loop = Loop(256, 1024, "static:37,219", dtype="float32", steps=2)
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(256, generator=generator).tolist() for _ in range(8)]

    gradients = ranks.run(train, 2, loop)[0]

    truth = alone(replace(loop, dtype="float64"))
    reordered = [max(map(relative_error, alone(loop, order), truth)) for order in orders]
    error = max(map(relative_error, gradients, truth))
    assert error <= 1e-5
    assert error <= 4 * max(reordered)


def test_plain_ddp_would_be_wrong_by_far(ranks: RankPool) -> None:
    loop = Loop(12, 36, "static:3,9", steps=1)

    broken = ranks.run(train, 2, replace(loop, broken=True))[0]

    assert relative_error(broken[0], alone(loop)[0]) > 0.1
