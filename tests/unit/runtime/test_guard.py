"""A batch that does not fit into memory comes again in pieces, and the gradient is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import evenstride
from evenstride.errors import ConfigError, OutOfMemory, UsageError
from evenstride.runtime.timing import StepRecord
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_training_is_the_same_as_if_it_had_fitted(
    make_stride: MakeStride, workers: int, weighted: bool
) -> None:
    options: dict[str, Any] = {"num_workers": workers}
    if weighted:
        options["weight_fn"] = lambda batch: float((batch[0] + 1).sum())
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
    stride._member.timer.finished = records.append

    train(stride, Small(4))

    assert [record.modelled for record in records] == [False, True, True]


def test_each_retry_spoils_its_step(make_stride: MakeStride) -> None:
    stride = make_stride(global_batch=8)
    records: list[StepRecord] = []
    stride._member.timer.finished = records.append
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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_backward_pass_that_was_held_back_is_repeated_with_its_step(
    make_stride: MakeStride, workers: int, weighted: bool
) -> None:
    options: dict[str, Any] = {"num_workers": workers}
    if weighted:
        options["weight_fn"] = lambda batch: float((batch[0] + 1).sum())
    expected = train(make_stride(global_batch=12), Small(99), 2, **options)
    model = ShortBack(3)

    steps, weights = train(make_stride(global_batch=12), model, 2, max_micro_batch=4, **options)

    assert [sorted(step) for step in steps] == [sorted(step) for step in expected[0]]
    assert weights == pytest.approx(expected[1], rel=1e-12)
    assert model.tried[:7] == [4] + [2] * 6


def test_what_was_trained_of_the_step_comes_again(make_stride: MakeStride) -> None:
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


def test_gradients_from_before_the_step_cannot_be_told_from_its_own(
    make_stride: MakeStride,
) -> None:
    stride, model = make_stride(global_batch=8), ShortBack(8)
    loader = stride.loader(numbered(24), max_micro_batch=4)
    stride.watch(model)

    def loop() -> None:
        for _, x in loader:
            with stride.guard(), stride.accumulate(model):
                stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
            model.fits = 8 if stride.step == 0 else 3  # and never zero_grad

    with pytest.raises(OutOfMemory, match=r"gradients from before the step.*zero_grad\(\)"):
        loop()


def _run(stride: evenstride.Stride, model: Small, body: Callable[[Tensor], None]) -> None:
    loader = stride.loader(numbered(24))
    stride.watch(model)
    for _, x in loader:
        body(x)


def test_a_single_sample_that_does_not_fit_is_the_end(make_stride: MakeStride) -> None:
    with pytest.raises(OutOfMemory, match="batch of 1 samples, and fewer samples than one"):
        train(make_stride(global_batch=8), Small(0))


def test_a_backward_pass_that_runs_out_is_the_end(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(99)

    def out_of_memory(_: Tensor) -> None:
        raise torch.OutOfMemoryError("in the middle of it")

    model.linear.weight.register_hook(out_of_memory)  # type: ignore[no-untyped-call]
    with pytest.raises(OutOfMemory, match=r"in its backward pass.*max_micro_batch=4") as caught:
        train(stride, model)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_the_second_loss_of_a_batch_cannot_be_repeated(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(99)

    def body(x: Tensor) -> None:
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
            raise torch.OutOfMemoryError

    with pytest.raises(OutOfMemory, match="in its backward pass"):
        _run(stride, model, body)


def test_without_accumulate_it_is_the_end(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(4)

    def body(x: Tensor) -> None:
        with stride.guard():
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(OutOfMemory, match=r"inside `with stride\.accumulate"):
        _run(stride, model, body)


def test_another_error_passes(make_stride: MakeStride) -> None:
    with pytest.raises(KeyError):
        train(make_stride(global_batch=8), Small(4, KeyError))


def test_outside_of_the_loop_nothing_is_swallowed(make_stride: MakeStride) -> None:
    with pytest.raises(torch.OutOfMemoryError), make_stride().guard():
        raise torch.OutOfMemoryError


def test_an_optimizer_step_between_the_pieces_is_refused(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def body(x: Tensor) -> None:
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
        other.step()
        optimizer.step()

    with pytest.raises(UsageError, match=r"in the middle of step 0.*stride\.synced"):
        _run(stride, model, body)


def test_a_model_that_is_not_watched_cannot_be_reset(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), ShortBack(3)
    loader = stride.loader(numbered(24), max_micro_batch=4)

    def loop() -> None:
        for _, x in loader:
            with stride.guard(), stride.accumulate(model):
                stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(OutOfMemory, match=r"its model is not watched \(model = stride\.watch"):
        loop()


def test_a_watched_model_outside_of_accumulate_cannot_be_reset(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(3)
    stride.watch(nn.Linear(1, 1))

    def body(x: Tensor) -> None:
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(OutOfMemory, match="not all watched models are given to"):
        _run(stride, model, body)


def test_gradients_that_are_dropped_between_the_pieces_are_noticed(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(x: Tensor) -> None:
        optimizer.zero_grad()  # at the top of the loop
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
        if stride.synced:
            optimizer.step()

    with pytest.raises(UsageError, match=r"gradients of step 0 are gone.*under `if stride\.synced"):
        _run(stride, model, body)


def test_no_more_is_done_with_a_batch_that_comes_again(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(4)

    def body(x: Tensor) -> None:
        for _ in range(2):
            with stride.guard(), stride.accumulate(model):
                stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(UsageError, match="did not fit into memory and comes again"):
        _run(stride, model, body)


def test_a_weight_that_is_no_sum_is_refused(make_stride: MakeStride) -> None:
    with pytest.raises(ConfigError, match="must be a sum over samples"):
        train(make_stride(global_batch=8), Small(4), weight_fn=lambda _: 1.0)


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
    assert "memory ended 2 time(s) on rank 0, whose batches have at most 2 samples" in str(summary)
