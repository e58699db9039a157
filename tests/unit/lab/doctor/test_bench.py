"""What ``evenstride doctor --bench`` measures, on processes where ranks matter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evenstride.errors import ConfigError
from evenstride.lab.doctor import bench_exactness as exact
from evenstride.lab.doctor import bench_ranks as places
from evenstride.lab.doctor import bench_run as running
from evenstride.lab.doctor.bench_exactness import exactness, wrong
from evenstride.lab.doctor.bench_ranks import BenchBudget, BenchRank, take_place
from evenstride.lab.doctor.bench_run import (
    BenchArm,
    EqualShares,
    RandomRows,
    choose_batch,
    compared,
    in_turns,
    median_interval,
    run_bench,
    while_waiting,
)
from evenstride.runtime.engines.device_support import RankDevice, read_device
from evenstride.runtime.stride import Stride
from evenstride.testing import RankPool
from tests.messages import check_message, raises_message

SHORT = replace(BenchBudget.of(1.0), step_s=0.002, block_s=0.02)
CPU = torch.device("cpu")
FACTS = read_device(CPU)
ALONE = BenchRank(0, CPU, (FACTS,), None, "")
OLD = RankDevice(
    "cuda", "Tesla P100", (6, 0), ("sm_75",), "2.13.0+cu130", "13.0", "emulated", False
)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, as ranks have it: several spin while they wait for a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _whole(rank: int) -> tuple[int, dict[str, Any], list[str]]:
    lines: list[str] = []
    own, findings = run_bench(2, SHORT, lines.append)
    assert dist.is_initialized(), "a group that was there is left as it was"
    return own, findings, lines


def test_two_ranks_measure_everything_and_hear_the_same(ranks: RankPool) -> None:
    (first, findings, lines), (second, others, silence) = ranks.run(_whole, 2)

    assert (first, second) == (0, 1)
    assert findings == others
    assert [line.partition(":")[0] for line in lines] == [
        "exactness",
        "timing",
        "waiting",
        "balance",
        "overhead",
    ]
    assert silence == []
    assert findings["wrong"] == []
    assert findings["backend"] == "gloo"
    assert [mine["rank"] for mine in findings["ranks"]] == [0, 1]
    assert json.loads(json.dumps(findings))["ranks"] == findings["ranks"]
    for one in findings["exactness"].values():
        assert one["error"] <= one["limit"] < one["control"]
    _balance_and_overhead_are_whole(findings)
    low, high = findings["timing"]
    assert low["share"] < high["share"]
    assert low["share"] + high["share"] == findings["global_batch"]
    for one in (low, high):
        assert 0 < one["true_s"] <= one["step_s"]
    waited = findings["waiting"]
    assert 0 < waited["share"] < findings["global_batch"]
    assert all(step_s > 0 for step_s in waited["step_s"])


def _balance_and_overhead_are_whole(findings: dict[str, Any]) -> None:
    balance, overhead = findings["balance"], findings["overhead"]
    assert sum(balance["shares"]) == balance["global_batch"] == findings["global_batch"]
    assert balance["blocks"] >= 3
    assert overhead["pairs"] >= 3
    for one, name in ((balance, "speedup"), (overhead, "ratio"), (overhead, "control")):
        low, high = one[f"{name}_interval"]
        assert 0 < low <= one[name] <= high
    assert 0 < overhead["own_s"] < overhead["evenstride_s"]
    assert overhead["verdict"] in ("met", "unresolved")


def test_busy_times_in_balance_and_in_waiting_are_compared_block_by_block() -> None:
    # Blocks of four steps; the first two blocks and each block's first step do not count.
    balanced_s = {step: 9.0 if step < 8 or step % 4 == 0 else 2.0 for step in range(16)}
    waited_s = {step: 9.0 if step < 8 or step % 4 == 0 else 2.1 for step in range(16)}
    waited_s |= dict.fromkeys(range(12, 16), 2.5)

    figures = while_waiting(balanced_s, waited_s, 4)

    assert figures["balance_s"] == 2.0
    assert figures["waiting_s"] == pytest.approx(2.3)
    assert figures["ratio"] == pytest.approx(1.15)
    assert figures["ratio_interval"] == pytest.approx((1.05, 1.25))


def test_without_reported_steps_there_is_nothing_to_compare() -> None:
    assert while_waiting(dict.fromkeys(range(16), 1.0), {3: 1.0}, 4) == {}


def _exactness(rank: int, broken: bool) -> dict[str, dict[str, Any]]:
    with take_place(2, SHORT) as place, pytest.MonkeyPatch.context() as patch:
        if broken and rank == 1:  # the one rank is enough
            patch.setattr("evenstride.runtime.loss.training_step.loss_factor", lambda *_: 1.0)
        return exactness(place, Stride)


def test_one_rank_with_a_broken_weight_is_found_out_on_all(ranks: RankPool) -> None:
    right, broken = ranks.run(_exactness, 2, False), ranks.run(_exactness, 2, True)

    assert right[0] == right[1]
    assert broken[0] == broken[1]
    assert wrong(right[0]) == []
    reasons = wrong(broken[0])
    assert len(reasons) == 2
    check_message(reasons[0])
    assert reasons[0].endswith("the limit is 1e-12")
    assert "float32" in reasons[1]


@pytest.mark.usefixtures("one_thread")
def test_one_process_alone_is_exact_over_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    right = exactness(ALONE, Stride)
    monkeypatch.setattr("evenstride.runtime.loss.training_step.loss_factor", lambda *_: 0.5)
    broken = exactness(ALONE, Stride)

    assert wrong(right) == []
    assert all(one["control"] > 0.1 for one in right.values())
    assert len(wrong(broken)) == 2


def test_a_gradient_that_is_no_number_is_wrong() -> None:
    figures = {"float64": {"error": math.nan, "limit": 1e-12, "control": 0.5}}

    assert "relative error of nan" in wrong(figures)[0]


@pytest.mark.parametrize("errors", [[1e-9, 2e-3], [2e-3, 1e-9], [1.0, math.nan]], ids=str)
def test_the_worst_rank_counts(monkeypatch: pytest.MonkeyPatch, errors: list[float]) -> None:
    monkeypatch.setattr(BenchRank, "gathered", lambda *_: errors)

    worst = exact.largest(ALONE, errors[0])

    assert worst == 2e-3 or math.isnan(worst)


@pytest.mark.usefixtures("one_thread")
def test_exactness_leaves_the_users_precision_as_it_was() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        exactness(ALONE, Stride)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("one_thread")
def test_a_single_rank_has_nothing_to_time_or_balance() -> None:
    lines: list[str] = []

    rank, findings = run_bench(1, SHORT, lines.append)

    assert rank == 0
    assert findings["timing"] is None
    assert findings["waiting"] is None
    assert findings["balance"] is None
    assert [line.partition(":")[0] for line in lines] == ["exactness", "overhead"]
    assert findings["overhead"]["pairs"] >= 3
    assert not dist.is_initialized()


def test_a_bench_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[float, bool] | None] = []
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later",
        lambda seconds, **options: calls.append((seconds, options["exit"])),
    )
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: calls.append(None))

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(running, "examine_rank", broken)
    with pytest.raises(ZeroDivisionError):
        run_bench(1, BenchBudget.of(50.0), print)

    assert calls == [(280.0, True), None]


def test_a_card_without_code_ends_the_bench_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "read_device", lambda _: OLD)

    with raises_message(ConfigError, "rank 0", "P100"):
        run_bench(1, SHORT, print)


def _places(rank: int, kinds: list[str], config: str | None) -> tuple[str, list[str]] | str:
    with pytest.MonkeyPatch.context() as patch:
        good = replace(OLD, arch_list=("sm_60",))
        patch.setattr(places, "read_device", lambda _: good if kinds[rank] == "cuda" else FACTS)
        patch.setattr(places, "own_device", lambda: torch.device(kinds[rank]))
        own = SimpleNamespace(uuid=str(rank))
        patch.setattr(torch.cuda, "get_device_properties", lambda _: own)
        if config is not None:
            patch.setattr(dist, "get_backend_config", lambda _: config)
        try:
            with take_place(len(kinds), SHORT) as place:
                return place.backend, [device.kind for device in place.devices]
        except ConfigError as refused:
            return str(refused)


def test_cards_and_processors_meet_on_gloo(ranks: RankPool) -> None:
    assert ranks.run(_places, 2, ["cuda", "cpu"], None) == [("gloo", ["cuda", "cpu"])] * 2


def test_ranks_that_would_hang_are_refused_on_all(ranks: RankPool) -> None:
    refusals = ranks.run(_places, 2, ["cuda", "cpu"], "cpu:gloo,cuda:nccl")

    assert refusals[0] == refusals[1]
    check_message(refusals[0])


@pytest.mark.parametrize(
    ("identities", "there", "answer"),
    [
        (["a 1", "a 2"], True, True),
        (["a 1", "a 2"], False, False),
        (["a 1", "a 1"], True, False),
        (["a 1", ""], True, False),
        (["", ""], True, False),
    ],
)
def test_nccl_is_for_ranks_that_each_have_a_card(
    monkeypatch: pytest.MonkeyPatch, identities: list[str], there: bool, answer: bool
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: there)

    assert places.nccl_serves(identities) is answer


def test_measured_times_are_compared_with_the_truth_of_the_same_steps() -> None:
    times_s = [(9.0, 9.0), (1.0, 3.0), (2.0, 3.0), (4.0, 5.0)]

    figures = compared(times_s, {0: 90.0, 1: 1.1, 3: 4.4, 7: 50.0}, 1)

    assert figures == {
        "true_s": 2.5,
        "step_s": 4.0,
        "read_s": pytest.approx(2.75),
        "ratio": pytest.approx(1.1),
    }
    nothing = compared(times_s, {0: 90.0}, 1)
    assert (nothing["read_s"], nothing["ratio"], nothing["true_s"]) == (None, None, 2.0)


def test_own_work_ends_with_the_last_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(BenchRank, "now_s", lambda _: float(next(clock)))
    monkeypatch.setattr(BenchRank, "computed_s", lambda _: float(next(clock)))
    arm = BenchArm(ALONE, RandomRows(8, CPU), None)

    times_s = arm.timed_steps(3)

    # Six parameters tick once each, then come the end of the backward pass and of the update:
    # of eight ticks one lies between the last gradient and the end of the backward pass.
    assert times_s == [(7.0, 8.0)] * 3
    arm.close()


def test_arms_take_turns_in_all_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(BenchRank, "now_s", lambda _: float(next(clock)))

    orders = list(in_turns(ALONE, 4.5, 3))

    assert len(orders) == 7  # three for certain, then one per tick until 4.5 are over
    assert len(set(orders[:6])) == 6
    assert orders[6] == orders[0]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert len(list(in_turns(ALONE, 0.0, 2))) == 3


def test_plain_training_sees_every_sample_once_in_equal_shares() -> None:
    samplers = [
        EqualShares(24, 8, BenchRank(rank, CPU, (FACTS, FACTS), None, "gloo")) for rank in range(2)
    ]
    first, second = ([list(sampler) for sampler in samplers] for _ in range(2))

    for epoch in (first, second):
        steps = list(zip(*epoch, strict=True))
        assert len(steps) == len(samplers[0]) == 3
        assert all(len(share) == 4 for step in steps for share in step)
        assert sorted(index for step in steps for share in step for index in share) == [*range(24)]
    assert first != second


def test_the_batch_is_what_the_mean_rank_does_in_a_steps_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = BenchRank(0, CPU, (FACTS, FACTS), None, "gloo")
    rates = [3000.0, 1000.0]
    ticks = count()
    monkeypatch.setattr(BenchRank, "now_s", lambda _: float(next(ticks)))
    monkeypatch.setattr(
        BenchRank,
        "gathered",
        lambda _, value: rates if isinstance(value, float) else [value, value],
    )

    assert choose_batch(place, replace(SHORT, step_s=0.05)) == 200
    assert choose_batch(place, replace(SHORT, step_s=1e-9)) == 16
    assert choose_batch(place, replace(SHORT, step_s=1e9)) == 16_384


def test_rows_are_fetched_a_batch_at_a_time() -> None:
    rows = RandomRows(5, CPU, steps=2)

    x, y = rows.__getitems__([3, 7])

    assert torch.equal(x[1], rows[7][0])
    assert torch.equal(y[0], rows[3][1])
    assert (len(rows), rows.batch) == (10, 5)


def test_the_interval_of_a_median_holds_it_and_shrinks_with_agreement() -> None:
    wide = median_interval([0.5, 0.9, 1.0, 1.1, 1.5])
    narrow = median_interval([0.99, 1.0, 1.0, 1.0, 1.01])

    assert wide[0] <= 0.9 < 1.1 <= wide[1]
    assert 0.99 <= narrow[0] <= 1.0 <= narrow[1] <= 1.01
    assert median_interval([2.0, 2.0]) == (2.0, 2.0)


def test_a_plan_of_some_seconds_takes_about_these() -> None:
    plan = BenchBudget.of(30.0)

    parts_s = (plan.timing_s, plan.waiting_s, plan.balance_s, plan.overhead_s)
    assert sum(parts_s) == pytest.approx(30.0)
    assert plan.deadline_s > 4 * 30.0
    assert plan.block_s < BenchBudget().block_s == BenchBudget.of(900.0).block_s
    assert SHORT.block_steps == 10
