"""Steps in which an allocator freed its cache, and so waited for the device, are not modelled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstride.runtime.timing import device_timer
from evenstride.runtime.timing.step_timer import StepRecord
from tests.unit.runtime.timing.test_device_timer import Bench, Device
from tests.unit.runtime.weighing import Rank


def test_a_step_in_which_the_allocator_waited_for_the_device_is_left_out() -> None:
    bench = Bench()

    for number in range(4):
        bench.step(number, forward_s=3.0, others_s=5.0)
        bench.retries += number == 1
    bench.end()

    assert [record.modelled for record in bench.records] == [True, False, True, True]


def test_an_allocator_that_has_long_been_quiet_is_read_in_some_steps_only() -> None:
    reads, retries = 0, 0

    def count() -> int:
        nonlocal reads
        reads += 1
        return retries

    watch = device_timer.RetryWatch(count)
    assert not any(watch.occurred() for _ in range(50))
    assert reads == 51
    assert not any(watch.occurred() for _ in range(100))
    assert reads == 61
    retries = 2
    assert [watch.occurred() for _ in range(12)].count(True) == 1
    reads = 0
    assert not any(watch.occurred() for _ in range(20))
    assert reads == 20, "others are likely to follow"


def _refuse(_: torch.device) -> dict[str, int]:
    raise RuntimeError("this allocator has no statistics")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ({"memory_stats_as_nested_dict": lambda _: {"num_alloc_retries": 7}}, 7),
        ({"memory_stats": lambda _: {"num_alloc_retries": 7, "num_ooms": 1}}, 7),
        ({"memory_stats": lambda _: {}}, 0),
        ({"memory_stats_as_nested_dict": _refuse}, 0),
        ({}, 0),
    ],
)
def test_retries_of_the_allocator_are_counted_where_it_counts_them(
    monkeypatch: pytest.MonkeyPatch, module: dict[str, Any], expected: int
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(**module))

    assert device_timer.alloc_retries(torch.device("xpu", 0))() == expected


def test_a_model_s_device_counts_its_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"num_alloc_retries": 0}
    monkeypatch.setattr(device_timer, "CudaMarks", lambda _: Device())
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    clock, records = Rank().clock, list[StepRecord]()
    clock.time_on(torch.device("cuda", 0))
    clock.timer.report_to(records)
    for number in range(3):
        clock.timer.fetch_started()
        clock.timer.fetch_ended(number, 8, modelled=True)
        clock.timer.gradients_ready()
        clock.timer.synchronised()
        stats["num_alloc_retries"] += number == 1
    clock.timer.pass_ended()
    clock.timer.settle()

    assert [record.modelled for record in records] == [True, False, True]
