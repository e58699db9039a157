"""An order with random access is a bijection that can be read anywhere, both ways."""

from __future__ import annotations

from math import isqrt

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstride.core.sampling.permutation import MAX_LENGTH, ROUNDS, SORTED_LENGTH, Permutation

LIMIT = 2**64
GOLDEN = 0x9E3779B97F4A7C15

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 2**40)
short = st.integers(1, 4 * SORTED_LENGTH)
long = st.one_of(
    st.integers(0, 2**20).map(lambda more: 2**40 + more),
    st.integers(2**20, MAX_LENGTH),
    st.integers(MAX_LENGTH - 1000, MAX_LENGTH),
    st.integers(2**10, 2**31).map(lambda root: root * root),  # no number to walk over, or many
)


def splitmix(state: int, number: int) -> int:
    """Return an output of SplitMix64, counted from 1, in Python's integers."""
    z = (state + number * GOLDEN) % LIMIT
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % LIMIT
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % LIMIT
    return z ^ (z >> 31)


def plainly(length: int, seed: int, epoch: int, position: int) -> int:
    """Return the sample at a position, one by one and in Python's integers."""
    state = 0
    for number in (seed, epoch, length):
        state = splitmix(state ^ (number % LIMIT), 1)
    if length <= SORTED_LENGTH:
        return min_by_rank([splitmix(state, i + 1) >> 10 for i in range(length)], position)
    high_size = isqrt(length - 1) + 1
    high_size += high_size % 2
    low_size = -(-length // high_size)
    while True:
        high, low = divmod(position, low_size)
        for number in range(1, ROUNDS + 1):
            key = splitmix(state, number)
            if number % 2:
                high = ((splitmix(key, low) | 2**63) - high) % high_size
            else:
                low = ((splitmix(key, high) | 2**63) - low) % low_size
        position = high * low_size + low
        if position < length:
            return position


def min_by_rank(bits: list[int], rank: int) -> int:
    """Return the index whose bits have the given rank; of equal ones the smaller comes first."""
    return sorted(range(len(bits)), key=lambda i: (bits[i], i))[rank]


@st.composite
def shuffles_and_numbers(draw: st.DrawFn) -> tuple[Permutation, list[int]]:
    """Draw an order and some of its positions, in any order and some of them repeated."""
    length = draw(st.one_of(short, long))
    shuffle = Permutation(length, draw(seeds), draw(epochs))
    return shuffle, draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=40))


@given(length=short, seed=seeds, epoch=epochs)
def test_every_sample_comes_exactly_once(length: int, seed: int, epoch: int) -> None:
    whole = Permutation(length, seed, epoch).at(np.arange(length))

    assert whole.dtype == np.int64
    np.testing.assert_array_equal(np.sort(whole), np.arange(length))


@given(length=short, seed=seeds, epoch=epochs)
def test_the_inverse_of_a_whole_order_is_its_positions(length: int, seed: int, epoch: int) -> None:
    shuffle = Permutation(length, seed, epoch)

    np.testing.assert_array_equal(shuffle.position_of(shuffle.at(np.arange(length))), range(length))
    np.testing.assert_array_equal(shuffle.at(shuffle.position_of(np.arange(length))), range(length))


@given(data=st.data(), length=short, seed=seeds)
def test_values_read_at_some_positions_are_those_of_the_whole_order(
    data: st.DataObject, length: int, seed: int
) -> None:
    shuffle = Permutation(length, seed, 3)
    some = np.array(data.draw(st.lists(st.integers(0, length - 1), max_size=60)), dtype=np.int64)

    np.testing.assert_array_equal(shuffle.at(some), shuffle.at(np.arange(length))[some])


@given(asked=shuffles_and_numbers())
def test_numbers_of_any_length_stay_in_range_and_lead_back(
    asked: tuple[Permutation, list[int]],
) -> None:
    shuffle, numbers = asked
    row = np.array(numbers, dtype=np.int64)

    there, back = shuffle.at(row), shuffle.position_of(row)

    for found in (there, back):
        assert found.dtype == np.int64
        assert found.min() >= 0
        assert found.max() < shuffle.length
        assert len(set(found.tolist())) == len(set(numbers))
    np.testing.assert_array_equal(shuffle.position_of(there), row)
    np.testing.assert_array_equal(shuffle.at(back), row)


@given(asked=shuffles_and_numbers())
def test_the_numbers_are_those_of_plain_integer_arithmetic(
    asked: tuple[Permutation, list[int]],
) -> None:
    shuffle, numbers = asked

    found = shuffle.at(np.array(numbers[:5])).tolist()

    expected = [plainly(shuffle.length, shuffle.seed, shuffle.epoch, n) for n in numbers[:5]]
    assert found == expected


@given(length=st.one_of(st.integers(SORTED_LENGTH + 1, 2**20), long))
def test_the_network_is_hardly_larger_than_the_range(length: int) -> None:
    high, low = Permutation(length, 0, 0).sides

    assert high % 2 == 0
    assert abs(high - low) <= 3
    assert length <= high * low < length + high


def test_the_plain_arithmetic_is_splitmix() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]

    assert [splitmix(1234567, number) for number in (1, 2, 3)] == published
