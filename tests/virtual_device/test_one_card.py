"""The parts of `benchmarks/gpu.py` for one card, on the virtual device, where figures are exact."""

from __future__ import annotations

import os
from typing import Any

import pytest
from benchmarks import gpu_features, gpu_peers, gpu_verdicts
from benchmarks.gpu_peers import Trial, trials

from evenstride.testing import RankPool
from tests.virtual_device import one_card

pytestmark = pytest.mark.slow

LIMIT_S = 240.0
COLLECTIVES = 15  # of five groups: a gather before either pass, and a scatter


def _trial(part: str, name: str) -> Trial:
    cores = sorted(os.sched_getaffinity(0))
    return trials(part, "virtual", cores, quick=True)[name]


def _run(pool: RankPool, program: Any, trial: Trial, *more: Any) -> dict[str, Any]:
    found: dict[str, Any] = pool.run(program, 2, trial, *more, timeout_s=LIMIT_S)[0]
    return found


@pytest.mark.parametrize("how", ["ddp", "fsdp", "ddp compiled", "fsdp compiled"])
def test_a_late_peer_adds_waiting_and_no_work(virtual_ranks: RankPool, how: str) -> None:
    trial = _trial("waits", f"waits {how}")
    figures = gpu_verdicts.waits_figures(_run(virtual_ranks, gpu_peers.waits, trial))

    assert figures["wrong"] == []
    assert figures["rounds"] == trial.rounds
    assert figures["busy_ratio"]["interval"] == pytest.approx((1.0, 1.0), abs=1e-6)
    assert figures["added_wait_ms"] == pytest.approx(figures["added_step_ms"], abs=1e-3)
    assert figures["parts_of_step"] == pytest.approx(1.0, abs=1e-6)
    assert (figures["frames"]["all"] > 0) is how.endswith("compiled")
    if how.startswith("ddp"):
        assert figures["added_wait_ms"] == pytest.approx(trial.delay_ms, abs=1e-3)
    else:
        assert figures["held_ms"] == pytest.approx(COLLECTIVES * trial.delay_ms, abs=1e-3)
        # Some of the gathers run during the work of the layer before.
        assert trial.delay_ms < figures["added_wait_ms"] < figures["held_ms"]


@pytest.mark.parametrize("fault", ["wait as work", "early mark", "wrong stream"])
def test_a_fault_of_the_timing_is_found(virtual_ranks: RankPool, fault: str) -> None:
    found = _run(virtual_ranks, one_card.waits, _trial("waits", "waits ddp"), fault)

    assert gpu_verdicts.waits_figures(found)["wrong"] != []


def test_waits_without_marks_are_found(virtual_ranks: RankPool) -> None:
    found = _run(virtual_ranks, one_card.unmarked, _trial("waits", "waits fsdp"))

    wrong = gpu_verdicts.waits_figures(found)["wrong"]
    assert "a late peer changes the busy time" in wrong


def test_every_feature_does_what_it_should(virtual_ranks: RankPool) -> None:
    found = _run(virtual_ranks, gpu_features.features, _trial("features", "features"))

    assert found["features"].keys() == gpu_features.FEATURES.keys()
    figures = gpu_verdicts.features_figures(found)
    assert figures["wrong"] == []
    assert "make_graphed_callables" in found["features"]["whole graph"]["error"]


def test_a_modelled_first_step_is_found(virtual_ranks: RankPool) -> None:
    found = _run(virtual_ranks, one_card.of_every_size, _trial("features", "features"))

    assert gpu_verdicts.features_figures(found)["wrong"] == [
        "sizes: the first step at a new size is modelled"
    ]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_the_price_is_measured_for_every_size(virtual_ranks: RankPool, how: str) -> None:
    trial = _trial("price", f"price {how}")
    figures = gpu_verdicts.price_figures(_run(virtual_ranks, gpu_peers.price, trial))

    assert list(figures["by_groups"]) == (["0"] if how == "ddp" else ["3", "9", "33"])
    for one in figures["by_groups"].values():
        assert one["plain_ms"] > 0
        assert 0 < one["own_ms"] < one["plain_ms"]
    assert (figures["us_per_group"] is None) is (how == "ddp")
