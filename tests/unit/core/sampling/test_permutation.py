"""An order with random access looks like any random order, at every length.

All seeds are fixed, so nothing here is left to chance. What is compared are standard scores, which
are close to normal: a figure beyond 4 has a chance of 1 in 16,000 with uniform permutations, and
some three hundred figures are looked at. The scores' mean square must be 1 as well, within 4 of its
standard errors; its excess kurtosis is at most 1 here (counts of rare events), hence ``3 / seeds``.
"""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from math import factorial, sqrt

import numpy as np
import pytest
from scipy import stats

from evenstride.core.fleet import IntArray
from evenstride.core.sampling.permutation import MAX_LENGTH, SORTED_LENGTH, Permutation
from evenstride.errors import ConfigError
from tests.messages import raises_message

FARTHEST = 4.0
# How many seeds at each length; 1,025 is the shortest with a network, where it is hardest.
SEEDS = {10: 2000, 100: 1000, 1000: 400, 1025: 400, 60_000: 16, 1_281_167: 2}

Score = Callable[[IntArray], float]


def whole(length: int, seed: int, epoch: int = 0) -> IntArray:
    return Permutation(length, seed, epoch).at(np.arange(length))


def first_position(order: IntArray) -> float:
    n = len(order)
    return float((order[0] - (n - 1) / 2) / sqrt((n * n - 1) / 12))


def adjacent_pairs(order: IntArray) -> float:
    """Score how often a sample is followed by the one that follows it in the data set."""
    n = len(order)
    mean = (n - 1) / n
    variance = (n - 2) / n + mean - mean * mean
    return float((np.count_nonzero(np.diff(order) == 1) - mean) / sqrt(variance))


def displacement(order: IntArray) -> float:
    """Score Spearman's footrule (moments: Diaconis & Graham 1977)."""
    n = len(order)
    total = int(np.abs(order - np.arange(n)).sum())
    return (total - (n * n - 1) / 3) / sqrt((n + 1) * (2 * n * n + 7) / 45)


def rank_correlation(order: IntArray) -> float:
    n = len(order)
    centred = np.arange(n) - (n - 1) / 2
    squares = n * (n * n - 1) / 12
    return float(centred @ (order - (n - 1) / 2)) / (squares / sqrt(n - 1))


def runs_up(order: IntArray) -> float:
    n = len(order)
    return float((np.count_nonzero(np.diff(order) > 0) - (n - 1) / 2) / sqrt((n + 1) / 12))


def serial_correlation(order: IntArray) -> float:
    """Score the circular serial correlation (moments: Wald & Wolfowitz 1943, centred values)."""
    n = len(order)
    values = order - (n - 1) / 2
    squares, fourths = float((values**2).sum()), float((values**4).sum())
    mean = -squares / (n - 1)
    variance = (squares**2 - fourths) / (n - 1) - mean * mean
    variance += (squares**2 - 2 * fourths) / ((n - 1) * (n - 2))
    return (float(values @ np.roll(values, 1)) - mean) / sqrt(variance)


def fixed_points(order: IntArray) -> float:
    return float(np.count_nonzero(order == np.arange(len(order))) - 1)


SCORES: list[Score] = [
    first_position,
    adjacent_pairs,
    displacement,
    rank_correlation,
    runs_up,
    serial_correlation,
    fixed_points,
]


def assert_standard(scores: list[float], what: str) -> None:
    """Fail unless the scores have mean 0 and mean square 1."""
    count = len(scores)
    mean = sum(scores) / sqrt(count)
    spread = (sum(score * score for score in scores) / count - 1) / sqrt(3 / count)
    assert abs(mean) < FARTHEST, f"{what}: mean {mean:.1f} standard errors from 0"
    assert abs(spread) < FARTHEST, f"{what}: square {spread:.1f} standard errors from 1"


def assert_uniform(orders: Iterator[IntArray]) -> None:
    """Fail unless permutations score in every way as uniform ones do."""
    scores = [[score(order) for score in SCORES] for order in orders]
    for score, column in zip(SCORES, zip(*scores, strict=True), strict=True):
        assert_standard(list(column), score.__name__)


@pytest.mark.parametrize("score", SCORES, ids=lambda score: score.__name__)
def test_the_scores_are_standard_over_all_permutations(score: Score) -> None:
    scores = [score(np.array(order)) for order in permutations(range(7))]

    assert np.mean(scores) == pytest.approx(0, abs=1e-9)
    assert np.mean(np.square(scores)) == pytest.approx(1)


