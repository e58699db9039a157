"""The training loader with one process: what a loop over it is given, and when it is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import evenstride
from evenstride.errors import ConfigError, LoaderBusy
from tests.messages import raises_message
from tests.order import epoch_order
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import Trainer, numbered


def _flat(steps: list[list[int]]) -> list[int]:
    return [index for ids in steps for index in ids]


def test_each_epoch_is_every_sample_once_in_its_own_order(make_stride: MakeStride) -> None:
    stride = make_stride(seed=7)
    loader, trainer = stride.loader(numbered(10)), Trainer(stride)

    epochs = [trainer.epoch(loader) for _ in range(3)]

    assert [len(ids) for ids in epochs[0]] == [4, 4, 2]
    for epoch, steps in enumerate(epochs):
        assert _flat(steps) == epoch_order(7, epoch, 10, shuffle=True).tolist()
    assert _flat(epochs[0]) != _flat(epochs[1])
    assert (stride.epoch, stride.step) == (3, 9)


def test_without_shuffling_the_data_sets_own_order_is_kept(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(6), shuffle=False), Trainer(stride)

    assert trainer.epoch(loader) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("length", "drop_last", "steps"), [(10, False, 3), (10, True, 2), (8, True, 2)]
)
def test_its_length_is_the_number_of_global_steps(
    make_stride: MakeStride, length: int, drop_last: bool, steps: int
) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(length), drop_last=drop_last), Trainer(stride)

    assert isinstance(loader, DataLoader)
    assert len(loader) == steps
    assert len(trainer.epoch(loader, steps=1)) == 1
    assert len(loader) == steps, "also in mid-epoch"


def test_its_length_counts_steps_and_not_micro_batches(make_stride: MakeStride) -> None:
    stride = make_stride(global_batch=7)
    loader, trainer = stride.loader(numbered(14), max_micro_batch=3), Trainer(stride)

    sizes, synced = [], []
    for batch in loader:
        with stride.accumulate(trainer.model):
            trainer.backward(batch)
        sizes.append(stride.samples)
        synced.append(stride.synced)
        if stride.synced:
            trainer.update()

    assert len(loader) == 2
    assert sizes == [3, 2, 2] * 2
    assert synced == [False, False, True] * 2
    assert stride.step == 2


def test_the_number_of_micro_batches_may_be_set(make_stride: MakeStride) -> None:
    stride = make_stride(global_batch=7)
    loader, trainer = stride.loader(numbered(17), micro_batches=5), Trainer(stride)

    sizes, steps, ends = [], [], []
    for batch in loader:
        with stride.accumulate(trainer.model):
            trainer.backward(batch)
        sizes.append(stride.samples)
        ends.append(loader.at_end)  # type: ignore[attr-defined]
        if stride.synced:
            trainer.update()
            steps.append(len(sizes))

    assert sizes == [2, 2, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1, 1]
    assert steps == [5, 10, 13], "the last step has 3 samples of 7, and so 3 batches of 5"
    assert ends == [False] * 12 + [True]


@pytest.mark.parametrize(
    "options", [{"max_micro_batch": 2}, {"cost_fn": [1.0] * 8}, {"micro_batches": 0}]
)
def test_a_number_and_a_size_of_micro_batches_exclude_each_other(
    make_stride: MakeStride, options: dict[str, Any]
) -> None:
    with raises_message(ConfigError, "micro_batches"):
        make_stride().loader(numbered(8), **{"micro_batches": 2, **options})
    with raises_message(ConfigError, "micro_batches"):
        make_stride().loader(numbered(8), train=False, micro_batches=2)


def test_drop_last_leaves_out_the_end_of_the_order_and_is_counted(make_stride: MakeStride) -> None:
    stride = make_stride(seed=1)
    loader, trainer = stride.loader(numbered(11), drop_last=True), Trainer(stride)

    for epoch in range(2):
        order = epoch_order(1, epoch, 11, shuffle=True).tolist()
        assert _flat(trainer.epoch(loader)) == order[:8]

    assert stride.summary().samples_dropped == 3
    assert "drop_last leaves 3 samples out" in str(stride.summary())


def test_a_loop_after_a_break_goes_on_in_the_same_epoch(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(20)), Trainer(stride)

    pieces = [trainer.epoch(loader, steps=steps) for steps in (2, 1, None)]

    order = epoch_order(0, 0, 20, shuffle=True).tolist()
    assert [len(steps) for steps in pieces] == [2, 1, 2]
    assert _flat([*pieces[0], *pieces[1], *pieces[2]]) == order
    assert stride.epoch == 1


def test_a_batch_that_was_not_trained_comes_again(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(8)), Trainer(stride)
    trainer.epoch(loader, steps=1)

    untrained = next(iter(loader))[0].tolist()

    assert _flat(trainer.epoch(loader)) == untrained


def test_restart_leaves_the_rest_of_an_epoch(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader: Any = stride.loader(numbered(12))
    trainer = Trainer(stride)
    loader.restart()
    assert stride.epoch == 0, "nothing of it has been trained, so there is nothing to leave"
    trainer.epoch(loader, steps=1)

    loader.restart()

    assert stride.epoch == 1
    assert _flat(trainer.epoch(loader)) == epoch_order(0, 1, 12, shuffle=True).tolist()


def test_restart_inside_the_loop_is_refused(make_stride: MakeStride) -> None:
    loader: Any = make_stride().loader(numbered(12))
    loop = iter(loader)
    next(loop)

    with raises_message(LoaderBusy):
        loader.restart()


def test_a_second_loop_inside_the_first_is_refused(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader = stride.loader(numbered(12))
    outer = iter(loader)
    next(outer)

    with raises_message(LoaderBusy):
        iter(loader)

    outer.close()  # type: ignore[attr-defined]
    assert next(iter(loader))


def test_two_iterators_made_before_either_is_used_are_refused(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(12)), Trainer(stride)
    one, other = iter(loader), iter(loader)
    trainer.step(next(one))

    with raises_message(LoaderBusy):
        next(other)


@pytest.mark.parametrize(("limit", "lengths"), [(0, []), (3, [3]), (5, [3, 2])])
def test_a_limit_of_steps_ends_the_pass_and_then_the_program(
    make_stride: MakeStride,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: int,
    lengths: list[int],
) -> None:
    """No pass is empty: a script may use the variables of its loop after it."""
    monkeypatch.setenv("EVENSTRIDE_MAX_STEPS", str(limit))
    stride = make_stride()
    loader, trainer = stride.loader(numbered(12)), Trainer(stride)

    assert [len(trainer.epoch(loader)) for _ in lengths] == lengths
    with pytest.raises(SystemExit) as ended:
        trainer.epoch(loader)

    assert ended.value.code == 0
    assert stride.step == limit
    assert f"EVENSTRIDE_MAX_STEPS={limit} is reached" in caplog.text


def test_the_progress_file_always_holds_the_count_of_steps(
    make_stride: MakeStride, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("_EVENSTRIDE_PROGRESS", str(tmp_path / "steps"))
    stride = make_stride()
    loader, trainer = stride.loader(numbered(12)), Trainer(stride)

    counts = []
    for batch in loader:
        counts.append(struct.unpack("<q", (tmp_path / "steps").read_bytes())[0])
        trainer.step(batch)

    assert counts == [0, 1, 2]
    assert struct.unpack("<q", (tmp_path / "steps").read_bytes()) == (3,)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # a fork next to threads
def test_persistent_loader_processes_serve_epochs_and_breaks(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader = stride.loader(numbered(24), num_workers=2, persistent_workers=True)
    trainer = Trainer(stride)

    seen = [trainer.epoch(loader, steps=steps) for steps in (None, 2, None, None)]

    del loader
    for epoch, steps in enumerate([seen[0], [*seen[1], *seen[2]], seen[3]]):
        assert _flat(steps) == epoch_order(0, epoch, 24, shuffle=True).tolist()


def test_the_global_generator_is_left_alone(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(12)), Trainer(stride)
    before = torch.get_rng_state()

    trainer.epoch(loader)

    assert torch.equal(torch.get_rng_state(), before)


def test_a_loop_over_a_closed_stride_still_ends(make_stride: MakeStride) -> None:
    stride: evenstride.Stride = make_stride()
    loader, trainer = stride.loader(numbered(12)), Trainer(stride)
    trainer.epoch(loader, steps=1)

    stride.close()

    assert len(trainer.epoch(loader)) == 2


def test_every_step_has_the_number_of_micro_batches_that_was_asked_for(
    make_stride: MakeStride,
) -> None:
    stride = make_stride(global_batch=5)
    loader = stride.loader(numbered(7), micro_batches=3, shuffle=False)
    net = torch.nn.Linear(1, 1)
    model = stride.watch(net)

    drawn = []
    for ids, x in loader:
        with stride.accumulate(model):
            stride.scale(net(x).mean()).backward()  # type: ignore[no-untyped-call]
        drawn.append((ids.tolist(), stride.samples, stride.synced))

    assert drawn == [
        ([0, 1], 2, False),
        ([2, 3], 2, False),
        ([4], 1, True),
        ([5], 1, False),  # a short step has fewer micro-batches
        ([6], 1, True),
    ]
