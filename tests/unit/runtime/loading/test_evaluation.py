"""Evaluation: every sample once, in the data set's order, and exact means."""

from __future__ import annotations

import math
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from evenstride.errors import ConfigError
from evenstride.runtime.loading.evaluation import EvalSampler
from evenstride.runtime.loading.seeding import item_seeds
from evenstride.runtime.session.rank_calls import exact_mean
from tests.messages import raises_message
from tests.unit.runtime.conftest import MakeStride
from tests.unit.runtime.loading.test_seeding import Noisy
from tests.unit.runtime.solo import Trainer, numbered

some_shares = st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any).map(tuple)


@given(
    length=st.integers(1, 80),
    batch=st.integers(1, 40),
    shares=some_shares,
    micro=st.none() | st.integers(1, 7),
)
def test_over_all_ranks_each_sample_comes_once(
    length: int, batch: int, shares: tuple[int, ...], micro: int | None
) -> None:
    samplers = [
        EvalSampler(length, batch, lambda: shares, rank, micro, None) for rank in range(len(shares))
    ]

    parts = [[list(keys) for keys in sampler] for sampler in samplers]

    delivered = [index for mine in parts for keys in mine for index in keys]
    assert sorted(delivered) == list(range(length))  # type: ignore[type-var]
    assert {len(sampler) for sampler in samplers} == {-(-length // batch)}
    sizes = [len(keys) for mine in parts for keys in mine]
    assert min(sizes) >= 1, "nothing is padded"
    assert max(sizes) <= (batch if micro is None else micro)


@given(length=st.integers(1, 60), batch=st.integers(8, 30), shares=some_shares)
def test_a_workers_part_grows_with_its_share(
    length: int, batch: int, shares: tuple[int, ...]
) -> None:
    parts = [
        sum(map(len, EvalSampler(length, batch, lambda: shares, rank, None, None)))
        for rank in range(len(shares))
    ]

    windows = -(-length // batch)
    for mine, share in zip(parts, shares, strict=True):
        usual = length * share / sum(shares)
        assert abs(mine - usual) <= windows * len(shares), "rounding apart"
        assert mine == 0 or share > 0


def test_each_pass_uses_the_shares_of_its_time() -> None:
    now = [(1, 3)]
    sampler = EvalSampler(8, 4, lambda: now[-1], 0, None, None)

    first = [len(keys) for keys in sampler]
    now.append((3, 1))

    assert (first, [len(keys) for keys in sampler]) == ([1, 1], [3, 3])


def test_seeds_are_the_same_in_every_pass_and_split() -> None:
    now = [(1,)]
    sampler = EvalSampler(9, 4, lambda: now[-1], 0, 2, 5)

    first = list(chain(*sampler))
    now.append((4,))
    second = list(chain(*sampler))

    expected = item_seeds(5, 0, np.arange(9)).tolist()
    assert first == second == list(zip(range(9), expected, strict=True))


class Endless(Dataset[int]):
    """More samples than a list of batches could have."""

    def __len__(self) -> int:
        return 10**15

    def __getitem__(self, index: int) -> int:
        return index


def test_a_loader_of_any_length_yields_at_once(make_stride: MakeStride) -> None:
    loader = make_stride(global_batch=4).loader(Endless(), train=False)

    assert len(loader) == 10**15 // 4
    assert [batch.tolist() for batch in islice(loader, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_alone_it_is_a_plain_loader_in_even_batches(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader = stride.loader(numbered(10), train=False)

    for _ in range(2):
        assert [ids.tolist() for ids, _ in loader] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert len(loader) == 3


def test_its_batch_and_its_micro_batches_may_be_chosen(make_stride: MakeStride) -> None:
    stride = make_stride(max_share=4)

    wide = stride.loader(numbered(10), train=False, global_batch=10)
    narrow = stride.loader(numbered(10), train=False, global_batch=10, max_micro_batch=3)

    assert [len(ids) for ids, _ in wide] == [4, 3, 3], "the cap of the memory holds here, too"
    assert [len(ids) for ids, _ in narrow] == [3, 3, 2, 2]
    assert (len(wide), len(narrow)) == (1, 1)


def test_any_number_of_them_may_run_inside_the_training_loop(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader, trainer = stride.loader(numbered(12)), Trainer(stride)
    one, other = (stride.loader(numbered(n), train=False) for n in (5, 7))

    seen: list[int] = []
    for batch in loader:
        seen += trainer.step(batch)
        pairs = list(zip_longest(one, other, fillvalue=[torch.zeros(0)]))
        for column, length in ((0, 5), (1, 7)):
            assert torch.cat([pair[column][0] for pair in pairs]).tolist() == list(range(length))

    assert sorted(seen) == list(range(12)), "training does not notice"
    assert stride.step == 3


def test_an_augmented_set_is_the_same_in_every_pass(make_stride: MakeStride) -> None:
    stride = make_stride()
    loader = stride.loader(Noisy(), train=False)

    passes = [[torch.stack(columns[1:]) for columns in loader] for _ in range(2)]

    assert all(map(torch.equal, *passes))


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a batch size": ({"batch_size": 2}, ("batch_size",)),
    "no batch": ({"global_batch": 0}, ()),
    "less than no batch": ({"global_batch": -3}, ()),
    "half a sample": ({"global_batch": 2.5}, ()),
    "less than no micro-batch": ({"max_micro_batch": -1}, ("max_micro_batch", "-1")),
    "no micro-batch": ({"max_micro_batch": 0}, ("max_micro_batch is 0",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loader_that_cannot_be_is_refused(make_stride: MakeStride, name: str) -> None:
    options, complaint = REFUSED[name]
    stride = make_stride()

    with raises_message(ConfigError, *complaint):
        stride.loader(numbered(9), train=False, **options)


@pytest.mark.parametrize(
    ("total", "count", "mean"),
    [
        (6, 4, 1.5),
        (6.0, torch.tensor(4), 1.5),
        (torch.tensor(6), 4, 1.5),
        (torch.tensor([6.0]), 4, 1.5),
        (2**24 + 1, 2**24 + 1, 1.0),  # more than single precision can count
        (torch.tensor(6.0, requires_grad=True), 4, 1.5),
        (torch.tensor(0.1, dtype=torch.float16), 1, float(torch.tensor(0.1, dtype=torch.float16))),
    ],
)
def test_a_mean_of_one_number_is_a_float(total: Any, count: Any, mean: float) -> None:
    answer = exact_mean(total, count)

    assert type(answer) is float
    assert answer == mean


def test_a_float_is_taken_as_it_is() -> None:
    assert exact_mean(0.1, 1) == 0.1
    assert exact_mean(2.0**24 + 1, 1) == 2.0**24 + 1


def test_a_mean_of_several_numbers_keeps_their_shape() -> None:
    answer = exact_mean(torch.tensor([[1, 2], [3, 4]]), 2)

    assert torch.equal(
        torch.as_tensor(answer), torch.tensor([[0.5, 1.0], [1.5, 2.0]], dtype=torch.float64)
    )


def test_a_mean_over_nothing_is_not_a_number(make_stride: MakeStride) -> None:
    answer = make_stride().mean(0.0, 0)

    assert isinstance(answer, float)
    assert math.isnan(answer)
