"""Batches by cost: the split follows the costs, and invalid costs are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evenstride.errors import ConfigError
from evenstride.runtime.loading.loader_options import CostFn, Costs
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import Trainer, numbered


@pytest.mark.parametrize("given", [[1.0, 2.0, 3.0], np.array([1, 2, 3]), torch.tensor([1, 2, 3])])
def test_an_array_is_a_function_of_the_index(given: CostFn) -> None:
    array, function = Costs(given, 3), Costs(lambda index: index + 1.0, 3)

    for costs in (array, function):
        assert costs.of(np.array([2, 0, 2])).tolist() == [3.0, 1.0, 3.0]
    assert array.digest() == function.digest()
    assert Costs([1.0, 2.0, 4.0], 3).digest() != array.digest()


@pytest.mark.parametrize(
    ("cost_fn", "says"),
    [
        ([1.0, 2.0], ()),
        ([1.0] * 7 + [0.0], ("0.0", "sample 7")),
        (lambda index: float("nan") if index else 1.0, ()),
    ],
)
def test_an_invalid_cost_is_refused(
    make_stride: MakeStride, cost_fn: CostFn, says: tuple[str, ...]
) -> None:
    with raises_message(ConfigError, *says):
        make_stride().loader(numbered(8), cost_fn=cost_fn)


def test_costs_are_for_training(make_stride: MakeStride) -> None:
    with raises_message(ConfigError, "cost_fn"):
        make_stride().loader(numbered(8), train=False, cost_fn=[1.0] * 8)


def test_micro_batches_keep_to_the_cost(make_stride: MakeStride) -> None:
    stride = make_stride(global_batch=8)
    costs = [1.0 + index % 5 for index in range(32)]
    loader = stride.loader(numbered(32), cost_fn=costs, max_micro_batch=7)
    trainer, steps = Trainer(stride), [[0.0]]
    seen = []
    for ids, x in loader:
        with stride.accumulate(trainer.model):
            trainer.backward((ids, x))
        steps[-1].append(sum(costs[index] for index in ids.tolist()))
        seen += ids.tolist()
        if stride.synced:
            trainer.update()
            steps.append([0.0])

    assert sorted(seen) == list(range(32))
    assert len(steps) == 4 + 1
    assert max(cost for step in steps for cost in step) <= 7


def test_buckets_need_costs(make_stride: MakeStride) -> None:
    with raises_message(ConfigError, "cost_fn"):
        make_stride().loader(numbered(8), bucketed=True)
    with raises_message(ConfigError, "bucketed"):
        make_stride().loader(numbered(8), train=False, bucketed=True)
