"""A batch that does not fit into memory comes again in pieces, and the gradient is the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import evenstride
from evenstride.runtime.timing.step_timer import StepRecord
from tests.inside import session
from tests.messages import check_message, lines_with
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import numbered


class Small(nn.Module):
    """A model that runs out of memory with more than some samples."""

    def __init__(self, fits: int, error: Callable[[], Exception] = torch.OutOfMemoryError) -> None:
        super().__init__()
        self.linear, self.fits, self.error = nn.Linear(1, 1).double(), fits, error
        self.tried: list[int] = []
        nn.init.constant_(self.linear.weight, 0.7)
        nn.init.constant_(self.linear.bias, -0.2)

    def forward(self, x: Tensor) -> Tensor:
        self.tried.append(len(x))
        if len(x) > self.fits:
            raise self.error()
        out: Tensor = self.linear(x.double())
        return out


def train(
    stride: evenstride.Stride, model: Small, epochs: int = 1, **options: Any
) -> tuple[list[list[int]], list[float]]:
    """Train; return the ids of every step, and the weights."""
    loader = stride.loader(numbered(24), **options)
    stride.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps: list[list[int]] = [[]]
    while stride.epoch < epochs:
        for ids, x in loader:
            weight = (ids + 1.0).double() if "weight_fn" in options else torch.ones(len(ids))
            with stride.guard(), stride.accumulate(model):
                squares = model(x).square()[:, 0]
                loss = (weight * squares).sum() / weight.sum()
                stride.scale(loss).backward()  # type: ignore[no-untyped-call]
            steps[-1] += ids.tolist() if stride.samples else []
            if stride.synced:
                optimizer.step()
                optimizer.zero_grad()
                steps.append([])
    return steps[:-1], parameters_to_vector(model.parameters()).tolist()


@pytest.fixture(params=[False, True], ids=["counted", "weighted"])
def weights(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return how samples are weighted: each alike, or by their numbers."""
    return {"weight_fn": lambda batch: float((batch[0] + 1).sum())} if request.param else {}


@pytest.fixture(params=[0, 2], ids=["alone", "workers"])
def options(request: pytest.FixtureRequest, weights: dict[str, Any]) -> dict[str, Any]:
    """Return a loader's options: with processes of its own or without."""
    return {"num_workers": request.param, **weights}


def test_training_is_the_same_as_if_it_had_fitted(
    make_stride: MakeStride, options: dict[str, Any]
) -> None:
    expected = train(make_stride(global_batch=8), Small(99), 2, **options)
    short = Small(3)

    steps, weights = train(make_stride(global_batch=8), short, 2, **options)

    assert steps == expected[0]
    assert weights == pytest.approx(expected[1], rel=1e-12)
    assert short.tried[:4] == [8, 4, 2, 2], "halved until it fits"


def test_once_learned_nothing_larger_is_tried(make_stride: MakeStride) -> None:
    model = Small(4)

    train(make_stride(global_batch=8), model, 2)

    # Until the optimizer has its states nothing is proven, and the last batch is tried held back.
    assert model.tried == [8, 4, 4] + [4, 3, 1] * 2 + [4, 4] * 3


def test_batches_that_were_prefetched_before_are_cut_on_their_way(make_stride: MakeStride) -> None:
    model = Small(4)

    train(make_stride(global_batch=8), model, 2, num_workers=1, prefetch_factor=4)

    assert model.tried.count(8) == 1
    assert max(model.tried[1:]) == 4


def test_a_step_that_was_repeated_is_not_modelled(make_stride: MakeStride) -> None:
    stride = make_stride(global_batch=8)
    records: list[StepRecord] = []
    session(stride).state.clock.timer.report_to(records)

    train(stride, Small(4))

    assert [record.modelled for record in records] == [False, True, True]


def test_each_retry_spoils_its_step(make_stride: MakeStride) -> None:
    stride = make_stride(global_batch=8)
    records: list[StepRecord] = []
    session(stride).state.clock.timer.report_to(records)
    model = Small(8)
    loader = stride.loader(numbered(32))
    stride.watch(model)
    for number, (_, x) in enumerate(loader):
        if number == 2:
            model.fits = 4
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    assert [record.modelled for record in records] == [False, True, False, True]


