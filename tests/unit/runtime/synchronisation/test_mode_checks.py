"""Calls that a synchronisation mode does not support are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import zeros
from torch.utils.data import TensorDataset

from evenstride.core.policies import policy_from_spec
from evenstride.core.policy import Policy
from evenstride.core.sync_modes.mode_specs import SyncMode, sync_from_spec
from evenstride.errors import ConfigError, LoaderBusy
from evenstride.runtime.loading.loader_agreement import check_unaligned_loader, policy_partitions
from evenstride.runtime.loading.loader_options import LoaderOptions
from evenstride.runtime.loading.shards import Shards
from evenstride.runtime.loading.streams import Stream
from evenstride.runtime.synchronisation.synchroniser import (
    check_unaligned_mean,
    check_unaligned_norm,
    refuse_weights,
)
from evenstride.runtime.usage_errors import by_epoch
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


@dataclass(frozen=True)
class Chosen:
    """The settings of a loader that decide how a policy's data is split."""

    policy: str = "dbs"
    sync: str = "bsp"
    global_batch: int = 4
    seed: int = 0
    max_share: int | None = None
    quantum: int | None = None
    chosen: bool = False

    @property
    def decides(self) -> Policy[Any]:
        return policy_from_spec(self.policy)

    @property
    def mode(self) -> SyncMode:
        return sync_from_spec(self.sync)


@pytest.mark.parametrize(
    ("chosen", "dataset", "by_cost", "cut"),
    [
        (Chosen(), ROWS, False, True),
        (Chosen(sync="local-sgd(every=2)"), ROWS, False, True),
        (Chosen("dbs:epoch_steps=9"), ROWS, False, False),
        (Chosen("adaptive"), ROWS, False, False),
        (Chosen("omnilearn"), ROWS, False, False),
        (Chosen(), ROWS, True, False),
        (Chosen(), Shards([2, 2], lambda *_: ()), False, False),
        (Chosen(), Stream([1, 2]), False, False),
        (Chosen(sync="asp"), ROWS, False, False),
    ],
)
def test_a_policy_cuts_data_into_parts_where_that_is_possible(
    chosen: Chosen, dataset: Any, by_cost: bool, cut: bool
) -> None:
    assert policy_partitions(dataset, chosen, by_cost=by_cost) is cut


def test_the_scripts_own_partition_counts() -> None:
    assert (by_epoch("step", None), by_epoch("epoch", None), by_epoch(None, [1])) == (
        False,
        True,
        None,
    )
    with raises_message(ConfigError, "'step'", "'epoch'"):
        by_epoch("rank", None)
    with raises_message(ConfigError, "cost_fn"):
        by_epoch("epoch", [1])


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
