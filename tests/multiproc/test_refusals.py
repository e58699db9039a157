"""Bad input gets a sharp error before any training, and on every rank alike."""

from __future__ import annotations

from typing import Any

import pytest

from evenstride.testing import RankPool
from tests.messages import check_message
from tests.multiproc.refusals import (
    USUAL_BACKENDS,
    divided,
    loaders,
    loops,
    missing,
    on_a_gpu_host,
    settings,
    warnings_of_the_rest,
    watched,
)
from tests.multiproc.sharded import needs_shards_on_cpu

SAME = {"global_batch": 8}
SETTINGS: dict[str, tuple[list[dict[str, Any]], str, tuple[str, ...]]] = {
    "a batch smaller than the workers": (
        [{"global_batch": 1}] * 2,
        "InfeasibleShares",
        (),
    ),
    "a batch above the caps": (
        [{"global_batch": 9, "max_share": 4}] * 2,
        "InfeasibleShares",
        ("2 workers",),
    ),
    "no batch at all": ([{"global_batch": 0}] * 2, "ConfigError", ("global_batch is 0",)),
    "a batch that is no number": (
        [{"global_batch": "8"}] * 2,
        "ConfigError",
        ("global_batch is '8'",),
    ),
    "batches that differ": (
        [{"global_batch": 8}, {"global_batch": 9}],
        "RanksDisagree",
        ("global_batch", "Stride()", "rank 0"),
    ),
    "seeds that differ": ([SAME, {**SAME, "seed": 3}], "RanksDisagree", ()),
    "policies that differ": ([SAME, {**SAME, "policy": "uniform"}], "RanksDisagree", ()),
    "an unknown policy": ([{**SAME, "policy": "magic"}] * 2, "UnknownPolicy", ()),
    "an unknown policy on one rank": (
        [SAME, {**SAME, "policy": "magic"}],
        "UnknownPolicy",
        (),
    ),
    "given shares for others": (
        [{**SAME, "policy": "static:1,3,4"}] * 2,
        "ConfigError",
        (),
    ),
    "bounds that cannot be": ([{**SAME, "min_share": 0}] * 2, "ConfigError", ("min_share is 0",)),
    "a trace that cannot be written": (
        [{**SAME, "trace": "/proc/nowhere/trace.jsonl"}] * 2,
        "ConfigError",
        (),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be_are_refused_on_every_rank(ranks: RankPool, name: str) -> None:
    by_rank, kind, text = SETTINGS[name]

    answers = ranks.run(settings, 2, by_rank)

    assert answers[0] == answers[1]
    assert answers[0][0] == kind
    check_message(answers[0][1], *text)


def test_ranks_of_other_versions_are_refused(ranks: RankPool) -> None:
    answers = ranks.run(_other_version, 2)

    assert answers[0] == answers[1]
    assert answers[0][0] == "RanksDisagree"
    assert "evenstride" in answers[0][1]


def _other_version(rank: int) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenstride.runtime.coordination.settings_agreement.__version__", f"0.{rank}")
        return settings(rank, [SAME, SAME])


LOADERS = {
    "another length": ("RanksDisagree", ("20", "rank 0")),
    "no length": ("ConfigError", ()),
    "empty on one rank": ("ConfigError", ()),
    "batch_size": ("ConfigError", ("batch_size",)),
    "shuffle": ("RanksDisagree", ()),
    "drop_last": ("ConfigError", ("drop_last",)),
    "twice": ("ConfigError", ()),
    "evaluation batch": ("ConfigError", ()),
    "other evaluation sets": ("RanksDisagree", ()),
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_that_cannot_be_are_refused_on_every_rank(ranks: RankPool, name: str) -> None:
    kind, text = LOADERS[name]

    answers = ranks.run(loaders, 2, name)

    assert answers[0] == answers[1]
    assert answers[0][0] == kind
    check_message(answers[0][1], *text)


LOOPS = {
    "not scaled": ("ScaleError", ()),
    "no backward": ("ScaleError", ("step 0",)),
    "scaled twice": ("ScaleError", ()),
    "two loops": ("LoaderBusy", ()),
    "micro-batches without accumulate": ("ScaleError", ("stride.accumulate",)),
    "state in mid-step": ("StepInFlight", ("optimizer.step()",)),
    "a negative weight": ("ScaleError", ("-1.0",)),
    "restart inside": ("LoaderBusy", ()),
    "load inside": ("LoaderBusy", ()),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_breaks_the_contract_is_stopped_on_every_rank(
    ranks: RankPool, name: str
) -> None:
    kind, text = LOOPS[name]

    answers = ranks.run(loops, 2, name)

    assert answers[0] == answers[1]
    assert answers[0][0] == kind
    check_message(answers[0][1], *text)


def test_a_rank_that_never_comes_is_named(ranks: RankPool) -> None:
    answers = ranks.run(missing, 3, group_timeout_s=20.0)

    assert answers[0][0] == answers[2][0] == "WorkerLost"
    assert "rank 1 did not reach Stride()" in answers[0][1]
    assert answers[0][1] == answers[2][1]


def test_a_device_that_one_rank_cannot_time_is_refused_on_every_rank(ranks: RankPool) -> None:
    answers = ranks.run(watched, 2, "an accelerator of another kind on one rank")

    for kind, text in answers:
        assert kind == "ConfigError"
        assert "meta device" in text


DIVIDED = {
    "tp": "tensor parallelism",
    "tp over all": "tensor parallelism",
    "tp fsdp": "tensor parallelism",
    "tp ddp": "tensor parallelism",
    "cp slice": "context parallelism",
    "cp flat": "context parallelism",
    "cp ddp": "context parallelism",
    "cp alone": "context parallelism",
    "cp context": "scale() was called inside context_parallel()",
    "ep ignored": "expert parallelism",
    "ep of one rank": "expert parallelism",
    "pp stage": "pipeline parallelism",
    "pp later": "pipeline parallelism",
    "pp parts": "pipeline parallelism",
    "pp over all": "pipeline parallelism",
}


@needs_shards_on_cpu
def test_a_model_whose_samples_are_divided_over_ranks_is_refused_alike(ranks: RankPool) -> None:
    everywhere = ranks.run(divided, 4, [*DIVIDED, "HSDP"], timeout_s=180.0)

    assert all(answers == everywhere[0] for answers in everywhere)
    for name, fact in DIVIDED.items():
        kind, text = everywhere[0][name]
        assert kind == ("RanksDisagree" if name == "pp parts" else "ConfigError")
        check_message(text, fact)
    assert everywhere[0]["HSDP"] == ("", ""), "which divides nothing but data"


@pytest.mark.parametrize(("policy", "warnings"), [(None, 1), ("uniform", 0)])
def test_one_rank_reports_that_only_a_part_of_the_job_is_balanced(
    ranks: RankPool, policy: str | None, warnings: int
) -> None:
    reported = ranks.run(warnings_of_the_rest, 4, policy)

    assert [len(one) for one in reported] == [warnings, 0, warnings, 0]


def test_a_cpu_rank_on_a_gpu_host_is_refused_on_every_rank_before_the_engine_hangs(
    ranks: RankPool,
) -> None:
    for kind, text in ranks.run(on_a_gpu_host, 2, [True, False]):
        assert kind == "ConfigError"
        check_message(text, "rank 0", "rank 1")

    for alike in (True, False):
        assert ranks.run(on_a_gpu_host, 2, [alike, alike]) == [("", "")] * 2


@pytest.mark.parametrize("backends", ["", USUAL_BACKENDS])
def test_a_rank_without_a_gpu_is_refused_with_the_backend_of_each_rank(
    ranks: RankPool, backends: str
) -> None:
    answers = ranks.run(on_a_gpu_host, 2, [True, False], [True, False], backends)

    assert answers[0] == answers[1]
    check_message(answers[0][1], "rank 0 (cuda) waits in nccl", "rank 1 (cpu) waits in gloo")
