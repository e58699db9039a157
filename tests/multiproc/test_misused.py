"""Wrong training is refused on every rank; calls that may be in vain cause one warning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from evenstride.testing import RankPool, run_ranks
from tests.messages import check_message
from tests.multiproc.exactness import alone
from tests.multiproc.misused import (
    BATCH,
    LENGTH,
    LOOPS,
    SHARES,
    clipped,
    line_of,
    restored,
    saved,
    trained,
)
from tests.multiproc.training import Loop, relative_error


def check_exact(reported: list[dict[str, Any]]) -> None:
    """Fail unless every rank had the gradients of one process."""
    truth = alone(Loop(BATCH, LENGTH, SHARES))
    for of in reported:
        assert of["error"] == ("", "")
        assert len(of["gradients"]) == len(truth)
        for actual, expected in zip(of["gradients"], truth, strict=True):
            assert relative_error(actual, expected) <= 1e-12


def check_refused(reported: list[dict[str, Any]], kind: str, *texts: str) -> None:
    """Fail unless all ranks raised the same before any optimizer step."""
    assert reported[0]["error"] == reported[1]["error"]
    assert reported[0]["error"][0] == kind
    for text in texts:
        assert text in reported[0]["error"][1]
    assert all(of["unchanged"] and not of["gradients"] for of in reported)


def test_a_bare_module_is_refused(ranks: RankPool) -> None:
    reported = ranks.run(trained, 2, "bare")

    check_refused(reported, "ConfigError", "watch() got a bare Sequential", 'engine="none"')


def test_training_without_any_engine_is_refused_before_the_optimizer_steps() -> None:
    # In processes of its own, because those of a pool may keep an engine of an earlier run.
    reported = run_ranks(_unwatched, 2, "bare")

    check_refused(reported, "ConfigError", "nothing averages their gradients", 'engine="none"')


def test_a_loop_that_calls_the_module_inside_its_engine_is_refused(ranks: RankPool) -> None:
    reported = ranks.run(trained, 2, "module inside")

    check_refused(reported, "UsageError", "the DistributedDataParallel that stride.watch()")


@pytest.mark.parametrize("name", ["contained", "held", "compiled", "compiled inside"])
def test_a_wrapper_that_has_an_engine_is_watched(ranks: RankPool, name: str) -> None:
    reported = ranks.run(trained, 2, name)

    check_exact(reported)
    assert not any(of["heard"] for of in reported)


def test_an_unwatched_engine_causes_one_warning(ranks: RankPool) -> None:
    reported = ranks.run(_unwatched, 2, "ddp")

    check_exact(reported)
    assert [len(of["heard"]) for of in reported] == [1, 0]
    check_message(reported[0]["heard"][0], "stride.watch")


@pytest.mark.parametrize("micro", [None, 2])
def test_a_script_that_averages_by_hand_says_so_and_is_exact(
    ranks: RankPool, micro: int | None
) -> None:
    reported = ranks.run(_by_hand, 2, micro)

    check_exact(reported)
    assert not any(of["heard"] for of in reported)


def test_a_script_that_averages_by_hand_need_not_watch(ranks: RankPool) -> None:
    reported = ranks.run(_unwatched, 2, "by hand")

    check_exact(reported)


def test_clipping_between_micro_batches_causes_a_warning_with_its_line(ranks: RankPool) -> None:
    reported = ranks.run(partial(clipped, in_pieces=True), 2)

    for heard in reported:
        (line,) = heard
        check_message(line)
        assert line.endswith(line_of("# in pieces"))


def test_clipping_a_whole_gradient_causes_no_warning(ranks: RankPool) -> None:
    assert ranks.run(partial(clipped, in_pieces=False), 2) == [[], []]


@pytest.mark.parametrize("name", ["from zero", "from zero, inline"])
def test_epochs_that_begin_again_after_a_restore_cause_one_warning(
    ranks: RankPool, name: str
) -> None:
    reported, others = ranks.run(restored, 2, name)

    (line,) = reported
    assert not others, "rank 0 speaks for all"
    check_message(line, "epoch 1", line_of("# " + name))


@pytest.mark.parametrize("name", [name for name in LOOPS if not name.startswith("from zero")])
def test_epochs_that_continue_after_a_restore_cause_no_warning(ranks: RankPool, name: str) -> None:
    assert ranks.run(restored, 2, name) == [[], []]


def test_checkpoints_that_are_never_restored_cause_one_warning(
    ranks: RankPool, tmp_path: Path
) -> None:
    run = partial(saved, restores=False, saves_scheduler=True)

    reported, others = ranks.run(run, 2, str(tmp_path))

    (line,) = reported
    assert not others, "rank 0 speaks for all"
    check_message(line, tmp_path)
    assert f"Call checkpoint.restore() after {_construction()}" in line


def test_a_scheduler_that_is_not_saved_causes_one_warning(ranks: RankPool, tmp_path: Path) -> None:
    run = partial(saved, restores=False, saves_scheduler=False, otherwise=True)

    reported, others = ranks.run(run, 2, str(tmp_path))

    (line,) = reported
    assert not others, "rank 0 speaks for all"
    check_message(line, "StepLR", _construction())


def test_a_run_that_restores_and_saves_all_gets_no_warning(ranks: RankPool, tmp_path: Path) -> None:
    run = partial(saved, restores=True, saves_scheduler=True)

    assert ranks.run(run, 2, str(tmp_path)) == [[], []]


def _construction() -> str:
    file, _, number = line_of("# the Checkpointer").rpartition(":")
    return f"{file}:{int(number) - 7}"  # where the call begins


def _unwatched(rank: int, name: str) -> dict[str, Any]:
    return trained(rank, name, watch=False)


def _by_hand(rank: int, micro: int | None) -> dict[str, Any]:
    return trained(rank, "by hand", micro=micro)