class ShortBack(Small):
    """A model that runs out of memory in the backward pass of more than some samples."""

    def forward(self, x: Tensor) -> Tensor:
        self.tried.append(len(x))
        out: Tensor = self.linear(x.double())
        if len(x) > self.fits:
            out.register_hook(self._run_out)  # type: ignore[no-untyped-call]
        return out

    def _run_out(self, _: Tensor) -> None:
        raise self.error()


def test_a_backward_pass_that_was_held_back_is_repeated_with_its_step(
    make_stride: MakeStride, options: dict[str, Any]
) -> None:
    expected = train(make_stride(global_batch=12), Small(99), 2, **options)
    model = ShortBack(3)

    steps, weights = train(make_stride(global_batch=12), model, 2, max_micro_batch=4, **options)

    assert [sorted(step) for step in steps] == [sorted(step) for step in expected[0]]
    assert weights == pytest.approx(expected[1], rel=1e-12)
    assert model.tried[:7] == [4] + [2] * 6


def test_the_trained_part_of_the_step_is_repeated(make_stride: MakeStride) -> None:
    expected = train(make_stride(global_batch=12), Small(99), 2)
    model = ShortBack(99)
    stride = make_stride(global_batch=12)
    tried = []

    def count(module: Any, _: Any) -> None:
        tried.append(0)
        module.fits = 2 if len(tried) == 5 else 99  # the second micro-batch of the second step

    model.register_forward_pre_hook(count)
    _, weights = train(stride, model, 2, max_micro_batch=4)

    assert weights == pytest.approx(expected[1], rel=1e-12)
    assert model.tried[:9] == [4, 4, 4, 4, 4, 2, 2, 2, 2]


def test_memory_that_ends_once_the_optimizer_has_its_states_is_survived(
    make_stride: MakeStride,
) -> None:
    expected = train(make_stride(global_batch=8), Small(99), 2)
    model = ShortBack(99)
    stride = make_stride(global_batch=8)

    def shrink(module: Any, _: Any) -> None:
        module.fits = 99 if stride.step == 0 else 5

    model.register_forward_pre_hook(shrink)
    _, weights = train(stride, model, 2)

    assert weights == pytest.approx(expected[1], rel=1e-12)
    assert model.tried[:2] == [8, 7], "all but a small rest is held back"


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable automatic garbage collection."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_what_a_failed_pass_held_is_free_before_its_samples_come_again(
    make_stride: MakeStride,
) -> None:
    errors: list[Exception] = []
    held: list[weakref.ref[Tensor]] = []

    def out_of_memory() -> Exception:
        errors.append(torch.OutOfMemoryError())  # which somebody keeps
        return errors[-1]

    class Littering(Small):
        def forward(self, x: Tensor) -> Tensor:
            ring: list[Any] = [x.clone()]
            ring.append(ring)
            held.append(weakref.ref(ring[0]))
            return super().forward(x)

    stride, model = make_stride(global_batch=8), Littering(4, out_of_memory)
    freed = []

    def body(x: Tensor) -> None:
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
        freed.append(held[-1]() is None)

    run(stride, model, body)

    assert errors
    assert freed[0]


def run(
    stride: evenstride.Stride, model: Small, body: Callable[[Tensor], None], **options: Any
) -> None:
    """Let a loop's body do as it likes with every batch."""
    loader = stride.loader(numbered(24), **options)
    stride.watch(model)
    for _, x in loader:
        body(x)


def test_leaving_the_loop_after_a_failure_trains_the_samples_once(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(4)
    loader = stride.loader(numbered(24))
    stride.watch(model)
    for _, x in loader:
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
        break

    assert stride.step == 0
    assert stride.state_dict()["position"] == 0
    steps = train_on(stride, loader, model)
    assert sorted(i for step in steps for i in step) == list(range(24))


def train_on(stride: evenstride.Stride, loader: Any, model: Small) -> list[list[int]]:
    """Train the rest of the epoch; return the ids of every step."""
    steps: list[list[int]] = [[]]
    for ids, x in loader:
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
        steps[-1] += ids.tolist() if stride.samples else []
        if stride.synced:
            steps.append([])
    return steps[:-1]


def test_the_summary_tells_how_often_and_to_what(make_stride: MakeStride) -> None:
    stride = make_stride(global_batch=8)

    train(stride, Small(3))

    summary = stride.summary()
    assert (summary.batches_repeated, summary.fits) == (2, 2)
    check_message(lines_with(str(summary), "ran out of memory"), "rank 0", "2 samples")
