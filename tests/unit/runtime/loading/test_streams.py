"""Streams and batch functions with one process: their ends, their randomness, what is refused."""

from __future__ import annotations

import random
from collections import UserDict, namedtuple
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import evenstride
from evenstride.errors import ConfigError, ScaleError, StepInFlight
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.solo import Trainer, numbered

Row = tuple[int, Tensor]


class Numbers(IterableDataset[Row]):
    """Numbered rows, which note where they are read from."""

    def __init__(self, length: int) -> None:
        self.length, self.opened, self.read = length, list[int](), 0

    def __iter__(self) -> Iterator[Row]:
        self.opened.append(0)
        return self._rows(0)

    def rest(self, _: int, skip: int) -> Iterator[Row]:
        """Return the rows after the first ones; the same in every epoch."""
        self.opened.append(skip)
        return self._rows(skip)

    def _rows(self, skip: int) -> Iterator[Row]:
        for number in range(skip, self.length):
            self.read += 1
            yield number, torch.tensor([number / self.length])


def draw(samples: int) -> tuple[Tensor, Tensor]:
    """Return numbered rows, drawn at random."""
    return torch.randint(1000, (samples,)), torch.rand(samples, 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("length", [4, 8, 10])
def test_an_iterable_data_set_is_a_stream(
    make_stride: MakeStride, length: int, workers: int
) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(Numbers(length), num_workers=workers), Trainer(stride)

    epochs = [trainer.epoch(loader) for _ in range(2)]

    for steps in epochs:
        assert steps == [list(range(s, min(s + 4, length))) for s in range(0, length, 4)]
    assert (stride.epoch, stride.state_dict()["position"]) == (2, 0)


def test_epochs_may_have_other_lengths(make_stride: MakeStride) -> None:
    stride = make_stride()
    source = evenstride.Stream(lambda epoch, skip: Numbers((7, 13, 2)[epoch]).rest(epoch, skip))
    loader, trainer = stride.loader(source), Trainer(stride)

    assert [sum(map(len, trainer.epoch(loader))) for _ in range(3)] == [7, 13, 2]


def test_a_state_from_the_last_step_of_an_epoch_is_at_the_next_one(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(Numbers(10)), Trainer(stride)
    places = []
    for batch in loader:
        trainer.step(batch)
        state = stride.state_dict()
        places.append((state["epoch"], state["position"]))

    assert places == [(0, 4), (0, 8), (1, 0)]


def test_a_stream_is_read_once_per_epoch_in_this_process(make_stride: MakeStride) -> None:
    numbers, stride = Numbers(10), make_stride()
    loader, trainer = stride.loader(numbers), Trainer(stride)

    for _ in range(2):
        trainer.epoch(loader, steps=1)  # the loop is left, and entered again
        trainer.epoch(loader)

    assert (len(numbers.opened), numbers.read) == (2, 20)


def test_the_end_of_a_stream_is_not_read_again_by_another_process(make_stride: MakeStride) -> None:
    numbers, stride = Numbers(10), make_stride()
    loader = stride.loader(numbers, num_workers=1)

    assert [len(ids) for ids in Trainer(stride).epoch(loader)] == [4, 4, 2]
    assert numbers.read == 0, "a loader process has handed over the samples of the last step"


def test_a_position_within_an_epoch_is_skipped_by_the_source(make_stride: MakeStride) -> None:
    numbers = Numbers(10)
    states, seen = list[dict[str, Any]](), list[list[int]]()
    for steps in (2, None):
        stride = make_stride()
        loader = stride.loader(evenstride.Stream(numbers.rest))
        if states:
            stride.load_state_dict(states[0])
        seen += Trainer(stride).epoch(loader, steps=steps)
        states.append(stride.state_dict())

    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert numbers.opened == [0, 8]


def test_a_length_makes_a_stream_countable(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader = stride.loader(evenstride.Stream(Numbers(10), length=10))

    assert len(loader) == 3
    assert len(Trainer(stride).epoch(loader)) == 3


def test_a_loader_of_unknown_length_has_no_len_as_in_torch(make_stride: MakeStride) -> None:
    for data in (Numbers(10), draw):
        loader = make_stride().loader(data)
        with pytest.raises(TypeError, match="length"):
            len(loader)


@pytest.mark.parametrize("length", [9, 11, 13], ids=["longer", "shorter", "a step shorter"])
def test_a_wrong_length_is_named(make_stride: MakeStride, length: int) -> None:
    stride = make_stride()
    loader = stride.loader(evenstride.Stream(Numbers(10), length=length))

    with raises_message(ConfigError, length):
        Trainer(stride).epoch(loader)


@pytest.mark.parametrize(("length", "drop_last"), [(0, False), (3, True)])
def test_a_stream_without_a_step_is_refused(
    make_stride: MakeStride, length: int, drop_last: bool
) -> None:
    stride = make_stride()
    loader = stride.loader(Numbers(length), drop_last=drop_last)

    with raises_message(ConfigError, f"{length} samples"):
        Trainer(stride).epoch(loader)


def test_random_numbers_of_a_stream_do_not_depend_on_the_script(make_stride: MakeStride) -> None:
    def noisy(_: int, skip: int) -> Iterator[Row]:
        drawn = ((torch.rand(1) + random.random() + np.random.rand()).float() for _ in range(9))
        return islice(enumerate(drawn), skip, None)

    seen = []
    for disturbed in (False, True):
        stride = make_stride(seed=2)
        loader, trainer = stride.loader(evenstride.Stream(noisy)), Trainer(stride)
        batches = []
        for batch in loader:
            if disturbed:
                torch.rand(3), random.random(), np.random.rand()
            trainer.step(batch)
            batches += batch[1].flatten().tolist()
        seen.append(batches)

    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 9


def test_reading_leaves_the_scripts_random_numbers_alone(make_stride: MakeStride) -> None:
    stream = evenstride.Stream(Numbers(8), transform=lambda row: (row[0], torch.rand(1)))
    for data in (stream, draw):
        stride = make_stride()
        loader, trainer = stride.loader(data, max_steps=2), Trainer(stride)
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        drawn = [torch.rand(1)]
        for batch in loader:
            trainer.step(batch)
            drawn.append(torch.rand(1))

        assert torch.equal(torch.cat(drawn), expected)


def test_the_loop_over_a_batch_function_ends_after_max_steps(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader = stride.loader(draw, max_steps=5)
    trainer = Trainer(stride)

    first = trainer.epoch(loader, steps=2)
    state = stride.state_dict()
    rest = trainer.epoch(loader)

    assert (len(loader), len(first), len(rest), stride.step, stride.epoch) == (5, 2, 3, 5, 0)
    assert trainer.epoch(loader) == []
    again = make_stride()
    loader = again.loader(draw, max_steps=7)
    again.load_state_dict(state)
    assert Trainer(again).epoch(loader)[:3] == rest
    assert again.step == 7


def test_max_steps_ends_a_loop_over_a_data_set_within_an_epoch(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(10), max_steps=5), Trainer(stride)

    lengths = [len(trainer.epoch(loader)) for _ in range(2)]

    assert (lengths, stride.step, stride.epoch) == ([3, 2], 5, 1)


def test_a_batch_function_may_return_arrays_of_any_kind(make_stride: MakeStride) -> None:
    pair = namedtuple("pair", ["a", "b"])

    def drawn(samples: int) -> dict[str, Any]:
        ids = torch.arange(samples)
        texts = [str(n) for n in range(samples)]
        return {"x": torch.rand(samples, 1), "more": pair(ids.numpy(), [ids, texts])}

    stride = make_stride()
    loader, trainer = stride.loader(drawn, max_micro_batch=3), Trainer(stride)
    batches = []
    for batch in loader:
        batches.append(batch)
        with stride.accumulate(trainer.model):
            trainer.backward((0, batch["x"]))
        if stride.synced:
            trainer.update()
            break

    assert [len(batch["x"]) for batch in batches] == [2, 2]
    more = batches[1]["more"]
    assert type(more).__name__ == "pair"
    assert more.a.tolist() == more.b[0].tolist() == [2, 3]
    assert more.b[1] == ["2", "3"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda _: torch.rand(12, 1),
        lambda samples: (torch.rand(samples), torch.rand(())),
        lambda _: None,
        lambda _: [1, 2, 3],
    ],
    ids=["fixed number", "no rows", "nothing", "short list"],
)
def test_a_batch_of_another_size_is_named(make_stride: MakeStride, wrong: Any) -> None:
    stride = make_stride()
    loader = stride.loader(wrong)

    with raises_message(ConfigError, "4 samples"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (iter([1, 2]), {}),
        (5, {}),
        ([1, 2], {"transform": 3}),
        ([1, 2], {"length": 0}),
        ([1, 2], {"length": 1.5}),
    ],
    ids=["read once", "number", "transform", "no length", "part"],
)
def test_what_is_no_stream_is_refused(source: Any, options: Any) -> None:
    with raises_message(ConfigError):
        evenstride.Stream(source, **options)


def test_a_source_that_returns_nothing_is_named(make_stride: MakeStride) -> None:
    loader = make_stride().loader(evenstride.Stream(lambda *_: None))  # type: ignore[arg-type]

    with raises_message(ConfigError, "NoneType"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("data", "settings", "options"),
    [
        (Numbers(9), {}, {"partition": "epoch"}),
        (draw, {}, {"cost_fn": [1.0] * 9}),
        (Numbers(9), {"sync": "asp"}, {}),
        (draw, {"sync": "asp"}, {}),
        (numbered(9), {"sync": "asp"}, {"max_steps": 4}),
        (Numbers(9), {"sync": "local-sgd(every=2)"}, {}),
        (draw, {"global_batch": "auto", "bounds": (4, 8)}, {}),
        (draw, {}, {"max_steps": 0}),
        (draw, {}, {"train": False}),
        (numbered(9), {}, {"train": False, "max_steps": 3}),
        (UserDict(), {}, {}),
        (object(), {}, {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_does_not_fit_together_is_refused(
    make_stride: MakeStride, data: Any, settings: Any, options: Any
) -> None:
    stride = make_stride(**settings)

    with raises_message(ConfigError):
        stride.loader(data, **options)


def test_a_state_belongs_to_its_kind_of_data(make_stride: MakeStride) -> None:
    states = []
    for data in (numbered(10), Numbers(10), draw):
        stride = make_stride()
        stride.loader(data)
        states.append(stride.state_dict())
        for state in states[:-1]:
            with raises_message(ConfigError):
                stride.load_state_dict(state)


def test_a_batch_fetched_before_the_backward_pass_is_refused(make_stride: MakeStride) -> None:
    stride = make_stride()
    batches, trainer = iter(stride.loader(draw)), Trainer(stride)
    loss = trainer.loss(next(batches))

    with raises_message(ScaleError, "num_workers"):
        next(batches)
    assert loss.requires_grad


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("data", [numbered(10), Numbers(10)], ids=["indexed", "stream"])
def test_a_loader_has_the_state_of_its_stride(
    make_stride: MakeStride, data: Any, options: Any
) -> None:
    stride = make_stride()
    loader: Any = stride.loader(data, **options)
    trainer = Trainer(stride)
    first = trainer.epoch(loader, steps=2)
    state = loader.state_dict()

    rest = trainer.epoch(loader, steps=1)
    at_the_end = loader.state_dict()
    loader.load_state_dict(state)

    assert state["position"] == 8
    assert trainer.epoch(loader) == rest
    assert (len(first), len(rest[0])) == (2, 2)
    loader.load_state_dict(at_the_end)
    assert (stride.epoch, len(trainer.epoch(loader))) == (1, 3)
    for batch in loader:
        trainer.backward(batch)
        with raises_message(StepInFlight):
            loader.state_dict()
        break


def test_an_iterator_that_is_kept_gives_the_micro_batches_of_each_step(
    make_stride: MakeStride,
) -> None:
    stride = make_stride()
    batches, trainer = iter(stride.loader(draw, max_micro_batch=3)), Trainer(stride)
    sizes = []
    while stride.step < 4:
        for batch in batches:
            with stride.accumulate(trainer.model):
                trainer.backward(batch)
            sizes.append(len(batch[0]))
            if stride.synced:
                break
        trainer.update()

    assert (sizes, stride.step) == ([2, 2] * 4, 4)
