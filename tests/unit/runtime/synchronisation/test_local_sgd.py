"""Local SGD, as far as one process can test it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from evenstride.core.sampling.draw import Draw
from evenstride.core.sync_modes.mode_specs import LocalSgd, RoundPosition
from evenstride.errors import ConfigError, UsageError
from evenstride.runtime.synchronisation.local_sgd import LocalTraining, OuterOptimizer
from evenstride.runtime.synchronisation.weighted_average import (
    TrainedState,
    WeightedAverage,
    buckets,
    summed,
)
from evenstride.runtime.timing.device_timer import RankClock
from evenstride.runtime.timing.step_timer import StepRecord, StepTimer
from evenstride.testing import FakeClock
from tests.messages import raises_message


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A process group with this process only."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class Bench:
    """A worker with steps of 10 samples each, 4 steps per epoch."""

    def __init__(self, mode: LocalSgd, group: dist.ProcessGroup) -> None:
        self.clock, self.records = FakeClock(), list[StepRecord]()
        self.timer = StepTimer(self.records, self.clock)
        self.net = nn.Linear(2, 1).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5)
        self.sync = LocalTraining(
            mode, lambda: WeightedAverage(group, group), RankClock(self.timer), self.place
        )
        self.sync.watch(self.net)

    def place(self, draw: Draw) -> RoundPosition:
        """Return the position of a step."""
        return RoundPosition(draw.step, draw.step % 4 * 10, 10, 40, 10)

    def step(self, step: int, share: int = 10) -> float:
        """Run a step, and return the factor of its loss."""
        draw = Draw(step, 10, share, share, first=True, last=True, trained=share)
        factor = self.sync.factor(draw)
        self.net(torch.ones(3, 2).double()).sum().backward()
        self.sync.before_step(self.optimizer)
        self.optimizer.step()
        self.sync.after_step(self.optimizer)
        self.optimizer.zero_grad()
        return factor

    @property
    def weights(self) -> list[float]:
        """The weights."""
        return torch.cat([p.detach().reshape(-1) for p in self.net.parameters()]).tolist()


def test_tensors_are_sent_in_few_buckets() -> None:
    tensors = [torch.zeros(3), torch.zeros(2).half(), torch.zeros(4), torch.zeros(9), torch.ones(1)]

    found = buckets(tensors, most_bytes=30)

    assert [[t.numel() for t in bucket] for bucket in found] == [[3, 4], [2], [9], [1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_a_weighted_sum_keeps_shape_and_order(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    tensors = [torch.arange(6).reshape(2, 3).t().to(dtype), torch.full((), 8).to(dtype)]

    sums = [total for _, total in summed(tensors, 0.5, group)]

    assert [total.tolist() for total in sums] == [(t / 2).tolist() for t in tensors]
    assert sums[0].dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)


def test_with_weight_0_a_tensor_adds_exact_zeros(group: dist.ProcessGroup) -> None:
    ((_, total),) = summed([torch.tensor([float("nan"), float("inf"), 1.0])], 0.0, group)

    assert total.tolist() == [0, 0, 0]


@given(
    rate=st.floats(0.1, 2),
    momentum=st.floats(0, 0.95),
    averages=st.lists(st.floats(-3, 3), min_size=1, max_size=6),
)
def test_the_outer_optimizer_is_torchs(rate: float, momentum: float, averages: list[float]) -> None:
    mine = nn.Parameter(torch.tensor([0.3, -2.0], dtype=torch.float64))
    theirs = nn.Parameter(mine.detach().clone())
    sgd = torch.optim.SGD([theirs], lr=rate, momentum=momentum, nesterov=momentum > 0)
    outer = OuterOptimizer(rate, momentum)

    for value in averages:
        average = torch.tensor([value, 1.0], dtype=torch.float64)
        theirs.grad = theirs.detach() - average
        sgd.step()
        outer.begin([mine])
        with torch.no_grad():
            mine.add_(100.0)  # where this rank has got to does not count
        outer.step(mine, average)

    assert mine.tolist() == pytest.approx(theirs.tolist(), rel=1e-12)


def test_with_rate_1_and_no_momentum_the_average_is_taken_bit_for_bit() -> None:
    parameter, average = nn.Parameter(torch.tensor([0.1, 1e8])), torch.tensor([0.3, 1e-9])
    outer = OuterOptimizer(1.0, 0.0)

    outer.begin([parameter])
    outer.step(parameter, average)

    assert parameter.tolist() == average.tolist()


def test_the_outer_optimizer_continues_from_its_state() -> None:
    def run(outer: OuterOptimizer, parameter: nn.Parameter, value: float) -> None:
        outer.begin([parameter])
        outer.step(parameter, torch.tensor([value]))

    one, outer = nn.Parameter(torch.tensor([1.0])), OuterOptimizer(0.7, 0.9)
    run(outer, one, 0.5)
    two, again = nn.Parameter(one.detach().clone()), OuterOptimizer(0.7, 0.9)
    again.load({k: v.clone() for k, v in outer.state({"w": one}).items()}, {"w": two})

    run(outer, one, 0.2)
    run(again, two, 0.2)

    assert two.tolist() == one.tolist()
    assert outer.state({"w": one})["w"].any()


def test_a_buffer_that_never_changes_is_not_averaged() -> None:
    net = nn.BatchNorm1d(2)
    net.register_buffer("mask", torch.full((2,), float("-inf")))
    trained = TrainedState()
    trained.watch(net)

    net(torch.randn(4, 2))

    buffers, changed = trained.changed_buffers()
    names = [name for name, _ in net.named_buffers()]
    assert dict(zip(names, changed, strict=True))["mask"] is False
    assert sum(changed) == len(buffers) - 1 == 3


def test_a_loss_is_a_mean_over_the_share_and_at_first_over_all(group: dist.ProcessGroup) -> None:
    bench = Bench(LocalSgd(every=2, after=1), group)

    factors = [
        bench.sync.factor(Draw(step, 10, 5, samples, first=True, last=False, trained=6))
        for step in (0, 1)
        for samples in (4, 0)
    ]

    assert factors == pytest.approx([4 / 10, 0, 4 / 6, 0])


def test_a_rank_without_samples_makes_no_step(group: dist.ProcessGroup) -> None:
    bench = Bench(LocalSgd(every=4), group)
    before = bench.weights

    bench.step(0, share=0)
    assert bench.weights == before
    bench.step(1, share=1)
    assert bench.weights != before


def test_the_optimizers_step_is_busy_time_and_the_average_is_waiting_time(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(LocalSgd(every=2, after=1), group)
    for kind, call, took_s in (
        (WeightedAverage, "weights", 5.0),
        (WeightedAverage, "gradients", 5.0),
    ):
        monkeypatch.setattr(kind, call, _slow(bench.clock, getattr(kind, call), took_s))
    monkeypatch.setattr(bench.optimizer, "step", _slow(bench.clock, bench.optimizer.step, 3.0))

    for step in range(4):
        bench.timer.fetch_started()
        bench.timer.fetch_ended(step, 10, modelled=True)
        bench.timer.gradients_ready()
        bench.step(step)
        bench.timer.synchronised()
    bench.timer.fetch_started()

    assert [record.busy_s for record in bench.records] == [3.0] * 4
    assert [record.wait_s for record in bench.records] == [5.0, 0.0, 5.0, 5.0]


def _slow(clock: FakeClock, call: Callable[..., Any], took_s: float) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        clock.now_s += took_s
        return call(*args, **kwargs)

    return slow


def test_a_jump_of_the_position_ends_the_round(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported, tell = list[int](), WeightedAverage.weights

    def weights(
        self: WeightedAverage, step: int, parameters: Any, samples: int, trained: Any
    ) -> Any:
        reported.append(samples)
        return tell(self, step, parameters, samples, trained)

    monkeypatch.setattr(WeightedAverage, "weights", weights)
    bench = Bench(LocalSgd(every=4), group)

    for step in (0, 1, 2, 8, 9, 10, 11, 12):
        bench.step(step, share=7)

    assert reported == [28]
    assert not bench.sync.settled
    bench.sync.settle()
    assert reported == [28, 7]
    bench.sync.settle()
    assert reported == [28, 7]


def test_a_model_must_be_watched(group: dist.ProcessGroup) -> None:
    timer = StepTimer([])
    sync = LocalTraining(
        LocalSgd(every=2),
        lambda: WeightedAverage(group, group),
        RankClock(timer),
        lambda _: RoundPosition(0, 0, 1, 9, 1),
    )

    with raises_message(UsageError, "stride.watch"):
        sync.factor(Draw(0, 1, 1, 1, first=True, last=True))


def test_an_optimizer_that_skips_steps_internally_is_refused(group: dist.ProcessGroup) -> None:
    bench = Bench(LocalSgd(every=2), group)
    bench.optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]

    with raises_message(ConfigError):
        bench.step(0)


def test_sparse_gradients_cannot_be_averaged(group: dist.ProcessGroup) -> None:
    net = nn.Embedding(3, 2, sparse=True)
    net(torch.tensor([1])).sum().backward()

    with raises_message(ConfigError):
        WeightedAverage(group, group).gradients(0, list(net.parameters()))


def test_gradients_that_no_rank_has_stay_none(group: dist.ProcessGroup) -> None:
    net = nn.Linear(2, 1)
    net.weight.grad = torch.ones(1, 2)

    WeightedAverage(group, group).gradients(0, list(net.parameters()))

    assert net.weight.grad.tolist() == [[1.0, 1.0]]
    assert net.bias.grad is None