@pytest.mark.parametrize("length", range(2, 9))
def test_all_orders_of_few_samples_come_up_equally_often(length: int) -> None:
    # With all cells alike the statistic's variance is 2 (k - 1) (N - 1) / N however few are in one.
    cells = factorial(length)
    count = max(3000, cells // 2)
    number_of = {order: number for number, order in enumerate(permutations(range(length)))}

    seen = [number_of[tuple(whole(length, seed).tolist())] for seed in range(count)]

    times = np.bincount(seen, minlength=cells)
    statistic = float(((times - count / cells) ** 2).sum()) / (count / cells)
    if cells < 100:
        assert stats.chi2.sf(statistic, cells - 1) > 1e-4
        assert stats.chi2.cdf(statistic, cells - 1) > 1e-4
    else:
        assert abs(statistic - (cells - 1)) < FARTHEST * sqrt(2 * (cells - 1))


@pytest.mark.parametrize("length", SEEDS)
def test_an_order_is_a_uniform_permutation(length: int) -> None:
    assert_uniform(whole(length, seed) for seed in range(SEEDS[length]))


@pytest.mark.parametrize("length", SEEDS)
def test_one_epoch_tells_nothing_of_the_next(length: int) -> None:
    def between(epoch: int) -> IntArray:
        return Permutation(length, 1, epoch + 1).position_of(whole(length, 1, epoch))

    assert_uniform(between(epoch) for epoch in range(SEEDS[length]))


@pytest.mark.parametrize("length", SEEDS)
def test_one_seed_tells_nothing_of_its_neighbour(length: int) -> None:
    def between(seed: int) -> IntArray:
        return Permutation(length, seed + 1, 0).position_of(whole(length, seed))

    assert_uniform(between(seed) for seed in range(-5, SEEDS[length] - 5))


@pytest.mark.parametrize("length", [1000, 1025])
def test_one_length_tells_nothing_of_the_next(length: int) -> None:
    # Orders of neighbouring lengths that agreed would do so at most positions.
    agree = [int(np.sum(whole(length, s) == whole(length + 1, s)[:-1])) for s in range(300)]

    assert_standard([count - 1.0 for count in agree], "agreement")


@pytest.mark.parametrize("length", [1025, 4095])
def test_the_digits_of_the_network_leave_no_trace(length: int) -> None:
    # Positions one row apart share their low digit. Pairs of them with equal differences betray
    # a network of four rounds at once. In a uniform permutation of an odd length any two
    # differences are equal with probability 1 / (length - 2).
    _, row = Permutation(length, 0, 0).sides
    pairs = (length - row) * (length - row - 1) / 2
    scores = []
    for seed in range(300):
        order = whole(length, seed)
        times = np.bincount((order[row:] - order[:-row]) % length)
        equal = float((times * (times - 1)).sum()) / 2
        scores.append((equal - pairs / (length - 2)) / sqrt(pairs / (length - 2)))

    assert_standard(scores, "equal differences")


@pytest.mark.parametrize("length", [10, 1000, 1089, 1156])
def test_even_and_odd_orders_are_as_frequent(length: int) -> None:
    # 1,089 is 33 * 33 and 1,156 is 34 * 34: nothing to walk over, which would hide a fixed parity.
    odd = [_is_odd(whole(length, seed)) for seed in range(400)]

    assert abs(sum(odd) - 200) / 10 < FARTHEST


def _is_odd(order: IntArray) -> bool:
    after, left, cycles = order.tolist(), set(range(len(order))), 0
    while left:
        at, cycles = left.pop(), cycles + 1
        while after[at] in left:
            at = after[at]
            left.remove(at)
    return (len(order) - cycles) % 2 == 1


@pytest.mark.parametrize(
    ("length", "classes", "windows"),
    [(1000, 2, 1), (60_000, 10, 117), (1_281_167, 1000, 300), (10**9, 10, 300), (2**58, 16, 300)],
)
def test_a_window_has_the_class_balance_of_a_random_draw(
    length: int, classes: int, windows: int
) -> None:
    # The data set is sorted by class; each window is a batch of 512 in a row.
    size = 512
    bounds = np.arange(classes + 1) * length // classes
    share = np.diff(bounds) / length
    # Without replacement a count has this variance, times 1 - share.
    scale = size * share * (length - size) / (length - 1)
    squares = []
    for seed in range(max(4, 1200 // windows)):
        for start in np.linspace(0, length - size, windows).astype(np.int64):
            drawn = Permutation(length, seed, 0).at(np.arange(start, start + size))
            times = np.bincount(np.searchsorted(bounds, drawn, "right") - 1, minlength=classes)
            squares.append(((times - size * share) ** 2 / scale).sum() / (classes - 1))

    standard_error = sqrt(2 / ((classes - 1) * len(squares)))
    assert abs(np.mean(squares) - 1) < FARTHEST * standard_error


@pytest.mark.parametrize(
    ("length", "seed", "epoch", "found"),
    [
        (1, 5, 0, [0, 0, 0, 0]),
        (10, 0, 0, [5, 1, 2, 3]),
        (1024, 1, 0, [654, 558, 679, 809]),
        (1025, 1, 0, [600, 810, 93, 502]),
        (60_000, 0, 3, [6074, 18044, 56334, 17113]),
        (1_281_167, 42, 89, [1222010, 443893, 53641, 1232314]),
        (10**9, -1, 1, [718095612, 868063658, 676948259, 120024896]),
        (2**40 + 1, 2**64 + 3, 7, [20951550207, 894773291033, 904778434157, 914661727121]),
        (
            MAX_LENGTH,
            -(2**80) - 5,
            2,
            [6914536023261318517, 3388353887695068770, 4621793898744821971, 3827882844026186051],
        ),
    ],
)
def test_an_order_is_the_same_for_good(
    length: int, seed: int, epoch: int, found: list[int]
) -> None:
    # A checkpoint is a position in such an order: another one would train other samples.
    positions = np.array([0, 1, length // 2, length - 1]) % length

    assert Permutation(length, seed, epoch).at(positions).tolist() == found


def test_the_lowest_64_bits_of_a_seed_count_all_of_them() -> None:
    order = whole(1000, 0).tolist()

    assert whole(1000, 2**64).tolist() == whole(1000, -(2**200)).tolist() == order
    assert whole(1000, -1).tolist() == whole(1000, 2**64 - 1).tolist()
    others = {tuple(whole(1000, 2**bit).tolist()) for bit in range(64)}
    assert len(others | {tuple(order), tuple(whole(1000, -1).tolist())}) == 66


def test_seed_and_epoch_are_not_exchanged() -> None:
    assert whole(1000, 1, 2).tolist() != whole(1000, 2, 1).tolist()
    assert whole(1000, 1, 2).tolist() != whole(1000, 3, 0).tolist()


def test_numbers_of_any_integer_type_are_taken_and_left_alone() -> None:
    for length in (100, 10**6):
        shuffle = Permutation(length, 1, 2)
        expected = shuffle.at(np.array([3, 90, 3]))
        for kind in (np.uint8, np.int32, np.uint64):
            positions = np.array([3, 90, 3], dtype=kind)

            found = shuffle.at(positions)  # type: ignore[arg-type]

            assert found.dtype == shuffle.position_of(found).dtype == np.int64
            assert found.tolist() == expected.tolist()
            assert positions.tolist() == shuffle.position_of(found).tolist() == [3, 90, 3]


@pytest.mark.parametrize("length", [3, 10**6])
def test_nothing_asked_for_is_nothing_found(length: int) -> None:
    nothing = np.zeros(0, dtype=np.int64)

    assert Permutation(length, 0, 0).at(nothing).tolist() == []
    assert Permutation(length, 0, 0).position_of(nothing).tolist() == []


def test_results_may_be_written_to() -> None:
    shuffle = Permutation(SORTED_LENGTH, 0, 0)
    before = shuffle.at(np.arange(SORTED_LENGTH))

    shuffle.at(np.arange(SORTED_LENGTH))[:] = -1

    assert shuffle.at(np.arange(SORTED_LENGTH)).tolist() == before.tolist()


def test_an_order_is_a_plain_value() -> None:
    shuffle = Permutation(10**9, 1, 2)

    assert pickle.loads(pickle.dumps(shuffle)) == shuffle
    assert replace(shuffle, epoch=3) == Permutation(10**9, 1, 3)
    assert len({shuffle, Permutation(10**9, 1, 2), Permutation(10**9, 1, 3)}) == 2


@pytest.mark.parametrize("length", [1000, 2000, 10**9, MAX_LENGTH])
def test_memory_in_addition_to_the_result_is_small(length: int) -> None:
    shuffle, asked = Permutation(length, 0, 0), np.arange(65_536) % length
    for read in (shuffle.at, shuffle.position_of):
        read(asked)
        tracemalloc.start()

        found = read(asked)

        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes - found.nbytes < 500_000


@pytest.mark.parametrize("length", [0, -1, MAX_LENGTH + 1])
def test_a_length_that_cannot_be_is_refused(length: int) -> None:
    with raises_message(ConfigError, length):
        Permutation(length, 0, 0)


def test_an_epoch_before_the_first_is_refused() -> None:
    with raises_message(ConfigError, "-1"):
        Permutation(10, 0, -1)


@pytest.mark.parametrize("length", [100, 10**6])
@pytest.mark.parametrize("past", [False, True])
def test_numbers_out_of_range_are_refused(length: int, past: bool) -> None:
    number = length if past else -1
    asked = np.array([0, number, 1])

    with raises_message(ConfigError, number, length - 1):
        Permutation(length, 0, 0).at(asked)
    with raises_message(ConfigError, number, length - 1):
        Permutation(length, 0, 0).position_of(asked)


@pytest.mark.parametrize(
    "asked", [np.array([0.0, 1.0]), np.array([True, False]), np.array(3), np.zeros((2, 2), int)]
)
def test_input_other_than_a_row_of_integers_is_refused(asked: IntArray) -> None:
    with raises_message(ConfigError):
        Permutation(10, 0, 0).at(asked)
    with raises_message(ConfigError):
        Permutation(10, 0, 0).position_of(asked)
