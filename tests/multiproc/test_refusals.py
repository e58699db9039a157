"""Bad input gets a sharp error before any training, and on every rank alike."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.testing import RankPool
from tests.multiproc.refusals import (
    divided,
    loaders,
    loops,
    missing,
    on_a_gpu_host,
    settings,
    told_of_the_rest,
    watched,
)
from tests.multiproc.sharded import needs_shards_on_cpu

SAME = {"global_batch": 8}
SETTINGS: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "a batch smaller than the workers": (
        [{"global_batch": 1}] * 2,
        "InfeasibleShares",
        "at least 2",
    ),
    "a batch above the caps": (
        [{"global_batch": 9, "max_share": 4}] * 2,
        "InfeasibleShares",
        "2 workers together accept 2 to 8",
    ),
    "no batch at all": ([{"global_batch": 0}] * 2, "ConfigError", "global_batch is 0"),
    "a batch that is no number": (
        [{"global_batch": "8"}] * 2,
        "ConfigError",
        "global_batch is '8'",
    ),
    "batches that differ": (
        [{"global_batch": 8}, {"global_batch": 9}],
        "RanksDisagree",
        "global_batch of Stride(): 8 on rank 0; 9 on rank 1",
    ),
    "seeds that differ": ([SAME, {**SAME, "seed": 3}], "RanksDisagree", "seed"),
    "policies that differ": ([SAME, {**SAME, "policy": "uniform"}], "RanksDisagree", "policy"),
    "an unknown policy": ([{**SAME, "policy": "magic"}] * 2, "UnknownPolicy", "adaptive, dbs"),
    "an unknown policy on one rank": (
        [SAME, {**SAME, "policy": "magic"}],
        "UnknownPolicy",
        "adaptive, dbs",
    ),
    "given shares for others": (
        [{**SAME, "policy": "static:1,3,4"}] * 2,
        "ConfigError",
        "3 shares, but there are 2",
    ),
    "bounds that cannot be": ([{**SAME, "min_share": 0}] * 2, "ConfigError", "min_share is 0"),
    "a trace that cannot be written": (
        [{**SAME, "trace": "/proc/nowhere/trace.jsonl"}] * 2,
        "ConfigError",
        "cannot be written",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be_are_refused_on_every_rank(ranks: RankPool, name: str) -> None:
    by_rank, kind, text = SETTINGS[name]

    answers = ranks.run(settings, 2, by_rank)

    assert answers[0] == answers[1]
    assert answers[0][0] == kind
    assert text in answers[0][1]


def test_ranks_of_other_versions_are_refused(ranks: RankPool) -> None:
    answers = ranks.run(_other_version, 2)

    assert answers[0] == answers[1]
    assert answers[0][0] == "RanksDisagree"
    assert "evenstride" in answers[0][1]


def _other_version(rank: int) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenstride.runtime.coordination.shown_settings.__version__", f"0.{rank}")
        return settings(rank, [SAME, SAME])


LOADERS = {
    "another length": ("RanksDisagree", "length of the training loader: 20 on rank 0"),
    "a stream": ("ConfigError", "map-style"),
    "no length": ("ConfigError", "give it a __len__"),
    "empty on one rank": ("ConfigError", "no samples"),
    "batch_size": ("ConfigError", "batch_size cannot be set"),
    "shuffle": ("RanksDisagree", "shuffle"),
    "drop_last": ("ConfigError", "drop_last leaves nothing"),
    "twice": ("ConfigError", "a training loader already"),
    "evaluation batch": ("ConfigError", "is for evaluation"),
    "other evaluation sets": ("RanksDisagree", "length of an evaluation loader"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_that_cannot_be_are_refused_on_every_rank(ranks: RankPool, name: str) -> None:
    kind, text = LOADERS[name]

    answers = ranks.run(loaders, 2, name)

    assert answers[0] == answers[1]
    assert answers[0][0] == kind
    assert text in answers[0][1]


LOOPS = {
    "not scaled": ("ScaleError", "was never scaled"),
    "no backward": ("ScaleError", "backward pass of step 0 never ran"),
    "scaled twice": ("ScaleError", "scaled twice"),
    "two loops": ("LoaderBusy", "still going on"),
    "micro-batches without accumulate": ("ScaleError", "with stride.accumulate(model)"),
    "state in mid-step": ("StepInFlight", "after optimizer.step()"),
    "a negative weight": ("ScaleError", "weight -1.0"),
    "restart inside": ("LoaderBusy", "leave the loop first"),
    "load inside": ("LoaderBusy", "leave the loop first"),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_breaks_the_contract_is_stopped_on_every_rank(
    ranks: RankPool, name: str
) -> None:
    kind, text = LOOPS[name]

    answers = ranks.run(loops, 2, name)

    assert answers[0] == answers[1]
    assert answers[0][0] == kind
    assert text in answers[0][1]


def test_a_rank_that_never_comes_is_named(ranks: RankPool) -> None:
    answers = ranks.run(missing, 3, group_timeout_s=6.0)

    assert answers[0][0] == answers[2][0] == "WorkerLost"
    assert "rank 1 did not reach Stride()" in answers[0][1]
    assert answers[0][1] == answers[2][1]


def test_a_device_that_one_rank_cannot_time_is_refused_on_every_rank(ranks: RankPool) -> None:
    answers = ranks.run(watched, 2, "an accelerator of another kind on one rank")

    for kind, text in answers:
        assert kind == "ConfigError"
        assert "meta device" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tp", "parameter 0.weight is a DTensor on (tp=2)"),
        ("tp fsdp", "parameter 0.weight is a DTensor on (dp=2, tp=2)"),
        ("tp ddp", "its device mesh (dp=2, tp=2) has tp=2"),
        ("cp slice", "its device mesh (dp=2, cp=2) has cp=2"),
        ("cp flat", "its device mesh (dp=2, cp=2) has cp=2"),
        ("cp ddp", "its device mesh (dp=2, cp=2) has cp=2"),
    ],
)
@needs_shards_on_cpu
def test_a_model_whose_samples_are_divided_over_ranks_is_refused(
    ranks: RankPool, name: str, text: str
) -> None:
    for kind, told in ranks.run(divided, 4, name):
        assert kind == "ConfigError"
        assert text in told
        assert "evenstride gives each rank samples of its own" in told


@needs_shards_on_cpu
def test_hsdp_divides_nothing_but_data(ranks: RankPool) -> None:
    assert ranks.run(divided, 4, "HSDP") == [("", "")] * 4


@pytest.mark.parametrize(("policy", "warnings"), [(None, 1), ("uniform", 0)])
def test_one_rank_tells_that_only_a_part_of_the_job_is_balanced(
    ranks: RankPool, policy: str | None, warnings: int
) -> None:
    told = ranks.run(told_of_the_rest, 4, policy)

    assert [len(one) for one in told] == [warnings, 0, warnings, 0]


def test_a_cpu_rank_on_a_gpu_host_is_refused_on_every_rank_before_the_engine_hangs(
    ranks: RankPool,
) -> None:
    for kind, text in ranks.run(on_a_gpu_host, 2, [True, False]):
        assert kind == "ConfigError"
        assert "rank 0 uses its GPU and rank 1 does not use its own yet" in text

    for alike in (True, False):
        assert ranks.run(on_a_gpu_host, 2, [alike, alike]) == [("", "")] * 2
