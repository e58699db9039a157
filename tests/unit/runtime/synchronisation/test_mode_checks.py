"""Calls that a synchronisation mode does not support are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import zeros
from torch.utils.data import TensorDataset

from evenstride.core.sync_modes.mode_specs import sync_from_spec
from evenstride.errors import ConfigError, LoaderBusy
from evenstride.runtime.loading.loader_agreement import check_unaligned_loader
from evenstride.runtime.loading.loader_options import LoaderOptions
from evenstride.runtime.loading.shards import Shards
from evenstride.runtime.synchronisation.synchroniser import (
    check_unaligned_mean,
    check_unaligned_norm,
    refuse_weights,
)
from tests.messages import raises_message

ROWS = TensorDataset(zeros(4, 1))
FREE, KEPT = ("asp", "ssp(staleness=2)"), ("bsp", "bsp-ps(servers=2)")


@pytest.mark.parametrize("spec", FREE)
@pytest.mark.parametrize(
    ("what", "dataset", "options", "by_cost"),
    [
        (("weight_fn",), ROWS, {"weight_fn": len}, False),
        (("cost_fn",), ROWS, {}, True),
        ((), ROWS, {"by_epoch": True}, False),
        ((), Shards([2, 2], lambda *_: ()), {}, False),
    ],
)
def test_calls_that_need_a_common_step_are_refused(
    spec: str, what: tuple[str, ...], dataset: Any, options: dict[str, Any], by_cost: bool
) -> None:
    asked = LoaderOptions(**options)
    for kept in KEPT:
        check_unaligned_loader(sync_from_spec(kept), dataset, asked, by_cost=by_cost)
    with raises_message(ConfigError, *what):
        check_unaligned_loader(sync_from_spec(spec), dataset, asked, by_cost=by_cost)
    check_unaligned_loader(sync_from_spec(spec), ROWS, LoaderOptions(), by_cost=False)


@pytest.mark.parametrize("spec", [*FREE, "local-sgd(every=2)"])
def test_batch_weights_are_refused_where_samples_count(spec: str) -> None:
    for kept in KEPT:
        refuse_weights(sync_from_spec(kept))
    with raises_message(ConfigError):
        refuse_weights(sync_from_spec(spec))


@pytest.mark.parametrize("spec", FREE)
def test_collective_calls_are_refused_by_name(spec: str) -> None:
    for kept in (*KEPT, "local-sgd(every=2)"):
        check_unaligned_norm(sync_from_spec(kept))
        check_unaligned_mean(sync_from_spec(kept))
    with raises_message(ConfigError):
        check_unaligned_norm(sync_from_spec(spec))
    with raises_message(LoaderBusy):
        check_unaligned_mean(sync_from_spec(spec))
