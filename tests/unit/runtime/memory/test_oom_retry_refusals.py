"""Errors for batches that cannot be repeated, and for loops that would train wrongly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from evenstride.errors import ConfigError, OutOfMemory, UsageError
from tests.inside import session
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.memory.test_oom_retry import ShortBack, Small, run, train
from tests.unit.runtime.solo import numbered


def test_gradients_from_before_the_step_cannot_be_separated_from_its_own(
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

    with raises_message(OutOfMemory, "zero_grad()"):
        loop()


def test_a_single_sample_that_does_not_fit_is_the_end(make_stride: MakeStride) -> None:
    with raises_message(OutOfMemory, "1 samples"):
        train(make_stride(global_batch=8), Small(0))


def test_a_backward_pass_that_runs_out_is_the_end(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(99)

    def out_of_memory(_: Tensor) -> None:
        raise torch.OutOfMemoryError("in the middle of it")

    model.linear.weight.register_hook(out_of_memory)  # type: ignore[no-untyped-call]
    with raises_message(OutOfMemory, "max_micro_batch") as caught:
        train(stride, model)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_the_last_of_several_backward_passes_that_runs_out_is_the_end(
    make_stride: MakeStride,
) -> None:
    stride, model = make_stride(global_batch=8), ShortBack(99)

    def body(x: Tensor) -> None:
        model.fits = 0 if stride.synced else 99
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    with raises_message(OutOfMemory):
        run(stride, model, body, max_micro_batch=4)


def test_the_second_loss_of_a_batch_cannot_be_repeated(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(99)

    def body(x: Tensor) -> None:
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
            raise torch.OutOfMemoryError

    with raises_message(OutOfMemory):
        run(stride, model, body)


def test_without_accumulate_it_is_the_end(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(4)

    def body(x: Tensor) -> None:
        with stride.guard():
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    with raises_message(OutOfMemory, "stride.accumulate"):
        run(stride, model, body)


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

    with raises_message(UsageError, "step 0", "stride.synced"):
        run(stride, model, body)


def test_a_model_that_is_not_watched_cannot_be_reset(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), ShortBack(3)
    loader = stride.loader(numbered(24), max_micro_batch=4)

    def loop() -> None:
        for _, x in loader:
            with stride.guard(), stride.accumulate(model):
                stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    with raises_message(OutOfMemory, "stride.watch"):
        loop()


def test_a_watched_model_outside_of_accumulate_cannot_be_reset(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(3)
    stride.watch(nn.Linear(1, 1))

    def body(x: Tensor) -> None:
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    with raises_message(OutOfMemory):
        run(stride, model, body)


@pytest.mark.parametrize(
    ("asks", "answer"),
    [
        ("is_sharded", True),
        ("syncs_late", False),
    ],
)
def test_engines_that_cannot_run_twice_are_named(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch, asks: str, answer: bool
) -> None:
    monkeypatch.setattr(f"evenstride.runtime.memory.oom_retry.{asks}", lambda _: answer)

    with raises_message(OutOfMemory):
        train(make_stride(global_batch=8), Small(4))


def test_statistics_over_all_ranks_are_not_waited_for_in_vain(make_stride: MakeStride) -> None:
    stride = make_stride(global_batch=8)
    session(stride).state.limits.even = True  # as with more ranks

    with raises_message(OutOfMemory) as caught:
        train(stride, Small(4))
    assert "max_micro_batch" not in str(caught.value), "it would make numbers unequal"
    assert "Stride(max_share=4)" in str(caught.value)


def test_a_weight_that_was_given_by_hand_is_of_one_batch(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(8)

    def body(x: Tensor) -> None:
        with stride.guard(), stride.accumulate(model):
            loss = model(x).square().mean()
            stride.scale(loss, weight=float(len(x))).backward()  # type: ignore[no-untyped-call]
        model.fits = 4

    with raises_message(OutOfMemory, "scale()", "weight_fn"):
        run(stride, model, body)


def test_gradients_that_are_dropped_between_the_pieces_are_noticed(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(x: Tensor) -> None:
        optimizer.zero_grad()  # at the top of the loop
        with stride.guard(), stride.accumulate(model):
            stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]
        if stride.synced:
            optimizer.step()

    with raises_message(UsageError, "step 0", "stride.synced"):
        run(stride, model, body)


def test_no_more_is_done_with_a_batch_that_comes_again(make_stride: MakeStride) -> None:
    stride, model = make_stride(global_batch=8), Small(4)

    def body(x: Tensor) -> None:
        for _ in range(2):
            with stride.guard(), stride.accumulate(model):
                stride.scale(model(x).square().mean()).backward()  # type: ignore[no-untyped-call]

    with raises_message(UsageError):
        run(stride, model, body)


def test_a_weight_that_is_no_sum_is_refused(make_stride: MakeStride) -> None:
    with raises_message(ConfigError):
        train(make_stride(global_batch=8), Small(4), weight_fn=lambda _: 1.0)
